"""Time to count an event in statistics of the past, and to read those of a request.

python -m benchmarks.live_counters

The groups that a table with labels has by default, a window of 32 events, 200 users and 5,000 items by a Zipf law, in
LMDB without fsync. `jfi train --follow` answers and counts the events of a part together. Results go to
`benchmarks/results/cpu/live_counters.json`.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import torch

from benchmarks import report
from benchmarks.run import Rates
from benchmarks.serving import ROOT, percentiles, timed
from jfi.events.groups import AUTO, WINDOW, ItemColumn, StatisticsSettings
from jfi.events.live_counters import LiveCounters
from jfi.events.live_index import Get, LiveRows

USERS, ITEMS, GENRES = 200, 5000, 20
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


def microseconds(count: Callable, environment: lmdb.Environment, log: LiveRows, size: int) -> list[float]:
    """The time per event of writes of so many events each, one after the other."""
    spent = []
    for begin in range(0, len(log), size):
        start = time.perf_counter()
        with environment.begin(write=True) as transaction:
            read: Get = lambda keys, transaction=transaction: [transaction.get(key) for key in keys]  # noqa: E731
            for key, value in count(read, log.take(slice(begin, begin + size))).items():
                transaction.put(key, value)
        spent.append((time.perf_counter() - start) / size * 1e6)
    return spent


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.live_counters", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/cpu")
    parser.add_argument("--commit", help="to record where the checkout is no git repository")
    options = parser.parse_args()
    draw, rows = np.random.default_rng(0), []
    columns = {"genres": ItemColumn("genres", 1 + GENRES, 2)}
    settings = StatisticsSettings("user", "item", AUTO[0], WINDOW, HALF_LIVES, False, ITEMS, ["genres"], columns)
    counters = LiveCounters(settings)
    log = events(draw, 26_200)

    def follow(get: Get, part: LiveRows) -> dict[bytes, bytes]:
        return counters.compute_and_add(get, part)[1]

    with tempfile.TemporaryDirectory() as folder, lmdb.open(folder, map_size=2**34, sync=False) as environment:
        spent = microseconds(counters.add, environment, log.take(slice(6000)), 1000)
        rows.append({"case": "an event counted, 1,000 in a write", **percentiles(spent[1:])})
        spent = microseconds(counters.add, environment, log.take(slice(6000, 6200)), 1)
        rows.append({"case": "an event counted alone", **percentiles(spent[1:])})

        def get(keys: list[bytes]) -> list[bytes | None]:
            with environment.begin() as transaction:
                return [transaction.get(key) for key in keys]

        for candidates in (100, 1000):
            items = ids("i", draw.choice(ITEMS, candidates, replace=False))
            of = np.repeat(ids("u", np.array([3])), candidates), items, np.full(candidates, 1e9 + len(log))
            query = LiveRows(*of, genres(draw, candidates))
            measured = timed(lambda _, query=query: counters.compute(get, query), 1.0)
            rows.append({"case": f"a request of {candidates} candidates", **measured})
        spent = microseconds(follow, environment, log.take(slice(6200, None)), 4000)
        rows.append({"case": "an event answered and counted, 4,000", **percentiles(spent[1:])})
    where = report.environment(torch.device("cpu"), Rates(), options.commit)
    report.write(options.out, "live_counters", where, [{"suite": "live_counters", **row} for row in rows])
    for row in rows:
        print(f"{row['case']:40s}{row['p50_us'] / 1e3:10.2f} ms p50")
    return 0


if __name__ == "__main__":
    sys.exit(main())
