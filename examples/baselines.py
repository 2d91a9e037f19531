"""Scores a config's held-out rows with baselines of hand-made features: item means, popularity, boosting and others.

python examples/baselines.py --config configs/quickstart.yaml

They have the split, the rows and the metrics of a training run with this config. The table is printed, and written to
baselines.json in training.run_dir.
"""

from jfi.utils.exit_codes import begin_command

if __name__ == "__main__":  # before the other imports
    begin_command()

import dataclasses
import sys
from pathlib import Path

from jfi.baselines import run_baselines
from jfi.data import load_dataset
from jfi.training import Config, ConfigError
from jfi.training.cli import parse_config, run_cli
from jfi.training.comparison import summarize, table, write_record
from jfi.training.distributed import launched
from jfi.training.run_folder import check_new, check_writable, new_run_dir

SEEDS = {"nargs": "+", "type": int, "default": [0], "help": "of the sampled negatives, for implicit feedback"}


def run(config: Config, seeds: list[int]) -> dict[str, dict]:
    """Runs all baselines, and writes baselines.json to the folder `training.run_dir`."""
    for seed in seeds:
        config.with_training(seed=seed)  # refuses a wrong seed
    folder = Path(config.training.run_dir or new_run_dir("baselines-"))
    check_new(folder)
    check_writable(folder)
    dataset = load_dataset(config.data)
    print(dataset.summary, flush=True)
    results = run_baselines(dataset, seeds, config.monitor)
    summaries = {name: summarize(runs) for name, runs in results.items()}
    record = {
        "data": dataclasses.asdict(config.data.with_absolute_paths()),
        "seeds": seeds,
        "summary": summaries,
        "runs": {name: [dataclasses.asdict(one) for one in runs] for name, runs in results.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_record(folder / "baselines.json", record)
    print(f"\n{table(summaries, len(seeds))}\n\nwritten to {folder / 'baselines.json'}")
    return summaries


def main() -> None:
    if launched():
        raise ConfigError("baselines.py runs in one process; run it without torchrun")
    description = "Baselines of hand-made features, on the rows and with the metrics of a training run."
    config, options = parse_config(sys.argv[1:], description, {"--seeds": SEEDS})
    run(config, options.seeds)


if __name__ == "__main__":
    sys.exit(run_cli(main))
