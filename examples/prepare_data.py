"""Turns tables of any length into a prepared dataset, from which training starts in seconds.

python examples/prepare_data.py --config configs/own.yaml --data.interactions clicks.parquet --out clicks.prepared
python examples/train_dlrm.py --config configs/own.yaml --data.prepared clicks.prepared
python examples/prepare_data.py --complete written_by_spark

Killed at any point and called again, it continues. See docs/prepared-data.md.
"""

import sys
from pathlib import Path

from jfi.data.prepare import prepare_dataset
from jfi.data.prepared_complete import complete_dataset
from jfi.training import ConfigError
from jfi.training.cli import parse_config, run_cli
from jfi.training.run_data import load_schema
from jfi.training.run_folder import RunFolder

OPTIONS = {
    "--out": {"type": Path, "metavar": "FOLDER", "help": "folder to write, must not exist"},
    "--memory": {"default": "1GB", "help": "most that sorting holds in memory (default: 1GB)"},
    "--run": {
        "type": Path,
        "help": "encode with the vocabularies of this run, so that it can go on with the dataset, instead of new ones",
    },
    "--complete": {
        "type": Path,
        "metavar": "FOLDER",
        "help": "check and complete a dataset that another program has written; takes only --memory beside it",
    },
}


def main() -> None:
    config, options = parse_config(sys.argv[1:], "Turn tables of any length into a prepared dataset.", OPTIONS)
    if options.complete is not None:
        named = [argument.split("=")[0] for argument in sys.argv[1:] if argument.startswith("--")]
        if others := [name for name in named if name not in ("--complete", "--memory")]:
            raise ConfigError(f"--complete takes only --memory beside it, not {others[0]}")
        complete_dataset(options.complete, options.memory)
        print(f"{options.complete} is complete; train with --data.prepared {options.complete}")
        return
    if options.out is None:
        raise ConfigError("--out is not set; it must name the folder to write")
    begun = options.out.parent / f".{options.out.name}.preparing"
    if options.out.exists() and not begun.exists():
        raise ConfigError(f"--out {options.out}: exists already; name a new folder")
    schema = None
    if options.run is not None:
        if not RunFolder(options.run).config.is_file():
            raise ConfigError(f"--run {options.run}: not a run folder, config.yaml is missing")
        run, _ = RunFolder.open(options.run)
        schema = load_schema(run)
    prepare_dataset(config.data, options.out, options.memory, schema)
    print(f"wrote {options.out}; train with --data.prepared {options.out}")


if __name__ == "__main__":
    sys.exit(run_cli(main))
