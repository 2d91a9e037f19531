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

from jfi.data import DataConfig, InteractionDataset, load_dataset
from jfi.data.manifest import prepared_config
from jfi.data.prepare import prepare_dataset

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
        item_categorical=["genres"],
        separators={"genres": "|"},
        event_categorical=["rating"],
        split="leave_one_out",
        max_history=MAX_HISTORY,
    )
    pa.parquet.write_table(pa.table(interactions), config.interactions)
    pa.parquet.write_table(pa.table({"item_id": np.arange(NUM_ITEMS), "genres": genres}), config.items)
    return config


def measure(dataset: InteractionDataset, batch_size: int) -> dict[str, float]:
    rates = []
    for epoch in range(REPEATS + 1):
        batches = dataset.batches("train", batch_size, shuffle=True, epoch=epoch)
        next(batches)  # draws the order of the epoch
        num_batches, num_events = SAMPLES // batch_size, 0
        start = time.perf_counter()
        for _ in range(num_batches):
            num_events += next(batches).sparse_features.length_per_key()[-1]
        rates.append(num_batches * batch_size / (time.perf_counter() - start))
    return {
        "batch_size": batch_size,
        "mean_history": num_events / (num_batches * batch_size),
        "samples_per_second": statistics.median(rates[1:]),  # the first warms the allocator
    }


def private_mb() -> float:
    """Memory of this process that no other one shares, pages of files that others could map left out."""
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(fields["Private_Dirty"].split()[0]) / 1024


def load_and_measure(config: DataConfig) -> dict:
    """Seconds until the first batch, samples per second, and the memory that the dataset and its batches add."""
    torch.set_num_threads(1)
    before, start = private_mb(), time.perf_counter()
    dataset = load_dataset(config)
    load_seconds = time.perf_counter() - start
    next(dataset.batches("train", BATCH_SIZES[0], shuffle=True))
    first = time.perf_counter() - start
    results = [measure(dataset, batch_size) for batch_size in BATCH_SIZES]
    found = {"load_seconds": load_seconds, "first_batch_seconds": first, "private_mb": private_mb() - before}
    return found | {"keys": [spec.key for spec in dataset.features], "results": results}


def in_a_process(config: DataConfig) -> dict:
    """`load_and_measure` in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(load_and_measure, config).result()


def show(name: str, found: dict) -> None:
    print(f"{name}: loaded in {found['load_seconds']:.1f} s, {found['private_mb']:,.0f} MB of its own")
    for row in found["results"]:
        print(f"  batch {row['batch_size']:5d}  mean history {row['mean_history']:5.1f}", end="")
        print(f"  {row['samples_per_second']:10,.0f} samples/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--prepared", action="store_true", help="compare the table with the dataset prepared from it")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        config = write_tables(Path(folder))
        report = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
        found = in_a_process(config)
        print(f"{NUM_USERS * EVENTS_PER_USER:,} events; keys: {', '.join(found['keys'])}")
        show("table", found)
        if arguments.prepared:
            prepare_dataset(config, Path(folder) / "prepared")
            prepared = in_a_process(prepared_config(Path(folder) / "prepared"))
            show("prepared", prepared)
            report |= {"table": found, "prepared": prepared}
        else:
            report |= {"load_seconds": found["load_seconds"], "results": found["results"]}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
