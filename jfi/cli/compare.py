"""Runs `jfi compare`."""

import dataclasses
import math
import statistics
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from jfi.baselines import BaselineResult, run_baselines
from jfi.cli.settings import MODELS
from jfi.data import load_dataset
from jfi.data.prepared.manifest import resolve
from jfi.training import Config, ConfigError, Result, train
from jfi.training.config import MONITORS
from jfi.training.distributed.processes import World, launched
from jfi.training.run.run_folder import check_new, check_writable, new_run_dir
from jfi.training.run.state import newer_samples
from jfi.training.run.warm_start import check_warm_start
from jfi.utils.files import write_file

#: By metric its title in the table.
_TITLES = {"auc": "AUC", "ne": "NE", "user_auc": "AUC per user", "r2": "R²", "rmse": "RMSE", "mae": "MAE"}


def compare(
    config: Config, seeds: Sequence[int], models: Sequence[str] = MODELS, memory: str | None = None
) -> dict[str, dict]:
    """Trains some or all of `MODELS` with every seed under `training.run_dir`, and writes comparison.json there."""
    for seed in seeds:
        config.with_training(seed=seed)  # refuses a wrong seed before the first training
    run_dir = config.training.run_dir
    if run_dir is not None:
        check_new(Path(run_dir), "")
    check_writable(Path(run_dir or "runs"))
    config = dataclasses.replace(config, data=resolve(config.data.with_absolute_paths()))
    if config.training.warm_start is not None:
        config = check_warm_start(config.training.warm_start, config)[1]
    dataset = load_dataset(config.data, memory=memory)
    print(dataset.summary, flush=True)
    label, several = dataset.schema.labels[0], len(dataset.schema.labels) > 1
    folder = new_run_dir("compare-") if run_dir is None else Path(run_dir)
    baselines: dict[str, list[BaselineResult]] = {}
    if "baselines" in models:
        print("-- baselines", flush=True)
        baselines = run_baselines(newer_samples(config, dataset, World()), seeds, config.monitor)
    results: dict[str, list[Result]] = {pooling: [] for pooling in models if pooling != "baselines"}
    for seed in seeds:
        for pooling in results:
            print(f"-- {pooling}, seed {seed}")
            run = config.with_training(run_dir=str(folder / f"{pooling}-seed{seed}"), seed=seed)
            run = dataclasses.replace(run, model=dataclasses.replace(config.model, pooling=pooling))
            results[pooling].append(train(run, dataset))
    summaries = {name: summarize(runs, MONITORS[label.task]) for name, runs in baselines.items()}
    of_label = f"_{label.name}" if several else ""
    summaries |= {name: summarize(runs, MONITORS[label.task], of_label) for name, runs in results.items()}
    record = {
        "data": config.data.without_tables().with_absolute_paths(),
        "seeds": list(seeds),
        "summary": summaries,
        "runs": results,
        "baselines": baselines,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_record(folder / "comparison.json", record)
    head = f"test split, {label.name}" if several else "test split"
    print(f"\n{table(summaries, len(seeds), head)}\n\nwritten to {folder / 'comparison.json'}")
    return summaries


def summarize(results: Sequence[BaselineResult | Result], metrics: Sequence[str], of_label: str = "") -> dict:
    """Mean and population standard deviation over the seeds; NaN where a metric is not defined.

    The AUC per user is not where no user has both labels in a split, as with `split: leave_one_out`.

    Args:
        results: of the seeds.
        metrics: the names of metrics.
        of_label: what follows these names in the results, "_" and the label where there are several.
    """
    summary: dict = {"train_seconds": statistics.fmean(r.train_seconds for r in results)}
    for split in ("validation", "test"):
        for metric in metrics:
            values = [getattr(r, split)[metric + of_label] for r in results]
            deviation = statistics.pstdev(values) if all(map(math.isfinite, values)) else math.nan
            summary[f"{split}_{metric}"] = {"mean": statistics.fmean(values), "std": deviation}
    return summary


def table(summaries: Mapping[str, dict], seeds: int, head: str = "test split") -> str:
    """The comparison as text, one line for each model; `summaries` are results of `summarize`."""
    width = 2 + max(map(len, (head, *summaries)))
    metrics = [key.removeprefix("test_") for key in next(iter(summaries.values())) if key.startswith("test_")]
    lines = [head.ljust(width) + "".join(f"{_TITLES[metric]:>18s}" for metric in metrics) + "   training"]
    for name, summary in summaries.items():
        cells = [summary[f"test_{metric}"] for metric in metrics]
        text = [f"{c['mean']:.4f}" + (f" ± {c['std']:.4f}" if seeds > 1 else "") for c in cells]
        cells = "".join(f"{cell:>18s}" for cell in text)
        lines.append(f"{name.ljust(width)}{cells}{summary['train_seconds']:9.0f} s")
    return "\n".join(lines)


def write_record(path: Path, record: dict) -> None:
    """Writes JSON, whole or not at all; a number that is not finite becomes null."""
    write_file(path, msgspec.json.format(msgspec.json.encode(record, enc_hook=float), indent=1))


def main(config: Config, options: Namespace) -> None:
    """Compares, and prints the table."""
    if launched():
        raise ConfigError("jfi compare trains in one process; run it without torchrun")
    compare(config, options.seeds, options.models, options.memory)
