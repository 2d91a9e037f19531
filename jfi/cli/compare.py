"""Runs `jfi compare`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jfi.baselines import BaselineResult, run_baselines
from jfi.data import load_dataset
from jfi.training import Config, ConfigError, Result, train
from jfi.training.cli import parse_config
from jfi.training.comparison import summarize, table, write_record
from jfi.training.distributed import launched
from jfi.training.run_folder import check_new, check_writable, new_run_dir

POOLINGS = ("none", "mean", "sum", "attention")
SEEDS = {"nargs": "+", "type": int, "default": [0], "help": "train each kind of pooling once per seed"}
KINDS = {"nargs": "*", "choices": POOLINGS, "default": list(POOLINGS), "help": "kinds of pooling; none trains no model"}
BASELINES = {"type": bool, "default": True, "help": "whether the table has baselines, whose features need memory"}


def compare(
    config: Config, seeds: Sequence[int], poolings: Sequence[str] = POOLINGS, with_baselines: bool = True
) -> dict[str, dict]:
    """Trains kinds of pooling with every seed under `training.run_dir`, and writes comparison.json there."""
    for seed in seeds:
        config.with_training(seed=seed)  # refuses a wrong seed before the first training
    folder = Path(config.training.run_dir or new_run_dir("compare-"))
    check_new(folder)
    check_writable(folder)
    dataset = load_dataset(config.data)
    print(dataset.summary, flush=True)
    baselines: dict[str, list[BaselineResult]] = {}
    if with_baselines:
        print("-- baselines", flush=True)
        baselines = run_baselines(dataset, seeds, config.monitor)
    results: dict[str, list[Result]] = {pooling: [] for pooling in poolings}
    for seed in seeds:
        for pooling in poolings:
            print(f"-- {pooling}, seed {seed}")
            run = config.with_training(run_dir=str(folder / f"{pooling}-seed{seed}"), seed=seed)
            run = dataclasses.replace(run, model=dataclasses.replace(config.model, pooling=pooling))
            results[pooling].append(train(run, dataset))
    summaries = {name: summarize(runs) for name, runs in (baselines | results).items()}
    record = {
        "data": dataclasses.asdict(config.data.without_tables().with_absolute_paths()),
        "seeds": list(seeds),
        "summary": summaries,
        "runs": {pooling: [dataclasses.asdict(r) for r in runs] for pooling, runs in results.items()},
        "baselines": {name: [dataclasses.asdict(r) for r in runs] for name, runs in baselines.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_record(folder / "comparison.json", record)
    print(f"\n{table(summaries, len(seeds))}\n\nwritten to {folder / 'comparison.json'}")
    return summaries


def main(arguments: Sequence[str]) -> None:
    """Compares, and prints the table."""
    if launched():
        raise ConfigError("jfi compare trains in one process; run it without torchrun")
    description = "Compare a DLRM without histories, with mean pooling, with sum pooling, and with target attention."
    options = {"--seeds": SEEDS, "--poolings": KINDS, "--baselines": BASELINES}
    config, given = parse_config(arguments, description, options)
    if not given.poolings and not given.baselines:
        raise ConfigError("--poolings names no kind and --baselines is false; nothing is left to compare")
    compare(config, given.seeds, given.poolings, given.baselines)
