"""Runs `jfi export`."""

import argparse
import dataclasses
import time

import torch

from jfi.cli.options import given_tables
from jfi.data import DataError
from jfi.serving.counters import LogCounters
from jfi.serving.dataset_schema import read_counters, schema_of_model
from jfi.serving.export import Export
from jfi.serving.publish import publish_artifact
from jfi.serving.schema import Limits, Schema
from jfi.training import ConfigError
from jfi.training.run.run_folder import RunFolder
from jfi.training.run.saved_run import SavedRun, load_run

#: Seconds after which the end of a log is old, without half-lives of popularity that say so.
_OLD = 30 * 86400.0


def main(options: argparse.Namespace) -> None:
    """Exports a run."""
    out = options.out or options.run / "artifact"
    # Check the options before loading the run, which takes seconds.
    if options.publish is None and out.exists():
        raise ConfigError(f"--out {out}: exists already; name a new folder")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no GPU here")
    if options.device == "cpu" and options.impl == "triton":
        raise ConfigError("--impl triton needs --device cuda")
    run = load_run(options.run, setting="--run")
    schema = schema_of_run(run)
    limits = Limits(options.max_candidates, run.schema.max_history)
    own = [run.calibration.get(label.name, {"a": 1.0, "b": 0.0}) for label in run.schema.labels]
    calibration = [(one["a"], one["b"]) for one in own] if run.calibration else None
    try:
        past = _read_log(run, options)
        made = Export(
            run.model,
            schema,
            limits,
            device=options.device,
            tables=options.tables,
            impl=options.impl,
            policy=run.policy,
            calibration=calibration,
            past=past,
            run=options.run.resolve().name,
            trained=RunFolder(options.run).read_versions(),
        )
        if options.publish is None:
            sha256 = made.write(out)
            print(f"wrote {out} ({options.tables} tables, for {options.device})")
        else:
            version = publish_artifact(options.publish, made)
            sha256 = version.manifest.base
            print(f"published version {version.number}: {version.path} ({options.tables} tables, for {options.device})")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    print(f"sha256 {sha256}")


def schema_of_run(run: SavedRun) -> Schema:
    """Returns the schema of the requests to a run's model."""
    own = run.config.model
    return schema_of_model(run.config.data, run.schema, run.model, own.pooling != "none", own.item_id)


def _read_log(run: SavedRun, options: argparse.Namespace) -> LogCounters | None:
    """Returns the statistics of the log, by default of the run's own; None if each request must have those it needs."""
    config, history = dataclasses.replace(run.config.data, **given_tables(options)), options.history
    if not config.statistics_columns():
        if history is not None:
            raise ConfigError(f"--history {history}: only data.statistics read a log, and run {run.path} has none")
        return None
    if history == "none":
        return None
    if history is not None:
        config = dataclasses.replace(config, interactions=history, split="time", validation=None, test=None)
    try:
        found = read_counters(config, run.schema)
    except DataError as fault:
        if history is not None:
            raise
        advice = "name a log of all users by --history FILE, or none; requests must have the statistics then"
        what = f"--run {run.path}: its log, of which statistics are made, cannot be read"
        raise ConfigError(f"{what}: {fault}; {advice}") from fault
    until, now = found.fields.until, time.time()
    print(f"data.statistics of requests are those of the log as of {found.fields.date()}")
    if not now - max(found.fields.half_lives, default=_OLD) <= until <= now:
        print("requests should have a `time` near it: from now on all ages are large, and recent popularity is none")
    return found
