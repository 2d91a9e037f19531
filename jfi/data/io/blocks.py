"""The files that a config names -> tables of some rows each, so that a source may be longer than memory."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from jfi.data.config import FILES, DataConfig
from jfi.data.errors import DataError
from jfi.data.io.arrays import TEXT, TEXTS, is_list, is_text
from jfi.data.io.json_lines import iterate_json
from jfi.data.io.layouts import FileSettings, with_settings
from jfi.data.io.parquet import check_values, iterate_parquet
from jfi.data.io.paths import File, find_files, is_url
from jfi.data.io.table import Reading, Table, check_columns, columns_in, join_tables
from jfi.data.io.text import iterate_text
from jfi.utils.files import reading_file

#: Rows that are read at a time.
BLOCK = 1 << 18


def read_table(
    paths: Any,
    wanted: Collection[str],
    settings: FileSettings | None = None,
    setting: str = "data.interactions",
) -> Table:
    """Returns the rows of `read_blocks` as one table, for sources that fit in memory."""
    return join_tables(list(read_blocks(paths, wanted, settings, setting)))


def read_blocks(
    paths: Any,
    wanted: Collection[str],
    settings: FileSettings | None = None,
    setting: str = "data.interactions",
    size: int | None = None,
) -> Iterator[Table]:
    """Yields the columns in `wanted` of a file, or of several files one after another, as tables of some rows.

    A file without rows has a table too, so that there is at least one. A column that holds lists does so in all tables.
    Memory does not grow with the files.

    Args:
        paths: what `find_files` takes: a file, a folder, a glob, a URL, a table in memory, or a list of these.
        wanted: the names of the columns to read.
        settings: how files are read; None for the defaults.
        setting: the config's field that gave `paths`, for messages.
        size: most rows of a table, `BLOCK` if it is None.

    Raises:
        DataError: a file cannot be read, its name has no known layout, a row is malformed, the files differ in the
            columns that are in use, or a column has lists in some rows and single values in others.
        OSError: the storage gives no rights, or fails.

    Example:
        >>> table = pa.table({"user_id": [7, 8], "tags": [["a"], None]})
        >>> [len(block) for block in read_blocks(table, ["user_id", "tags"], size=1)]
        [1, 1]
    """
    settings = settings or FileSettings()
    files = find_files(paths, setting, settings.delimiter)
    return (table for _, table in _alike(_Source(files, wanted, settings, BLOCK if size is None else size)))


@dataclass(frozen=True)
class _Source:
    """Files of one table; see `read_blocks`."""

    files: list[File]
    wanted: Collection[str]
    settings: FileSettings
    size: int

    def __iter__(self) -> Iterator[tuple[File, Table]]:
        reading = Reading(tuple(self.settings.missing_values))
        return ((file, table) for file in self.files for table in self._tables(file, reading))

    def has(self, format: str) -> bool:
        """True if a file is of this format."""
        return any(file.layout.format == format for file in self.files)

    def _tables(self, file: File, reading: Reading) -> Iterator[Table]:
        layout = with_settings(file.layout, self.settings, file.setting)
        with reading_file(file.path, DataError):
            if layout.format == "arrow":
                tables = iter([_of_memory(file, self.wanted, reading)])
            elif layout.format == "parquet":
                tables = iterate_parquet(file.path, self.wanted, self.size, reading)
            else:
                iterate = iterate_json if layout.format == "json" else iterate_text
                tables = iterate(file.path, layout, self.wanted, reading)
            for table in tables:
                yield from cut_table(_add_partitions(table, file, self.wanted), self.size)


def cut_table(table: Table, size: int | None = None) -> Iterator[Table]:
    """Yields a table of one file as tables of at most `size` (None: BLOCK) rows, at least one."""
    size = BLOCK if size is None else size
    for start in range(0, max(len(table), 1), size):
        yield replace(table, data=table.data.slice(start, size), line=partial(_shifted, table.line, start))


def _shifted(line: Callable[[int], int], start: int, row: int) -> int:
    return line(start + row)


def _of_memory(file: File, wanted: Collection[str], reading: Reading) -> Table:
    names = file.table.column_names
    used = [name for name in names if name in wanted]
    for name in used:
        if names.count(name) > 1:
            raise DataError(f"{file.path}: column '{name}' appears twice")
        check_values(file.path, name, file.table.column(name), 0)
    return Table(file.path, columns_in(file.table, used), names, lambda row: row + 1, reading=reading)


def _add_partitions(table: Table, file: File, wanted: Collection[str]) -> Table:
    """Returns the table with the columns that the names of the file's folders give."""
    for name, value in file.partitions.items():
        if name not in table.known:
            column = pa.repeat(pa.scalar(value, pa.large_string()), len(table))
            data = table.data.append_column(name, column) if name in wanted else table.data
            table = replace(table, data=data, known=[*table.known, name])
    return table


