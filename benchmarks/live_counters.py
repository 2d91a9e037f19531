"""Time to count an event in statistics of the past, and to read those of a request.

python -m benchmarks.live_counters

The groups that a table with labels has by default, a window of 32 events, 200 users and 5,000 items by a Zipf law, in
LMDB without fsync. Events are counted 1,000 in a write. Results go to `benchmarks/results/cpu/live_counters.json`.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import lmdb
import numpy as np
import torch

from benchmarks import report
from benchmarks.run import Rates
from benchmarks.serving import ROOT, percentiles, timed
from jfi.events.groups import AUTO, WINDOW
from jfi.events.live_counters import LiveCounters
from jfi.events.live_index import Get, LiveRows

USERS, ITEMS, GENRES, AT_ONCE = 200, 5000, 20, 1000
HALF_LIVES = [1e3, 1e4, 1e5, 1e6]


def ids(kind: str, numbers: np.ndarray) -> np.ndarray:
    """Numbers of users, items or genres as digests."""
    return np.uint64(ord(kind) << 56) + numbers.astype(np.uint64)


def genres(draw: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    """Two genres of each of `count` targets."""
    return {"genres": ids("g", np.argsort(draw.random((count, GENRES)))[:, :2])}


def events(draw: np.random.Generator, count: int) -> LiveRows:
    item, user = draw.zipf(1.3, count) % ITEMS, draw.integers(0, USERS, count)
    label, is_event = draw.integers(0, 2, count).astype(float), np.ones(count, bool)
    of = ids("u", user), ids("i", item), 1e9 + np.arange(count), genres(draw, count)
    return LiveRows(*of, label, is_event, order=ids("i", item))


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.live_counters", description=__doc__.splitlines()[0])
    parser.add_argument("--writes", type=int, default=6, help="of 1,000 events; the first is not timed")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/cpu")
    parser.add_argument("--commit", help="to record where the checkout is no git repository")
    options = parser.parse_args()
    draw, rows = np.random.default_rng(0), []
    counters = LiveCounters(AUTO[0], ["genres"], {"genres": 2}, WINDOW, HALF_LIVES, is_implicit=False, num_known=ITEMS)
    log, spent = events(draw, options.writes * AT_ONCE), []
    with tempfile.TemporaryDirectory() as folder, lmdb.open(folder, map_size=2**34, sync=False) as environment:
        for begin in range(0, len(log), AT_ONCE):
            start = time.perf_counter()
            with environment.begin(write=True) as transaction:
                read: Get = lambda keys, transaction=transaction: [transaction.get(key) for key in keys]  # noqa: E731
                for key, value in counters.add(read, log.take(slice(begin, begin + AT_ONCE))).items():
                    transaction.put(key, value)
            spent.append((time.perf_counter() - start) / AT_ONCE * 1e6)
        rows.append({"case": "an event counted", **percentiles(spent[1:])})

        def get(keys: list[bytes]) -> list[bytes | None]:
            with environment.begin() as transaction:
                return [transaction.get(key) for key in keys]

        for candidates in (100, 1000):
            items = ids("i", draw.choice(ITEMS, candidates, replace=False))
            of = np.repeat(ids("u", np.array([3])), candidates), items, np.full(candidates, 1e9 + len(log))
            question = LiveRows(*of, genres(draw, candidates))
            measured = timed(lambda _, question=question: counters.answers(get, question), 1.0)
            rows.append({"case": f"a request of {candidates} candidates", **measured})
    where = report.environment(torch.device("cpu"), Rates(), options.commit)
    report.write(options.out, "live_counters", where, [{"suite": "live_counters", **row} for row in rows])
    for row in rows:
        print(f"{row['case']:36s}{row['p50_us'] / 1e3:10.2f} ms p50")
    return 0


if __name__ == "__main__":
    sys.exit(main())
