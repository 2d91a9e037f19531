"""The server in this process: faults, storms, and what is batched with what."""

import asyncio
import inspect
import json
import re
import threading

import jsonschema
import pytest

pytest.importorskip("aiohttp")

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from jfi.cli import options
from jfi.serving.server.app import _BODIES, make_app, make_runner, run
from jfi.serving.server.batcher import Batcher

from .conftest import as_sent


def test_the_server_has_the_limits_of_the_command():
    """As `jfi serve --help` says."""
    given = inspect.signature(make_app).parameters
    assert (given["max_body"].default, given["queue"].default) == (2 * 2**20, 64)
    assert given["max_wait"].default == inspect.signature(Batcher).parameters["max_wait"].default == 0


class Server(TestServer):
    """With the bounds of `run`."""

    async def _make_runner(self, **_):
        return make_runner(self.app)


def serve(scorer, talk, **how):
    """Runs `talk(client)` with a server that listens on the loopback address."""

    async def run():
        app = make_app(scorer, **{"max_batch": 100, **how})
        async with TestClient(Server(app)) as client:
            return await talk(client)

    return asyncio.run(run())


async def samples(client) -> dict[str, float]:
    """The samples of /metrics by name and labels."""
    answer = await client.get("/metrics")
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = (await answer.text()).splitlines()
    for line in lines:  # the whole grammar that is used
        assert re.fullmatch(r'# (HELP|TYPE) \w+ .+|\w+(\{\w+="[^"\\]*"(,\w+="[^"\\]*")*\})? [0-9.e+-]+', line), line
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


class Slow:
    """A scorer that blocks until it is released, and records the sizes of its batches."""

    def __init__(self, scorer):
        self.reader, self.info, self._score = scorer.reader, scorer.info, scorer.score
        self.identity, self.example, self.state = scorer.identity, scorer.example, scorer.state
        self.let_go, self.batches = threading.Event(), []

    def score(self, requests):
        self.batches.append(len(requests))
        assert self.let_go.wait(120)
        if any(request.num_candidates == 3 for request in requests):
            raise RuntimeError("three")
        return self._score(requests)


def test_it_answers(scorer, request_body):
    async def talk(client):
        answers = [await client.post("/score", json=request_body) for _ in range(2)]
        schema = await (await client.get("/schema")).json()
        health = await (await client.get("/health")).json()
        return [(answer.status, await answer.json()) for answer in answers], schema, health

    ((status, first), again), schema, health = serve(scorer, talk)
    assert status == 200 and (status, first) == again
    assert first["scores"] == as_sent(scorer.score([scorer.reader(request_body)])[0])
    jsonschema.validate(request_body, schema)
    assert set(schema["$defs"]["Event"]["properties"]) == {"item", "category", "rating", "age"}
    assert health["status"] == "ok"


def test_faults_get_a_reason_and_disturb_nobody(scorer, request_body):
    bodies = {
        "the request is not JSON": b"{",
        "unknown field 'color'": json.dumps(request_body | {"color": 1}),
        "candidates must be array of length >= 1": json.dumps(request_body | {"candidates": []}),
        "candidates must be array of length <= 1000": json.dumps(request_body | {"candidates": [{}] * 1001}),
        "candidates[0].item must be bool | int": json.dumps(
            request_body | {"candidates": [{"item": {}, "category": 1}]}
        ),
    }

    async def talk(client):
        good = [asyncio.create_task(client.post("/score", json=request_body)) for _ in range(5)]
        found = {reason: await client.post("/score", data=body) for reason, body in bodies.items()}
        other = [
            await client.post("/score", data=b" " * 30_000),
            # A body whose length is not announced.
            await client.post("/score", data=pieces(30)),
            await client.get("/nothing"),
            await client.get("/score"),
            await client.post("/score", data=b"junk", headers={"Content-Encoding": "gzip"}),
        ]
        for reason, answer in found.items():
            assert answer.status == 400 and reason in (await answer.json())["error"]
        assert [answer.status for answer in other] == [413, 413, 404, 405, 415]
        assert all([(await answer.json())["error"] for answer in other])
        return {(await answer).status for answer in good}

    async def pieces(count):
        for _ in range(count):
            yield b" " * 1000

    assert serve(scorer, talk, max_body=20_000) == {200}


