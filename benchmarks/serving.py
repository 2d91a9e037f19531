"""Latency and throughput of serving: the dense part alone, a request without HTTP, and over HTTP on loopback.

python -m benchmarks.serving --synthetic                 a model of D=64, H=4 with a table of 1,000,000 items
python -m benchmarks.serving --synthetic --state         users with and without state, see benchmarks/serving_state.py
python -m benchmarks.serving --synthetic --attack        beside a client that sends anything, see serving_attack.py
python -m benchmarks.serving --artifact ARTIFACT
"""

import argparse
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torchrec import EmbeddingCollection, EmbeddingConfig

from benchmarks import report
from benchmarks.http_client import Client
from benchmarks.run import Rates
from jfi.models import AttentionPooling, SequenceDLRM
from jfi.modules import KeyBias, SequenceFeatureConfig
from jfi.serving.export import Export
from jfi.serving.schema import Field, Limits, Schema
from jfi.serving.scorer import Scorer, batch_inputs

ROOT = Path(__file__).parents[1]
BODIES = 8  # distinct requests, that go round
WARM_UP = 5
LARGE_HISTORY = 100_000  # of the requests that another client sends meanwhile


@dataclass(frozen=True)
class Shape:
    """A request: events and candidates."""

    history: int
    candidates: int

    @property
    def name(self) -> str:
        return f"history {self.history}, {self.candidates} candidates"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.serving", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_artifact_options(parser)
    parser.add_argument("--large", type=int, nargs=2, default=(2000, 1000), help="history and candidates of a request")
    parser.add_argument("--small", type=int, nargs=2, default=(200, 100), help="those of the other kind of request")
    parser.add_argument("--clients", type=int, default=16, help="at a time, for requests a second")
    parser.add_argument("--seconds", type=float, default=2.5, help="on each figure")
    parser.add_argument("--state", action="store_true", help="compare ways to send histories, with --synthetic")
    parser.add_argument("--attack", action="store_true", help="compare a quiet server with one that is attacked")
    lengths = "of the histories that --state compares"
    parser.add_argument("--lengths", type=int, nargs="+", default=(200, 2000, 20_000), help=lengths)
    options = parser.parse_args()
    if (options.state or options.attack) and not options.synthetic:
        parser.error("--state and --attack need --synthetic")
    return options


