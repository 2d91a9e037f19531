"""Processes that add events are killed again and again: what they have acknowledged stays, and nothing counts twice."""

import json
import random
import signal
import threading
import time
import urllib.error
import urllib.request
from functools import cache
from http.client import HTTPException

import numpy as np
import pytest
from processes import context

from jfi.serving.artifact import read
from jfi.serving.requests import RequestReader
from jfi.state.dictionaries import text_key
from jfi.state.layout import ID, TIME, layout_of
from jfi.state.state import UserState, scan_records, write_layout
from jfi.state.stores import open_store

from ..test_commands import server
from . import adding
from .adding import LOG
from .conftest import EVENT, NOW
from .test_replay import contents


def event_ids(state: UserState) -> set[int]:
    return {one for _, records in scan_records(state.store, state.layout) for one in records[ID].tolist()}


@cache
def ids_of(number: int) -> list[int]:
    return adding.READ(adding.body(number)).records[ID].tolist()


def check_records(state: UserState) -> None:
    """Checks that records are sorted, and that each value has one number, with a text."""
    for _, records in scan_records(state.store, state.layout):
        assert len(records) and (np.diff(records[TIME]) >= 0).all()
        for name in state.layout.columns:
            numbers = np.unique(records[name])
            assert None not in state.texts(name, numbers[numbers != 0].tolist())
    texts = [[text for _, text in state.store.scan(text_key(name, 0)[:-8])] for name in ("item", "tags")]
    assert all(len(set(one)) == len(one) for one in texts)


def received(pipe, until: int) -> int:
    """The number of the last body that is acknowledged, `until` or what came before the end of the pipe, or -1."""
    last = -1
    while last < until:
        try:
            last = pipe.recv()
        except EOFError:
            break
    return last


def test_no_acknowledged_event_is_lost_by_50_kills(tmp_path):
    """Each process begins some bodies before the first that is not acknowledged; their events count once."""
    draw, path = random.Random(1), str(tmp_path / "state")
    store = open_store(path, create=True)
    write_layout(store, adding.LAYOUT)
    store.close()
    acknowledged = 0
    for _ in range(55):
        ours, theirs = context().Pipe(duplex=False)
        begin = max(0, acknowledged - draw.randrange(4))
        process = context().Process(target=adding.add, args=(path, begin, theirs))
        process.start()
        theirs.close()
        last = received(ours, begin + draw.randrange(8))
        time.sleep(draw.random() * 0.004)  # some moment between two of its steps
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        acknowledged = max(acknowledged, last + 1, received(ours, begin + 60) + 1)
        ours.close()
        state = UserState(open_store(path), adding.READER)
        there = event_ids(state)
        next_one = set(ids_of(acknowledged))  # all of it may be there, but it was not acknowledged
        assert there - next_one == {one for number in range(acknowledged) for one in ids_of(number)}
        assert next_one & there in (set(), next_one)
        check_records(state)
        state.store.close()

    # All is sent again: the events that are there count once, and nothing else differs from a run without kills.
    state = UserState(open_store(path), adding.READER)
    bodies = [adding.READ(adding.body(number)) for number in range(acknowledged + 30)]
    results = state.add(bodies)
    assert sum(one.repeated for one in results) == len(there)
    whole = open_store(str(tmp_path / "whole"), create=True)
    write_layout(whole, adding.LAYOUT)
    plain = UserState(whole, adding.READER)
    for begin in range(0, len(bodies), 30):
        plain.add(bodies[begin : begin + 30])
    assert contents(state) == contents(plain)
    assert sum(map(len, contents(plain).values())) == sum(map(len, bodies))
    state.store.close()
    whole.close()


def send(address: str, rows: list[dict]) -> dict:
    request = urllib.request.Request(f"{address}/events", json.dumps(rows).encode())
    return json.load(urllib.request.urlopen(request, timeout=60))


@pytest.mark.slow
def test_a_server_that_is_killed_keeps_what_it_has_acknowledged(exported, tmp_path):
    info, _ = read(exported.path)
    layout, draw, path = layout_of(info.schema, info.limits.max_history, LOG), random.Random(2), tmp_path / "state"
    reader = RequestReader(info.schema, info.limits)
    store = open_store(str(path), create=True)
    write_layout(store, layout)
    store.close()
    bodies = [[EVENT | {"user": f"u{i % 3}", "event_id": i, "time": NOW + i, "item": i}] for i in range(90)]
    acknowledged, wanted = 0, {}
    for number, rows in enumerate(bodies):
        wanted.setdefault(f"u{number % 3}", []).append(rows[0]["time"])
    for kill in range(5):
        with server("--artifact", exported.path, "--state", path) as (process, address):
            alarm = threading.Timer(draw.random() * 0.05, process.kill)
            try:
                while acknowledged < len(bodies):
                    told = send(address, bodies[acknowledged])
                    assert told["added"] + told["repeated"] == 1
                    acknowledged += 1
                    if acknowledged == 18 * kill + 9:
                        alarm.start()
            except (urllib.error.URLError, HTTPException, ConnectionError):
                assert process.wait(60) == -signal.SIGKILL
            alarm.cancel()
        state = UserState(open_store(str(path)), reader)
        there = {user: records[TIME].tolist() for user, records in scan_records(state.store, layout)}
        assert {user: [time for time in times if time < NOW + acknowledged] for user, times in there.items()} == {
            user: [time for time in times if time < NOW + acknowledged] for user, times in wanted.items()
        }
        state.store.close()
    with server("--artifact", exported.path, "--state", path) as (_, address):
        told = send(address, [row for rows in bodies for row in rows])
        assert told["repeated"] >= acknowledged and told["added"] + told["repeated"] == len(bodies)
    state = UserState(open_store(str(path)), reader)
    assert {user: records[TIME].tolist() for user, records in scan_records(state.store, layout)} == wanted
    state.store.close()
