"""Turns tables of any length into a prepared dataset, from which training starts in seconds.

python examples/prepare_data.py --config configs/own.yaml --data.interactions clicks.parquet --out clicks.prepared
python examples/train_dlrm.py --config configs/own.yaml --data.prepared clicks.prepared

Killed at any point and called again, it continues. See docs/prepared-data.md.
"""

import sys
from pathlib import Path

from jfi.data.prepare import prepare_dataset
from jfi.training import ConfigError
from jfi.training.cli import parse_config, run_cli

OPTIONS = {
    "--out": {"type": Path, "metavar": "FOLDER", "help": "folder to write, must not exist"},
    "--memory": {"default": "1GB", "help": "most that sorting holds in memory (default: 1GB)"},
}


def main() -> None:
    config, options = parse_config(sys.argv[1:], "Turn tables of any length into a prepared dataset.", OPTIONS)
    if options.out is None:
        raise ConfigError("--out is not set; it must name the folder to write")
    if options.out.exists():
        raise ConfigError(f"--out {options.out}: exists already; name a new folder")
    prepare_dataset(config.data, options.out, options.memory)
    print(f"wrote {options.out}; train with --data.prepared {options.out}")


if __name__ == "__main__":
    sys.exit(run_cli(main))
