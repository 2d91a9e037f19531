"""Tables a block of rows at a time, so that a table may be longer than memory."""

from collections.abc import Container, Iterator
from dataclasses import replace

from jfi.data.decode import UTF8
from jfi.data.paths import File, find_files
from jfi.data.read_parquet import iterate_parquet
from jfi.data.readers import add_partitions, read_file
from jfi.data.table import Table

#: Rows that are read at a time.
BLOCK = 1 << 18


def read_blocks(
    paths: str | list[str],
    wanted: Container[str],
    encoding: str = UTF8,
    quoting: bool = True,
    setting: str = "data.interactions",
    size: int | None = None,
) -> Iterator[Table]:
    """The rows that `read_table` reads, as tables of some rows of one file, each with its place in the file.

    `size` is the number of rows at a time, `BLOCK` if it is None. A Parquet file is read by the block, a text file
    whole.

    Raises:
        DataError: as `read_table`.
    """
    size = BLOCK if size is None else size
    for file in find_files(paths, setting):
        yield from _file_blocks(file, wanted, encoding, quoting, size)


def _file_blocks(file: File, wanted: Container[str], encoding: str, quoting: bool, size: int) -> Iterator[Table]:
    if file.layout.format != "parquet":
        yield from cut_table(read_file(file, wanted, encoding, quoting), size)
        return
    start = 0
    for table in iterate_parquet(file.path, wanted, size):
        yield _shifted(add_partitions(table, file, wanted), start)
        start += len(table)


def cut_table(table: Table, size: int | None = None) -> Iterator[Table]:
    """The table as tables of at most `size` (None: BLOCK) rows."""
    size = BLOCK if size is None else size
    for start in range(0, len(table), size):
        yield _shifted(replace(table, data=table.data.slice(start, size)), start)


def _shifted(table: Table, start: int) -> Table:
    """The table with the places of rows that begin at `start`."""
    line = table.line
    return replace(table, line=lambda row: line(start + row))
