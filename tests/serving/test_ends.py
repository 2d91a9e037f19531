"""How processes of `jfi serve` end, and what they leave behind."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import cache_dir

from .conftest import ROOT
from .publishing import add, bodies, new_base
from .test_commands import post, server

pytest.importorskip("aiohttp")


@pytest.fixture
def temporary(tmp_path) -> Path:
    """An empty folder for temporary files."""
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


def environment(temporary: Path) -> dict[str, str]:
    """That of a process with this folder for temporary files, whose compiler has another one."""
    return os.environ | {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": cache_dir()}


def wait_until(condition: Callable[[], object], process: subprocess.Popen) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)


def test_a_version_unloads_the_artifact_before_and_the_end_the_last(published, temporary, tmp_path):
    folder = tmp_path / "versions"
    add(folder, published.folder, 1)
    with server("--follow", folder, env=environment(temporary)) as (process, address):

        def version() -> int:
            return json.load(urllib.request.urlopen(f"{address}/health"))["version"]

        for number in (2, 3):
            before = list(temporary.iterdir())
            assert len(before) == 1
            new_base(folder, published.folder, number, run=f"run {number}")
            wait_until(lambda number=number: version() == number, process)
            wait_until(lambda before=before: not before[0].exists(), process)
            assert post(address, bodies()[0])["version"] == number
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    assert not list(temporary.iterdir())


def test_a_server_that_drains_still_answers_and_waits_for_bodies(exported, temporary, scorer, request_body):
    body, wanted = json.dumps(request_body).encode(), pytest.approx(scorer.score([scorer.reader(request_body)])[0])
    head = b"POST /score HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    options = ["--artifact", exported.path, "--drain-seconds", 3600, "--body-seconds", 600]
    with server(*options, env=environment(temporary)) as (process, address):
        host, port = address.removeprefix("http://").split(":")

        def ask(path: str, body: bytes | None = None) -> tuple[int, str, dict]:
            connection = http.client.HTTPConnection(host, int(port), timeout=60)
            connection.request("GET" if body is None else "POST", path, body)
            answer = connection.getresponse()
            return answer.status, answer.getheader("Connection"), json.loads(answer.read())

        assert ask("/health/ready")[:2] == (200, None)
        with socket.create_connection((host, int(port)), timeout=60) as half:
            half.sendall(head + body[:9])
            wait_until(
                lambda: b"jfi_bodies_arriving 1.0" in urllib.request.urlopen(f"{address}/metrics").read(), process
            )
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: ask("/health/ready")[:2] == (503, "close"), process)
            assert ask("/score", body) == (200, "close", {"scores": wanted})
            process.send_signal(signal.SIGTERM)  # ends the time for draining
            wait_until(lambda: not listens(host, int(port)), process)
            half.sendall(body[9:])
            answer = http.client.HTTPResponse(half)
            answer.begin()
            assert answer.status == 200 and answer.getheader("Connection") == "close"
            assert json.loads(answer.read())["scores"] == wanted
        assert process.wait(120) == 0
    assert not list(temporary.iterdir())


def test_another_signal_ends_the_wait_for_bodies_and_answers(exported, temporary, request_body):
    """One body does not arrive, and one request waits an hour for others in its batch."""
    hour = 3_600_000
    options = ["--body-seconds", 3600, "--max-wait-ms", hour, "--deadline-ms", hour]
    with server("--artifact", exported.path, *options, env=environment(temporary)) as (process, address):
        host, port = address.removeprefix("http://").split(":")
        body = json.dumps(request_body).encode()
        head = b"POST /score HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
        with (
            socket.create_connection((host, int(port)), timeout=60) as half,
            socket.create_connection((host, int(port)), timeout=60) as waiting,
        ):
            half.sendall(head + body[:9])
            waiting.sendall(head + body)
            found = [b"jfi_bodies_arriving 1.0", b"jfi_queue_length 1.0"]
            wait_until(lambda: all(one in metrics(address) for one in found), process)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: not listens(host, int(port)), process)
            time.sleep(0.2)
            assert process.poll() is None  # it waits for both
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0
            assert "Traceback" not in process.stderr.read()
    assert not list(temporary.iterdir())


def metrics(address: str) -> bytes:
    return urllib.request.urlopen(f"{address}/metrics").read()


def listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port)).close()
    except ConnectionError:
        return False
    return True


def test_a_server_that_ends_while_it_loads_leaves_nothing(exported, temporary):
    command = [sys.executable, "-m", "jfi", "serve", "--artifact", exported.path, "--port", "0", "--drain-seconds", "0"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(temporary), stdout=subprocess.PIPE)
    try:
        # Python itself tries the folder first with a file that it removes at once.
        wait_until(lambda: list(temporary.glob("jfi-*")), process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) in (143, 0)  # 0 where it has just begun to serve
    finally:
        process.kill()
        process.communicate()
    assert not list(temporary.iterdir())
