"""Stores of each kind, LMDB and a Redis server of the test's own, and a server with a state of users."""

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest

from jfi.serving.scorer import Scorer, StateSettings
from jfi.state.layout import layout_of
from jfi.state.state import write_layout
from jfi.state.stores import LmdbStore, StoreUnavailableError, open_store

from .adding import LOG

#: A Debian package of the same name has it; Valkey's is the same for these tests.
REDIS = shutil.which("redis-server") or shutil.which("valkey-server")


@contextmanager
def running_redis(folder: Path) -> Iterator[tuple[Path, subprocess.Popen]]:
    """A Redis server without a port: its socket and its process."""
    if REDIS is None:
        pytest.skip("redis-server is not installed")
    socket = folder / "socket"
    socket.unlink(missing_ok=True)
    options = ["--port", "0", "--unixsocket", socket, "--save", "", "--dir", folder]
    process = subprocess.Popen([REDIS, *map(str, options)], stdout=subprocess.DEVNULL)
    try:
        while not socket.exists():
            assert process.poll() is None
            time.sleep(0.02)
        yield socket, process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def redis_socket(tmp_path_factory):
    """The socket of a Redis server that ends with the tests."""
    with running_redis(tmp_path_factory.mktemp("redis", numbered=True)) as (socket, _):
        yield socket


@pytest.fixture(params=["lmdb", "redis"])
def new_store(request, tmp_path):
    """Opens an empty store, a new one with each call; what they are named is in `names`."""
    opened, names = [], []

    def make(name: str = "state"):
        if request.param == "lmdb":
            names.append(str(tmp_path / name))
        else:
            socket = request.getfixturevalue("redis_socket")
            names.append(f"unix://{socket}?prefix={quote(f'{tmp_path.name}-{name}')}")
        opened.append(open_store(names[-1], create=True, timeout=10.0))
        return opened[-1]

    make.names = names
    yield make
    for store in opened:
        store.close()


NOW = 1_700_000_000.0
EVENT = {"user": "u", "time": NOW, "event_id": "e", "item": 3, "category": 3, "rating": 5}
CANDIDATES = {"item": [3, 17], "category": [3, 3]}


class Failing(LmdbStore):
    """A store that can be told to fail or to wait."""

    fault: str | None = None
    go_on: threading.Event | None = None

    def snapshot(self):
        if self.fault is not None:
            raise StoreUnavailableError(self.fault)
        return super().snapshot()

    def update(self, change):
        self.updates = getattr(self, "updates", 0) + 1
        if self.go_on is not None:
            assert self.go_on.wait(60)
        if self.fault is not None:
            raise StoreUnavailableError(self.fault)
        super().update(change)


@pytest.fixture
def store(tmp_path, scorer):
    store = Failing(tmp_path / "state", create=True, max_bytes=1 << 24)
    write_layout(store, layout_of(scorer.info.schema, scorer.info.limits.max_history, LOG))
    yield store
    store.close()


@pytest.fixture
def stateful(exported, store):
    return Scorer(exported.path, state=StateSettings(store, max_events=20))


def request(user: object = "u", now: float = NOW + 60) -> dict:
    return {"user": user, "candidates": CANDIDATES, "time": now}


async def answer(response) -> tuple[int, dict]:
    return response.status, await response.json()


async def added(client, *events: dict) -> dict:
    status, told = await answer(await client.post("/events", json=list(events)))
    assert status == 200, told
    return told


async def asked(client, user: object = "u", now: float = NOW + 60) -> dict:
    status, told = await answer(await client.post("/score", json=request(user, now)))
    assert status == 200, told
    return told["state"]