def _alike(source: _Source) -> Iterator[tuple[File, Table]]:
    """Yields tables with the same columns, in which each column has lists in all tables or in none."""
    tables, first = iter(source), None
    begin = [next(tables)]
    lists, is_known = _find_lists(source, begin)
    if not is_known:
        lists, _ = _find_lists(source, source)
    for file, table in chain(begin, tables):
        for name, has_lists in lists.items():
            if name in table.known or file.layout.format == "json":
                table = _with_kind(table, name, has_lists)
        first = table if first is None else first
        check_columns(first, table)
        yield file, table


def _find_lists(source: _Source, tables: Iterable[tuple[File, Table]]) -> tuple[dict[str, bool], bool]:
    """Returns by column whether it has lists, and whether the tables tell it of all columns.

    A file of JSON Lines may name a column, or give it a value, in a late row only: then it is read up to there.
    """
    found: dict[str, bool] = {}
    rows, empty, is_json = 0, set(), source.has("json")
    for _, table in tables:
        rows += len(table)
        for name in set(source.wanted).intersection(table.data.column_names) - found.keys():
            column = table.data.column(name)
            if _is_empty(column) and (is_json or pa.types.is_null(column.type)):
                empty.add(name)
            else:
                found[name] = is_list(column.type)
        if not (set(source.wanted) if is_json else empty) - found.keys():
            return found, True
    if not rows and is_json:  # a file without rows has no names
        empty |= set(source.wanted)
    return dict.fromkeys(empty, False) | found, False


def _with_kind(table: Table, name: str, has_lists: bool) -> Table:
    """Returns the table with its column as lists or as single values, if it is without values or lacks the column."""
    empty = pa.chunked_array([pa.nulls(len(table), TEXTS if has_lists else pa.null())])
    if name not in table.data.column_names:
        known = table.known if name in table.known else [*table.known, name]
        return replace(table, data=table.data.append_column(name, empty), known=known)
    column = table.data.column(name)
    if is_list(column.type) == has_lists:
        return table
    if not _is_empty(column):
        here, there = ("a single value", "a list") if has_lists else ("a list", "a single value")
        row = next(row for row, value in enumerate(column) if value.is_valid)
        raise table.fault(row, f"'{name}' is {here} here and {there} in other rows; it must be of one kind")
    return replace(table, data=table.data.set_column(table.data.column_names.index(name), name, empty))


def _is_empty(column: pa.ChunkedArray) -> bool:
    if is_text(column.type):
        return not pc.any(pc.not_equal(column.cast(TEXT), "")).as_py()
    return column.null_count == len(column)


def input_files(config: DataConfig) -> list[Path]:
    """Returns the files of this machine of all tables that a config names.

    Raises:
        DataError: nothing is there, or a file's kind is unknown.
    """
    named = {name: paths for name in FILES if (paths := getattr(config, name)) is not None}
    found = [find_files(paths, f"data.{name}", config.delimiter) for name, paths in named.items()]
    return [Path(file.path) for files in found for file in files if file.table is None and not is_url(file.path)]


def count_rows(config: DataConfig) -> int | None:
    """Returns the number of interactions where the files tell it without being read, else None."""
    count = 0
    for file in _files(config):
        if file.table is not None:
            count += len(file.table)
            continue
        if file.layout.format != "parquet" or is_url(file.path):
            return None
        try:
            with pyarrow.parquet.ParquetFile(file.path) as parquet:
                count += parquet.metadata.num_rows
        except (OSError, pa.ArrowException):
            return None  # the reader says what is wrong with it
    return count


def iterate_tables(config: DataConfig, size: int | None = None) -> Iterator[tuple[int, Table]]:
    """Yields the interactions as tables of at most `size` (None: BLOCK) rows, each after the number of its setting.

    The settings are `interactions` and, with `split: files`, `validation` and `test`.

    Raises:
        DataError: as `read_blocks`.
    """
    settings, size = config.file_settings(), BLOCK if size is None else size
    numbers = {setting: number for number, (setting, _) in enumerate(_interactions(config))}
    for file, table in _alike(_Source(_files(config), config.columns(), settings, size)):
        yield numbers[file.setting], table


def _interactions(config: DataConfig) -> list[tuple[str, Any]]:
    names = ("interactions", "validation", "test") if config.split == "files" else ("interactions",)
    return [(f"data.{name}", getattr(config, name)) for name in names]


def _files(config: DataConfig) -> list[File]:
    found = [find_files(paths, setting, config.delimiter) for setting, paths in _interactions(config)]
    return [file for files in found for file in files]


def name_of(config: DataConfig) -> str:
    """Returns how messages name the table of interactions: its file, or the first and the last one."""
    files = _files(config)
    return files[0].path if len(files) == 1 else f"{files[0].path} to {files[-1].path}"
