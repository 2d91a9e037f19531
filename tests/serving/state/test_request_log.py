"""The log of requests: what a line says, what is sampled, rotated, dropped and removed."""

import json
import os
import threading

import numpy as np
import pytest

pytest.importorskip("aiohttp")

from jfi.serving import request_log
from jfi.serving.request_log import LENGTH, RequestLog, digest, digests, read_lines, remove_user
from jfi.utils.errors import InputError

from ..test_server import samples, serve
from .conftest import EVENT, NOW, added, answer, request


@pytest.fixture
def logged(tmp_path):
    """Opens a log of all requests, and counts its lines."""
    return lambda count: RequestLog(tmp_path / "log", 1.0, 1 << 20, count)


def test_a_line_has_what_the_model_has_read(exported, stateful, logged, tmp_path):
    body = json.dumps(request(), indent=1).encode()  # with line breaks, of which a line has none

    async def talk(client):
        await added(client, EVENT)
        told = []
        for name in ("a", "b/2"):
            status, found = await answer(await client.post("/score", data=body, headers={"X-Request-ID": name}))
            assert status == 200
            told.append(found["scores"])
        assert (await client.post("/score", json={})).status == 400  # which has no line
        return told

    told = serve(stateful, talk, log=logged)
    lines = list(read_lines(tmp_path / "log"))
    assert [line.id for line in lines] == ["a", "b/2"]
    (filled,) = stateful.state.fill([stateful.reader(request())])
    for line, scores in zip(lines, told, strict=True):
        assert json.loads(bytes(line.request)) == request()
        np.testing.assert_array_equal(np.float32(line.scores), np.float32(scores))
        assert (line.now, line.position, line.available, line.version) == (NOW + 60, 1, True, None)
        assert (line.model.artifact, line.model.run) == (stateful.identity, "run")
        assert line.model.output == "logits" and len(line.model.checkpoint) == 16
        assert line.features == digests(filled, stateful.reader)
        assert line.features[LENGTH] == "1"
        assert line.features["item"] == digest(filled.ids["item"]) != line.features["history_item"]


def test_the_id_of_a_request_says_whether_it_is_logged(scorer, request_body, tmp_path):
    def chosen(folder, share):
        log = RequestLog(tmp_path / folder, share, 1 << 30, lambda *_: None)
        read = scorer.reader(request_body)
        scorer.score([read])
        for number in range(1000):
            log.add(f"r{number}", b"{}", [1.0], read, scorer.reader)
        log.close()
        return [line.id for line in read_lines(tmp_path / folder)]

    some = chosen("some", 0.2)
    assert 120 < len(some) < 280 and chosen("again", 0.2) == some
    assert {*some} < {*chosen("more", 0.5)} and len(chosen("all", 1.0)) == 1000


def test_old_files_are_removed_and_a_part_of_a_line_is_skipped(scorer, request_body, tmp_path, monkeypatch):
    folder, counts = tmp_path / "log", {"written": 0, "dropped": 0}
    monkeypatch.setattr(request_log, "_FILE", 20_000)

    def count(result, number):
        counts[result] += number

    log, read = RequestLog(folder, 1.0, 100_000, count), scorer.reader(request_body)
    scorer.score([read])
    for number in range(1500):
        log.add(f"r{number}", b'{"user": %d}' % (number % 3), [1.0], read, scorer.reader)
    log.close()
    files = sorted(folder.iterdir())
    assert sum(file.stat().st_size for file in files) <= 100_000 and len(files) > 2
    assert counts == {"written": 1500, "dropped": 0}
    kept = [line.id for line in read_lines(folder)]
    assert kept == [f"r{number}" for number in range(1500 - len(kept), 1500)]
    with open(files[-1], "rb+") as file:
        file.truncate(files[-1].stat().st_size - 7)
    assert [line.id for line in read_lines(folder)] == kept[:-1]
    removed = remove_user(folder, "1", "user")
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}  # also of files written anew
    left = [line.id for line in read_lines(folder)]
    assert left == [name for name in kept[:-1] if int(name[1:]) % 3 != 1] and removed == len(kept) - 1 - len(left)
    files[-1].write_text("{}\n")
    with pytest.raises(InputError, match="line 1 is no request"):
        list(read_lines(folder))
    with pytest.raises(InputError, match="no file requests-"):
        list(read_lines(tmp_path))


def test_a_user_is_removed_while_requests_are_logged(scorer, request_body, tmp_path):
    log, read = RequestLog(tmp_path, 1.0, 1 << 20, lambda *_: None), scorer.reader(request_body)
    scorer.score([read])
    for number in range(100):
        log.add(f"r{number}", b'{"user": {"user": "u%d"}}' % (number % 2), [1.0], read, scorer.reader)
    log.remove_user("u1", "user")
    log.add("later", b'{"user": "u0"}', [1.0], read, scorer.reader)
    log.close()
    assert [line.id for line in read_lines(tmp_path)] == [*[f"r{number}" for number in range(0, 100, 2)], "later"]
    assert b"u1" not in b"".join(file.read_bytes() for file in tmp_path.iterdir())


def test_lines_of_a_user_that_are_taken_and_not_yet_written_are_removed(scorer, request_body, tmp_path, monkeypatch):
    monkeypatch.setattr(request_log, "_GATHER", 0.2)  # all lines are taken together
    write, is_writing, go_on = RequestLog._write, threading.Event(), threading.Event()

    def slow(self, content):
        write(self, content)
        is_writing.set()
        assert go_on.wait(60)

    monkeypatch.setattr(RequestLog, "_write", slow)
    log, read = RequestLog(tmp_path, 1.0, 1 << 20, lambda *_: None), scorer.reader(request_body)
    scorer.score([read])
    for number in range(200):
        log.add(f"r{number}", b'{"user":\r\n"u%d"}' % (number % 2), [1.0], read, scorer.reader)
    assert is_writing.wait(60)
    removing = threading.Thread(target=log.remove_user, args=("u1", "user"))
    removing.start()
    removing.join(0.3)
    go_on.set()
    removing.join(60)
    log.add("later", b'{"user": "u2"}', [1.0], read, scorer.reader)
    log.close()
    assert [line.id for line in read_lines(tmp_path)] == [*[f"r{number}" for number in range(0, 200, 2)], "later"]


def test_a_full_disk_drops_lines_and_no_request(stateful, logged, log, monkeypatch):
    def full(*_):
        raise OSError(28, os.strerror(28))

    async def talk(client):
        assert (await client.post("/score", json=request())).status == 200
        while (found := (await samples(client))['jfi_logged_requests_total{result="dropped"}']) < 1:
            pass
        return found

    with monkeypatch.context() as patch:
        patch.setattr(request_log.os, "write", full)
        assert serve(stateful, talk, log=logged) == 1
    assert "requests are dropped from the log" in log()


def test_a_slow_disk_delays_no_request(scorer, request_body, tmp_path, monkeypatch):
    counts = {"written": 0, "dropped": 0}

    def count(result, number):
        counts[result] += number

    monkeypatch.setattr(request_log, "_MOST_BYTES", 1000)
    monkeypatch.setattr(request_log, "_GATHER", 60.0)
    log, read = RequestLog(tmp_path, 1.0, 1 << 20, count), scorer.reader(request_body)
    scorer.score([read])
    for number in range(100):
        log.add(f"r{number}", b'{"user": 1}' + b" " * 89, [1.0], read, scorer.reader)
    log.close()
    assert counts == {"written": 10, "dropped": 90}
