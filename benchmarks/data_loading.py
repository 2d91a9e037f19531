"""Samples per second assembled into KeyedJaggedTensors on one core, with histories of 100 events on average.

    python benchmarks/data_loading.py [--prepared] [--json out.json]

Every user has 203 events and trains on all but the last two, so history lengths are uniform in [0, 200]. A history has
the item, a rating, up to six genres and the age of each event: nine aligned keys.
With --prepared the same is measured for the dataset prepared from the table, each in a process of its own.
"""

import argparse
import json
import multiprocessing
import platform
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch

from jfi.data import DataConfig, FeatureConfig, InteractionDataset, load_dataset
from jfi.data.prepared.manifest import prepared_config
from jfi.data.prepared.prepare import prepare_dataset

EVENTS_PER_USER, MAX_HISTORY = 203, 200
NUM_USERS, NUM_ITEMS = 5_000, 20_000
BATCH_SIZES = (512, 2048, 8192)
SAMPLES, REPEATS = 200_000, 5


def write_tables(folder: Path) -> DataConfig:
    rng = np.random.default_rng(0)
    count = NUM_USERS * EVENTS_PER_USER
    interactions = {
        "user_id": np.repeat(np.arange(NUM_USERS), EVENTS_PER_USER),
        "item_id": np.minimum(rng.zipf(1.3, count), NUM_ITEMS) - 1,
        "timestamp": rng.permutation(count),
        "rating": rng.integers(1, 6, count),
    }
    genres = ["|".join(f"g{g}" for g in rng.choice(18, n, replace=False)) for n in rng.integers(1, 7, NUM_ITEMS)]
    config = DataConfig(
        interactions=str(folder / "interactions.parquet"),
        items=str(folder / "items.parquet"),
        label="rating >= 4",
        features=[FeatureConfig("genres", "item", separator="|"), FeatureConfig("rating", "event")],
        split="leave_one_out",
        max_history=MAX_HISTORY,
        statistics=[],
    )
    pa.parquet.write_table(pa.table(interactions), config.interactions)
    pa.parquet.write_table(pa.table({"item_id": np.arange(NUM_ITEMS), "genres": genres}), config.items)
    return config


def measure(dataset: InteractionDataset, batch_size: int, epoch: int) -> dict[str, float]:
    """Samples of an epoch per second, and per second of CPU time, which other processes do not disturb."""
    batches = iter(dataset.batches("train", batch_size, shuffle=True, epoch=epoch))
    next(batches)  # draws the order of the epoch
    num_batches, num_events = SAMPLES // batch_size, 0
    start, cpu_start = time.perf_counter(), time.process_time()
    for _ in range(num_batches):
        num_events += next(batches).sparse_features.length_per_key()[-1]
    samples = num_batches * batch_size
    return {
        "batch_size": batch_size,
        "mean_history": num_events / samples,
        "samples_per_second": samples / (time.perf_counter() - start),
        "samples_per_cpu_second": samples / (time.process_time() - cpu_start),
    }


def private_mb() -> float:
    """Memory of this process that no other one shares, pages of files that others could map left out."""
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(fields["Private_Dirty"].split()[0]) / 1024


class Loaded:
    """A dataset in a process of its own.

    Args:
        config: of the dataset.
    """

    def __init__(self, config: DataConfig) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        self.opened = self._pool.submit(_load, config).result()

    def measure(self, batch_size: int, epoch: int) -> dict[str, float]:
        """As the function `measure`."""
        return self._pool.submit(_measure, batch_size, epoch).result()

    def close(self) -> float:
        """Ends the process; MB of memory of its own that the dataset and its batches have added."""
        private = self._pool.submit(private_mb).result()
        self._pool.shutdown()
        return private - self.opened["private_mb_before"]


def _load(config: DataConfig) -> dict:
    global _dataset
    torch.set_num_threads(1)
    before, start = private_mb(), time.perf_counter()
    _dataset = load_dataset(config)
    load_seconds = time.perf_counter() - start
    _dataset.batches("train", BATCH_SIZES[0], shuffle=True)[0]
    first = time.perf_counter() - start
    keys = [spec.key for spec in _dataset.features]
    return {"load_seconds": load_seconds, "first_batch_seconds": first, "private_mb_before": before, "keys": keys}


def _measure(batch_size: int, epoch: int) -> dict[str, float]:
    return measure(_dataset, batch_size, epoch)


def compare(configs: dict[str, DataConfig]) -> dict[str, dict]:
    """The datasets in turn, epoch by epoch, so that what else the machine does disturbs all of them."""
    datasets = {name: Loaded(config) for name, config in configs.items()}
    report = {name: {**dataset.opened, "results": []} for name, dataset in datasets.items()}
    for batch_size in BATCH_SIZES:
        rows = {name: [] for name in datasets}
        for epoch in range(REPEATS + 1):  # the first warms the allocator
            for name, dataset in datasets.items():
                rows[name].append(dataset.measure(batch_size, epoch))
        for name, measured in rows.items():
            report[name]["results"].append(
                {key: statistics.median(row[key] for row in measured[1:]) for key in measured[0]}
            )
    for name, dataset in datasets.items():
        report[name]["private_mb"] = dataset.close()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--prepared", action="store_true", help="compare the table with the dataset prepared from it")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        configs = {"table": write_tables(Path(folder))}
        if arguments.prepared:
            prepare_dataset(configs["table"], Path(folder) / "prepared")
            configs["prepared"] = prepared_config(Path(folder) / "prepared")
        report = compare(configs)
    print(f"{NUM_USERS * EVENTS_PER_USER:,} events; keys: {', '.join(report['table']['keys'])}")
    for name, found in report.items():
        print(f"{name}: loaded in {found['load_seconds']:.2f} s, {found['private_mb']:,.0f} MB of its own")
        for row in found["results"]:
            print(f"  batch {row['batch_size']:5d}  mean history {row['mean_history']:5.1f}", end="")
            print(f"  {row['samples_per_second']:10,.0f} samples/s", end="")
            print(f"  {row['samples_per_cpu_second']:10,.0f} per second of CPU time")
    if arguments.json is not None:
        machine = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
        arguments.json.write_text(json.dumps(machine | report, indent=2) + "\n")


if __name__ == "__main__":
    main()
