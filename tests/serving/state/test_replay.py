"""A log replayed against a server: events and requests in the order of time, ties and late events among them."""

import random
from collections import Counter

import commands
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import jfi
from jfi.data.prepared.scoring import ScoringRows, Sources
from jfi.serving.scorer import Scorer, StateSettings
from jfi.state.layout import TIME, layout_of
from jfi.state.state import UserState, write_layout
from jfi.state.stores import open_store
from jfi.state.user_rows import scan_records

from ..conftest import as_sent
from ..test_server import serve
from . import adding
from .adding import LOG

START = 1_700_000_000.0
COLUMNS = ["item", "category", "rating"]


def category_of(item: int) -> int | None:
    """That of the run's table of items, which `jfi predict` and `jfi state load` read."""
    return item % 10 if item < 60 else None


def log(count: int = 400) -> list[dict]:
    """Events of few users in the order in which they arrive: often several at a time, some late, items that are new."""
    draw, rows, now = random.Random(0), [], START
    for number in range(count):
        now += draw.choice([0, 0, 1, 1, 30, 5000])
        item = draw.choice([*range(1, 60), 991, 992, 993])
        late = draw.choice([0, 0, 0, 0, 3, 40])
        user, rating = f"u{draw.randrange(6)}", draw.choice([1, 2, 3, 4, 5, None])
        row = {"user": user, "item": item, "category": category_of(item), "rating": rating, "timestamp": now - late}
        rows.append(row | {"id": f"e{number}"})
    return rows


def as_table(rows: list[dict]) -> pa.Table:
    kinds = {"user": pa.string(), "item": pa.int64(), "category": pa.int64(), "rating": pa.int64()}
    schema = pa.schema([*kinds.items(), ("timestamp", pa.float64())])
    return pa.Table.from_pylist([{name: row[name] for name in schema.names} for row in rows], schema)


def body_of(rows: list[dict]) -> list[dict]:
    names = {"user": "user", "timestamp": "time", "id": "event_id"} | {name: name for name in COLUMNS}
    return [{to: row[name] for name, to in names.items()} for row in rows]


@pytest.fixture
def stateful(exported, new_store):
    """The scorer of the artifact with an empty state."""
    store, plain = new_store(), Scorer(exported.path)
    write_layout(store, layout_of(plain.info.schema, plain.info.limits.max_history, LOG))
    return Scorer(exported.path, state=StateSettings(store))


def request_of(user: str, now: float) -> dict:
    items = [3, 991, 17, 58]
    candidates = {"item": items, "category": [category_of(item) for item in items]}
    return {"user": user, "candidates": candidates, "time": now}


def explicit(rows: list[dict], user: str, now: float) -> dict:
    """The same request with the history of a user, which is sorted as training sorts it."""
    own = [row for row in rows if row["user"] == user and row["timestamp"] < now]
    own.sort(key=lambda row: (row["timestamp"], row["item"]))
    history = {name: [row[name] for row in own] for name in COLUMNS}
    history["age"] = [now - row["timestamp"] for row in own]
    return request_of({}, now) | {"history": history}


def inputs_of_predict(run, rows: list[dict], request: dict, folder) -> dict[str, list]:
    """The ids of the events that `jfi predict` reads for a request."""
    row = {"user": request["user"], "item": 3, "category": 3, "rating": None, "timestamp": request["time"]}
    sources, config = Sources(as_table([row]), as_table(rows)), run.config.data.resolved()
    (batch,) = ScoringRows(sources, folder, run.schema, config).dataset.batches("rows", 10)
    found = batch.sparse_features
    return {key: one.values().tolist() for key, one in found.to_dict().items() if key.startswith("history_")}


