"""Preparing tables: seconds, CPU seconds and peak memory, of this tree and of another one in turn.

    python -m benchmarks.prepare --out results.json                 all cases but the largest
    python -m benchmarks.prepare --other ../old-tree --cases rows json
    python -m benchmarks.prepare --cases large                      50 million rows: some minutes and 10 GB of disk

Each figure is of a process of its own, which imports jfi from one of the trees and prepares one file. `open_seconds` is
the time of opening what was prepared.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from jfi.utils.files import write_file

ROOT = Path(__file__).parents[1]
_CHILD = """
import json, resource, sys, time
from jfi.data import DataConfig, load_dataset
path, out, action = sys.argv[1:4]
try:
    from jfi.data import FeatureConfig
    from jfi.data.prepared.prepare import prepare_dataset
    features = [FeatureConfig("action", "event")] if action == "True" else []
    features.append(FeatureConfig("price", "event", "number"))
    config = DataConfig(interactions=path, label="clicked", features=features, statistics=[])
except ImportError:  # a tree of before the features
    from jfi.data.prepare import prepare_dataset
    features = {"event_categorical": ["action"] if action == "True" else [], "event_dense": ["price"]}
    config = DataConfig(interactions=path, label="clicked", **features)
wall, cpu = time.perf_counter(), time.process_time()
prepare_dataset(config, out, show=False)
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
opened = time.perf_counter()
load_dataset(DataConfig(prepared=out))
opened = time.perf_counter() - opened
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
print(json.dumps({"seconds": wall, "cpu_seconds": cpu, "open_seconds": opened, "peak_gb": peak}))
"""


@dataclass(frozen=True)
class Case:
    """A table to prepare.

    Args:
        rows: number of interactions.
        users, items: numbers of distinct ids.
        format: "parquet" or "jsonl".
        action: whether events have a column of five values.
    """

    rows: int
    users: int
    items: int
    format: str = "parquet"
    action: bool = True


CASES = {
    "rows": Case(3_000_000, 300_000, 100_000),
    "json": Case(1_000_000, 100_000, 50_000, "jsonl"),
    "few_values": Case(10_000_000, 10_000, 10_000, action=False),
    "many_values": Case(10_000_000, 10_000_000, 10_000, action=False),
    "large": Case(50_000_000, 500_000, 1_000_000),
}


def write_case(case: Case, path: Path) -> None:
    """Writes the table of a case a million rows at a time; ids are texts."""
    rng, writer = np.random.default_rng(0), None
    with open(path, "wb") as file:
        for begin in range(0, case.rows, 1_000_000):
            count = min(1_000_000, case.rows - begin)
            user, item = rng.integers(0, case.users, count), rng.integers(0, case.items, count)
            columns = {"user_id": pa.array(user).cast(pa.string()), "item_id": pa.array(item).cast(pa.string())}
            columns["timestamp"] = pa.array(1_700_000_000 + np.sort(rng.integers(0, 10_000_000, count)) + begin)
            columns["action"] = pa.array(np.array(["view", "cart", "buy", "like", "hide"])[rng.integers(0, 5, count)])
            columns |= {"price": pa.array(rng.random(count).round(3)), "clicked": pa.array(rng.integers(0, 2, count))}
            table = pa.table(columns)
            if case.format == "jsonl":
                file.writelines(json.dumps(row).encode() + b"\n" for row in table.to_pylist())
                continue
            writer = writer or pa.parquet.ParquetWriter(file, table.schema)
            writer.write_table(table)
        if writer is not None:
            writer.close()


def measure(case: Case, path: Path, tree: Path, folder: Path) -> dict[str, float]:
    """Returns the figures of a tree for a table that is written."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        command = [sys.executable, "-c", _CHILD, str(path), f"{out}/prepared", str(case.action)]
        environment = os.environ | {"PYTHONPATH": str(tree)}
        printed = subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, text=True).stdout
    return {name: round(value, 3) for name, value in json.loads(printed.splitlines()[-1]).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--other", type=Path, help="a tree to compare with")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[name for name in CASES if name != "large"])
    parser.add_argument("--out", type=Path, help="JSON file to write")
    options = parser.parse_args()
    trees = {"this": ROOT} | ({} if options.other is None else {"other": options.other.resolve()})
    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.cases:
            path = Path(folder) / f"rows.{CASES[name].format}"
            write_case(CASES[name], path)
            found[name] = {of: measure(CASES[name], path, tree, Path(folder)) for of, tree in trees.items()}
            print(name, json.dumps(found[name]), flush=True)
            path.unlink()
    if options.out is not None:
        write_file(options.out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
