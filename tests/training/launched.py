"""Launched runs on a small table: the table, its configs, and processes over gloo that do the jobs of `worker.py`."""

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jfi.data import DataConfig
from jfi.training import Config, ModelConfig, OptimizerConfig, OptimizerGroup, ShardingConfig, TrainingConfig
from jfi.training.cli import save_config
from jfi.training.metrics import METRICS
from jfi.training.recorder import read_metrics

ROOT = Path(__file__).parents[2]
#: Of a loss around 0.7 in float32 over some 60 steps.
ROUNDING = 5e-6


def write_tables(path: Path) -> None:
    """table.csv: tables for both collections, dense features, histories of very different lengths; 801 train."""
    draw = random.Random(0)
    rows = ["user_id,item_id,rating,timestamp,country,age"]
    for user in range(80):
        country, age = draw.choice("abcde"), draw.randint(20, 60)
        for event in range(draw.randint(1, 40)):
            item = draw.randrange(40)
            like = int(draw.random() < (0.8 if (item + user) % 3 == 0 else 0.3))
            rows.append(f"{user},{item},{like},{event * 100 + user},{country},{age}")
    (path / "table.csv").write_text("\n".join(rows[:1002]) + "\n")
    # Ids move: of an item and a country that sort before the others, and of an item that is gone.
    new = [f"{i % 80},-1,{i // 2 % 2},{i * 37},A,30" for i in range(100)]
    kept = [row for row in rows[1:1003] if row.split(",")[1] != "7"]
    (path / "grown.csv").write_text("\n".join([rows[0], *new, *kept][:1002]) + "\n")


def tiny(folder: Path, name: str, optimizer: str = "adagrad", sharding: str = "auto", **training: object) -> Config:
    config = Config(
        data=DataConfig(
            interactions=str(folder / "table.csv"),
            label="rating >= 1",
            event_categorical=["rating"],
            user_categorical=["country", "user_id"],
            user_dense=["age"],
        ),
        model=ModelConfig(embedding_dim=8, num_heads=2, bias="history_age", dense_arch=[8], over_arch=[8]),
        optimizer=OptimizerConfig(embeddings=OptimizerGroup(name=optimizer, learning_rate=0.1)),
        sharding=ShardingConfig(type=sharding, min_partition=4),
        training=TrainingConfig(
            run_dir=str(folder / name),
            epochs=3,
            batch_size=40,  # the last batch has one sample: fewer than processes, so that one of them gets none
            eval_batch_size=31,
            patience=None,
            device="cpu",
            log_every=1,
            checkpoint_every=5,
        ),
    )
    return config.with_training(**training)


def environment(rank: int, size: int) -> dict[str, str]:
    """What torchrun would set, but for the port, which every job brings."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {name: str(value) for name, value in values.items()} | {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def in_two_processes(folder: Path, jobs: list[dict]) -> list[list[dict]]:
    """The outcomes of the jobs, by rank."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    outcomes = [folder / f"outcomes-{rank}.json" for rank in range(2)]
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-X",
                "faulthandler",
                ROOT / "tests/training/worker.py",
                folder / "jobs.json",
                outcomes[rank],
            ],
            env={**os.environ, **environment(rank, 2), "OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=180)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()  # one that waits for another that has failed
    codes = [process.returncode for process in processes]
    if codes != [0, 0]:
        pytest.fail("\n".join([f"exit codes {codes}", *errors]), pytrace=False)  # whole: an assertion cuts it short
    return [json.loads(path.read_text()) for path in outcomes]


def job(folder: Path, config: Config, **options: object) -> dict:
    path = folder / f"{Path(config.training.run_dir).name}.yaml"
    save_config(config, path)
    return {"port": free_port(), "config": str(path), **options}


def assert_same_metrics(run: Path, other: Path, rounding: float = ROUNDING, steps: int = 63) -> None:
    log, other_log = read_metrics(run / "metrics.jsonl"), read_metrics(other / "metrics.jsonl")
    assert [(r["split"], r["step"]) for r in log] == [(r["split"], r["step"]) for r in other_log]
    # An AUC goes by steps: a pair of samples that changes places is up to 0.0005 of auc and 0.016 of user_auc. Among
    # 100 samples are 13 of equal inputs, which round differently in other batches, and are ties no longer.
    bounds = {"loss": rounding, "ne": 2 * rounding, "auc": 4e-3, "user_auc": 0.02}
    for record, other_record in zip(log, other_log, strict=True):
        names = ("loss", "ne") if record["split"] == "train" else METRICS
        for name in names:
            assert record[name] == pytest.approx(other_record[name], abs=bounds[name]), (name, record)
    assert log[-1]["step"] == steps
