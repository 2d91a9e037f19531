"""Turns tables of any length into a prepared dataset, from which training starts in seconds.

python examples/prepare_data.py --config configs/own.yaml --data.interactions clicks.parquet --out clicks.prepared
python examples/train_dlrm.py --config configs/own.yaml --data.prepared clicks.prepared
python examples/prepare_data.py --run runs/first --data.interactions more_clicks.parquet --out more_clicks.prepared
python examples/prepare_data.py --verify clicks.prepared

Killed at any point and called again, it continues. See docs/prepared-data.md.
"""

from jfi.utils.exit_codes import begin_command

if __name__ == "__main__":  # before the other imports
    begin_command()

import dataclasses
import sys
from pathlib import Path

from jfi.data.prepared.prepare import prepare_dataset
from jfi.data.prepared.store import verify_dataset
from jfi.data.prepared.summary import Summary
from jfi.training import ConfigError
from jfi.training.checkpoint import latest_checkpoint
from jfi.training.cli import load_config, parse_config, run_cli
from jfi.training.progress import describe_changes, load_progress
from jfi.training.run_data import check_settings, load_schema
from jfi.training.run_folder import RunFolder

OPTIONS = {
    "--out": {"type": Path, "metavar": "FOLDER", "help": "folder to write, must not exist"},
    "--memory": {"default": "1GB", "help": "most that sorting holds in memory (default: 1GB)"},
    "--run": {
        "type": Path,
        "help": "prepare with the config and the vocabularies of this run, so that it can go on with the dataset",
    },
    "--verify": {
        "type": Path,
        "metavar": "FOLDER",
        "help": "verify the checksums of a dataset; takes no other option",
    },
}


def main() -> None:
    arguments, description = sys.argv[1:], "Turn tables of any length into a prepared dataset."
    config, options = parse_config(arguments, description, OPTIONS)
    if options.verify is not None:
        _takes_only(arguments, "--verify")
        verify_dataset(options.verify)
        print(f"{options.verify} is whole")
        return
    if options.out is None:
        raise ConfigError("--out is not set; it must name the folder to write")
    begun = options.out.parent / f".{options.out.name}.preparing"
    if options.out.exists() and not begun.exists():
        raise ConfigError(f"--out {options.out}: exists already; name a new folder")
    schema = None
    if options.run is not None:
        run = RunFolder(options.run)
        if not run.config.is_file():
            raise ConfigError(f"--run {options.run}: not a run folder, config.yaml is missing")
        if not any(argument.split("=")[0] == "--config" for argument in arguments):
            config, _ = parse_config(["--config", str(run.config), *arguments], description, OPTIONS)
            # The run may have been trained on a prepared dataset; this one is made of the tables.
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, prepared=None))
        own, last = load_config(run.config), latest_checkpoint(run.checkpoints)
        if last is not None:
            changed = describe_changes(own, load_progress(last), lambda name: name.startswith("data."))
            if changed is not None:
                raise ConfigError(f"--run {options.run}: {changed}")
        check_settings(run, own.data, config.data)
        schema = load_schema(run)
    prepare_dataset(config.data, options.out, options.memory, schema)
    print(Summary.load(options.out / "summary.json"))
    print(f"{options.out} is written; train with --data.prepared {options.out}")


def _takes_only(arguments: list[str], option: str) -> None:
    named = [argument.split("=")[0] for argument in arguments if argument.startswith("--")]
    if wrong := [name for name in named if name != option]:
        raise ConfigError(f"{option} takes no other option, not {wrong[0]}")


if __name__ == "__main__":
    sys.exit(run_cli(main))
