"""Launched runs on a small table: the table, its configs, and processes over gloo that do the jobs of `worker.py`."""

import json
import os
import random
import signal
import socket
import time
from contextlib import ExitStack, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from data_configs import data_config
from processes import context
from worker import work

from jfi.training import Config, ModelConfig, OptimizerConfig, OptimizerGroup, ShardingConfig, TrainingConfig
from jfi.training.config_parser import save_config
from jfi.training.run.recorder import read_metrics

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
        data=data_config(
            interactions=str(folder / "table.csv"),
            label="rating >= 1",
            event_categorical=["rating"],
            user_categorical=["country", "user_id"],
            user_dense=["age"],
        ),
        model=ModelConfig(
            embedding_dim=8, num_heads=2, bias="history_age", dense_arch=[8], over_arch=[8], cross_layers=0, dropout=0.0
        ),
        optimizer=OptimizerConfig(
            dense=OptimizerGroup(), embeddings=OptimizerGroup(name=optimizer, learning_rate=0.1), ema_decay=None
        ),
        sharding=ShardingConfig(type=sharding, exchange="rows"),
        training=TrainingConfig(
            run_dir=str(folder / name),
            epochs=2,
            batch_size=40,  # the last batch has one sample: fewer than processes, so that one of them gets none
            eval_batch_size=31,
            patience=None,
            device="cpu",
            checkpoint_every=5,
        ),
    )
    return config.with_training(**training)


def environment(rank: int, size: int) -> dict[str, str]:
    """What torchrun would set, but for the port, which every job brings."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {name: str(value) for name, value in values.items()} | {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def free_port() -> int:
    """A port for a store that is opened later: below those that Linux gives to sockets without a port of their own."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("localhost", port))
            return port


def in_two_processes(folder: Path, jobs: list[dict]) -> list[list[dict]]:
    """The outcomes of the jobs, by rank; where a process fails or hangs, what both printed and where they were."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    outcomes, errors = ([folder / f"{name}-{rank}" for rank in range(2)] for name in ("outcomes", "errors"))
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    with ExitStack() as stack:
        processes = []
        for rank in range(2):
            own = environment(rank, 2) | {"TMPDIR": str(scratch)}
            files = folder / "jobs.json", outcomes[rank], errors[rank]
            processes.append(context().Process(target=work, args=(own, *files)))
            processes[rank].start()
            stack.callback(processes[rank].kill)
        codes = wait_for_all(processes)
        if codes != [0, 0]:  # whole: an assertion cuts it short
            printed = [f"Rank {rank}:\n{path.read_text()}" for rank, path in enumerate(errors) if path.exists()]
            pytest.fail("\n".join([f"exit codes {codes}", *printed]), pytrace=False)
    return [json.loads(path.read_text()) for path in outcomes]


def wait_for_all(processes: list[BaseProcess], seconds: float = 360, grace: float = 60) -> list[int]:
    """Their exit codes; those that run longer, or `grace` longer than one that failed, print their stacks and end."""
    end = time.monotonic() + seconds
    while any(process.is_alive() for process in processes) and time.monotonic() < end:
        if any(process.exitcode for process in processes):  # the others wait for it
            end = min(end, time.monotonic() + grace)
            grace = seconds
        time.sleep(0.05)
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGABRT)  # faulthandler prints where each thread is
        process.join()
    return [process.exitcode for process in processes]


def job(folder: Path, config: Config, **options: object) -> dict:
    path = folder / f"{Path(config.training.run_dir).name}.yaml"
    save_config(config, path)
    constants = [TrainingConfig.log_every, ShardingConfig.replicate_below]
    return {"port": free_port(), "config": str(path), "constants": constants, **options}


def assert_same_metrics(run: Path, other: Path, rounding: float = ROUNDING, steps: int = 42) -> None:
    log, other_log = read_metrics(run / "metrics.jsonl"), read_metrics(other / "metrics.jsonl")
    assert [(r["split"], r["step"]) for r in log] == [(r["split"], r["step"]) for r in other_log]
    # An AUC goes by steps: a pair of samples that changes places is up to 0.0005 of auc and 0.016 of user_auc. Among
    # 100 samples are 13 of equal inputs, which round differently in other batches, and are ties no longer.
    bounds = {"loss": rounding, "ne": 2 * rounding, "auc": 4e-3, "user_auc": 0.02}
    for record, other_record in zip(log, other_log, strict=True):
        names = ("loss", "ne") if record["split"] == "train" else ("loss", "ne", "auc", "user_auc")
        for name in names:
            assert record[name] == pytest.approx(other_record[name], abs=bounds[name]), (name, record)
    assert log[-1]["step"] == steps
