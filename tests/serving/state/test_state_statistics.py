"""Statistics of the past in the state of users: a log replayed, and what requests get compared with `jfi predict`."""

import dataclasses
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jfi.data import DataConfig, FeatureConfig, load_dataset
from jfi.data.prepared.scoring import ScoringRows, Sources
from jfi.events.groups import GROUPS
from jfi.serving.dataset_schema import schema_of, statistics_settings
from jfi.serving.requests import BadRequestError, RequestReader
from jfi.serving.schema import Limits
from jfi.state.counters import StateCounters
from jfi.state.events import EventReader
from jfi.state.layout import digest, layout_of
from jfi.state.load import fill
from jfi.state.state import UserState
from jfi.state.stores import StateError

COUNT, ITEMS, START = 700, 30, 1_600_000_000


@pytest.fixture(scope="module")
def log() -> list[dict]:
    """Rows in the order of time, some of them at the same one, with lists, missing labels and repeated items."""
    rng = np.random.default_rng(0)
    tags = [[f"t{tag}" for tag in rng.choice(6, rng.integers(0, 4), replace=False)] for _ in range(ITEMS)]
    time = np.sort(rng.integers(0, 40_000, COUNT)) * 5.0 + START
    rows = [
        {"user_id": f"u{rng.integers(0, 12)}", "item_id": int(item), "timestamp": float(one), "brand": f"b{item % 5}"}
        | {"rating": int(rng.integers(1, 6)), "tags": tags[item], "visit": f"v{one // 7000}" if item % 4 else None}
        for item, one in zip(rng.integers(0, ITEMS, COUNT), time, strict=True)
    ]
    return sorted(rows, key=lambda row: (row["timestamp"], row["item_id"]))


KINDS = pa.schema(
    [
        ("user_id", pa.string()),
        ("item_id", pa.int64()),
        ("timestamp", pa.float64()),
        ("rating", pa.int64()),
        ("tags", pa.list_(pa.string())),
        ("brand", pa.string()),
        ("visit", pa.string()),
    ]
)
FEATURES = [FeatureConfig("tags", "item"), FeatureConfig("brand", "item"), FeatureConfig("rating", "event")]
CASES = {
    "labels": {"label": "rating >= 4", "statistics": list(GROUPS)},
    "implicit": {"statistics": list(GROUPS)},
    "auto, hashed": {
        "label": "rating >= 4",
        "features": [FeatureConfig("tags", "item", hash_buckets=7), FeatureConfig("brand", "item", default="b1")],
    },
    "history": {"label": "rating >= 4", "statistics": list(GROUPS), "history": "rating >= 3"},
    "session": {"label": "rating >= 4", "statistics": ["session", "user"], "session": "visit"},
}


class Replay:
    """A state without a model, and what `jfi predict` would read."""

    def __init__(self, log: list[dict], change: dict, folder, store, known: int) -> None:
        pq.write_table(pa.Table.from_pylist(log, KINDS), folder / "log.parquet")
        base = DataConfig(interactions=str(folder / "log.parquet"), features=FEATURES, max_history=20, max_slots=2)
        self.config = dataclasses.replace(base, **change).resolved()
        self.log, self.folder = log, folder
        self.schema = load_dataset(self.config).schema
        pq.write_table(pa.Table.from_pylist(log[:known], KINDS), folder / "known.parquet")
        fields = schema_of(self.config, self.schema, True, True)
        self.fields = dataclasses.replace(fields, statistics=statistics_settings(self.config, self.schema))
        interactions = str(folder / "known.parquet") if known else "none"
        fill(store, self.fields, self.config, self.schema, interactions)
        self.reader = RequestReader(self.fields, Limits(100, 20), state=layout_of(self.fields, 20).info)
        self.state = UserState(store, self.reader)
        self.events = EventReader(self.state.layout)

    def body(self, rows: list[dict]) -> list[dict]:
        """Events as a client sends them, with all fields that the run has."""
        names = {*self.events.required, *self.events.optional}
        return [{name: value for name, value in row.items() if name in names} for row in rows]

    def request(self, user: str, now: float) -> dict:
        by_item = {row["item_id"]: row for row in self.log}
        candidates = [{name: row[name] for name in self.reader.fields["candidates"]} for row in by_item.values()]
        candidates.append(candidates[0] | {"item_id": 999})
        return {"user": user, "candidates": candidates, "time": now}

    def wanted(self, request: dict, known: list[dict]) -> np.ndarray:
        """The dense features that `jfi predict` reads."""
        rows = [
            {"rating": None, "user_id": request["user"], "timestamp": request["time"]} | one
            for one in request["candidates"]
        ]
        rows = [{"tags": None, "brand": None, "visit": None} | row for row in rows]
        (folder := self.folder / f"{len(known)}-{request['time']}-{request['user']}").mkdir()
        sources = Sources(pa.Table.from_pylist(rows, KINDS), pa.Table.from_pylist(known, KINDS))
        scoring = ScoringRows(sources, folder, self.schema, self.config.resolved())
        (batch,) = scoring.dataset.batches("rows", 1000)
        found = np.empty_like(batch.dense_features.numpy())
        found[scoring.rows[batch.samples.numpy()]] = batch.dense_features.numpy()
        return found


