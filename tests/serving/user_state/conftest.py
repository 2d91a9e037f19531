"""A store of each kind: a folder of LMDB, and a Redis server of the test's own."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest

from jfi.serving.user_state.stores import open_store

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
