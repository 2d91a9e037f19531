"""Runs `jfi export`."""

import argparse

import torch

from jfi.cli.state import make_state, own_state, schema_of_run
from jfi.serving.export import Export
from jfi.serving.publish import publish_artifact
from jfi.serving.schema import Limits
from jfi.training import ConfigError
from jfi.training.run.run_folder import RunFolder
from jfi.training.run.saved_run import load_run


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
        made = Export(
            run.model,
            schema,
            limits,
            device=options.device,
            tables=options.tables,
            impl=options.impl,
            policy=run.policy,
            calibration=calibration,
            run=options.run.resolve().name,
            trained=RunFolder(options.run).read_versions(),
            checkpoint=run.fingerprint(),
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
    if options.state != "none":
        name = options.state or own_state(out if options.publish is None else None, options.publish)
        make_state(str(name), run, options.run)