@pytest.mark.parametrize(
    ("case", "known", "new_store"),
    [*((case, 400, "lmdb") for case in CASES), ("labels", 0, "lmdb"), ("history", 0, "redis")],
    indirect=["new_store"],
)
def test_requests_get_what_predict_computes(log, case, known, tmp_path, new_store):
    """Bit for bit, at the time of the newest event, right after it and later."""
    if case == "session":  # with less time between the events of a user
        log = [row | {"timestamp": START + (row["timestamp"] - START) / 10} for row in log]
    replay, rng = Replay(log, CASES[case], tmp_path, new_store(), known), np.random.default_rng(1)
    for begin in range(known, known + 150, 30):
        part = log[begin : begin + 30]
        for _ in range(2):  # the second time they are repeated
            (added,) = replay.state.add([replay.events(replay.body(part))])
        assert (added.added, added.repeated) == (0, 30)
        newest = part[-1]["timestamp"]
        for now in (newest, newest + 0.5, newest + 1e5):
            for user in {f"u{rng.integers(0, 13)}", part[-1]["user_id"]}:
                request = replay.request(user, now)
                (filled,) = replay.state.fill([replay.reader(request)])
                np.testing.assert_array_equal(filled.dense, replay.wanted(request, log[: begin + 30]))
    assert filled.dense.std() > 0.1


@pytest.mark.parametrize("case", ["labels", "session"])
def test_a_user_who_is_deleted_is_a_new_one_in_statistics_that_items_keep(log, case, tmp_path, new_store):
    """No key has the digest of the user; what is sent afterwards counts from zero."""
    replay = Replay(log, CASES[case], tmp_path, store := new_store(), 400)
    now, one, other = log[449]["timestamp"] + 60, "u3", "u5"
    replay.state.add([replay.events(replay.body(log[400:450]))])

    def dense(user: str) -> np.ndarray:
        (found,) = replay.state.fill([replay.reader(replay.request(user, now))])
        return found.dense

    before, strangers = dense(other), dense("a stranger")
    assert any(digest(one) in key for key, _ in store.scan(b"k")) and not np.array_equal(dense(one), strangers)
    assert replay.state.delete("user", one) and not replay.state.delete("user", one)
    assert not any(digest(one) in key or one.encode() in key for key, _ in store.scan(b""))
    np.testing.assert_array_equal(dense(one), strangers)
    np.testing.assert_array_equal(dense(other), before)
    rows = [row | {"user_id": user, "timestamp": now - 30} for user in (one, "new") for row in log[400:406]]
    replay.state.add([replay.events(replay.body(rows))])
    np.testing.assert_array_equal(dense(one), dense("new"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rating": [0.5]}, "events[0].rating must be bool | int | float | str | null, got array"),
        ({"item_id": None}, "events[0].item_id must be bool | int | float | str, got null"),
    ],
)
@pytest.mark.parametrize("new_store", ["lmdb"], indirect=True)
def test_faults_of_what_is_counted_are_named(log, tmp_path, new_store, change, message):
    replay = Replay(log, CASES["labels"], tmp_path, new_store(), 0)
    body = [replay.body(log[:1])[0] | change]
    with pytest.raises(BadRequestError) as fault:
        replay.events(body)
    assert str(fault.value) == message


