"""The delay from an event to a changed score, with trainer and server on one machine.

python -m benchmarks.freshness

The log is that of `examples/online_log.py`, with 100,000 items; the run of `configs/online.yaml` has a table of
1,000,000 rows of 64 for them, and publishes every second. Measured are

- the state of users: an event is posted and its user is scored, whose history has changed; nothing is trained;
- the model: a part of 1,000 rows gets its name, is scored and trained on, published, applied, and an answer is of that
  version. Shares: "noticed" until the trainer begins with the part, "trained" until its metrics are written,
  "published" until the version has its name, "served" until the answer.

Processes are those of `jfi train --follow` and `jfi serve --follow --state`. Results go to
`benchmarks/results/cpu/freshness.json`.
"""

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import torch

from benchmarks import report
from benchmarks.http_client import Client
from benchmarks.run import Rates
from benchmarks.serving import ROOT, percentiles
from examples.online_log import hours
from jfi.serving.published import numbers, path_of, read_version

ITEMS, ROWS, WIDTH, PART, DAY = 100_000, 1_000_000, 64, 1000, 12
SHARES = ("noticed", "trained", "published", "served")


@contextmanager
def running(folder: Path, name: str, *arguments: object) -> Iterator[Path]:
    """Runs a command of jfi within the block; gives the file with what it says."""
    with (log := folder / f"{name}.log").open("wb") as file:
        command = [sys.executable, "-m", "jfi", *map(str, arguments)]
        process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        yield log
    finally:
        process.terminate()
        process.wait()


def until(found) -> object:
    """Asks again and again until there is a result; returns it."""
    while not (result := found()):
        time.sleep(0.005)
    return result


def write(path: Path, table: pa.Table) -> float:
    """Writes a part and gives it its name; returns the time at which it has it."""
    pa.parquet.write_table(table, path.with_name(f".{path.name}"))
    path.with_name(f".{path.name}").rename(path)
    return time.time()


def ask(client: Client, path: str, body: object = None) -> dict:
    status, answer, *_ = client.request(path, None if body is None else json.dumps(body).encode())
    if status != 200:
        raise RuntimeError(f"{path} answered {status}: {answer[:200].decode()}")
    return json.loads(answer)


def events(client: Client, table: pa.Table, count: int) -> dict:
    """Posts events one by one, each followed by a request of its user, whose score must change."""
    times, same = [], 0
    for row in table.slice(0, count).to_pylist():
        body = {"user": row["user"], "candidates": {"item": [row["item"]]}, "time": row["time"] + 1}
        before = ask(client, "/score", body)
        start = time.perf_counter()
        ask(client, "/events", [{name: row[name] for name in ("user", "item", "time", "clicked")}])
        after = ask(client, "/score", body)
        times.append((time.perf_counter() - start) * 1e6)
        same += before["scores"] == after["scores"]
    if same:
        raise RuntimeError(f"{same} of {count} scores are the same after an event")
    return percentiles(times)


def parts(client: Client, run: Path, folder: Path, log: Iterator[pa.Table], count: int) -> list[dict[str, float]]:
    """Writes parts; returns the seconds of each from its name to an answer, by share."""
    found, seen, draw = [], 0, random.Random(0)
    metrics = run / "follow/metrics.jsonl"
    for number in range(count):
        table = next(log)
        row, name = table.slice(0, 1).to_pylist()[0], f"part-{number:05d}.parquet"
        body = {"user": row["user"], "candidates": {"item": [row["item"]]}, "time": row["time"]}
        begin = write(folder / name, table)

        def learned() -> int:
            health = ask(client, "/health")
            return health["version"] if (health["log_position"] or {}).get("part") == name else 0  # noqa: B023

        version = until(learned)
        until(lambda: ask(client, "/score", body)["version"] >= version)  # noqa: B023
        end, written = time.time(), metrics.stat().st_mtime
        line = json.loads(metrics.read_text().splitlines()[-1])
        trained = line["labeled"] / line["samples_per_second"]
        first = min(one for one in numbers(run / "published") if one > seen and place(run, one) == name)
        named, seen = path_of(run / "published", first).stat().st_ctime, version
        shares = written - trained - begin, trained, named - written, end - named
        found.append({"whole": end - begin, **dict(zip(SHARES, shares, strict=True))})
        time.sleep(draw.uniform(1, 3))
    return found


def place(run: Path, number: int) -> str | None:
    return (read_version(run / "published", number).manifest.log_position or {}).get("part")


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.freshness", description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=500)
    parser.add_argument("--parts", type=int, default=30)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/cpu")
    parser.add_argument("--commit", help="to record where the checkout is no git repository")
    options = parser.parse_args()
    config = (ROOT / "configs/online.yaml").read_text().replace("capacity: 400", f"capacity: {ROWS}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for sub in ("day", "parts"):
            (folder / sub).mkdir()
        log = hours(users=10_000, items=ITEMS, rows=8 * PART)
        for number, table in enumerate(itertools.islice(log, DAY)):
            write(folder / f"day/hour-{number:05d}.parquet", table)
        (folder / "config.yaml").write_text(config)
        run, settings = folder / "run", ["--data.interactions", folder / "day", "--training.epochs", 1]
        settings += ["--model.embedding_dim", WIDTH, "--training.publish_every", 1, "--training.run_dir", run]
        for command in (
            ["train", "--config", folder / "config.yaml", *settings],
            ["state", "load", "--run", run, "--state", folder / "users"],
        ):
            subprocess.run([sys.executable, "-m", "jfi", *map(str, command)], check=True, cwd=ROOT)
        followed = (hour.slice(first, PART) for hour in log for first in range(0, hour.num_rows, PART))
        seldom = "--checkpoint-seconds", 60  # one takes 3 s, after which the next part is looked for
        with running(folder, "trainer", "train", "--resume", run, "--follow", folder / "parts", *seldom):
            until(lambda: numbers(run / "published"))
            shared = "--state", folder / "users", "--port", 0, "--drain-seconds", 0
            with running(folder, "server", "serve", "--follow", run / "published", *shared) as said:
                line = until(lambda: "serving on" in said.read_text() and said.read_text())
                with Client(line.split("serving on ")[1].split(";")[0]) as client:
                    posted = events(client, next(followed), options.events)
                    delays = parts(client, run, folder / "parts", followed, options.parts)
    rows: list[dict] = [{"case": "event posted, score changed", **posted}]
    for share in ("whole", *SHARES):
        seconds = [one[share] for one in delays]
        figures = {"median_s": statistics.median(seconds), "worst_s": max(seconds), "parts": len(seconds)}
        rows.append({"case": f"part of {PART} rows: {share}", **figures})
    where = report.environment(torch.device("cpu"), Rates(), options.commit)
    where |= {"table_rows": ROWS, "width": WIDTH}
    report.write(options.out, "freshness", where, [{"suite": "freshness", **row} for row in rows])
    for row in rows:
        print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
