"""Clients that a server meets: hostile ones, slow ones, and one with very large histories."""

import asyncio
import copy
import gc
import gzip
import json
import logging
import random
import re
import resource
import threading
from pathlib import Path

import numpy as np
import pytest

from benchmarks import serving_attack
from jfi.cli.serve import most_connections
from jfi.serving.scorer import Scorer
from jfi.serving.server import live

pytest.importorskip("aiohttp")
from aiohttp import compression_utils

from jfi.serving.server import admission
from jfi.serving.server.app import once_a_minute

from .test_server import samples, serve


async def bodies_arriving(client, count: int) -> None:
    """Waits until so many bodies are arriving."""
    while (await samples(client))["jfi_bodies_arriving"] != count:
        await asyncio.sleep(0.01)


async def half_sent(client, count: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connections whose requests lack most of their bodies."""
    halves = [await asyncio.open_connection(client.host, client.port) for _ in range(count)]
    for _, writer in halves:
        writer.write(b'POST /score HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n{"user": ')
    await bodies_arriving(client, count)
    return halves


async def body_until(end: asyncio.Event, body: bytes):
    """A body that is complete only when `end` is set."""
    yield body
    await end.wait()


def test_half_sent_bodies_keep_nobody_waiting(scorer, request_body, log):
    async def talk(client):
        halves = await half_sent(client, 64)
        for _ in range(10):
            assert (await client.post("/score", json=request_body)).status == 200
        assert (await samples(client))["jfi_bodies_arriving"] == 64  # none of them has been waited for
        # Who leaves is no error, and one more than fits is refused.
        halves[0][1].close()
        await bodies_arriving(client, 63)
        end = asyncio.Event()
        more = [asyncio.create_task(client.post("/score", data=body_until(end, b"{"))) for _ in range(3)]
        refused, waiting = await asyncio.wait(more, return_when=asyncio.FIRST_COMPLETED)
        assert [answer.result().status for answer in refused] == [503]
        end.set()
        assert [(await answer).status for answer in waiting] == [400, 400]
        for _, writer in halves:
            writer.close()
        await bodies_arriving(client, 0)
        return (await samples(client))["jfi_clients_left_total"]

    assert serve(scorer, talk, queue=2, bodies=65, body_seconds=3600) == 64
    assert "has left" in log() and "Traceback" not in log()


def test_who_sends_a_body_too_slowly_is_told(scorer, request_body, log):
    async def talk(client):
        answers = [(await reader.read(1000)).split(b"\r\n")[0] for reader, _ in await half_sent(client, 9)]
        await bodies_arriving(client, 0)
        return set(answers)

    assert serve(scorer, talk, body_seconds=2) == {b"HTTP/1.1 408 Request Timeout"}
    assert "Traceback" not in log()


def test_bodies_that_arrive_have_a_bound_of_bytes_together(scorer, request_body):
    body, end = json.dumps(request_body).encode() + b" " * 14_000, asyncio.Event()

    async def talk(client):
        one_by_one = [(await client.post("/score", data=body)).status for _ in range(3)]
        slow = asyncio.create_task(client.post("/score", data=body_until(end, body)))
        await bodies_arriving(client, 1)
        refused = await client.post("/score", data=body)
        found = await samples(client)
        end.set()
        return one_by_one, refused.status, found['jfi_refused_total{reason="full_bodies"}'], (await slow).status

    assert serve(scorer, talk, queue=1, max_body=20_000, body_seconds=3600) == ([200] * 3, 503, 1, 200)


def test_compressed_bodies_are_refused_by_name_and_not_inflated(scorer, request_body, monkeypatch):
    """aiohttp would inflate even what it reads after the answer."""
    monkeypatch.setattr(compression_utils.ZLibDecompressor, "decompress_sync", None)
    bomb = gzip.compress(bytes(2**24))

    async def talk(client):
        encodings = ["gzip", "deflate", "br", "GZIP, identity"] * 4
        sent = [client.post("/score", data=bomb, headers={"Content-Encoding": one}) for one in encodings]
        answers = await asyncio.gather(*sent)
        headers = {"Content-Encoding": "identity"}
        assert (await client.post("/score", json=request_body, headers=headers)).status == 200
        refused = (await samples(client))['jfi_refused_total{reason="compressed"}']
        return [(answer.status, (await answer.json())["error"]) for answer in answers], refused

    answers, refused = serve(scorer, talk)
    assert refused == len(answers) == 16 and {status for status, _ in answers} == {415}
    assert answers[0][1] == "Content-Encoding is 'gzip'; send the body uncompressed"


def test_headers_that_do_not_arrive_close_the_connection(scorer, request_body):
    async def talk(client):
        ends = [await asyncio.open_connection(client.host, client.port) for _ in range(3)]
        for (_, writer), sent in zip(
            ends, (b"POST /score HT", b"GET /health HTTP/1.1\r\nHost: a\r\nX: ", b""), strict=True
        ):
            writer.write(sent)
        assert [await reader.read() for reader, _ in ends[:2]] == [b"", b""]
        found = await samples(client)
        ends[2][1].write(b"GET /health/live HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert (await ends[2][0].read()).startswith(b"HTTP/1.1 200 ")  # it has waited, but for no headers
        return found['jfi_refused_total{reason="slow_headers"}'], found["jfi_connections"]

    assert serve(scorer, talk, body_seconds=0.2) == (2, 2)


@pytest.mark.parametrize("idle", [True, False], ids=["idle", "new"])
def test_connections_have_a_bound(scorer, request_body, monkeypatch, idle):
    """Those that have been idle are closed for new ones; if there are none, new ones are."""
    monkeypatch.setattr(admission, "_CLOSED_AFTER", 0.0 if idle else 3600.0)

    async def talk(client):
        for _ in range(2):  # the connection of this client stays in use
            assert (await client.post("/score", json=request_body)).status == 200
        many = [await asyncio.open_connection(client.host, client.port) for _ in range(10)]
        while (found := await samples(client))['jfi_refused_total{reason="full_connections"}'] < 7:
            await asyncio.sleep(0.01)
        assert (await client.post("/score", json=request_body)).status == 200
        closed = [reader.at_eof() for reader, _ in many]
        for _, writer in many:
            writer.close()
        return found["jfi_connections"], closed

    count, closed = serve(scorer, talk, connections=4)
    assert count == 4 and closed == ([True] * 7 + [False] * 3 if idle else [False] * 3 + [True] * 7)


@pytest.mark.parametrize(
    ("limits", "most", "soft"),
    [((1024, 4096), 1024, 1280), ((1024, -1), 1024, 1280), ((1024, 1024), 768, 1024), ((256, 256), 64, 256)],
)
def test_connections_leave_file_descriptors_to_the_rest(monkeypatch, limits, most, soft):
    given = [limits]
    monkeypatch.setattr(resource, "getrlimit", lambda _: given[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: given.append(new))
    assert most_connections(1024) == most and given[-1] == (soft, limits[1])


def test_connections_without_a_file_descriptor_are_logged_once_a_minute():
    passes, passed = once_a_minute(), []
    for seconds in (0, 1, 59, 60, 61, 121):
        record = logging.makeLogRecord(
            {"msg": "socket.accept() out of system resource\nsocket: ...", "created": seconds}
        )
        passed += [seconds] if passes(record) else []
        assert passes(logging.makeLogRecord({"msg": "another", "created": seconds}))
    assert passed == [0, 60, 121] and record.getMessage() == "no connection can be accepted: too many open files"


def hostile(body: dict, draw: random.Random) -> tuple[str, str, bytes, dict]:
    """Method, path, body and headers of a request that somebody should not send."""
    text = json.dumps(body).encode()
    odd = [None, True, -1, 1e300, 10**400, 2**63, "x" * 300, [], {}, [[[]]], "\ud800", -0.0, "NaN"]
    changed = json.loads(text)
    kind = draw.randrange(7)
    if kind == 0:  # a value of another type
        part = draw.choice([changed, changed["history"][0], changed["candidates"][1]])
        part[draw.choice([*part, "color"])] = draw.choice(odd)
    elif kind == 1:  # a field is missing
        part = draw.choice([changed, changed["history"][2], changed["candidates"][0]])
        del part[draw.choice(list(part))]
    elif kind == 2:  # bytes are lost, or others
        at = draw.randrange(len(text))
        end = at + draw.randrange(9)
        return "POST", "/score", text[:at] + draw.randbytes(draw.randrange(5)) + text[end:], {}
    elif kind == 3:
        junk = draw.choice([b"", b"\x00" * 50, b"[" * 9000, b"9" * 9000, b"[NaN]", b'{"user":' * 3000, b"\xff\xfe" * 9])
        return "POST", "/score", junk, {}
    elif kind == 4:
        path = draw.choice(
            ["/", "/scores", "/../etc/passwd", "/score/%00", "/health/x", "/%ff", "/score?a=" + "b" * 999]
        )
        return draw.choice(["GET", "POST", "PUT", "DELETE", "BREW"]), path, text, {}
    elif kind == 5:
        encoding = draw.choice(["gzip", "deflate", "br", "zstd", "none"])
        return "POST", "/score", draw.choice([text, b"", draw.randbytes(50)]), {"Content-Encoding": encoding}
    else:
        size = draw.choice([30_000, 60_000])
        return "POST", "/score", text + b" " * size, {"Content-Type": "image/png", "X-Request-ID": "\xe9" * 200}
    return "POST", "/score", json.dumps(changed).encode(), {}


def test_hostile_requests_get_an_answer_that_is_no_failure(scorer, request_body, log):
    draw = random.Random(0)
    requests = [hostile(request_body, draw) for _ in range(2000)]

    async def talk(client):
        statuses, left = [], iter(requests)

        async def ask():
            for method, path, body, headers in left:
                async with client.session.request(method, client.make_url(path), data=body, headers=headers) as answer:
                    statuses.append(answer.status)
                    await answer.read()

        await asyncio.gather(*(ask() for _ in range(8)))
        # What is not HTTP at all.
        for junk in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"POST /score HTTP/1.1\r\nContent-Length: x\r\n\r\n"):
            reader, writer = await asyncio.open_connection(client.host, client.port)
            writer.write(junk)
            assert b" 400 " in (await reader.read(100))
            writer.close()
        assert (await client.post("/score", json=request_body)).status == 200
        return statuses

    statuses = serve(scorer, talk, max_body=40_000, pace=1e6)
    assert len(statuses) == 2000 and set(statuses) <= {200, 400, 404, 405, 413, 415} and statuses.count(400) > 1000
    assert "Traceback" not in log() and not re.search("ERROR|CRITICAL", log())


@pytest.mark.parametrize("seconds", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_a_client_that_sends_anything_fails_no_other(scorer, request_body, log, seconds):
    """On 64 connections; the benchmark has the times. Each answer is one of its kind, and counted by the server."""
    columns = {
        part: {name: [row[name] for row in request_body[part]] for name in request_body[part][0]}
        for part in ("history", "candidates")
    }
    sent = serving_attack.attacks(request_body | columns)
    (wanted,) = scorer.score([scorer.reader(request_body)])

    async def talk(client):
        messages = {name: message for name, (message, _) in sent.items()}
        other = serving_attack.attack(client.host, client.port, messages, 64, seconds)
        attack, answered = asyncio.create_task(other), []
        while not attack.done():
            answer = await client.post("/score", json=request_body)
            answered.append((answer.status, (await answer.json())["scores"]))
            assert (await client.get("/health/live")).status == 200
            found = await samples(client)
            assert found["jfi_requests_inside"] <= 64 and found["jfi_connections"] <= 256
        await bodies_arriving(client, 0)
        return await attack, answered, await samples(client)

    (messages, found), answered, counted = serve(scorer, talk, connections=256, body_seconds=1, pace=1e5)
    assert len(answered) > 1 and {status for status, _ in answered} == {200}
    for _, scores in answered:  # others that are scored together may change the last bit
        np.testing.assert_allclose(scores, wanted, rtol=1e-6)
    assert messages.keys() == sent.keys() and messages.total() - found.total() <= 64  # the last of each connection
    assert {(name, status) for name, status in found if status not in {*sent[name][1], 408}} == set()
    for reason, status in {"compressed": 415, "too_large": 413, "slow_body": 408, "not_found": 404}.items():
        received = sum(count for (_, one), count in found.items() if one == status)
        assert 0 < received <= counted[f'jfi_refused_total{{reason="{reason}"}}'] <= received + 64, reason
    assert counted['jfi_refused_total{reason="slow_headers"}'] >= found["half of headers", 0] > 0
    assert "Traceback" not in log() and not re.search("ERROR|CRITICAL", log())


def large_body(body: dict, size: int) -> bytes:
    event = json.dumps(body["history"][0])
    events = ", ".join([event] * (size // (len(event) + 2)))
    return json.dumps(body | {"history": []}).replace('"history": []', f'"history": [{events}]').encode()


class Reading:
    """The reader of requests of another one; reading of a large body waits until it may go on."""

    def __init__(self, reader) -> None:
        self._reader, self.begun, self.go_on = reader, threading.Event(), threading.Event()

    def __getattr__(self, name: str):
        return getattr(self._reader, name)

    def read(self, body: bytes, *how):
        if len(body) > live.LARGE:
            self.begun.set()
            assert self.go_on.wait(120)
        return self._reader.read(body, *how)


def test_a_client_with_a_large_history_keeps_nobody_waiting(scorer, request_body):
    """The benchmark of serving measures how much it delays others."""
    beside = copy.copy(scorer)
    beside.reader = reading = Reading(scorer.reader)

    async def talk(client):
        large = asyncio.create_task(client.post("/score", data=large_body(request_body, 2 * live.LARGE)))
        while not reading.begun.is_set():
            await asyncio.sleep(0.01)
        for _ in range(10):
            assert (await client.post("/score", json=request_body)).status == 200
        assert not large.done()
        reading.go_on.set()
        return (await large).status

    assert serve(beside, talk, deadline=3600) == 200


@pytest.mark.parametrize("columns", [True, False], ids=["columns", "rows"])
def test_large_histories_leave_no_memory_behind(scorer, request_body, columns):
    body = large_body(request_body, 7_500_000 if columns else 3_000_000)
    if columns:
        whole = json.loads(body)
        body = json.dumps(
            whole
            | {
                "history": {
                    name: [row[name] for row in whole["history"]] for name in ("item", "category", "rating", "age")
                }
            }
        ).encode()

    async def talk(client):
        assert (await client.post("/score", json=request_body)).status == 200
        before = resident()
        for _ in range(20):
            assert (await client.post("/score", data=body)).status == 200
        gc.collect()
        return resident() - before

    assert serve(scorer, talk, max_body=2**23, deadline=3600) < 100 * 2**20


def resident() -> int:
    """Bytes of memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_large_request_is_cut_and_refused_as_a_small_one(exported, scorer, request_body, monkeypatch):
    small = Scorer(exported.path, max_history=2, max_candidates=2)
    bodies = [
        request_body,
        dict(request_body, candidates=request_body["candidates"] * 3),
        dict(request_body, history={}),
    ]
    bodies.append(
        dict(request_body, history=[*request_body["history"], {"item": {}, "category": 1, "rating": 1, "age": 1}])
    )

    async def talk(client):
        answers = [await client.post("/score", json=body) for body in bodies]
        return [(answer.status, await answer.json()) for answer in answers]

    plain = serve(small, talk)
    monkeypatch.setattr(live, "LARGE", 1)
    assert serve(small, talk) == plain
    assert [status for status, _ in plain] == [200, 400, 400, 400]
    assert "length <= 2" in plain[1][1]["error"] and "history[3].item" in plain[3][1]["error"]