def add_artifact_options(parser: argparse.ArgumentParser) -> None:
    """What is served, and where the results go."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--artifact", type=Path, help="of `jfi export`; its requests have random values")
    which.add_argument("--synthetic", action="store_true", help="a model with random weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="with --synthetic")
    parser.add_argument("--tables", default="float32", help="float32 or int8, with --synthetic")
    parser.add_argument("--tables-device", help="where the tables lie (default: as the model)")
    parser.add_argument("--items", type=int, default=1_000_000, help="with --synthetic")
    parser.add_argument("--out", type=Path, help="folder of the results (default: benchmarks/results/<device>)")
    parser.add_argument("--commit", help="to record where the checkout is no git repository")


def synthetic(path: Path, items: int, device: str, tables: str, shape: Shape, light: bool = False) -> None:
    """Exports an untrained model: its scores are noise, its latency is not. A light one pools by the mean."""
    torch.manual_seed(0)
    width = 8 if light else 64
    sizes = {"item": items, "category": 1000, "rating": 6}
    configs = [
        EmbeddingConfig(
            name=name,
            embedding_dim=width,
            num_embeddings=rows,
            feature_names=[f"history_{name}"] if name == "rating" else [name, f"history_{name}"],
        )
        for name, rows in sizes.items()
    ]
    histories = [f"history_{name}" for name in sizes]
    bias = None if light else KeyBias("history_age")
    taste = SequenceFeatureConfig("taste", histories, ["item", "category"], bias=bias)
    sizes_of_layers = ([16, width], [16, 1]) if light else ([512, 256, width], [512, 256, 1])
    pooling = "mean" if light else AttentionPooling(num_heads=4)
    model = SequenceDLRM(None, EmbeddingCollection(tables=configs), [taste], 1, *sizes_of_layers, pooling=pooling)
    schema = Schema(
        user=[],
        candidate=[Field(name, "category", [name]) for name in ("item", "category")],
        event=[
            *(Field(name, "category", [f"history_{name}"]) for name in sizes),
            Field("age", "age", num_buckets=32),
        ],
        vocabularies={name: [str(i) for i in range(1, rows)] for name, rows in sizes.items()},
        user_id="user_id",
        item_id="item",
    )
    Export(model, schema, Limits(shape.candidates, shape.history), device=device, tables=tables).write(path)


def tables_of(scorer: Scorer) -> dict:
    """The tables of an artifact, for the record."""
    sizes = {name: one.rows for name, one in scorer.info.tables.items()}
    return {"tables": scorer.info.quantization, "table_sizes": sizes, "embedding_dim": scorer.info.embedding_dim}


def make_body(scorer: Scorer, shape: Shape, draw: random.Random) -> bytes:
    """A request with known values, by columns."""
    schema = scorer.reader.schema

    def value(one: Field) -> object:
        if one.kind in ("number", "quantile", "age"):
            return round(draw.uniform(0, 1e6))
        known = draw.choice(schema.vocabularies[one.name])
        return known if one.kind == "category" else [known]

    def columns(of: list[Field], count: int) -> dict[str, list]:
        return {one.name: [value(one) for _ in range(count)] for one in of}

    body = {"user": {one.name: value(one) for one in schema.user}}
    body["candidates"] = columns(schema.candidate, shape.candidates)
    if schema.event:
        body["history"] = columns(schema.event, shape.history)
    return json.dumps(body, separators=(",", ":")).encode()


def by_rows(body: bytes) -> bytes:
    """The same request by rows."""
    whole = json.loads(body)
    for name in {"candidates", "history"} & whole.keys():
        part = whole[name]
        whole[name] = [dict(zip(part, row, strict=True)) for row in zip(*part.values(), strict=True)]
    return json.dumps(whole, separators=(",", ":")).encode()


def timed(call: Callable[[int], object], seconds: float) -> dict[str, float]:
    """Percentiles of calls one after the other, in microseconds."""
    for i in range(WARM_UP):
        call(i)
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < WARM_UP:
        start = time.perf_counter()
        call(len(times))
        times.append((time.perf_counter() - start) * 1e6)
    return percentiles(times)


def percentiles(times: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(times, [50, 99])
    return {"p50_us": float(p50), "p99_us": float(p99), "calls": len(times)}


def in_process(scorer: Scorer, shape: Shape, bodies: list[bytes], seconds: float) -> list[dict]:
    """The dense part alone, what surrounds it, and the same candidates with the history read for each."""
    requests, rows = [scorer.reader.read(body) for body in bodies], list(map(by_rows, bodies))
    inputs = [batch_inputs([request], scorer.inputs, scorer.tables, scorer.device) for request in requests]

    def dense(i: int) -> None:
        scorer.package(*inputs[i % BODIES])
        if scorer.device.type == "cuda":
            torch.cuda.synchronize()

    def apart(i: int) -> None:
        scorer.score(one_by_one[i % 2])

    one_by_one = []
    for body in bodies[:2]:
        whole = json.loads(by_rows(body))
        alone = [scorer.reader(whole | {"candidates": [candidate]}) for candidate in whole["candidates"][:8]]
        one_by_one.append([alone[i % 8] for i in range(shape.candidates)])
    measured = {
        "dense part": timed(dense, seconds),
        "request to scores": timed(lambda i: scorer.score([requests[i % BODIES]]), seconds),
        "reading of JSON": timed(lambda i: scorer.reader.read(bodies[i % BODIES]), seconds),
        "reading of JSON by rows": timed(lambda i: scorer.reader.read(rows[i % BODIES]), seconds),
        "history read once a candidate": timed(apart, seconds / 4),
    }
    return [{"case": shape.name, "measured": name, **row} for name, row in measured.items()]


@contextmanager
def server(
    path: Path,
    *options: object,
    command: Sequence[str] = ("-m", "jfi", "serve"),
    begun: Callable[[subprocess.Popen], object] = lambda _: None,
):
    """`jfi serve`, or another command with its options, in a process of its own; gives its address."""
    whole = [sys.executable, "-u", *command, "--artifact", path, "--port", 0, "--drain-seconds", 0, *options]
    # This checkout's jfi, whichever is installed.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.getenv("PYTHONPATH")])])}
    process = subprocess.Popen(list(map(str, whole)), cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        begun(process)
        for line in process.stdout:
            if found := re.search(r"http://[\w.]+:\d+", line):
                yield found[0]
                break
    finally:
        process.terminate()
        process.wait()


def load(address: str, bodies: list[bytes], clients: int, seconds: float) -> dict:
    """Clients on loopback, each in a thread, with one request after the other."""
    order = itertools.cycle(bodies)

    def client(end: float) -> list[tuple[int, float, int]]:
        """Status, microseconds and bytes of the bodies of each request and its answer."""
        found = []
        with Client(address) as connection:
            while time.perf_counter() < end:
                status, answer, before, after = connection.request("/score", body := next(order))
                found.append((status, (after - before) / 1e3, len(body) + len(answer)))
        return found

    with ThreadPoolExecutor(clients) as threads:
        list(threads.map(client, [0.5 + time.perf_counter()] * clients))  # warm-up
        start = time.perf_counter()
        found = list(itertools.chain(*threads.map(client, [start + seconds] * clients)))
        spent = time.perf_counter() - start
    if (statuses := {status for status, *_ in found}) != {200}:
        slow = f"; the server is too slow for {clients} clients, set --clients" if 503 in statuses else ""
        raise RuntimeError(f"answers other than 200: {statuses}{slow}")
    rates = {"clients": clients, "requests_per_second": len(found) / spent}
    bytes_of_bodies = sum(size for *_, size in found) / len(found)
    return rates | percentiles([spent for _, spent, _ in found]) | {"wire_bytes": bytes_of_bodies}


def load_beside(address: str, bodies: list[bytes], large: bytes, seconds: float) -> dict:
    """One client, while another sends requests with large histories one after the other."""
    over = threading.Event()

    def send() -> None:
        with Client(address) as connection:
            while not over.is_set():
                connection.request("/score", large)

    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(send)
        try:
            return load(address, bodies, 1, seconds)
        finally:
            over.set()
            sending.result()


def main() -> int:
    options = arguments()
    if options.state:
        from benchmarks import serving_state  # which takes the model, the clients and the server from here

        return serving_state.run(options)
    if options.attack:
        from benchmarks import serving_attack

        return serving_attack.run(options)
    shapes = [Shape(*options.large), Shape(*options.small)]
    with tempfile.TemporaryDirectory() as folder:
        path = options.artifact or Path(folder) / "artifact"
        start = time.perf_counter()
        if options.synthetic:
            synthetic(path, options.items, options.device, options.tables, shapes[0])
        exported = time.perf_counter() - start
        scorer = Scorer(path, options.tables_device, shapes[0].candidates, shapes[0].history)
        draw, rows = random.Random(0), []
        bodies = {shape: [make_body(scorer, shape, draw) for _ in range(BODIES)] for shape in shapes}
        for shape in shapes:
            rows += in_process(scorer, shape, bodies[shape], options.seconds / 2)
        limits = ["--max-candidates", shapes[0].candidates, "--max-history", shapes[0].history]
        limits += ["--queue", 2 * options.clients, "--max-body-mb", 8]
        if options.tables_device:
            limits += ["--tables-device", options.tables_device]
        with server(path, *limits) as address:
            for shape, clients in itertools.product(shapes, (1, options.clients)):
                measured = load(address, bodies[shape], clients, options.seconds)
                rows.append({"case": shape.name, "measured": "HTTP on loopback", **measured})
            large = make_body(scorer, Shape(LARGE_HISTORY, 1), draw)
            for shape in shapes:
                measured = load_beside(address, bodies[shape], large, options.seconds)
                rows.append({"case": shape.name, "measured": f"HTTP beside {LARGE_HISTORY:,} events", **measured})
    where = report.environment(scorer.device, Rates(), options.commit)
    where |= tables_of(scorer)
    where |= {"export_seconds": exported, "tables_device": options.tables_device or scorer.info.device}
    out = options.out or ROOT / "benchmarks/results" / report.folder_name(scorer.device)
    report.write(out, "serving", where, [{"suite": "serving", **row} for row in rows])
    for row in rows:
        speed = f"{row['requests_per_second']:8.1f}/s, {row['clients']} clients" if "clients" in row else ""
        print(f"{row['case']:36s}{row['measured']:32s}{row['p50_us']:10.0f} us p50{row['p99_us']:10.0f} p99 {speed}")
    print(f"in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
