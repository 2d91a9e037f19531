"""The log of requests and `jfi audit`: `python -m benchmarks.serving_audit --requests 1000000`.

A run is trained on the first rows of a synthetic log, exported, and its state is loaded. Then the log goes on: its rows
are added to the state, and each of them is a request, by ids, of its user at its time, for its item and two others, by
the server's scorer in this process, `BATCH` requests a call, and each is logged. Of each `LATE`-th batch the rows come
after the requests, as events that are late. The audit runs in a process of its own. Seconds are of the CPU and of the
wall, since other work may share the cores. Results go to `benchmarks/results/cpu/serving_audit.json`.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks import report
from benchmarks.run import Rates
from benchmarks.serving import ROOT
from jfi import cli
from jfi.examples import synthetic_tables
from jfi.serving.request_log import RequestLog
from jfi.serving.scorer import Scorer, StateSettings
from jfi.state.stores import open_store

#: Rows that the run is trained on, requests of a call, one of so many batches with late events, and rows of a part.
TRAINED, BATCH, LATE, PART = 200_000, 64, 100, 10_000


def prepare(folder: Path, requests: int) -> pa.Table:
    """Trains and exports a run, and loads its state; returns the rows that come later."""
    made = synthetic_tables.taste(num_users=(TRAINED + requests) // 55, num_items=5000, mean_length=60.0)
    rows = made[0].sort_by("timestamp")
    synthetic_tables.write(folder / "tables", (rows.slice(0, TRAINED), made[1]))
    tables = [f"--data.{name}={folder}/tables/{name}.parquet" for name in ("interactions", "items")]
    options = ["--training.run_dir", str(folder / "run"), "--training.epochs", "1", "--data.max_history", "50"]
    cli.run(["train", "--config", str(ROOT / "configs/quickstart.yaml"), *tables, *options, "--training.device", "cpu"])
    cli.run(["export", "--run", str(folder / "run")])
    cli.run(["state", "load", "--run", str(folder / "run"), "--state", str(folder / "state"), "--state-gb", "4"])
    return rows.slice(TRAINED, requests)


def serve(folder: Path, rows: pa.Table, is_logged: bool) -> tuple[float, dict[str, int]]:
    """Replays rows; returns the CPU seconds of scoring and logging requests, and what became of the lines."""
    (folder / "log").mkdir(exist_ok=True)
    table = pq.read_table(folder / "tables/items.parquet")
    items = dict(zip(table["item"].to_pylist(), table["category"].to_pylist(), strict=True))
    counts, draw, spent, known = {"written": 0, "dropped": 0}, np.random.default_rng(0), 0.0, list(items)

    def count(result: str, number: int) -> None:
        counts[result] += number

    with closing(open_store(str(folder / "state"), max_gb=4)) as store:
        scorer = Scorer(folder / "run/artifact", state=StateSettings(store, max_late=1e9))
        log = RequestLog(folder / "requests", 1.0, 1 << 40, count) if is_logged else None
        for number, begin in enumerate(range(0, len(rows), BATCH)):
            part = rows.slice(begin, BATCH).to_pylist()
            events = [row | {"category": items[row["item"]]} for row in part]
            is_late = number % LATE == LATE - 1
            if not is_late:
                scorer.state.add([scorer.events(events)])
            bodies = []
            for row in part:
                others = [known[i] for i in draw.integers(0, len(known), 2).tolist()]
                body = {"user": row["user"], "candidates": [row["item"], *others], "time": row["timestamp"]}
                bodies.append(json.dumps(body).encode())
            start = time.process_time()
            requests = [scorer.reader.read(body) for body in bodies]
            for i, (body, request, scores) in enumerate(zip(bodies, requests, scorer.score(requests), strict=True)):
                if log is not None:
                    log.add(f"{begin + i}", body, scores, request, scorer.reader)
            spent += time.process_time() - start
            if is_late:
                scorer.state.add([scorer.events(events)])
        if log is not None:
            start = time.process_time()
            log.close()
            spent += time.process_time() - start
    for begin in range(0, len(rows), PART):
        pq.write_table(rows.slice(begin, PART), folder / f"log/part-{begin:09d}.parquet")
    return spent, counts


def audit(folder: Path) -> dict[str, object]:
    """Runs the audit; returns its report, its seconds and its peak resident set."""
    out, start = folder / "report.json", time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = ["audit", "--run", folder / "run", "--requests", folder / "requests", "--log", folder / "log"]
    done = subprocess.run([sys.executable, "-m", "jfi", *map(str, command), "--report", str(out)], env=os.environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = {"exit_code": done.returncode, "audit_seconds": time.perf_counter() - start, "audit_cpu_seconds": cpu}
    return found | {"audit_peak_rss": after.ru_maxrss * 1024} | json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.serving_audit", description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1_000_000, help="how many")
    parser.add_argument("--folder", help="for files, such as one in memory (default: a temporary one)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/cpu", help="folder of the results")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        rows = prepare(folder, options.requests)
        seconds, counts = serve(folder, rows, is_logged=True)
        size = sum(file.stat().st_size for file in (folder / "requests").iterdir())
        row = {"suite": "serving_audit", "case": f"{len(rows):,} requests of 3 candidates", "candidates": 3}
        row |= {"serve_cpu_seconds": seconds, **counts, "log_bytes": size, **audit(folder)}
    row["features"] = {name: one["requests"] for name, one in row["features"].items()}
    where = report.environment(torch.device("cpu"), Rates(), None)
    report.write(options.out, "serving_audit", where, [row])
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
