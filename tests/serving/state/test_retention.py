"""Rows of users expire, for requests, at writes, by a pass and by the command; a user's rows of a day are bounded."""

import asyncio
import dataclasses
import random
import time
from itertools import count

import commands
import numpy as np
import pytest

pytest.importorskip("aiohttp")

from jfi.serving.requests import RequestReader
from jfi.serving.schema import Limits
from jfi.serving.scorer import Scorer, StateSettings
from jfi.serving.server import events as server_events
from jfi.state.events import EventReader
from jfi.state.layout import TIME, other_key, user_key
from jfi.state.retention import DAY, Retention, quota_key
from jfi.state.state import Added, UserState, write_layout
from jfi.state.stores import StateError, open_store

from ..test_server import samples, serve
from .adding import LAYOUT, SCHEMA
from .conftest import EVENT, added, answer, asked

NOW = 20_000 * DAY + 3600.0


class State:
    """A state whose clock is `now`."""

    def __init__(self, store, days: float = np.inf, quota: int | None = None) -> None:
        self.now, self.store, self.numbers = NOW, store, count()
        write_layout(store, LAYOUT)
        retention = Retention(days * DAY, quota, clock=lambda: self.now)
        reader = RequestReader(SCHEMA, Limits(1, 100), state=LAYOUT.info)
        self.state = UserState(store, reader, np.inf, retention)
        self.read = EventReader(LAYOUT, clock=lambda: self.now)

    def add(self, *ages: float, user: str = "u", item: object = 1, ids: list | None = None) -> Added:
        ids = [next(self.numbers) for _ in ages] if ids is None else ids
        rows = [
            {"user": user, "time": self.now - age, "item": item, "tags": None, "event_id": one}
            for age, one in zip(ages, ids, strict=True)
        ]
        (found,) = self.state.add([self.read(rows)])
        return found

    def seen(self, user: str = "u", ago: float = 0.0) -> list[float]:
        """The ages of the events that a request reads."""
        request = self.state.reader({"user": user, "candidates": [{}], "time": self.now - ago})
        (found,) = self.state.fill([request])
        assert found.num_events == found.stored.events
        stored = self.stored(user)[TIME]
        end = int(stored.searchsorted(request.stored.now))
        return (self.now - stored[end - found.num_events : end]).tolist()

    def stored(self, user: str = "u") -> np.ndarray:
        (found,) = self.store.get([user_key(user)])
        return LAYOUT.records(found, user)

    def keys(self) -> set[bytes]:
        return {key for key, _ in self.store.scan(b"") if key[:1] in (b"u", b"i", b"q")}

    def expire(self) -> int:
        return sum(self.state.expire())


def test_rows_that_are_kept_no_longer_are_not_read_and_go_with_the_next_write(new_store):
    made = State(new_store(), days=2)
    made.add(3 * DAY, 2 * DAY, 2 * DAY - 1, DAY, 10.0)
    assert made.seen() == [2 * DAY - 1, DAY, 10.0]  # what is older when it comes counts as repeated
    assert made.add(2.5 * DAY, 1.0) == Added(1, 1)
    made.now += DAY
    assert made.seen() == [DAY + 10.0, DAY + 1.0]
    assert made.seen(ago=DAY + 5) == [DAY + 10.0] and made.seen(ago=2 * DAY) == []  # relative to now
    assert len(made.stored()) == 4
    made.add(5.0)
    assert len(made.stored()) == 3 and made.seen() == [DAY + 10.0, DAY + 1.0, 5.0]
    made.now += 10 * DAY
    assert made.seen() == [] and len(made.stored()) == 3
    assert made.add(20.0 * DAY, 1.0) == Added(1, 1) and made.seen() == [1.0]  # a user who comes back begins anew


def test_a_pass_removes_the_rows_and_the_keys_of_users_who_are_no_longer_written(new_store, monkeypatch):
    monkeypatch.setattr("jfi.state.stores._AT_ONCE", 7)
    made, draw, wanted = State(new_store()), random.Random(0), {}
    for number in range(60):
        ages = sorted((draw.choice([1, 5, 40, 50]) * DAY - draw.random() for _ in range(3)), reverse=True)
        made.add(*ages, user=f"u{number}")
        wanted[f"u{number}"] = ages
    others = np.zeros(3, LAYOUT.others)
    others[TIME] = NOW - np.array([31, 30, 29]) * DAY
    made.store.put([(other_key("u1"), others.tobytes()), (other_key("x"), others[:2].tobytes()), (b"Uu2", b"a column")])
    made.state.retention = dataclasses.replace(made.state.retention, seconds=30 * DAY)
    stay = {user: [age for age in ages if age < 30 * DAY] for user, ages in wanted.items()}
    old = sum(map(len, wanted.values())) - sum(map(len, stay.values()))
    assert made.expire() == old + 4 and 0 < old < 180
    for user, ages in stay.items():
        np.testing.assert_allclose(made.now - made.stored(user)[TIME], ages, atol=1e-4)
    assert made.keys() == {user_key(user) for user, ages in stay.items() if ages} | {other_key("u1")}
    assert made.store.get([other_key("u1"), b"Uu2"]) == [others[2:].tobytes(), b"a column"]
    assert made.expire() == 0


