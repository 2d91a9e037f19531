"""Sorts rows on disk with DuckDB, as preparation does, and with Polars' streaming engine: time and peak memory.

    python benchmarks/sort_engines.py [--rows 10000000] [--json out.json]

Rows of 40 bytes (user, item, time, row, value) in an Arrow file are read, sorted by the first four columns and written.
Each engine runs in a process of its own; its peak is the process's, with the pages of mapped files in it. The seconds
of CPU, imports included, say more than the others on a machine that does something else too.
"""

import argparse
import json
import multiprocessing
import os
import platform
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from jfi.data.prepared.stages.sort import sort_batches
from jfi.utils.jagged import BLOCK

BY = ["user", "item", "time", "row"]
ENGINES = {"duckdb, limit 1GB": "1GB", "duckdb, limit 500MB": "500MB", "polars, streaming": None}


def write_rows(path: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    schema = pa.schema([(name, pa.int64()) for name in BY] + [("value", pa.float64())])
    with pa.ipc.new_file(path, schema) as writer:
        for first in range(0, count, BLOCK):
            n = min(BLOCK, count - first)
            ids = rng.integers(0, count // 100, n), rng.integers(0, count // 50, n), rng.integers(0, 10**9, n)
            columns = [*ids, np.arange(first, first + n), rng.random(n)]
            writer.write_batch(pa.record_batch([pa.array(one) for one in columns], schema=schema))


def sort_with_duckdb(source: Path, target: Path, memory: str) -> None:
    with pa.memory_map(str(source)) as file, pa.ipc.open_file(file) as reader:
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        with pa.ipc.new_file(target, reader.schema) as writer:
            for batch in sort_batches(batches, BY, memory, target.parent):
                writer.write_batch(batch)


def sort_with_polars(source: Path, target: Path) -> None:
    import polars

    polars.scan_ipc(source).sort(BY).sink_ipc(target, engine="streaming")


def measure(source: Path, target: Path, memory: str | None, results: multiprocessing.Queue) -> None:
    start = time.perf_counter()
    if memory is None:
        sort_with_polars(source, target)
    else:
        sort_with_duckdb(source, target, memory)
    seconds, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    cpu = used.ru_utime + used.ru_stime
    results.put({"seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1), "peak_gb": round(used.ru_maxrss / 1e6, 2)})


def check(target: Path, count: int) -> None:
    """Raises ValueError unless the rows are all there, in order."""
    with pa.memory_map(str(target)) as file:
        table = pa.ipc.open_file(file).read_all()
        user, row = (table.column(name).to_numpy() for name in ("user", "row"))
        if len(user) != count or (np.diff(user) < 0).any() or not np.bincount(row, minlength=count).all():
            raise ValueError(f"{target} is not the sorted rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    import duckdb
    import polars

    results = []
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        source, target = Path(name) / "rows.arrow", Path(name) / "sorted.arrow"
        write_rows(source, options.rows)
        for engine, memory in ENGINES.items():
            queue = spawn.Queue()
            process = spawn.Process(target=measure, args=(source, target, memory, queue))
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"{engine} failed")
            results.append({"engine": engine, **queue.get()})
            check(target, options.rows)
            target.unlink()
            print(results[-1], flush=True)
    report = {
        "what": __doc__.splitlines()[0],
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": [round(one, 1) for one in os.getloadavg()],
        "versions": {"duckdb": duckdb.__version__, "polars": polars.__version__},
        "rows": options.rows,
        "results": results,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
