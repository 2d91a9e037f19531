"""The interactions of a config, a block of rows at a time."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from jfi.data.coded import BLOCK, blocks
from jfi.data.config import DataConfig
from jfi.data.errors import DataError
from jfi.data.readers import read_table
from jfi.data.table import Table


def input_files(config: DataConfig) -> list[Path]:
    """The files of interactions, users and items, in the order in which they are read."""
    return [Path(path) for path in (config.interactions, config.users, config.items) if path is not None]


def count_rows(config: DataConfig) -> int | None:
    """The number of interactions where the files tell it without being read, else None."""
    if Path(config.interactions).suffix != ".parquet":
        return None
    try:
        with pyarrow.parquet.ParquetFile(config.interactions) as file:
            return file.metadata.num_rows
    except (OSError, pa.ArrowInvalid):
        return None  # the reader says what is wrong with it


def iterate_tables(config: DataConfig, size: int = BLOCK) -> Iterator[Table]:
    """The interactions as tables of at most `size` rows, each with its place in the file.

    A Parquet file is read by the block; a text file is read whole.

    Raises:
        DataError: as `read_table`.
    """
    path, wanted = config.interactions, config.columns()
    if Path(path).suffix != ".parquet" or not Path(path).is_file():
        yield from _cut(read_table(path, wanted), size)
        return
    # Reads no column, and refuses what is no Parquet file.
    known = read_table(path, ()).known
    with pyarrow.parquet.ParquetFile(path) as file:
        start = 0
        for batch in file.iter_batches(size, columns=[name for name in known if name in wanted]):
            yield _shifted(Table(path, pa.Table.from_batches([batch]), known, lambda row: row + 1), start)
            start += batch.num_rows


def _cut(table: Table, size: int) -> Iterator[Table]:
    for begin, end in blocks(len(table), size):
        yield _shifted(replace(table, data=table.data.slice(begin, end - begin)), begin)


def _shifted(table: Table, start: int) -> Table:
    """The table with the places of rows that begin at `start`."""
    line = table.line
    return replace(table, line=lambda row: line(start + row))


def same_kind(table: Table, name: str, first: pa.Array) -> Table:
    """The table with one more row in front, whose value of column `name` is `first [1]`.

    The kind of a column of text (numbers or dates) follows from its first value, which may be in another block.
    """
    column = pa.chunked_array([first, *table.data.column(name).chunks])
    line = table.line
    return Table(table.name, pa.table({name: column}), table.known, lambda row: line(row - 1), table.separators)


def fault_of_no_rows(config: DataConfig) -> DataError:
    """The error for a table without rows."""
    return DataError(f"{config.interactions}: no rows")
