"""Trains the same DLRM without histories, with their mean, and with target attention over them, and compares the three.

python examples/compare_pooling.py --config configs/quickstart.yaml --seeds 0 1 2

Each run has its own folder under training.run_dir; the table is printed and written there as comparison.json.
"""

from jfi.exit_codes import begin_command

if __name__ == "__main__":  # before the other imports
    begin_command()

import dataclasses
import json
import statistics
import sys
from pathlib import Path

from jfi.data import load_dataset
from jfi.files import write_file
from jfi.training import Config, ConfigError, Result, train
from jfi.training.cli import parse_config, run_cli
from jfi.training.distributed import launched
from jfi.training.run_folder import check_new, check_writable, new_run_dir

POOLINGS = ("none", "mean", "attention")
COLUMNS = {"auc": "AUC", "ne": "NE", "user_auc": "AUC per user"}
SEEDS = {"nargs": "+", "type": int, "default": [0], "help": "train each kind of pooling once per seed"}


def summarize(results: list[Result]) -> dict:
    """Mean and population standard deviation over the seeds."""
    summary: dict = {"train_seconds": statistics.fmean(r.train_seconds for r in results)}
    for split in ("validation", "test"):
        for metric in COLUMNS:
            values = [getattr(r, split)[metric] for r in results]
            summary[f"{split}_{metric}"] = {"mean": statistics.fmean(values), "std": statistics.pstdev(values)}
    return summary


def table(summaries: dict[str, dict], seeds: int) -> str:
    """The comparison as text, one line for each kind of pooling."""
    lines = ["test split    " + "".join(f"{title:>18s}" for title in COLUMNS.values()) + "   training"]
    for pooling, summary in summaries.items():
        cells = [summary[f"test_{metric}"] for metric in COLUMNS]
        text = [f"{c['mean']:.4f}" + (f" ± {c['std']:.4f}" if seeds > 1 else "") for c in cells]
        lines.append(f"{pooling:14s}" + "".join(f"{cell:>18s}" for cell in text) + f"{summary['train_seconds']:9.0f} s")
    return "\n".join(lines)


def compare(config: Config, seeds: list[int]) -> dict[str, dict]:
    """Trains every kind of pooling with every seed under `training.run_dir`, and writes comparison.json there."""
    for seed in seeds:
        config.with_training(seed=seed)  # refuses a wrong seed before the first training
    folder = Path(config.training.run_dir or new_run_dir("compare-"))
    check_new(folder)
    check_writable(folder)
    dataset = load_dataset(config.data)
    print(dataset.summary, flush=True)
    results: dict[str, list[Result]] = {pooling: [] for pooling in POOLINGS}
    for seed in seeds:
        for pooling in POOLINGS:
            print(f"-- {pooling}, seed {seed}")
            run = config.with_training(run_dir=str(folder / f"{pooling}-seed{seed}"), seed=seed)
            run = dataclasses.replace(run, model=dataclasses.replace(config.model, pooling=pooling))
            results[pooling].append(train(run, dataset))
    summaries = {pooling: summarize(runs) for pooling, runs in results.items()}
    record = {
        "seeds": seeds,
        "summary": summaries,
        "runs": {pooling: [dataclasses.asdict(r) for r in runs] for pooling, runs in results.items()},
    }
    write_file(folder / "comparison.json", json.dumps(record, indent=1) + "\n")
    print(f"\n{table(summaries, len(seeds))}\n\nwritten to {folder / 'comparison.json'}")
    return summaries


def main() -> None:
    if launched():
        raise ConfigError("compare_pooling.py trains in one process; run it without torchrun")
    description = "Compare a DLRM without histories, with mean pooling, and with target attention."
    config, options = parse_config(sys.argv[1:], description, {"--seeds": SEEDS})
    compare(config, options.seeds)


if __name__ == "__main__":
    sys.exit(run_cli(main))
