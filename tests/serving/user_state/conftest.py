"""A store of each kind: a folder of LMDB, and a Redis server of the test's own."""

import shutil
import subprocess
import time

import pytest

from jfi.serving.user_state.stores import open_store

#: A Debian package of the same name has it; Valkey's is the same for these tests.
REDIS = shutil.which("redis-server") or shutil.which("valkey-server")


@pytest.fixture(scope="session")
def redis_socket(tmp_path_factory):
    """The socket of a Redis server without a port, which ends with the tests."""
    if REDIS is None:
        pytest.skip("redis-server is not installed")
    socket = tmp_path_factory.mktemp("redis", numbered=True) / "socket"
    options = ["--port", "0", "--unixsocket", socket, "--save", "", "--dir", socket.parent]
    process = subprocess.Popen([REDIS, *map(str, options)], stdout=subprocess.DEVNULL)
    while not socket.exists():
        assert process.poll() is None
        time.sleep(0.02)
    yield socket
    process.terminate()
    process.wait()


@pytest.fixture(params=["lmdb", "redis"])
def new_store(request, tmp_path):
    """Opens an empty store, a new one with each call; what they are named is in `names`."""
    opened, names = [], []

    def make(name: str = "state"):
        if request.param == "lmdb":
            names.append(str(tmp_path / name))
        else:
            socket = request.getfixturevalue("redis_socket")
            names.append(f"unix://{socket}?prefix={tmp_path.name}-{name}")
        opened.append(open_store(names[-1], create=True, timeout=10.0))
        return opened[-1]

    make.names = names
    yield make
    for store in opened:
        store.close()