def test_scores_are_those_of_explicit_histories_and_of_predict(exported, stateful, scorer, tmp_path):
    run, rows, draw = jfi.load_run(exported.run), log(), random.Random(1)

    async def talk(client):
        known, compared = [], 0
        while len(known) < len(rows):
            part = rows[len(known) : len(known) + draw.choice([1, 2, 5, 40])]
            again = draw.sample(known, min(2, len(known)))  # sent a second time
            answer = await client.post("/events", json=body_of(part + again))
            assert (answer.status, await answer.json()) == (200, {"added": len(part), "repeated": len(again)})
            known += part
            newest = max(row["timestamp"] for row in known)
            for now in {newest, newest + 0.5, newest - 1.0}:  # at the time of the newest event it does not count
                request = request_of(f"u{draw.randrange(7)}", now)
                answer = await (await client.post("/score", json=request)).json()
                wanted = explicit(known, request["user"], now)
                own = wanted["history"]["age"][-30:]
                newest_own = now - own[-1] if own else None
                assert answer["state"] == {"events": len(own), "time": newest_own, "available": True}
                del wanted["time"]
                assert answer["scores"] == as_sent(scorer.score([scorer.reader(wanted)])[0])  # bit for bit
                if draw.random() < 0.15:
                    compared += 1
                    check_predict(request, known, answer["scores"], tmp_path / str(compared))
        assert compared > 5

    def check_predict(request, known, scores, folder):
        items = request["candidates"]
        targets = [
            {"user": request["user"], "item": item, "category": category, "rating": None, "timestamp": request["time"]}
            for item, category in zip(items["item"], items["category"], strict=True)
        ]
        predicted = run.predict(as_table(targets), history=as_table(known))["score"].to_numpy()
        np.testing.assert_allclose(scores, predicted, atol=2e-6)
        folder.mkdir()
        wanted = inputs_of_predict(run, known, request, folder)
        (filled,) = stateful.state.fill([stateful.reader(request)])
        own = {key: filled.ids[key].tolist() for key in wanted if key != "history_age"}
        assert own | {"history_age": filled.ages.tolist()} == wanted  # bit for bit what predict reads

    serve(stateful, talk)


def contents(state: UserState) -> dict[str, list[tuple]]:
    """By user the times and the values of all events."""
    found = {}
    for user, records in scan_records(state.store, state.layout):
        columns = [records[TIME].tolist()]
        for name, one in state.layout.columns.items():
            numbers = records[name].tolist()
            if one.kind == "texts":
                columns.append([state.texts(name, own) for own in numbers])
            else:
                columns.append(state.texts(name, numbers) if one.kind == "text" else numbers)
        found[user] = list(zip(*columns, strict=True))
    return found


def test_a_state_does_not_depend_on_the_order_of_arrival(exported, stateful, new_store, tmp_path):
    state, rows = UserState(stateful.state.store, stateful.reader, max_late=np.inf), log()
    for begin in range(0, len(rows), 90):
        state.add([stateful.events(body_of(rows[begin : begin + 90]))])
    first = contents(state)
    counts = Counter(row["user"] for row in rows)
    assert {user: len(events) for user, events in first.items()} == {user: min(94, n) for user, n in counts.items()}
    for user in first:
        assert state.delete("user", user) and not state.delete("user", user)
    shuffled = random.Random(2).sample(rows, len(rows))
    state.add([stateful.events(body_of(shuffled[i : i + 7])) for i in range(0, len(rows), 7)])
    assert contents(state) == first
    # The log in a file, loaded by the command, gives the same state.
    store, names = new_store("loaded"), new_store.names
    store.close()
    file, out = tmp_path / "log.parquet", tmp_path / "events.parquet"
    pq.write_table(as_table(shuffled), file)
    name = names[-1] if "://" in names[-1] else f"{names[-1]}-1"
    commands.run("state", "load", "--run", exported.run, "--interactions", file, "--state", name)
    commands.run("state", "export", "--state", name, "--out", out)
    loaded = UserState(open_store(name, timeout=10.0), stateful.reader)
    assert contents(loaded) == first
    table = pq.read_table(out)
    assert table.column_names == ["user", "timestamp", "item", "category", "rating"]
    rows_of = {}
    for user, *values in zip(*(column.to_pylist() for column in table.columns), strict=True):
        rows_of.setdefault(user, []).append(tuple(values))
    assert rows_of == first
    loaded.store.close()


@pytest.mark.parametrize("new_store", ["redis"], indirect=True)
def test_servers_that_write_rows_of_other_users_do_not_wait_for_each_other(new_store, monkeypatch):
    """All of them move the position on; each server writes once, and no row has the position of another one."""
    write_layout(new_store(), adding.LAYOUT)
    states = [UserState(new_store(), adding.READER, is_logged=True) for _ in range(2)]
    row = {"time": 1000.0, "item": 1, "tags": None, "event_id": "e"}
    rows = [[adding.READ([row | {"user": f"{of}{n}"}]) for n in range(9)] for of in "ab"]
    for state, own in zip(states, rows, strict=True):
        state.add(own[:1])  # the item has its number
    count, counted, others = UserState._count, [], iter(rows[1][1:])

    def counting(self, *given, **how):
        found = count(self, *given, **how)
        if self is states[0]:
            counted.append(1)
            states[1].add([next(others)])
        return found

    monkeypatch.setattr(UserState, "_count", counting)
    for body in rows[0][1:]:
        states[0].add([body])
    assert len(counted) == 8 and states[0].position == 18
    assert sorted(int.from_bytes(key[1:]) for key, _ in states[0].store.scan(b"o")) == [*range(18)]
