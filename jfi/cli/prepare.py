"""Runs `jfi prepare`."""

import dataclasses
from argparse import Namespace

from jfi.cli.settings import parser
from jfi.data.prepared.manifest import verify_dataset
from jfi.data.prepared.prepare import prepare_dataset
from jfi.data.prepared.summary import Summary
from jfi.training import Config, ConfigError
from jfi.training.checkpoints.checkpoint import latest_checkpoint
from jfi.training.config_parser import load_config, parse_config
from jfi.training.run.run_data import check_settings, load_schema
from jfi.training.run.run_folder import RunFolder
from jfi.training.run.run_position import describe_changes, load_progress


def main(config: Config, options: Namespace) -> None:
    """Prepares a dataset, or verifies one."""
    if options.verify is not None:
        if wrong := [name for name in options.named if name != "--verify"]:
            raise ConfigError(f"--verify takes no other option, not {wrong[0]}")
        verify_dataset(options.verify)
        print(f"{options.verify} is whole")
        return
    if options.out is None:
        raise ConfigError("--out is not set; it must name the folder to write")
    if options.out.exists() and not (options.out.parent / f".{options.out.name}.preparing").exists():
        raise ConfigError(f"--out {options.out}: exists already; name a new folder")
    schema = None
    if options.run is not None:
        run = RunFolder(options.run)
        if not run.config.is_file():
            raise ConfigError(f"--run {options.run}: not a run folder, config.yaml is missing")
        if "--config" not in options.named:
            config, _ = parse_config(["--config", str(run.config), *options.arguments], parser=parser("prepare"))
            # The run may have been trained on a prepared dataset; this one is made of the tables.
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, prepared=None))
        own, last = load_config(run.config), latest_checkpoint(run.checkpoints)
        if last is not None:
            changed = describe_changes(own, load_progress(last), lambda name: name.startswith("data."))
            if changed is not None:
                raise ConfigError(f"--run {options.run}: {changed}")
        check_settings(run, own.data, config.data)
        schema = load_schema(run)
    if config.data.statistics == "auto":
        print(f"defaults: data.statistics: {config.data.statistics_groups()}", flush=True)
    prepare_dataset(config.data, options.out, options.memory, schema)
    print(Summary.load(options.out / "summary.json"))
    print(f"{options.out} is written; train with --data.prepared {options.out}")
