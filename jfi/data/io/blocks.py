"""Tables a block of rows at a time, so that a table may be longer than memory."""

from collections.abc import Container, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from jfi.data.config import FILES, DataConfig
from jfi.data.errors import DataError
from jfi.data.io.arrays import is_text
from jfi.data.io.decode import UTF8
from jfi.data.io.json_lines import iterate_json
from jfi.data.io.parquet import iterate_parquet
from jfi.data.io.paths import File, find_files
from jfi.data.io.readers import add_partitions, file_layout
from jfi.data.io.table import Table
from jfi.data.io.text import iterate_text
from jfi.utils.files import reading_file

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

    `size` is the number of rows at a time, `BLOCK` if it is None. Memory does not grow with the files.

    Raises:
        DataError: as `read_table`; also if a column of JSON Lines has true and false first and texts further down. Of
            several faults an earlier one may be named.
    """
    size = BLOCK if size is None else size
    for file in find_files(paths, setting):
        yield from _file_blocks(file, wanted, encoding, quoting, size)


def _file_blocks(file: File, wanted: Container[str], encoding: str, quoting: bool, size: int) -> Iterator[Table]:
    start, layout = 0, file_layout(file, encoding, quoting)
    with reading_file(file.path, DataError):
        if layout.format == "parquet":
            for table in iterate_parquet(file.path, wanted, size):
                yield _shifted(add_partitions(table, file, wanted), start)
                start += len(table)
        elif layout.format == "json":
            for table in iterate_json(file.path, layout, wanted, size):
                yield add_partitions(table, file, wanted)
        else:
            for table in iterate_text(file.path, layout, wanted):
                yield from cut_table(add_partitions(table, file, wanted), size)


def cut_table(table: Table, size: int | None = None) -> Iterator[Table]:
    """The table as tables of at most `size` (None: BLOCK) rows."""
    size = BLOCK if size is None else size
    for start in range(0, len(table), size):
        yield _shifted(replace(table, data=table.data.slice(start, size)), start)


def _shifted(table: Table, start: int) -> Table:
    """The table with the places of rows that begin at `start`."""
    line = table.line
    return replace(table, line=lambda row: line(start + row))


def input_files(config: DataConfig) -> list[Path]:
    """The files of all tables that a config names.

    Raises:
        DataError: nothing is there, or a file's kind is unknown.
    """
    found = [find_files(paths, f"data.{name}") for name in FILES if (paths := getattr(config, name)) is not None]
    return [Path(file.path) for files in found for file in files]


def count_rows(config: DataConfig) -> int | None:
    """The number of interactions where the files tell it without being read, else None."""
    count = 0
    for setting, paths in _interactions(config):
        for file in find_files(paths, setting):
            if file.layout.format != "parquet":
                return None
            try:
                with pyarrow.parquet.ParquetFile(file.path) as parquet:
                    count += parquet.metadata.num_rows
            except (OSError, pa.ArrowException):
                return None  # the reader says what is wrong with it
    return count


def iterate_tables(config: DataConfig, size: int | None = None) -> Iterator[tuple[int, Table]]:
    """The interactions as tables of at most `size` (None: BLOCK) rows, each after the number of its setting.

    The settings are `interactions` and, with `split: files`, `validation` and `test`.

    Raises:
        DataError: as `read_table`; also if files differ in the type of a column, which a whole table would be cast to.
    """
    wanted, first = config.interaction_columns(), None
    for number, (setting, paths) in enumerate(_interactions(config)):
        for table in read_blocks(paths, wanted, config.encoding, config.quoting, setting, size):
            first = table if first is None else first
            _check_same(first, table)
            yield number, table


def _interactions(config: DataConfig) -> list[tuple[str, str | list[str]]]:
    names = ("interactions", "validation", "test") if config.split == "files" else ("interactions",)
    return [(f"data.{name}", getattr(config, name)) for name in names]


def _check_same(first: Table, table: Table) -> None:
    if table.separators != first.separators:
        raise DataError(f"{table.name}: other multi-valued columns than in {first.name}")
    for name in first.data.column_names:
        if name not in table.data.column_names:
            raise DataError(f"{table.name}: no column '{name}', which {first.name} has")
        kind, other = _plain(first.data.schema.field(name).type), _plain(table.data.schema.field(name).type)
        if kind != other:
            what = f"column '{name}' has type {other}, but {kind} in {first.name}"
            raise DataError(f"{table.name}: {what}; a prepared dataset needs one type")


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type, where all types of text are one."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    return pa.string() if is_text(kind) or pa.types.is_string_view(kind) else kind


def same_kind(table: Table, name: str, first: pa.Array) -> Table:
    """The table with one more row in front, whose value of column `name` is `first [1]`.

    The kind of a column of text (numbers or dates) follows from its first value, which may be in another block.
    """
    column = table.data.column(name)
    if column.type != first.type:
        column = column.cast(pa.large_string())
        first = first.cast(pa.large_string())
    line = table.line
    data = pa.table({name: pa.chunked_array([first, *column.chunks])})
    return Table(table.name, data, table.known, lambda row: line(row - 1), table.separators)


def fault_of_no_rows(config: DataConfig) -> DataError:
    """The error for a table without rows."""
    return DataError(f"{name_of(config)}: no rows")


def name_of(config: DataConfig) -> str:
    """Returns how messages name the table of interactions: its file, or the first and the last one."""
    files = [file for setting, paths in _interactions(config) for file in find_files(paths, setting)]
    return files[0].path if len(files) == 1 else f"{files[0].path} to {files[-1].path}"
