"""Runs `jfi train`."""

import os
from argparse import Namespace
from typing import Any

from jfi.data.config import FILES
from jfi.training import Config, ConfigError, resume, train

#: Where tables of a run are now. Those of its config that are URLs have to be named.
_TABLES = {f"--data.{name}": name for name in FILES}
#: What belongs to --follow, and what goes with it.
OF_FOLLOW = ("--until-idle", "--checkpoint-seconds", "--late-seconds", "--refused-to")
WITH_FOLLOW = ("--resume", "--follow", *OF_FOLLOW, *_TABLES)


def main(config: Config, options: Namespace) -> None:
    """Trains or resumes a run, and prints its metrics."""
    named = options.named
    tables = {name: getattr(config.data, name) for option, name in _TABLES.items() if option in named}
    if options.follow is None and (other := next((name for name in named if name in OF_FOLLOW), None)):
        raise ConfigError(f"{other} belongs to --follow")
    if options.resume is None:
        for name in ("--data-changed", "--config-changed", "--follow"):
            if name in named:
                raise ConfigError(f"{name} belongs to --resume")
        result = train(config, memory=options.memory)
    elif options.follow is not None:
        _follow(options, named, tables)
        return
    else:
        others = [
            name
            for name in named
            if name not in ("--resume", "--data-changed", "--config-changed", "--memory", *_TABLES, "--data.prepared")
        ]
        if others:
            raise ConfigError(f"--resume uses the config of its run; it takes no other option such as {others[0]}")
        changed = {"data_changed": options.data_changed, "config_changed": options.config_changed}
        more = {"prepared": config.data.prepared, "tables": tables, "memory": options.memory}
        result = resume(options.resume, **more, **changed)
    if os.environ.get("RANK", "0") != "0":  # under torchrun one process prints the result, which all have
        return
    best = f"best epoch {result.best_epoch:.4g} of {result.epochs:.4g}"
    print(f"{best}, {result.train_seconds:.0f} s of training")
    for split, metrics in (("validation", result.validation), ("test", result.test)):
        _print_metrics(split, metrics)
        if split in result.start:
            _print_metrics("  at start", result.start[split])
    print(f"run folder {result.run_dir}")


def _follow(options: Namespace, named: list[str], tables: dict[str, Any]) -> None:
    """Trains a run on a log that grows."""
    from jfi.follow.start import follow

    if other := next((name for name in named if name not in WITH_FOLLOW), None):
        raise ConfigError(f"--follow uses the config of its run; it takes no other option such as {other}")
    limits = {"checkpoint_seconds": options.checkpoint_seconds, "late_seconds": options.late_seconds}
    more = {"tables": tables, "until_idle": options.until_idle, "refused_to": options.refused_to}
    count = follow(options.resume, options.follow, **more, **limits)
    print(f"trained on {count} {'part' if count == 1 else 'parts'}; run folder {options.resume}")


def _print_metrics(name: str, metrics: dict[str, float]) -> None:
    print(f"{name:10s} " + "  ".join(f"{metric} {value:.4f}" for metric, value in metrics.items()))
