"""Writes a log of clicks hour by hour, whose users change their tastes and whose items come and go.

python examples/online_log.py --out log --hours 24 --first 24 --seconds 10

Each hour of log time is a Parquet file, which appears under its name when it is complete. A user likes some of four
categories more than others, and this drifts within days; an item has a category and a quality, which no column says,
and is shown for about a day. The column `truth` has the probability of a click, so that the best possible AUC is
known.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

#: Seconds since 1970 at which the log begins.
START = 1_767_225_600
CATEGORIES = 4


def hours(users: int = 1000, items: int = 100, rows: int = 4000, seed: int = 0) -> Iterator[pa.Table]:
    """Yields the rows of one hour after the other, sorted by time; equal seeds give equal logs.

    Args:
        users: number of users.
        items: number of items that are shown at a time, on average.
        rows: rows an hour.
        seed: of all random numbers.
    """
    rng = np.random.default_rng(seed)
    taste = rng.normal(size=(users, CATEGORIES))
    alive, born = np.arange(items), items
    category = rng.integers(0, CATEGORIES, items)
    quality, popularity = rng.normal(0, 0.7, items), rng.lognormal(0, 0.7, items)
    hour = 0
    while True:
        user = rng.integers(0, users, rows)
        item = rng.choice(len(alive), rows, p=popularity / popularity.sum())
        probability = 1 / (1 + np.exp(0.7 - 2.0 * taste[user, category[item]] - quality[item]))
        yield pa.table(
            {
                "user": [f"u{one}" for one in user],
                "item": [f"i{one}" for one in alive[item]],
                "time": START + 3600 * hour + np.sort(rng.uniform(0, 3600, rows)),
                "clicked": (rng.random(rows) < probability).astype(np.int8),
                "truth": probability,
            }
        )
        hour += 1
        # A correlation of 0.985 an hour: after two days half of a taste is left.
        taste = 0.985 * taste + np.sqrt(1 - 0.985**2) * rng.normal(size=taste.shape)
        stay = rng.random(len(alive)) > 1 / 24
        new = rng.poisson(items / 24)
        alive = np.append(alive[stay], np.arange(born, born + new))
        born += new
        category = np.append(category[stay], rng.integers(0, CATEGORIES, new))
        quality = np.append(quality[stay], rng.normal(0, 0.7, new))
        popularity = np.append(popularity[stay], rng.lognormal(0, 0.7, new))


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a log of clicks, a Parquet file for each hour.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the files")
    parser.add_argument("--first", type=int, default=0, help="number of the first hour")
    parser.add_argument("--hours", type=int, default=24, help="number of hours")
    parser.add_argument("--seconds", type=float, default=0.0, help="seconds between two files")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for number, table in enumerate(hours()):
        if number >= options.first + options.hours:
            break
        if number >= options.first:
            name = f"hour-{number:05d}.parquet"
            pa.parquet.write_table(table, options.out / f".{name}")
            (options.out / f".{name}").rename(options.out / name)
            time.sleep(options.seconds)


if __name__ == "__main__":
    main()