def test_a_storm_is_refused_and_who_was_accepted_is_answered(scorer, request_body):
    slow = Slow(scorer)

    async def talk(client):
        storm = [asyncio.create_task(client.post("/score", json=request_body)) for _ in range(40)]
        done, waiting = await asyncio.wait(storm, timeout=120, return_when=asyncio.FIRST_COMPLETED)
        while len(waiting) > 8:
            more, waiting = await asyncio.wait(waiting, timeout=120, return_when=asyncio.FIRST_COMPLETED)
            assert more
            done |= more
        assert {task.result().status for task in done} == {503}
        assert all(task.result().headers["Retry-After"] for task in done)
        slow.let_go.set()
        assert {(await task).status for task in waiting} == {200}
        assert (await client.post("/score", json=request_body)).status == 200

    serve(slow, talk, queue=8, max_batch=6)
    # The first alone, then three requests of two candidates at a time.
    assert max(slow.batches) == 3 and sum(slow.batches) == 9


def test_the_failure_of_one_request_is_its_own(scorer, request_body):
    slow = Slow(scorer)
    bad = request_body | {"candidates": request_body["candidates"][:1] * 3}

    async def talk(client):
        bodies = [request_body, request_body, bad, request_body]
        tasks = [asyncio.create_task(client.post("/score", json=body)) for body in bodies]
        while len(slow.batches) < 1:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        slow.let_go.set()
        return [(await task).status for task in tasks]

    assert serve(slow, talk) == [200, 200, 500, 200]


def test_who_leaves_is_not_scored(scorer, request_body):
    slow = Slow(scorer)

    async def run():
        batcher = Batcher(slow.score, max_batch=100)
        request = scorer.reader(request_body)
        first = asyncio.create_task(batcher.score(request))
        while not slow.batches:
            await asyncio.sleep(0.01)
        leaves, stays = (asyncio.create_task(batcher.score(request)) for _ in range(2))
        await asyncio.sleep(0)
        leaves.cancel()
        slow.let_go.set()
        assert await stays == await first
        await batcher.close()

    asyncio.run(run())
    assert slow.batches == [1, 1]


@pytest.mark.parametrize("max_wait", [0.0, 0.2])
def test_waiting_for_more_makes_batches(scorer, request_body, max_wait):
    slow = Slow(scorer)
    slow.let_go.set()

    async def run():
        batcher = Batcher(slow.score, max_batch=100, max_wait=max_wait)
        request = scorer.reader(request_body)

        answers = await asyncio.gather(batcher.score(request), batcher.score(request))
        await batcher.close()
        return answers

    first, second = asyncio.run(run())
    assert first == pytest.approx(second, abs=1e-6)
    assert slow.batches == ([2] if max_wait else [1, 1])


def test_clients_that_leave_when_they_are_told_lose_no_request(scorer, request_body, monkeypatch):
    """They keep their connections until an answer has `Connection: close`."""
    body = json.dumps(request_body).encode()
    message = b"POST /score HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    answers, stop = [], asyncio.Event()

    async def client(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        head = b""
        while b"Connection: close" not in head:
            writer.write(message)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(re.search(rb"Content-Length: (\d+)", head)[1]))
            answers.append(head[:12])
            if len(answers) == 40:
                stop.set()
        writer.close()

    async def end() -> None:
        running, host, port = await begin(make_app(scorer, max_batch=100), stop, monkeypatch, drain_seconds=3600)
        await asyncio.gather(*(client(host, port) for _ in range(16)))
        stop.set()
        await asyncio.wait_for(running, 20)

    asyncio.run(end())
    assert len(answers) >= 40 and set(answers) == {b"HTTP/1.1 200"}
    assert options.serve().get_default("drain_seconds") == 10


async def begin(app, stop, monkeypatch, *, stops_again=False, **how) -> tuple[asyncio.Task, str, int]:
    """Lets a server run; gives its task, its host and its port. It may set `stop` when it has stopped to listen."""
    begun = asyncio.Future()

    class Site(web.TCPSite):
        async def start(self):
            await super().start()
            begun.set_result(self.name)

        async def stop(self):
            await super().stop()
            if stops_again:
                stop.set()

    monkeypatch.setattr(web, "TCPSite", Site)
    running = asyncio.create_task(run(app, "127.0.0.1", 0, stop, **how))
    host, port = (await begun).removeprefix("http://").split(":")
    return running, host, int(port)


def test_a_signal_while_the_server_stops_listening_ends_the_wait_for_bodies(scorer, monkeypatch):
    async def end():
        stop, app = asyncio.Event(), make_app(scorer, max_batch=1, body_seconds=600)
        running, host, port = await begin(app, stop, monkeypatch, stops_again=True)
        _, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /score HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{")
        while not app[_BODIES].arriving:
            await asyncio.sleep(0.01)
        stop.set()
        await asyncio.wait_for(running, 20)
        writer.close()

    asyncio.run(end())
