"""Serving with the state of users next to histories in requests: `python -m benchmarks.serving --synthetic --state`.

The same users, events and candidates are scored four ways: histories as JSON by rows and by columns, and a user's id
with the events in LMDB and in Redis; the scores must agree. Bytes on the wire are those of the bodies of a request and
its answer. Results go to `benchmarks/results/<device>/serving_state.json`, after each figure, so that a run that is cut
short keeps what it has. A Redis server without persistence is started on a socket; where none is installed
(`redis-server`, `valkey-server`, or the file that the environment's REDIS_SERVER names) its rows are left out.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch

from benchmarks import report, serving
from benchmarks.http_client import Client
from benchmarks.run import Rates
from benchmarks.serving import BODIES, Shape, timed
from jfi.serving.schema import Schema
from jfi.serving.scorer import Scorer, StateSettings, batch_inputs
from jfi.state.dictionaries import Dictionaries
from jfi.state.layout import TIME, EventLayout, Log, layout_of, user_key
from jfi.state.state import UserState, write_layout
from jfi.state.stores import Store, open_store

CANDIDATES = 1000
BY_ROWS, BY_COLUMNS, LMDB, REDIS = "JSON by rows", "JSON by columns", "state in LMDB", "state in Redis"
WAYS = (BY_ROWS, BY_COLUMNS, LMDB, REDIS)
#: Events of a body of POST /events, each of another user of WRITTEN_HISTORY events.
WRITTEN = (1, 100, 10_000)
WRITTEN_HISTORY = 200
TIMEOUT_MS = 30_000
#: Scores of one request in ways that reach the kernels in batches of other sizes.
TOLERANCE = 1e-3

Record = Callable[[dict], None]


@contextmanager
def redis_server(folder: Path) -> Iterator[str | None]:
    """A Redis server without persistence on a socket in a folder; gives its URL, or None where none is installed."""
    program = os.environ.get("REDIS_SERVER") or shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        yield None
        return
    socket = folder / "redis"
    options = ["--port", "0", "--unixsocket", socket, "--save", "", "--dir", folder]
    process = subprocess.Popen([program, *map(str, options)], stdout=subprocess.DEVNULL)
    try:
        while not socket.exists():
            if process.poll() is not None:
                raise RuntimeError(f"{program} ended with {process.returncode}")
            time.sleep(0.02)
        yield f"unix://{socket}?prefix=benchmark"
    finally:
        process.terminate()
        process.wait()


def in_time_order(body: bytes) -> bytes:
    """A request by columns whose events are sorted, oldest first, as those of a state are."""
    whole = json.loads(body)
    order = np.argsort([-age for age in whole["history"]["age"]], kind="stable")
    whole["history"] = {name: [values[i] for i in order] for name, values in whole["history"].items()}
    return json.dumps(whole, separators=(",", ":")).encode()


def records_of(body: bytes, layout: EventLayout, now: int) -> np.ndarray:
    """The events of a request as a state keeps them; the values are numbers from 1, as those of the dictionaries."""
    history = json.loads(body)["history"]
    records = np.zeros(len(history["age"]), layout.dtype)
    records[TIME] = now - np.array(history["age"], np.float64)
    for name in layout.columns:
        records[name] = np.array(history[name], np.int64)
    return records


def of_user(body: bytes, user: str, now: int) -> bytes:
    """The same request with a user's id in place of the events."""
    whole = json.loads(body)
    request = {"user": user, "candidates": whole["candidates"], "time": now}
    return json.dumps(request, separators=(",", ":")).encode()


def fill(store: Store, layout: EventLayout, schema: Schema, bodies: dict[int, list[bytes]], now: int) -> None:
    """Writes the values of the vocabularies, the users of the requests, and those that events are posted for."""
    names = Dictionaries()
    sizes = {name: len(names.numbers(name, schema.vocabularies[name])) for name in layout.columns}
    store.put(names.changes().items())
    for length, own in bodies.items():
        of_users = ((user_key(f"{length}-{i}"), records_of(body, layout, now)) for i, body in enumerate(own))
        store.put((key, records.tobytes()) for key, records in of_users)
    draw = np.random.default_rng(0)
    records = np.zeros(WRITTEN_HISTORY, layout.dtype)
    records[TIME] = now - 1e6 + np.arange(WRITTEN_HISTORY)
    for name, known in sizes.items():
        records[name] = draw.integers(1, known + 1, WRITTEN_HISTORY)
    store.put((user_key(f"w{i}"), records.tobytes()) for i in range(max(WRITTEN)))
    write_layout(store, layout)


