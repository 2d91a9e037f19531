"""Writes the interactions of a config with the columns of `data.statistics`, to prepare or to score them.

python examples/add_statistics.py --config configs/own.yaml --data.statistics '[item, user]' --out out.parquet

The columns are those that a run with this config makes for itself; of the others it writes those that the config uses.
A table to score needs them too: give the past and the new rows in one table, with empty labels where they are not
known, and score the new rows of the result.
"""

from jfi.utils.exit_codes import begin_command

if __name__ == "__main__":  # before the other imports
    begin_command()

import sys
from pathlib import Path

import pyarrow.parquet

from jfi.data.config_checks import check_data_config
from jfi.data.prepared.add_statistics import add_statistics
from jfi.data.prepared.sources import open_tables
from jfi.training import ConfigError
from jfi.training.cli import parse_config, run_cli
from jfi.utils.files import writing_file

OPTIONS = {
    "--out": {"type": Path, "required": True, "metavar": "FILE", "help": "Parquet file to write, must not exist"}
}


def main() -> None:
    config, options = parse_config(sys.argv[1:], "Add statistics of the past to a table of interactions.", OPTIONS)
    check_data_config(config.data)
    if config.data.prepared is not None:
        raise ConfigError("data.prepared must be null: the columns are added to the tables that it is prepared from")
    if options.out.exists():
        raise ConfigError(f"--out: {options.out} exists")
    tables = open_tables(config.data)
    table = add_statistics(tables.blocks(), tables.config)
    with writing_file(options.out) as unfinished:
        pyarrow.parquet.write_table(table, unfinished, write_page_checksum=True)
    print(f"{table.num_rows:,} rows with {', '.join(config.data.statistics_columns())} in {options.out}")


if __name__ == "__main__":
    sys.exit(run_cli(main))
