"""benchmarks/serving_state.py, user_state.py and what is drawn and written of their results, at small size."""

import json
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("aiohttp")

from benchmarks import figures, serving, serving_state, state_page, user_state
from jfi.serving.requests import RequestReader
from jfi.state.layout import layout_of
from jfi.state.state import UserState
from jfi.state.stores import open_store

from .state.adding import LOG, records_of

NOW = 1_750_000_000


@pytest.fixture
def synthetic(monkeypatch, tmp_path):
    """The schema and the limits of the synthetic model, without compiling it."""
    found = []
    made = SimpleNamespace(write=lambda path: None)
    monkeypatch.setattr(serving, "Export", lambda model, *given, **_: found.extend(given) or made)
    serving.synthetic(tmp_path, 1000, "cpu", "float32", serving.Shape(40, 5))
    return found


def test_all_ways_give_the_model_the_same_request(synthetic, tmp_path):
    schema, limits = synthetic
    plain, of_state = RequestReader(schema, limits), RequestReader(schema, limits, state=layout_of(schema, 40).info)
    draw, scorer = random.Random(0), SimpleNamespace(reader=plain)
    bodies = [serving_state.in_time_order(serving.make_body(scorer, serving.Shape(40, 5), draw)) for _ in range(3)]
    store, layout = open_store(str(tmp_path / "state"), create=True), layout_of(schema, 40, LOG)
    serving_state.fill(store, layout, schema, {40: bodies}, NOW)
    state = UserState(store, of_state)
    for i, body in enumerate(bodies):
        by_columns, by_rows = plain.read(body), plain.read(serving.by_rows(body))
        (stored,) = state.fill([of_state.read(serving_state.of_user(body, f"40-{i}", NOW))])
        for other in (by_rows, stored):
            assert other.num_events == by_columns.num_events == 40 and other.ids.keys() == by_columns.ids.keys()
            assert all(np.array_equal(other.ids[key], ids) for key, ids in by_columns.ids.items())
            assert np.array_equal(other.ages, by_columns.ages)
    assert len(records_of(state, ["w0"])[0]) == serving_state.WRITTEN_HISTORY
    store.close()


@pytest.mark.slow
def test_it_measures_all_ways(tmp_path, monkeypatch):
    monkeypatch.setattr(serving_state, "WRITTEN", (1, 5))
    sizes = ["--items", 100, "--lengths", 5, 30, "--clients", 2, "--seconds", 0.1, "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["serving", "--synthetic", "--state", *map(str, sizes), "--out", str(tmp_path)])
    assert serving.main() == 0
    found = json.loads((tmp_path / "serving_state.json").read_text())
    ways = set(serving_state.WAYS) - (set() if found["environment"]["redis"] else {serving_state.REDIS})
    sent = [row for row in found["rows"] if "history" in row]
    expected = {(way, length, clients) for way in ways for length in (5, 30) for clients in (1, 2)}
    assert {(row["way"], row["history"], row["clients"]) for row in sent} == expected
    size = {(row["way"], row["history"]): row["wire_bytes"] for row in sent}
    assert all(
        size[serving_state.LMDB, 30] < size[way, 30] for way in (serving_state.BY_ROWS, serving_state.BY_COLUMNS)
    )
    assert all(row["fresh"] > 0 for row in found["rows"] if row["case"] == "freshness")


def results() -> dict:
    environment = {"device": "a CPU", "commit": "abc", "date": "2026-01-02T03", "versions": {"torch": "2"}}
    rows = []
    for way, speed in (("JSON by rows", 1), ("state in LMDB", 4)):
        for clients in (1, 16):
            row = {"case": "history 20", "way": way, "measured": "HTTP on loopback", "history": 20, "clients": clients}
            spent = {"p50_us": 8000 / speed, "p99_us": 9000 / speed, "requests_per_second": 100 * speed}
            rows.append(row | spent | {"wire_bytes": 50_000 / speed})
    times = {"p50_us": 250.0, "p99_us": 500.0}
    rows.append({"case": "history 20, 1 candidates", "way": "state in LMDB", "measured": "store read", **times})
    rows.append({"case": "200 events a user", "way": "state in LMDB", "measured": "POST /events, 1 events", **times})
    return {"environment": environment, "rows": rows}


def test_tables_have_the_gain_over_rows_and_the_parts():
    text = state_page.serving_state(results())
    assert "| 20 | state in LMDB | 2 \\| 2.25 | 400 \\| 400 | 4.0x \\| 4.0x | 12.5 kB |" in text
    assert "a CPU, commit abc, 2026-01-02." in text
    assert "| store read | 0.25 |" in state_page.state_parts(results())
    assert "| POST /events, 1 events | 0.25 \\| 0.5 |" in state_page.state_writes(results())


def test_the_picture_is_drawn(tmp_path):
    (path,) = figures.serving_state(results(), tmp_path)
    assert path.name == "serving_state.png" and path.stat().st_size > 10_000
    found = results()
    found["rows"] = [row for row in found["rows"] if row.get("clients") != 16]
    assert figures.serving_state(found, tmp_path) == []


def test_bytes_of_users_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(user_state, "SIZES", ((20, 30),))
    monkeypatch.setattr(sys, "argv", ["user_state", "--out", str(tmp_path)])
    assert user_state.main() == 0
    found = json.loads((tmp_path / "user_state.json").read_text())
    assert {"LMDB"} <= {row["store"] for row in found["rows"]} <= {"LMDB", "Redis"}
    for row in found["rows"]:
        assert (row["users"], row["events"]) == (20, 30) and row["bytes"] > 20 * 30 * 28
    assert "| 20 | 30 | LMDB |" in state_page.user_state(found)
