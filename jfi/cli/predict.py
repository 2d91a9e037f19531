"""Runs `jfi predict`."""

import argparse

import torch

from jfi.training import ConfigError
from jfi.training.run.saved_run import SavedRun, load_run
from jfi.training.run.scores import check_out, check_results

#: The options that name tables other than the interactions.
TABLES = ("history", "users", "items", "semantic_ids")


def main(options: argparse.Namespace) -> None:
    """Scores a table."""
    check_out(options.out)
    run = open_run(options, {})
    print(run.predict(options.interactions, out=options.out, **scoring(options)))
    print(f"wrote {options.out}")


def open_run(options: argparse.Namespace, written: dict[str, str | None]) -> SavedRun:
    """Loads the run, after the options are checked, since it takes seconds.

    Args:
        options: of `jfi predict` or `jfi evaluate`.
        written: by option the file to write, or None, but for those that the run's own methods write and check.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no GPU here")
    if any(path is not None for path in written.values()):
        read = {f"--{name.replace('_', '-')}": getattr(options, name) for name in ("interactions", *TABLES)}
        check_results(written, read)
    return load_run(options.run, options.device, "--run")


def scoring(options: argparse.Namespace) -> dict[str, object]:
    """Returns the arguments of `SavedRun.predict` and `evaluate`, but for the interactions and the results."""
    return {name: getattr(options, name) for name in (*TABLES, "batch_size", "output", "memory")}
