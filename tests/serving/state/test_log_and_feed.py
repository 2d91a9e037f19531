"""The log that a server writes, and a state that is fed from it: both have the same rows, bit for bit."""

import errno
import json
import logging
import multiprocessing
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jfi.data import DataError
from jfi.follow.feed import Feed
from jfi.serving.requests import BadRequestError
from jfi.state import outbox
from jfi.state.outbox import PartWriter
from jfi.state.state import UserState
from jfi.state.stores import StateError

from .test_state_statistics import CASES, COUNT, KINDS, Replay, log  # noqa: F401

CASES = {name: CASES[name] for name in ("labels", "history", "session", "implicit")}


def replay_of(log, case, folder, store) -> Replay:
    folder = folder.with_name(f"run of {folder.name}")
    folder.mkdir()
    replay = Replay(log, CASES[case], folder, store, 0)
    replay.state = UserState(store, replay.reader, is_logged=True)
    return replay


def bodies_of(replay: Replay, rows: list[dict], draw: random.Random) -> list[list]:
    """Transactions of bodies: rows out of order and late, some twice, some first without their label."""
    sent = []
    for row in rows:
        at = row["timestamp"] + draw.choice([0, 0, 0, draw.uniform(0, 3000), draw.uniform(0, 150_000)])
        sent.append((at, row if draw.random() < 0.8 else row | {"rating": None}))
        if draw.random() < 0.2:
            sent.append((at + draw.uniform(0, 9000), row))
    rows = replay.body([row for _, row in sorted(sent, key=lambda one: one[0])])
    found, begin = [], 0
    while begin < len(rows):
        transaction = []
        for _ in range(draw.randrange(1, 4)):
            end = begin + draw.randrange(1, 25)
            own = rows[begin:end]
            if own and draw.random() < 0.3:
                own = {name: [row[name] for row in own] for name in own[0]}
            transaction += [replay.events(own)] if own else []
            begin = end
        found.append(transaction)
    return found


def contents(state: UserState) -> dict[bytes, bytes]:
    """All keys but for those of the state's identity, its outbox, its feed and its locks."""
    return {key: value for key, value in state.store.scan(b"") if key[:1] not in (b"m", b"o", b"f", b"l")}


def fed(replay: Replay, folder) -> list:
    feed, told = Feed(folder), []
    while feed.step(replay.state, replay.events, told.append):
        pass
    return told


def assert_same_requests(one: Replay, other: Replay, log: list[dict]) -> None:  # noqa: F811
    for user in ("u3", "u7", "new"):
        for now in (log[-1]["timestamp"] + 60, log[300]["timestamp"]):
            request = one.request(user, now)
            a, b = (each.state.fill([each.reader(request)])[0] for each in (one, other))
            assert (a.stored.events, a.stored.position) == (b.stored.events, b.stored.position)
            np.testing.assert_array_equal(a.dense, b.dense)
            assert a.ids.keys() == b.ids.keys()
            for name in a.ids:
                np.testing.assert_array_equal(a.ids[name], b.ids[name])


@pytest.mark.parametrize(
    ("case", "new_store"), [*((case, "lmdb") for case in CASES), ("labels", "redis")], indirect=["new_store"]
)
def test_a_state_that_is_fed_the_log_is_that_which_wrote_it(log, case, tmp_path, new_store):  # noqa: F811
    draw = random.Random(case)
    one = replay_of(log, case, tmp_path / "one", new_store("one"))
    (folder := tmp_path / "parts").mkdir()
    writer = PartWriter(one.state.store, one.state.layout, folder, rows=70, seconds=1e9)
    accepted = refused = repeated = 0
    for transaction in bodies_of(one, log, draw):
        for told in one.state.add(transaction):
            refused += isinstance(told, BadRequestError)
            accepted += getattr(told, "added", 0)
            repeated += getattr(told, "repeated", 0)
        if draw.random() < 0.5:
            writer.step()
    assert min(refused, repeated) > 5 and one.state.position == accepted > COUNT / 2
    assert 0 < writer.waiting < 70 or accepted % 70 == 0
    writer.flush()
    assert not list(one.state.store.scan(b"o")) and writer.waiting == 0
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) > 3 and names[-1].endswith(f"-{accepted - 1:020d}.parquet")
    assert sum(pq.read_metadata(folder / name).num_rows for name in names) == accepted
    other = replay_of(log, case, tmp_path / "other", new_store("other"))
    told = fed(other, folder)
    assert [sum(getattr(each, name) for each in told) for name in ("added", "repeated", "late")] == [accepted, 0, 0]
    assert contents(other.state) == contents(one.state)
    assert_same_requests(one, other, log)
    assert fed(other, folder) == []


@pytest.mark.parametrize("new_store", ["lmdb"], indirect=True)
def test_parts_of_others_give_the_same_state_whatever_the_order_of_their_rows(log, tmp_path, new_store, monkeypatch):  # noqa: F811
    """The rows of a part are added in the order of time, in transactions of bounded size."""
    monkeypatch.setattr("jfi.follow.feed._AT_ONCE", 37)
    one = replay_of(log, "labels", tmp_path / "one", new_store("one"))
    for begin in range(0, len(log), 90):
        one.state.add([one.events(one.body(log[begin : begin + 90]))])
    for name, order in (("reversed", log[::-1]), ("shuffled", random.Random(0).sample(log, len(log)))):
        (folder := tmp_path / f"parts {name}").mkdir()
        pq.write_table(pa.Table.from_pylist(order, KINDS), folder / "a.parquet")
        other = replay_of(log, "labels", tmp_path / name, new_store(name))
        assert len(fed(other, folder)) > 10
        assert other.state.position == len(log)
        assert_same_requests(one, other, log)
