"""The step on semantic IDs on tiny batches: all ways run, one that differs or fails gets no time."""

import json

import pytest
import torch

from benchmarks import sid_step
from benchmarks.sid_step import DENSE, REGISTERS, WAYS, SidShape
from jfi.tables import table_rows

CPU = torch.device("cpu")
TINY = SidShape(4, 6, D=8, H=2, digits=7, items=50)


def run(tmp_path, limit: float = 100.0) -> list[dict]:
    sid_step.run((TINY,), tmp_path / "new/sid_step.json", 0.0, limit, CPU)
    return json.loads((tmp_path / "new/sid_step.json").read_text())["rows"]


def test_every_way_runs(tmp_path):
    rows = run(tmp_path)
    assert [row["implementation"] for row in rows] == list(WAYS)
    assert all(row["status"] == "ok" and row["eager_us"] > 0 and row["memory_mb"] > 0 for row in rows), rows
    assert {row["events"] for row in rows} == {24} and {row["batch_bytes"] for row in rows} == {8 * (28 + 8)}
    assert 0 < rows[0]["error"] < sid_step.TOLERANCE
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-2)
    assert json.loads((tmp_path / "new/sid_step.json").read_text())["environment"]["commit"]


def test_registers_are_not_dense():
    made = {}
    for way in (REGISTERS, DENSE):
        model = sid_step.build(way, TINY, CPU)
        batch = sid_step.make_batch(TINY, torch.zeros(50, dtype=torch.int64), 0, CPU)
        found = model.embeddings(batch.ids)
        model.layer({"history": found["history"]}, {"item": found["item"].values()})
        made[way] = getattr(found["history"], "is_read", True)
    assert made == {REGISTERS: False, DENSE: True}


@pytest.mark.slow
def test_a_failure_does_not_stop_the_others(tmp_path, monkeypatch):
    build = sid_step.build
    monkeypatch.setattr(sid_step, "build", lambda way, *more: 1 / 0 if way == DENSE else build(way, *more))
    rows = run(tmp_path)
    assert [row["status"] for row in rows] == ["failed", "failed", "ok", "ok"]  # the first is compared with the second
    assert "ZeroDivisionError" in rows[1]["note"] and "eager_us" not in rows[1]


@pytest.mark.slow
def test_a_wrong_result_gets_no_time(tmp_path, monkeypatch):
    words = table_rows.sid_words
    monkeypatch.setattr(table_rows, "sid_words", lambda *given: words(*given).bitwise_and(0x55555555))
    rows = run(tmp_path)
    assert rows[0]["status"] == "wrong" and "eager_us" not in rows[0] and rows[1]["status"] == "ok"


@pytest.mark.slow
def test_the_limit_skips(tmp_path):
    assert {row["status"] for row in run(tmp_path, limit=-1.0)} == {"skipped"}
