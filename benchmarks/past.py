"""Statistics of the past of an artifact: seconds of counting a log, bytes of its counters, ms of a request's look-up.

    python -m benchmarks.past --out benchmarks/results/cpu/past.json

A generated log with a label, 50 rows a user, 20,000 items of skewed popularity and two of their categories; all groups
of `auto`, and all but `similar`. Look-ups are medians of wall time over 60 requests of different users, one thread.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import report
from jfi.data import DataConfig, FeatureConfig, load_dataset
from jfi.events.groups import AUTO
from jfi.serving.counters import RequestStatistics
from jfi.serving.dataset_schema import read_counters
from jfi.utils.files import write_file

ITEMS, CANDIDATES, REQUESTS = 20_000, (100, 1000), 60


def write_log(path: Path, rows: int) -> None:
    draw = np.random.default_rng(0)
    weight = np.arange(1, ITEMS + 1) ** -0.8
    item = draw.choice(ITEMS, rows, p=weight / weight.sum())
    columns = {
        "user_id": draw.integers(0, rows // 50, rows),
        "item_id": item,
        "category": item % 50,
        "brand": item % 700,
    }
    columns |= {"timestamp": np.sort(draw.integers(0, 10**7, rows)), "clicked": draw.integers(0, 2, rows)}
    pq.write_table(pa.table(columns), path)


def measure(config: DataConfig, rows: int) -> dict:
    schema, start = load_dataset(config).schema, time.process_time()
    counters = read_counters(config, schema)
    found = {"cpu_seconds": time.process_time() - start}
    found["bytes_per_row"] = sum(values.nbytes for values in counters.arrays.values()) / rows
    statistics, draw = RequestStatistics(counters), np.random.default_rng(1)
    for count in CANDIDATES:
        items, times = [str(one) for one in draw.integers(0, ITEMS, count)], []
        ids = {column.key: draw.integers(1, 50, (count, 1)) for column in counters.fields.columns.values()}
        for user in draw.integers(0, rows // 50, REQUESTS):
            start = time.perf_counter()
            statistics(str(user), items, ids, 2e7)
            times.append(1e3 * (time.perf_counter() - start))
        found[f"ms_{count}_candidates"] = median(times)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path)
    options, found = parser.parse_args(), {}
    with tempfile.TemporaryDirectory() as folder:
        write_log(path := Path(folder) / "log.parquet", options.rows)
        features = [FeatureConfig("category", "item"), FeatureConfig("brand", "item")]
        config = DataConfig(interactions=str(path), label="clicked", features=features)
        for name, groups in (
            ("auto", AUTO[False]),
            ("without similar", [one for one in AUTO[False] if one != "similar"]),
        ):
            found[name] = measure(dataclasses.replace(config, statistics=groups), options.rows)
            print(name, found[name], flush=True)
    if options.out is not None:
        where = {"rows": options.rows, "commit": report.commit(), "device": report.cpu_name()}
        write_file(options.out, json.dumps(where | {"groups": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
