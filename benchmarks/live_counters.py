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
from jfi.events.live_counters import Get, LiveCounters
from jfi.events.live_index import LiveQuestion
from jfi.events.live_records import LiveEvent

USERS, ITEMS, GENRES, AT_ONCE = 200, 5000, 20, 1000
HALF_LIVES = [1e3, 1e4, 1e5, 1e6]


def digest(kind: str, number: int) -> bytes:
    return f"{kind}{number:07d}".encode()


def genres(draw: np.random.Generator) -> list[bytes]:
    return [digest("g", one) for one in draw.choice(GENRES, 2, replace=False)]


def events(draw: np.random.Generator, count: int) -> list[LiveEvent]:
    item = draw.zipf(1.3, count) % ITEMS
    user, label = draw.integers(0, USERS, count), draw.integers(0, 2, count)
    return [
        LiveEvent(digest("u", user[i]), digest("i", item[i]), 1e9 + i, float(label[i]), values={"genres": genres(draw)})
        for i in range(count)
    ]


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.live_counters", description=__doc__.splitlines()[0])
    parser.add_argument("--writes", type=int, default=6, help="of 1,000 events; the first is not timed")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/cpu")
    parser.add_argument("--commit", help="to record where the checkout is no git repository")
    options = parser.parse_args()
    draw, rows = np.random.default_rng(0), []
    counters = LiveCounters(AUTO[0], ["genres"], {"genres": 3}, WINDOW, HALF_LIVES, is_implicit=False, num_known=ITEMS)
    log, spent = events(draw, options.writes * AT_ONCE), []
    with tempfile.TemporaryDirectory() as folder, lmdb.open(folder, map_size=2**34, sync=False) as environment:
        for begin in range(0, len(log), AT_ONCE):
            start = time.perf_counter()
            with environment.begin(write=True) as transaction:
                read: Get = lambda keys, transaction=transaction: [transaction.get(key) for key in keys]  # noqa: E731
                for key, value in counters.add(read, log[begin : begin + AT_ONCE]).items():
                    transaction.put(key, value)
            spent.append((time.perf_counter() - start) / AT_ONCE * 1e6)
        rows.append({"case": "an event counted", **percentiles(spent[1:])})

        def get(keys: list[bytes]) -> list[bytes | None]:
            with environment.begin() as transaction:
                return [transaction.get(key) for key in keys]

        for candidates in (100, 1000):
            items = [digest("i", one) for one in draw.choice(ITEMS, candidates, replace=False)]
            values = {"genres": [genres(draw) for _ in items]}
            question = LiveQuestion(digest("u", 3), items, 1e9 + len(log), values)
            measured = timed(lambda _, question=question: counters.answers(get, [question]), 1.0)
            rows.append({"case": f"a request of {candidates} candidates", **measured})
    where = report.environment(torch.device("cpu"), Rates(), options.commit)
    report.write(options.out, "live_counters", where, [{"suite": "live_counters", **row} for row in rows])
    for row in rows:
        print(f"{row['case']:36s}{row['p50_us'] / 1e3:10.2f} ms p50")
    return 0


if __name__ == "__main__":
    sys.exit(main())
