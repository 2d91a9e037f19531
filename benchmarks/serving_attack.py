"""A client of the server alone, and beside one that sends anything on 64 connections.

python -m benchmarks.serving --synthetic --attack --seconds 60

The other client runs in a process of its own: compressed bodies, long texts, deep, wide and large JSON, unknown values,
probes, slow and idle connections, one after the other on each connection. Of the client there are the times of
/score, one request after the other, and of /health/live, 50 a second; of the server its memory.
"""

import argparse
import asyncio
import gzip
import itertools
import json
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.http_client import Client
from benchmarks.run import Rates
from benchmarks.serving import BODIES, ROOT, Shape, make_body, percentiles, server, synthetic
from jfi.serving.scorer import Scorer

CONNECTIONS = 64
SLOW = ("half a body", "half of headers", "nothing")


def attacks(request: dict) -> dict[str, tuple[bytes, set[int]]]:
    """By name what a client should not send, and the statuses of its answers; 0 is a connection that is closed.

    Args:
        request: a valid one, by columns.
    """

    def post(body: bytes | dict, *headers: str, length: int | None = None) -> bytes:
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = ["POST /score HTTP/1.1", "Host: a", f"Content-Length: {length or len(body)}", *headers, "", ""]
        return "\r\n".join(lines).encode() + body

    def get(path: str) -> bytes:
        return f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode()

    candidates = request["candidates"]
    text = next(name for name in candidates)
    long = request | {"candidates": candidates | {text: ["x" * 250_000, *candidates[text][1:]]}}
    new = request | {"candidates": candidates | {text: [f"new {i}" for i in range(len(candidates[text]))]}}
    twice, big = b'"time": 1, "time": 2, ', 2**21 - 100
    scored = {200, 503}
    return {
        "compressed": (post(gzip.compress(bytes(2**26)), "Content-Encoding: gzip"), {415}),
        "too large": (post(b" " * 2**22), {413}),
        "long text": (post(long), {200, 400, 503}),
        "unknown values": (post(new), scored),
        "deep": (post(b"[" * 60_000), {400, 503}),
        "nested": (post(b",".join([b"[" * 500 + b"]" * 500] * 130)), {400, 503}),
        "wide": (post(b"[" + b"[]," * (big // 3) + b"[]]"), {400, 503}),
        "keys": (post(b"{" + b",".join(b'"%x":1' % i for i in range(big // 10)) + b"}"), {400, 503}),
        "candidates": (post(b'{"candidates":[' + b"{}," * 60_000 + b"{}]}"), {400, 503}),
        "twice": (post(b"{" + twice + json.dumps(request).encode()[1:]), {400, 503}),
        "ready": (get("/health/ready"), {200}),
        "metrics": (get("/metrics"), {200}),
        "schema": (get("/schema"), {200}),
        "path": (get("/nothing"), {404}),
        "half a body": (post(b"{", length=1000), {408, 503}),
        "half of headers": (b"POST /score HTTP/1.1\r\nX: ", {0}),
        "nothing": (b"", {0}),
        "no HTTP": (b"\x16\x03\x01\x02\x00\r\n\r\n", {400}),
    }


async def attack(
    host: str, port: int, messages: dict[str, bytes], connections: int, seconds: float
) -> tuple[Counter, Counter]:
    """Sends messages on so many connections, one after the other on each.

    A fourth of the connections sends those that are answered late or never, so that the others need not wait.

    Returns:
        how many were sent by name, and how many were answered by name and status, 0 where the connection was closed.
    """
    sent = Counter()
    found = Counter()
    slow, fast = (itertools.cycle([one for one in messages if (one in SLOW) == late]) for late in (True, False))
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds

    async def send_all(names: Iterator[str]) -> None:
        while loop.time() < end:
            reader, writer = await asyncio.open_connection(host, port)
            try:
                while loop.time() < end:
                    name = next(names)
                    writer.write(messages[name])
                    sent[name] += 1
                    head = await reader.readuntil(b"\r\n\r\n")
                    if size := re.search(rb"content-length: *(\d+)", head, re.IGNORECASE):
                        await reader.readexactly(int(size[1]))
                    found[name, int(head[9:12])] += 1
                    if head.startswith(b"HTTP/1.0") or b"connection: close" in head.lower():
                        break
            except (ConnectionError, asyncio.IncompleteReadError):
                found[name, 0] += 1
            finally:
                writer.close()

    sending = [asyncio.create_task(send_all(slow if i % 4 == 0 else fast)) for i in range(connections)]
    _, late = await asyncio.wait(sending, timeout=seconds + 1)
    for task in late:  # of connections on which nothing comes
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    return sent, found


def send_attack(address: str, request: dict, seconds: float) -> tuple[Counter, Counter]:
    """Attacks from this process."""
    host, port = address.removeprefix("http://").split(":")
    messages = {name: message for name, (message, _) in attacks(request).items()}
    return asyncio.run(attack(host, int(port), messages, CONNECTIONS, seconds))


def ask(address: str, path: str, bodies: list[bytes | None], end: float, pause: float) -> tuple[list[float], Counter]:
    """The microseconds of requests one after the other on one connection, and their statuses."""
    times, statuses = [], Counter()
    with Client(address) as connection:
        for body in itertools.cycle(bodies):
            if time.perf_counter() > end:
                return times, statuses
            status, _, before, after = connection.request(path, body)
            statuses[status] += 1
            times.append((after - before) / 1e3)
            time.sleep(pause)


def measure(address: str, bodies: list[bytes], seconds: float, process: int) -> Iterator[dict]:
    """The times of a client alone and beside the attack, and what the attack was answered."""
    for beside in ("quiet", "attacked"):
        with ProcessPoolExecutor(1, get_context("spawn")) as other, ThreadPoolExecutor(2) as threads:
            if beside == "attacked":
                sent = other.submit(send_attack, address, json.loads(bodies[0]), seconds + 1)
                time.sleep(1)  # it begins
            end = time.perf_counter() + seconds
            asked = {"/score": (bodies, 0.0), "/health/live": ([None], 0.02)}
            found = {path: threads.submit(ask, address, path, of, end, pause) for path, (of, pause) in asked.items()}
            for path, future in found.items():
                times, statuses = future.result()
                row = {"measured": f"{path}, {beside}", **percentiles(times), "worst_us": max(times)}
                yield row | {"statuses": {str(status): count for status, count in statuses.items()}}
            memory = {"resident_bytes": _memory(process, "VmRSS"), "peak_bytes": _memory(process, "VmHWM")}
            yield {"measured": f"memory, {beside}", **memory}
            if beside == "attacked":
                count, answers = sent.result()
                statuses = {f"{name}: {status}": number for (name, status), number in sorted(answers.items())}
                yield {"measured": "the attack", "calls": count.total(), "statuses": statuses}


def _memory(process: int, name: str) -> int:
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())[1])


def run(options: argparse.Namespace) -> int:
    """Measures and writes the results."""
    shape, draw = Shape(*options.small), random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        path, processes = Path(folder) / "artifact", []
        synthetic(path, options.items, options.device, options.tables, shape)
        scorer = Scorer(path)
        bodies = [make_body(scorer, shape, draw) for _ in range(BODIES)]
        with server(path, begun=lambda process: processes.append(process.pid)) as address:
            rows = list(measure(address, bodies, options.seconds, processes[0]))
    where = report.environment(torch.device(options.device), Rates(), options.commit) | {"connections": CONNECTIONS}
    out = options.out or ROOT / "benchmarks/results" / report.folder_name(torch.device(options.device))
    report.write(out, "serving_attack", where, [{"suite": "serving attack", "case": shape.name, **row} for row in rows])
    for row in rows:
        print(*(f"{name} {value:.0f}" if isinstance(value, float) else f"{value}" for name, value in row.items()))
    print(f"in {out}")
    return 0
