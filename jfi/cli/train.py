"""Runs `jfi train`."""

import os
from collections.abc import Sequence

from jfi.training import ConfigError, resume, train
from jfi.training.config_parser import parse_config

CHANGED = {"choices": ["refuse", "accept"], "default": "refuse"}
OPTIONS = {
    "--resume": {
        "metavar": "RUN",
        "help": "continue the run in this folder, with its config; --data.prepared gives it another dataset",
    },
    "--data-changed": CHANGED
    | {"help": "with --resume: what to do if the data is not what the run was started with (default: refuse)"},
    "--config-changed": CHANGED
    | {"help": "with --resume: what to do if the run's config.yaml was changed (default: refuse)"},
}


def main(arguments: Sequence[str]) -> None:
    """Trains or resumes a run, and prints its metrics."""
    config, options = parse_config(arguments, "Train a DLRM with sequence features.", OPTIONS)
    named = [argument.split("=")[0] for argument in arguments if argument.startswith("--")]
    if options.resume is None:
        for name in ("--data-changed", "--config-changed"):
            if name in named:
                raise ConfigError(f"{name} belongs to --resume")
        result = train(config)
    else:
        others = [name for name in named if name not in (*OPTIONS, "--data.prepared")]
        if others:
            raise ConfigError(f"--resume uses the config of its run; it takes no other option such as {others[0]}")
        changed = {"data_changed": options.data_changed, "config_changed": options.config_changed}
        result = resume(options.resume, prepared=config.data.prepared, **changed)
    if os.environ.get("RANK", "0") != "0":  # under torchrun one process prints the result, which all have
        return
    best = f"best epoch {result.best_epoch:.4g} of {result.epochs:.4g}"
    print(f"{best}, {result.train_seconds:.0f} s of training")
    for split, metrics in (("validation", result.validation), ("test", result.test)):
        _print_metrics(split, metrics)
        if split in result.start:
            _print_metrics("  at start", result.start[split])
    print(f"run folder {result.run_dir}")


def _print_metrics(name: str, metrics: dict[str, float]) -> None:
    print(f"{name:10s} " + "  ".join(f"{metric} {value:.4f}" for metric, value in metrics.items()))
