"""AUC of following a log, against training anew each hour and each day.

python -m benchmarks.online
python -m benchmarks.online --seeds 8 --jobs 2

The log is that of `examples/online_log.py`: 48 hours of 4,000 rows. Every way starts with the first 24 hours and
predicts each later hour before it learns of it, with the histories of all rows before that hour. "daily" keeps the
model of the first day, and "hourly" is trained anew each hour on the 24 hours before, both with a vocabulary; "follow"
is the run of `configs/online.yaml`, whose table of items grows, and goes on by `jfi train --follow`. "truth" is the
probability that the labels were drawn with, so that no model can be better. Results go to
`benchmarks/results/cpu/online.json`.

With `--seeds` it follows 72 hours after the first day, with a row for each item of these four days, as a vocabulary of
all has, and with half as many, for so many seeds of the model and of the log; results go to `online_half.json`.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import torch
from sklearn.metrics import roc_auc_score

import jfi
from benchmarks import report
from benchmarks.run import Rates
from examples.online_log import hours
from jfi.follow.start import follow
from jfi.training import Config, train
from jfi.training.config_parser import parse_config

ROOT, DAY = Path(__file__).parents[1], 24


def settings(rows: pa.Table | str, run: Path, capacity: int | None, seed: int = 0) -> Config:
    """The config of the example; 0 rows are those of the example, and None takes a vocabulary."""
    config, _ = parse_config([f"--config={ROOT / 'configs/online.yaml'}"])
    features = [one for one in config.data.features if capacity is not None or one.capacity is None]
    if capacity:
        features = [dataclasses.replace(one, capacity=capacity) if one.capacity else one for one in features]
    data = dataclasses.replace(config.data, interactions=rows, features=features)
    return dataclasses.replace(config, data=data).with_training(run_dir=str(run), seed=seed)


def retrained(tables: list[pa.Table], every: int, folder: Path) -> list[float]:
    """The AUC of each hour after the first day, of models trained every so many hours on the day before."""
    found, run = [], None
    for hour in range(DAY, len(tables)):
        if run is None or (hour - DAY) % every == 0:
            path = folder / f"every-{every}-{hour}"
            train(settings(pa.concat_tables(tables[hour - DAY : hour]), path, None))
            run = jfi.load_run(path)
        scores = run.predict(tables[hour], history=pa.concat_tables(tables[:hour]))
        found.append(roc_auc_score(tables[hour]["clicked"], scores["probability"]))
    return found


def followed(tables: list[pa.Table], folder: Path, capacity: int = 0, seed: int = 0) -> tuple[list[float], float]:
    """The AUC of each hour after the first day, and the seconds to follow them all."""
    for name, hour in itertools.product(("day", "parts"), range(len(tables))):
        if (name == "day") == (hour < DAY):
            (folder / name).mkdir(exist_ok=True)
            pa.parquet.write_table(tables[hour], folder / name / f"hour-{hour:05d}.parquet")
    train(settings(str(folder / "day"), folder / "run", capacity, seed))
    start = time.perf_counter()
    follow(folder / "run", folder / "parts", until_idle=True)
    seconds = time.perf_counter() - start
    lines = [json.loads(line) for line in (folder / "run/follow/metrics.jsonl").read_text().splitlines()]
    return [line["auc"] for line in lines if "part" in line], seconds


def halved(seed: int) -> dict:
    """The AUC with a row for each item of a log, and with half as many."""
    torch.set_num_threads(1)
    tables = list(itertools.islice(hours(seed=seed), 4 * DAY))
    items, found = len(pa.concat_tables(tables)["item"].unique()), {"suite": "online_half", "seed": seed}
    for name, capacity in {"all": items + 1, "half": items // 2 + 1}.items():
        with tempfile.TemporaryDirectory() as folder:
            by_hour, _ = followed(tables, Path(folder), capacity, seed)
        found |= {f"{name}_rows": capacity, f"{name}_auc": statistics.mean(by_hour)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.online", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/cpu")
    parser.add_argument("--commit", help="to record where the checkout is no git repository")
    parser.add_argument("--seeds", type=int, help="compare numbers of rows alone, for so many seeds")
    parser.add_argument("--jobs", type=int, default=1, help="processes for the seeds")
    options = parser.parse_args()
    where = report.environment(torch.device("cpu"), Rates(), options.commit)
    if options.seeds:
        with get_context("spawn").Pool(options.jobs) as pool:
            rows = pool.map(halved, range(options.seeds), chunksize=1)
        report.write(options.out, "online_half", where, rows)
        lost = [row["all_auc"] - row["half_auc"] for row in rows]
        for row in rows:
            print(row)
        print(
            f"half as many rows lose {statistics.mean(lost):.4f} AUC, standard deviation {statistics.pstdev(lost):.4f}"
        )
        return 0
    tables = list(itertools.islice(hours(), 2 * DAY))
    truth = [roc_auc_score(table["clicked"], table["truth"]) for table in tables[DAY:]]
    with tempfile.TemporaryDirectory() as folder:
        ways = {"truth": truth, "daily": retrained(tables, DAY, Path(folder))}
        ways["follow"], seconds = followed(tables, Path(folder))
        ways["hourly"] = retrained(tables, 1, Path(folder))
    rows = [{"suite": "online", "way": name, "auc": sum(one) / len(one), "by_hour": one} for name, one in ways.items()]
    rows[2]["seconds"] = seconds
    report.write(options.out, "online", where, rows)
    for row in rows:
        print(f"{row['way']:8s}{row['auc']:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
