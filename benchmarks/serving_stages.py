"""Where the time of one request over HTTP goes: a table of its stages, from the client's first byte to its last.

python -m benchmarks.serving_stages --synthetic            the model of benchmarks/serving.py
python -m benchmarks.serving_stages --synthetic --light    with mean pooling of width 8, which takes little to score
python -m benchmarks.serving_stages --artifact ARTIFACT

One client on loopback sends one request after the other to `jfi serve`, first as it is, then with time stamps
(benchmarks/stamped_server.py). A stage is the time between two stamps; its CPU time is that of its thread, where one
thread does it all. Bodies go round, so many of them that what is looked up for one is out of the caches for the next.
Medians do not add up exactly. Results go to `benchmarks/results/<device>/serving_stages.json`.
"""

import argparse
import itertools
import json
import random
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks import report, serving
from benchmarks.http_client import Client
from benchmarks.run import Rates
from jfi.serving.scorer import Scorer

BODIES = 64
#: By stamp what has been done since the one before.
STAGES = {
    "headers": "request sent, headers read",
    "body": "rest of the body read",
    "parsed": "JSON parsed",
    "values": "ids and numbers of the values",
    "to the thread": "hand-over to the model's thread",
    "arrays": "arrays joined, copied to the device",
    "look-up": "look-up of embeddings",
    "inputs": "inputs of the model",
    "model": "model",
    "scores": "scores as a list",
    "from the thread": "hand-over back",
    "answer": "JSON of the answer",
    "received": "answer sent and received",
}
#: The model's own time, which is not the server's.
OF_MODEL = ("look-up", "model")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.serving_stages", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    serving.add_artifact_options(parser)
    parser.add_argument("--light", action="store_true", help="with --synthetic, mean pooling of width 8")
    parser.add_argument("--size", type=int, nargs=2, default=(2000, 1000), help="history and candidates of a request")
    parser.add_argument("--requests", type=int, default=500, help="that are measured, after a tenth as many before")
    return parser.parse_args()


def ask(address: str, bodies: list[bytes], count: int) -> list[tuple[int, int]]:
    """Start and end of requests one after the other, in nanoseconds."""
    times = []
    with Client(address) as client:
        for i, body in enumerate(itertools.islice(itertools.cycle(bodies), count + count // 10)):
            if i == count // 10:
                client.request("/stages")  # those so far are not measured; a server without stamps has no such path
                times.clear()
            status, answer, *when = client.request("/score", body)
            if status != 200:
                raise RuntimeError(f"the server answered {status}: {answer[:200].decode()}")
            times.append(tuple(when))
    return times


def stamps_of(address: str) -> list[list]:
    with Client(address) as client:
        return json.loads(client.request("/stages")[1])


def stages(times: list[tuple[int, int]], stamps: list[list]) -> list[dict]:
    """A row for each stage, in µs."""
    wall: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    for (start, end), request in zip(times, stamps, strict=True):
        before, before_cpu, before_thread = start, None, None
        for name, now, used, thread in request:
            wall.setdefault(name, []).append((now - before) / 1e3)
            if thread == before_thread:
                cpu.setdefault(name, []).append((used - before_cpu) / 1e3)
            before, before_cpu, before_thread = now, used, thread
        wall.setdefault("received", []).append((end - before) / 1e3)
    wall = {name: wall[name] for name in STAGES if name in wall}
    if short := [name for name, found in wall.items() if len(found) != len(times)]:
        raise RuntimeError(f"requests were read in different ways; not all have the stages {', '.join(short)}")
    wall["all"] = list(map(sum, zip(*wall.values(), strict=True)))
    wall["all but look-up and model"] = [
        whole - sum(parts)
        for whole, *parts in zip(wall["all"], *(wall[name] for name in OF_MODEL if name in wall), strict=True)
    ]
    rows = []
    for name, found in wall.items():
        row = {"stage": STAGES.get(name, name), **serving.percentiles(found), "p5_us": float(np.percentile(found, 5))}
        rows.append(row | ({"cpu_p50_us": float(np.median(cpu[name]))} if name in cpu else {}))
    return rows


def main() -> int:
    options = arguments()
    shape = serving.Shape(*options.size)
    with tempfile.TemporaryDirectory() as folder:
        path = options.artifact or Path(folder) / "artifact"
        if options.synthetic:
            serving.synthetic(path, options.items, options.device, options.tables, shape, options.light)
        scorer = Scorer(path, options.tables_device, shape.candidates, shape.history)
        draw = random.Random(0)
        bodies = [serving.make_body(scorer, shape, draw) for _ in range(BODIES)]
        where = report.environment(scorer.device, Rates(), options.commit)
        where |= serving.tables_of(scorer)
        where |= {"requests": options.requests, "light": options.light, "size": list(options.size)}
        where["orjson"] = report.version("orjson")
        device = scorer.device
        del scorer
        limits = ["--max-candidates", shape.candidates, "--max-history", shape.history]
        limits += ["--tables-device", options.tables_device] if options.tables_device else []
        with serving.server(path, *limits) as address:
            plain = [(end - start) / 1e3 for start, end in ask(address, bodies, options.requests)]
        with serving.server(path, *limits, command=["-m", "benchmarks.stamped_server"]) as address:
            times = ask(address, bodies, options.requests)
            rows = stages(times, stamps_of(address))
    rows.append({"stage": "all, server without stamps", **serving.percentiles(plain)})
    rows[-1]["p5_us"] = float(np.percentile(plain, 5))
    out = options.out or serving.ROOT / "benchmarks/results" / report.folder_name(device)
    report.write(out, "serving_stages", where, [{"suite": "serving_stages", "case": shape.name, **row} for row in rows])
    print(
        f"{shape.name}: {len(bodies[0]) / 1e3:.0f} kB, in µs\n{'':38s}{'p50':>8s}{'p5':>8s}{'p99':>8s}{'CPU p50':>9s}"
    )
    for row in rows:
        used = f"{row['cpu_p50_us']:9.0f}" if "cpu_p50_us" in row else ""
        print(f"{row['stage']:38s}{row['p50_us']:8.0f}{row['p5_us']:8.0f}{row['p99_us']:8.0f}{used}")
    print(f"in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
