"""Bytes and time of the state of users: `python -m benchmarks.user_state`.

Fills LMDB and Redis with users of random events, and loads a Parquet log as `jfi state load` does. Each is filled in a
process of its own, whose peak resident set is recorded; bytes are those that LMDB's file takes on the disk, and
`used_memory` of a Redis server that is started for it. A size that has not been filled is not in the results. Results
go to `benchmarks/results/cpu/user_state.json`, after each figure.
"""

import argparse
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import duckdb
import numpy as np
import torch

from benchmarks import report
from benchmarks.run import Rates
from benchmarks.serving import ROOT
from benchmarks.serving_state import redis_server
from jfi.serving.schema import Field, Schema
from jfi.state.layout import TIME, EventLayout, layout_of, user_key
from jfi.state.state import write_layout
from jfi.state.stores import open_store

ITEMS = 100_000
#: Values of each column of events.
SIZES_OF_COLUMNS = {"item": ITEMS, "category": 1000, "action": 6}
SIZES = ((1_000_000, 200), (100_000, 10_000))
LOADED = (1_000_000, 20)


def three_columns(events: int) -> EventLayout:
    """Records of three ids: 28 bytes an event."""
    fields = [Field(name, "category", [f"history_{name}"]) for name in SIZES_OF_COLUMNS]
    return layout_of(Schema([], [], fields, user_id="user_id", item_id="item"), events)


def users_of(layout: EventLayout, users: int, events: int) -> Iterator[tuple[str, np.ndarray]]:
    """Users with random events."""
    draw = np.random.default_rng(0)
    for user in range(users):
        records = np.zeros(events, layout.dtype)
        records[TIME] = np.sort(draw.integers(1_600_000_000, 1_700_000_000, events))
        for name, size in SIZES_OF_COLUMNS.items():
            records[name] = draw.integers(1, size + 1, events)
        yield f"user-{user}", records


def peak_rss() -> int:
    """Returns the largest resident set of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fill(name: str, users: int, events: int, results: SimpleQueue) -> None:
    """Fills a store, in a process of its own."""
    layout, start = three_columns(events), time.perf_counter()
    store = open_store(name, create=True, timeout=60.0)
    store.put((user_key(user), records.tobytes()) for user, records in users_of(layout, users, events))
    write_layout(store, layout)
    store.close()
    results.put((time.perf_counter() - start, peak_rss()))


def alone(target: Callable[..., None], *given: object) -> tuple[float, int]:
    """Runs a function in a fresh process; returns its seconds and its peak resident set."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=target, args=(*given, results))
    process.start()
    process.join()
    if process.exitcode or results.empty():
        raise RuntimeError(f"{given[0]} could not be filled: exit code {process.exitcode}")
    return results.get()


def disk_bytes(path: Path) -> int:
    """Returns the bytes that a folder of LMDB takes on the disk."""
    return (path / "data.mdb").stat().st_blocks * 512


def used_memory(url: str) -> int:
    """Returns the bytes that a Redis server has allocated."""
    import valkey

    return valkey.Valkey.from_url(url.split("?")[0]).info("memory")["used_memory"]


def write_log(path: Path, users: int, events: int) -> None:
    """A Parquet log of users with so many events each, in the order of time."""
    path.unlink(missing_ok=True)
    duckdb.sql(f"""
        copy (
            select 'user-' || (i % {users}) as user_id, 1 + hash(i) % {ITEMS - 1} as item_id,
                1600000000 + i as timestamp, (hash(i + 1) % 2)::int as label
            from range({users * events}) as rows(i)
        ) to '{path}' (format parquet)
    """)


def load(store: str, run: str, log: str, results: SimpleQueue) -> None:
    """Loads a log as `jfi state load` does, in a process of its own."""
    from jfi.cli import state
    from jfi.cli.options import state as options

    start = time.perf_counter()
    given = ["load", "--run", run, "--interactions", log, "--state", store]
    state.main(options().parse_args(given))
    results.put((time.perf_counter() - start, peak_rss()))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.user_state", description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=int, default=1, help="divides the numbers of users")
    parser.add_argument("--redis-gib", type=float, default=12.0, help="larger states are not put into Redis")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/cpu")
    parser.add_argument("--commit", help="to record where the checkout is no git repository")
    parser.add_argument("--run", help="of `jfi train` with user_id, item_id, timestamp and label, to load a log with")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    where = report.environment(torch.device("cpu"), Rates(), options.commit)
    where |= {"event_bytes": three_columns(1).dtype.itemsize, "scale": options.scale}
    rows: list[dict] = []

    def record(users: int, events: int, store: str, seconds: float, peak: int, size: int) -> None:
        row = {"users": users, "events": events, "store": store, "seconds": seconds, "peak_rss": peak, "bytes": size}
        rows.append({"suite": "user_state", "case": f"{users:,} users of {events:,} events", **row})
        report.write(options.out, "user_state", where, rows)
        print(f"{rows[-1]['case']:36s}{store:10s}{seconds:8.1f} s{size / users / events:8.1f} B an event", flush=True)

    for users, events in SIZES:
        users = max(1, users // options.scale)
        with tempfile.TemporaryDirectory() as folder:
            found = alone(fill, folder, users, events)
            record(users, events, "LMDB", *found, disk_bytes(Path(folder)))
        if users * events * where["event_bytes"] > options.redis_gib * 2**30:
            print(f"{users:,} users of {events:,} events: too large for Redis here, see --redis-gib")
            continue
        with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as url:
            if url is not None:
                found = alone(fill, url, users, events)
                record(users, events, "Redis", *found, used_memory(url))
    if options.run:
        from jfi.training.run.saved_run import load_run

        users, events = max(1, LOADED[0] // options.scale), LOADED[1]
        with tempfile.TemporaryDirectory() as folder:
            log, state = Path(folder) / "log.parquet", Path(folder) / "state"
            write_log(log, users, events)
            found = alone(load, str(state), options.run, str(log))
            kind = " with statistics" if load_run(options.run).config.data.statistics_groups() else ""
            record(users, events, f"LMDB, of a log{kind}", *found, disk_bytes(state))
    return 0


if __name__ == "__main__":
    sys.exit(main())