def parts(
    scorer: Scorer, store: Store, way: str, length: int, bodies: list[bytes], record: Record, seconds: float
) -> None:
    """Times of the parts of a request in one process."""
    state = UserState(store, scorer.reader)
    requests = [scorer.reader.read(body) for body in bodies]
    users = [one.stored.user for one in requests]
    keys = [user_key(user) for user in users]
    records = zip(state.store.get([*map(user_key, users)]), users, strict=True)
    histories = [state.layout.records(*one) for one in records]
    filled = [state.fill([one])[0] for one in requests]
    inputs = [batch_inputs([one], scorer.inputs, scorer.tables, scorer.device) for one in filled]
    wait = torch.cuda.synchronize if scorer.device.type == "cuda" else lambda: None

    def score(i: int) -> None:
        scorer._score(state.fill([requests[i % BODIES]]))

    def copy(i: int) -> None:
        batch_inputs([filled[i % BODIES]], scorer.inputs, scorer.tables, scorer.device)
        wait()

    def dense(i: int) -> None:
        scorer.package(*inputs[i % BODIES])
        wait()

    def decode(i: int) -> None:
        state._with_events(requests[i % BODIES], histories[i % BODIES])

    measured = {
        "JSON parsed": lambda i: scorer.reader.read(bodies[i % BODIES]),
        "store read": lambda i: store.get([keys[i % BODIES]]),
        "records decoded": decode,
        "copy and look-up": copy,
        "dense part": dense,
        "request to scores": score,
    }
    for name, call in measured.items():
        record({"case": case(length), "way": way, "measured": name, **timed(call, seconds)})


def case(length: int) -> str:
    return Shape(length, CANDIDATES).name


def scores_of(address: str, body: bytes) -> np.ndarray:
    with Client(address) as client:
        status, answer, *_ = client.request("/score", body)
    if status != 200:
        raise RuntimeError(f"the server answered {status}: {answer[:200].decode()}")
    return np.array(json.loads(answer)["scores"])


def posted(address: str, number: int, way: str, record: Record, seconds: float) -> None:
    """Latency of POST /events of so many events, each of another user, of the time now."""
    values = {"item": "1", "category": "1", "rating": "1"}
    users = [f"w{i}" for i in range(number)]

    with Client(address) as client:

        def post(i: int) -> None:
            rows = {"user": users, "time": [time.time()] * number} | {
                name: [one] * number for name, one in values.items()
            }
            status, answer, *_ = client.request("/events", json.dumps(rows).encode())
            if status != 200 or json.loads(answer)["added"] != number:
                raise RuntimeError(f"POST /events answered {status}: {answer[:200].decode()}")

        name = f"POST /events, {number:,} events"
        record({"case": f"{WRITTEN_HISTORY} events a user", "way": way, "measured": name, **timed(post, seconds)})


def fresh(address: str, body: bytes, max_history: int, way: str, record: Record, seconds: float) -> None:
    """Posts an event and scores its user, one after the other; the event must count in the request."""
    values = {"item": ["1"], "category": ["1"], "rating": ["1"]}
    whole = json.loads(body) | {"user": "fresh"}
    used = []
    with Client(address) as client:

        def post_and_score(i: int) -> None:
            now = time.time()
            client.request("/events", json.dumps({"user": ["fresh"], "time": [now]} | values).encode())
            _, answer, *_ = client.request("/score", json.dumps(whole | {"time": now + 1e-3}).encode())
            used.append(json.loads(answer)["state"]["events"])
            if used[-1] != min(len(used), max_history):
                raise RuntimeError(f"a request after {len(used)} acknowledged events reads {used[-1]}")

        spent = timed(post_and_score, seconds)
    record({"case": "freshness", "way": way, "measured": "POST /events, then POST /score", **spent, "fresh": len(used)})


