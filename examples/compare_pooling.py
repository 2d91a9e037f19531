"""Trains a DLRM without histories, with their mean, with their sum, and with target attention, and compares the four.

python examples/compare_pooling.py --config configs/quickstart.yaml --seeds 0 1 2

Beside them stand the baselines of examples/baselines.py, such as gradient boosting on hand-made features. Each run has
its own folder under training.run_dir; the table is printed and written there as comparison.json.
"""

from jfi.utils.exit_codes import begin_command

if __name__ == "__main__":  # before the other imports
    begin_command()

import dataclasses
import sys
from pathlib import Path

from jfi.baselines import BaselineResult, run_baselines
from jfi.data import load_dataset
from jfi.training import Config, ConfigError, Result, train
from jfi.training.cli import parse_config, run_cli
from jfi.training.comparison import summarize, table, write_record
from jfi.training.distributed import launched
from jfi.training.run_folder import check_new, check_writable, new_run_dir

POOLINGS = ("none", "mean", "sum", "attention")
SEEDS = {"nargs": "+", "type": int, "default": [0], "help": "train each kind of pooling once per seed"}
BASELINES = {"type": bool, "default": True, "help": "whether the table has baselines, whose features need memory"}


def compare(config: Config, seeds: list[int], with_baselines: bool = True) -> dict[str, dict]:
    """Trains every kind of pooling with every seed under `training.run_dir`, and writes comparison.json there."""
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
    results: dict[str, list[Result]] = {pooling: [] for pooling in POOLINGS}
    for seed in seeds:
        for pooling in POOLINGS:
            print(f"-- {pooling}, seed {seed}")
            run = config.with_training(run_dir=str(folder / f"{pooling}-seed{seed}"), seed=seed)
            run = dataclasses.replace(run, model=dataclasses.replace(config.model, pooling=pooling))
            results[pooling].append(train(run, dataset))
    summaries = {name: summarize(runs) for name, runs in (baselines | results).items()}
    record = {
        "seeds": seeds,
        "summary": summaries,
        "runs": {pooling: [dataclasses.asdict(r) for r in runs] for pooling, runs in results.items()},
        "baselines": {name: [dataclasses.asdict(r) for r in runs] for name, runs in baselines.items()},
    }
    write_record(folder / "comparison.json", record)
    print(f"\n{table(summaries, len(seeds))}\n\nwritten to {folder / 'comparison.json'}")
    return summaries


def main() -> None:
    if launched():
        raise ConfigError("compare_pooling.py trains in one process; run it without torchrun")
    description = "Compare a DLRM without histories, with mean pooling, with sum pooling, and with target attention."
    config, options = parse_config(sys.argv[1:], description, {"--seeds": SEEDS, "--baselines": BASELINES})
    compare(config, options.seeds, options.baselines)


if __name__ == "__main__":
    sys.exit(run_cli(main))
