"""Runs `jfi prepare`."""

import dataclasses
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet

from jfi.cli.settings import parser
from jfi.data import DataConfig, DataSchema
from jfi.data.config_checks import check_data_config
from jfi.data.prepared.add_statistics import add_statistics
from jfi.data.prepared.prepare import prepare_dataset
from jfi.data.prepared.sources import open_tables
from jfi.data.prepared.store import verify_dataset
from jfi.data.prepared.summary import Summary
from jfi.training import Config, ConfigError
from jfi.training.checkpoints.checkpoint import latest_checkpoint
from jfi.training.config_parser import load_config, parse_config
from jfi.training.run.run_data import check_settings, load_schema
from jfi.training.run.run_folder import RunFolder
from jfi.training.run.run_position import describe_changes, load_progress
from jfi.utils.files import writing_file


def main(config: Config, options: Namespace) -> None:
    """Prepares a dataset, verifies one, or adds statistics to a table."""
    arguments = options.arguments
    if options.verify is not None:
        _takes_only(arguments, "--verify")
        verify_dataset(options.verify)
        print(f"{options.verify} is whole")
        return
    if options.add_statistics is not None:
        if options.out is not None:
            raise ConfigError("--add-statistics writes a table, not a dataset; it takes no --out")
    elif options.out is None:
        raise ConfigError("--out is not set; it must name the folder to write")
    elif options.out.exists() and not (options.out.parent / f".{options.out.name}.preparing").exists():
        raise ConfigError(f"--out {options.out}: exists already; name a new folder")
    schema = None
    if options.run is not None:
        run = RunFolder(options.run)
        if not run.config.is_file():
            raise ConfigError(f"--run {options.run}: not a run folder, config.yaml is missing")
        if not any(argument.split("=")[0] == "--config" for argument in arguments):
            config, _ = parse_config(["--config", str(run.config), *arguments], parser=parser("prepare"))
            # The run may have been trained on a prepared dataset; this one is made of the tables.
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, prepared=None))
        own, last = load_config(run.config), latest_checkpoint(run.checkpoints)
        if last is not None:
            changed = describe_changes(own, load_progress(last), lambda name: name.startswith("data."))
            if changed is not None:
                raise ConfigError(f"--run {options.run}: {changed}")
        check_settings(run, own.data, config.data)
        schema = load_schema(run)
    if options.add_statistics is not None:
        _write_statistics(config.data, options.add_statistics, schema)
        return
    if config.data.statistics == "auto":
        print(f"defaults: data.statistics: {config.data.statistics_groups()}", flush=True)
    prepare_dataset(config.data, options.out, options.memory, schema)
    print(Summary.load(options.out / "summary.json"))
    print(f"{options.out} is written; train with --data.prepared {options.out}")


def _write_statistics(config: DataConfig, out: Path, schema: DataSchema | None) -> None:
    check_data_config(config)
    if config.prepared is not None:
        raise ConfigError("data.prepared must be null: the columns are added to the tables that it is prepared from")
    if out.suffix != ".parquet":
        raise ConfigError(f"--add-statistics: {out} must end in .parquet, which is what it is written as")
    if out.exists():
        raise ConfigError(f"--add-statistics: {out} exists")
    tables = open_tables(config)
    table = add_statistics(tables.blocks(), tables.config, schema)
    with writing_file(out) as unfinished:
        pyarrow.parquet.write_table(table, unfinished, write_page_checksum=True)
    print(f"{table.num_rows:,} rows with {', '.join(tables.config.statistics_columns())} in {out}")


def _takes_only(arguments: Sequence[str], option: str) -> None:
    named = [argument.split("=")[0] for argument in arguments if argument.startswith("--")]
    if wrong := [name for name in named if name != option]:
        raise ConfigError(f"{option} takes no other option, not {wrong[0]}")