@pytest.mark.parametrize("new_store", ["lmdb"], indirect=True)
def test_other_statistics_are_refused(log, tmp_path, new_store):
    replay = Replay(log, CASES["labels"], tmp_path, new_store(), 0)
    past = dataclasses.replace(replay.fields.statistics, half_lives=[1.0, 2.0, 3.0, 4.0])
    with pytest.raises(StateError, match=r"has other statistics of the past, half_lives .* and not \[1.0, 2.0, "):
        reads = RequestReader(
            dataclasses.replace(replay.fields, statistics=past), Limits(100, 20), state=replay.state.layout.info
        )
        UserState(replay.state.store, reads)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"label": "rating >= 3"},
            "made by `data.label rating >= 4`, and the model by `data.label rating >= 3`; load it",
        ),
        ({"history": "rating >= 3"}, "made by no `data.history`, and the model by `data.history rating >= 3`; load it"),
    ],
)
@pytest.mark.parametrize("new_store", ["lmdb"], indirect=True)
def test_a_model_of_another_label_or_history_is_refused(log, tmp_path, new_store, change, message):
    replay = Replay(log, CASES["labels"], tmp_path, new_store(), 0)
    schema = dataclasses.replace(replay.fields, **change)
    with pytest.raises(StateError, match=message):
        UserState(replay.state.store, RequestReader(schema, Limits(100, 20), state=replay.state.layout.info))


@pytest.mark.parametrize("change", [{}, {"event_id": "eid"}, {"history": "rating >= 3"}])
@pytest.mark.parametrize("new_store", ["lmdb"], indirect=True)
def test_rows_of_a_loaded_log_count_once(log, tmp_path, new_store, monkeypatch, change):
    monkeypatch.setitem(globals(), "KINDS", KINDS.append(pa.field("eid", pa.string())))
    rows = [row | {"eid": f"e{number}"} for number, row in enumerate(log)]
    replay = Replay(rows, CASES["labels"] | change, tmp_path, new_store(), len(rows))
    state, before = UserState(replay.state.store, replay.reader, max_late=np.inf), dict(replay.state.store.scan(b""))
    random.Random(0).shuffle(rows)
    (told,) = state.add([replay.events(replay.body(rows))])
    assert (told.added, told.repeated) == (0, len(rows))
    assert dict(state.store.scan(b"")) == before


@pytest.mark.parametrize("new_store", ["lmdb"], indirect=True)
def test_a_label_of_a_row_that_is_there_is_never_too_late(log, tmp_path, new_store):
    replay = Replay(log, CASES["labels"], tmp_path, new_store(), 0)
    first = log[0] | {"rating": None}
    for row, added in ((first, 1), (first | {"timestamp": first["timestamp"] + 90_000}, 1), (first, 0), (log[0], 1)):
        (told,) = replay.state.add([replay.events(replay.body([row]))])
        assert told.added == added
    (late,) = replay.state.add([replay.events(replay.body([log[0] | {"item_id": 3}]))])
    assert isinstance(late, BadRequestError) and "older than the newest row of the user" in str(late)


@pytest.mark.parametrize("new_store", ["lmdb"], indirect=True)
def test_rows_of_a_body_are_counted_in_the_order_of_time(log, tmp_path, new_store, monkeypatch):
    monkeypatch.setattr("jfi.events.live_counters._AT_ONCE", 50)
    found = []
    for name, order in (("time", log), ("user", sorted(log, key=lambda row: row["user_id"]))):
        (tmp_path / name).mkdir()
        replay = Replay(log, CASES["labels"], tmp_path / name, new_store(name), 0)
        state = UserState(replay.state.store, replay.reader, max_late=np.inf)
        state.add([replay.events(replay.body(order))])
        (filled,) = state.fill([replay.reader(replay.request("u3", log[-1]["timestamp"] + 60))])
        found.append(filled.dense)
    np.testing.assert_array_equal(*found)


def test_a_request_has_the_events_and_the_statistics_of_its_position(log, tmp_path, new_store, monkeypatch):
    """Another server writes between the reads of the first try."""
    replay, read, positions = Replay(log, CASES["labels"], tmp_path, new_store(), 400), StateCounters.read, []
    other = UserState(replay.state.store, replay.reader)
    request = replay.request(log[400]["user_id"], log[400]["timestamp"] + 60)

    def reading(self, get, asked):
        if not positions:
            other.add([replay.events(replay.body(log[400:401]))])
        positions.append(asked[0].position)
        return read(self, get, asked)

    monkeypatch.setattr(StateCounters, "read", reading)
    (filled,) = replay.state.fill([replay.reader(request)])
    assert filled.stored.position == positions[-1] and positions in ([0], [0, 1])
    np.testing.assert_array_equal(filled.dense, replay.wanted(request, log[: 400 + positions[-1]]))