def test_a_pass_stops_at_a_state_that_was_replaced(new_store):
    made = State(new_store(), days=1)
    made.add(10.0)
    made.now += 2 * DAY
    write_layout(made.store, LAYOUT)
    with pytest.raises(StateError, match="was removed or replaced"):
        made.expire()
    assert made.stored()[TIME] == NOW - 10


def test_of_a_user_no_more_rows_count_on_a_day_than_the_quota(new_store):
    made = State(new_store(), quota=5)
    assert made.add(1.0, 2.0, 3.0) == Added(3, 0)
    assert made.add(1.0, 2.0, ids=[0, 1]) == Added(0, 2)  # repeated ones do not count
    assert made.add(4.0, 1.0, 5.0, 6.0, ids=["a", 0, "b", "c"]) == Added(2, 1, over_quota=1)
    before = dict(made.store.scan(b""))
    for _ in range(3):
        assert made.add(*range(7)) == Added(0, 0, over_quota=7)
    assert dict(made.store.scan(b"")) == before  # nothing is written for them
    assert made.add(1.0, user="v") == Added(1, 0)
    assert sorted(made.seen()) == [1.0, 2.0, 3.0, 4.0, 5.0]
    made.now += DAY
    assert made.add(7.0, 8.0) == Added(2, 0) and made.store.get([quota_key("v")]) != [None]
    made.expire()
    assert made.keys() == {user_key("u"), user_key("v"), quota_key("u")}  # the quota of an earlier day goes
    assert made.state.delete("user", "u") and made.keys() == {user_key("v")}


def test_bodies_that_are_written_together_share_the_quota_as_they_come(new_store):
    """Whatever rows come together, of each user the first ones that are new count."""
    over = 0
    for seed in range(20):
        draw, (one, other) = random.Random(seed), (State(new_store(f"{of} {seed}"), quota=4) for of in ("one", "other"))
        bodies = []
        for _ in range(4):
            rows = [
                {"user": draw.choice("ab"), "time": NOW - draw.randrange(5), "item": draw.randrange(3), "tags": None}
                for _ in range(draw.randrange(1, 6))
            ]
            bodies.append(one.read(rows))
        together = one.state.add(bodies)
        alone = [other.state.add([body])[0] for body in bodies]
        assert together == alone
        over += sum(one.over_quota for one in alone)
        assert dict(one.store.scan(b"u")) == dict(other.store.scan(b"u"))
        assert dict(one.store.scan(b"q")) == dict(other.store.scan(b"q"))
        assert all(len(one.stored(user)) <= 4 for user in "ab")
    assert over > 10


def test_the_server_leaves_out_rows_over_the_quota_and_removes_old_ones(exported, store, monkeypatch):
    monkeypatch.setattr(server_events, "_STEP_SECONDS", (0.0, 0.0))
    now, passes = [EVENT["time"] + 100], []
    retention = Retention(2 * DAY, 2, clock=lambda: now[0])
    scorer = Scorer(exported.path, state=StateSettings(store, max_events=20, retention=retention))
    sleep = asyncio.sleep

    async def sleeping(seconds: float) -> None:
        if seconds > 1000:  # until the next pass
            passes.append(seconds)
            while len(passes) == 1:
                await sleep(0.01)
        await sleep(min(seconds, 0.01))

    monkeypatch.setattr(server_events.asyncio, "sleep", sleeping)

    async def talk(client):
        async with asyncio.timeout(60):
            while not passes:
                await sleep(0.01)
        assert await added(client, EVENT) == {"added": 1, "repeated": 0, "over_quota": 0}
        body = [EVENT | {"event_id": number} for number in range(3)] + [EVENT | {"user": "v"}]
        assert await added(client, *body) == {"added": 2, "repeated": 0, "over_quota": 2}
        assert (await asked(client))["events"] == 2
        now[0] += 1.5 * DAY
        told = await added(client, EVENT | {"event_id": "later", "time": now[0]})
        assert told == {"added": 1, "repeated": 0, "over_quota": 0}
        now[0] += DAY
        assert await asked(client, now=now[0] + 1) == {"events": 1, "time": now[0] - DAY, "available": True}
        passes.append(0)  # the next pass begins
        async with asyncio.timeout(60):
            while (found := await samples(client))["jfi_state_expired_rows_total"] < 3:
                await sleep(0.01)
        assert found['jfi_state_events_total{result="over_quota"}'] == 2
        assert found["jfi_state_expired_rows_total"] == 3
        assert store.get([user_key("v")]) == [None] and store.get([user_key("u")]) != [None]
        status, told = await answer(await client.post("/events", json=[EVENT | {"time": now[0] + 601}]))
        assert status == 400 and "more than 600 s in the future" in told["error"]

    serve(scorer, talk, pace=1e9)


def test_the_command_removes_old_rows(new_store, capsys):
    made = State(new_store())
    made.now = time.time()
    made.add(10 * DAY, 1.0)
    made.add(9 * DAY, user="v")
    made.store.close()
    (name,) = new_store.names
    with pytest.raises(StateError, match="jfi state expire needs --keep-days"):
        commands.run("state", "expire", "--state", name)
    for removed in (2, 0):
        commands.run("state", "expire", "--state", name, "--keep-days", 7)
        assert capsys.readouterr().out == f"removed {removed} rows of {name} that are older than 7 days\n"
    store = open_store(name)
    assert {key for key, _ in store.scan(b"u")} == {user_key("u")}
    store.close()