def run(options: argparse.Namespace) -> int:
    """Measures all ways; the options are those of benchmarks/serving.py."""
    longest, draw = max(options.lengths), random.Random(0)
    rows: list[dict] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = folder / "artifact"
        start = time.perf_counter()
        serving.synthetic(path, options.items, options.device, options.tables, Shape(longest, CANDIDATES))
        exported = time.perf_counter() - start
        plain = Scorer(path, options.tables_device)
        shapes = {length: Shape(length, CANDIDATES) for length in options.lengths}
        columns = {
            n: [in_time_order(serving.make_body(plain, one, draw)) for _ in range(BODIES)] for n, one in shapes.items()
        }
        schema, now = plain.info.schema, int(time.time())
        layout = layout_of(schema, longest, Log("user", "item", "time"))
        users = {n: [of_user(body, f"{n}-{i}", now) for i, body in enumerate(own)] for n, own in columns.items()}
        bodies = {way: users for way in WAYS} | {BY_COLUMNS: columns}
        bodies[BY_ROWS] = {n: list(map(serving.by_rows, own)) for n, own in columns.items()}
        where = report.environment(plain.device, Rates(), options.commit) | serving.tables_of(plain)
        where |= {"export_seconds": exported, "tables_device": options.tables_device or plain.info.device}
        where |= {"redis": None, "event_bytes": layout.dtype.itemsize, "seconds": options.seconds}
        out = options.out or serving.ROOT / "benchmarks/results" / report.folder_name(plain.device)
        del plain

        def record(row: dict) -> None:
            rows.append({"suite": "serving_state", **row})
            report.write(out, "serving_state", where, rows)
            speed = f"{row['requests_per_second']:8.1f}/s, {row['clients']} clients" if "clients" in row else ""
            spent = f"{row['p50_us']:10.0f} us p50{row['p99_us']:10.0f} p99"
            print(f"{row['case']:32s}{row['way']:17s}{row['measured']:32s}{spent} {speed}", flush=True)

        url = stack.enter_context(redis_server(folder))
        names = {LMDB: str(folder / "state")} | ({} if url is None else {REDIS: url})
        if url is None:
            print("redis-server is not installed: Redis is left out")
        else:
            where["redis"] = report.run_command(os.environ.get("REDIS_SERVER", "redis-server"), "--version")
        for way, name in names.items():
            store = open_store(name, create=True, timeout=TIMEOUT_MS / 1e3)
            fill(store, layout, schema, columns, now)
            scorer = Scorer(path, options.tables_device, state=StateSettings(store))
            for length in options.lengths:
                parts(scorer, store, way, length, users[length], record, options.seconds / 4)
            store.close()
            del scorer
        expected: dict[int, np.ndarray] = {}
        for way in (BY_ROWS, BY_COLUMNS, *names):
            _over_http(options, path, names.get(way), way, bodies[way], expected, record)
    print(f"in {out}")
    return 0


def _over_http(
    options: argparse.Namespace,
    path: Path,
    state: str | None,
    way: str,
    bodies: dict[int, list[bytes]],
    expected: dict[int, np.ndarray],
    record: Record,
) -> None:
    """A server of its own: scores, checked against those of the first way; then what writes to the state."""
    limits: list[object] = ["--queue", 2 * options.clients, "--max-body-mb", 8, "--deadline-ms", 60_000]
    limits += ["--tables-device", options.tables_device] if options.tables_device else []
    limits += ["--state", state, "--state-timeout-ms", TIMEOUT_MS] if state else []
    with serving.server(path, *limits) as address:
        for length, own in bodies.items():
            scores = scores_of(address, own[0])
            if (error := np.abs(scores - expected.setdefault(length, scores)).max()) > TOLERANCE:
                raise RuntimeError(f"{way}: scores of {length} events differ by {error} from those of {BY_ROWS}")
        for (length, own), clients in itertools.product(bodies.items(), (1, options.clients)):
            spent = serving.load(address, own, clients, options.seconds)
            record({"case": case(length), "way": way, "measured": "HTTP on loopback", "history": length, **spent})
        if state:
            for number in WRITTEN:
                posted(address, number, way, record, options.seconds / 2)
            fresh(address, bodies[min(bodies)][0], max(bodies), way, record, options.seconds / 2)
