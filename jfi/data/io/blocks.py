"""The files that a config names -> tables of some rows each, so that a source may be longer than memory."""

import codecs
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from jfi.data.config import FILES, DataConfig
from jfi.data.errors import DataError
from jfi.data.io.arrays import count_rounded, has_values, is_list, is_text
from jfi.data.io.json_lines import iterate_json
from jfi.data.io.paths import File, FileLayout, find_files, identify_file, is_url, open_file
from jfi.data.io.table import (
    BLOCK,
    SourceReading,
    SourceRows,
    columns_in,
    first_fault,
    join_tables,
    of_other_kind,
)
from jfi.data.io.text import iterate_text
from jfi.utils.errors import memory_cause
from jfi.utils.files import reading_file

_T = TypeVar("_T")


def iterate_parquet(file: File, wanted: Container[str], reading: SourceReading) -> Iterator[SourceRows]:
    """Yields the columns of a Parquet file that are in `wanted` as tables of some rows."""
    path = file.path
    with open_file(path) as stream:
        # Other units would wrap INT96 times that are far from 1970.
        settings = {"coerce_int96_timestamp_unit": "us", "page_checksum_verification": True}
        stream.read(1)  # an error of the storage, which Arrow may take for an empty file
        source = stream if is_url(path) else path
        parquet = _try(path, lambda: pyarrow.parquet.ParquetFile(source, **settings))
        schema = _try(path, lambda: parquet.schema_arrow)
        _check_names(path, schema.names, wanted)
        # Without a column the number of rows would be lost.
        used = [name for name in schema.names if name in wanted] or schema.names[:1]
        batches, start = parquet.iter_batches(BLOCK, columns=used), 0
        while (batch := _try(path, lambda: next(batches, None))) is not None:
            data = pa.Table.from_batches([batch]).replace_schema_metadata(schema.metadata)
            yield _table(path, data, schema.names, wanted, start, reading)
            start += len(data)
        if not start:
            yield _table(path, schema.empty_table(), schema.names, wanted, 0, reading)


def iterate_memory(file: File, wanted: Container[str], reading: SourceReading) -> Iterator[SourceRows]:
    """Yields the columns of a table in memory that are in `wanted`."""
    _check_names(file.path, file.table.column_names, wanted)
    yield _table(file.path, file.table, file.table.column_names, wanted, 0, reading)


def _check_names(path: str, names: list[str], wanted: Container[str]) -> None:
    if twice := next((name for name in names if name in wanted and names.count(name) > 1), None):
        raise DataError(f"{path}: column '{twice}' appears twice")


def _try(path: str, read: Callable[[], _T]) -> _T:
    # A damaged file makes pyarrow raise errors of many kinds: those of Arrow, OSError, ValueError, UnicodeDecodeError.
    try:
        return read()
    except Exception as error:
        if (isinstance(error, OSError) and error.errno is not None) or memory_cause(error) is not None:
            raise
        raise DataError(f"{path}: a damaged Parquet file, or one that Arrow cannot read: {error}") from error


def _table(
    path: str, data: pa.Table, known: list[str], wanted: Container[str], start: int, reading: SourceReading
) -> SourceRows:
    """Returns the table of some rows, after `start` others.

    Raises:
        DataError: content does not fit its type, such as text that is not UTF-8.
    """
    table = SourceRows(path, columns_in(data, wanted), known, lambda row: start + row + 1, reading=reading)
    for name in table.data.column_names:
        column = table.data.column(name)
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            if is_text(column.type):
                row = first_fault(lambda values: values.validate(full=True), column)
                raise table.fault(row, f"'{name}' is not UTF-8") from error
            raise DataError(f"{path}: column '{name}' is damaged: {error}") from error
    return table


_log = logging.getLogger(__name__)
#: Advice for a row without an id.
DROP = "; data.null_ids: drop leaves such rows out"


def read_table(
    paths: Any, wanted: Collection[str], config: DataConfig | None = None, setting: str = "data.interactions"
) -> SourceRows:
    """Returns the tables of `read_files` as one, for sources that fit in memory.

    Args:
        paths: what `find_files` takes: a file, a folder, a glob, a URL, a table in memory, or a list of these; or the
            files that `find_table` has found.
        wanted: the names of the columns to read.
        config: says how files are read, by its encoding, delimiter and the like; None for the defaults.
        setting: the config's field that gave `paths`, for messages.

    Example:
        >>> table = pa.table({"user_id": [7, 8], "tags": [["a"], None]})
        >>> read_table(table, ["user_id", "tags"]).ids("user_id").to_pylist()
        ['7', '8']
    """
    config = DataConfig() if config is None else config
    return join_tables([table for _, table in read_files(find_table(paths, setting, config), wanted, config)])


def find_table(paths: Any, setting: str, config: DataConfig) -> list[File]:
    """Returns the files of `find_files` as the config says that they are read; those that are found stay.

    Raises:
        DataError: nothing is there, or a file's kind is unknown.
    """
    if isinstance(paths, list) and paths and all(isinstance(one, File) for one in paths):
        return paths
    files = find_files(paths, setting, config.delimiter)
    return [replace(file, layout=_with_settings(file.layout, config, setting)) for file in files]


def _with_settings(layout: FileLayout, config: DataConfig, setting: str) -> FileLayout:
    if codecs.lookup(config.encoding).name != "utf-8":
        layout = replace(layout, encodings=(config.encoding,))
    if not config.quoting:
        layout = replace(layout, quote=None)
    if layout.format != "text" or layout.typed or layout.columns is not None:
        return layout
    delimiter = config.delimiter or layout.delimiter
    quote = layout.quote if len(delimiter.encode()) == 1 else None
    name = setting.removeprefix("data.").removeprefix("--")
    name = "interactions" if name in ("validation", "test", "history") else name
    return replace(layout, delimiter=delimiter, quote=quote, columns=config.header.get(name))


def read_files(files: list[File], wanted: Collection[str], config: DataConfig) -> Iterator[tuple[File, SourceRows]]:
    """Yields the columns in `wanted` of files, one after another, as tables of some rows, each after its file.

    A file without rows has a table too, so that there is at least one. All tables have the same columns; one that holds
    lists does so in all tables where it has a value. Memory does not grow with the files.

    Raises:
        DataError: a file cannot be read, a row is malformed, the files differ in the columns that are in use, or a
            column has lists in some rows and single values in others.
        OSError: the storage gives no rights, or fails.
    """
    reading, lists = SourceReading(tuple(config.missing_values), files[0].is_configured), {}
    ids = {config.user, config.item, config.request_id, config.session}
    ids |= {feature.name for feature in config.features if feature.type == "category"}
    rounded: Counter[str] = Counter()
    first = names = None
    for file in files:
        for table in _tables(file, wanted, reading):
            if file.layout.format == "json" and not set(wanted).issubset(table.known):
                names = _find_names(files, wanted) if names is None else names
                for name in sorted(names.difference(table.known)):
                    table = table.with_column(name, None)
            first = table if first is None else first
            _check_columns(first, table)
            _check_lists(table, lists)
            for part in table.cut(BLOCK):
                for name in ids.intersection(part.known, part.data.column_names):
                    rounded[name] += count_rounded(part.data.column(name))
                yield file, part.with_ids(_id_columns(file, config)) if config.null_ids == "drop" else part

    for name, count in sorted((+rounded).items()):
        what = "as floats from 2^53 on, to which ids are rounded, so that several may have become one"
        _log.warning(
            "%s: column '%s' has %s values %s; write integers or texts", name_files(files), name, f"{count:,}", what
        )


def _check_columns(first: SourceRows, table: SourceRows) -> None:
    """Raises DataError if two tables differ in their columns in use."""
    for one, other in ((first, table), (table, first)):
        for name in set(one.data.column_names) & set(one.known) - set(other.known):
            raise DataError(f"{other.name}: no column '{name}', which {one.name} has")


def _id_columns(file: File, config: DataConfig) -> list[str]:
    of = file.setting.removeprefix("data.").removeprefix("--")
    return {"users": [config.user], "items": [config.item]}.get(of, [config.user, config.item])


def describe_left_out(name: str, rows: int, left_out: int) -> list[str]:
    """Returns a line about the rows of a table that `data.null_ids` has left out; none if there are no such rows."""
    what = f"left out {left_out:,} of {rows + left_out:,} rows without a user or an item (data.null_ids: drop)"
    return [f"{name}: {what}"] if left_out else []


_READERS = {"arrow": iterate_memory, "parquet": iterate_parquet, "json": iterate_json, "text": iterate_text}


def _tables(file: File, wanted: Collection[str], reading: SourceReading) -> Iterator[SourceRows]:
    with reading_file(file.path, DataError):
        for table in _READERS[file.layout.format](file, wanted, reading):
            for name, value in file.partitions.items():
                if name not in table.known:
                    known = [*table.known, name]
                    table = table.with_column(name, value) if name in wanted else replace(table, known=known)
            yield table


def _find_names(files: list[File], wanted: Collection[str]) -> set[str]:
    """Returns the names in `wanted` that some row has: a late row of JSON Lines may be the first one with a name."""
    found, rows = set(), 0
    for file in files:
        for table in _tables(file, wanted, SourceReading()):
            found, rows = found.union(table.known), rows + len(table)
            if found.issuperset(wanted):
                return set(wanted)
    return found.intersection(wanted) if rows else set(wanted)


def _check_lists(table: SourceRows, lists: dict[str, bool]) -> None:
    """Raises DataError for a value that is a list where `lists` says that those before are not, or the reverse."""
    for name in table.data.column_names:
        column = table.data.column(name)
        has_lists = is_list(column.type)
        if lists.get(name) == has_lists or not has_values(column) or lists.setdefault(name, has_lists) == has_lists:
            continue
        row = pc.index(column.is_valid(), True).as_py()
        raise table.fault(row, f"'{name}' {of_other_kind(has_lists)}")


def identify_files(config: DataConfig) -> list[tuple[str, object]]:
    """Returns the files of all tables that a config names, each with what changes where it is replaced.

    Raises:
        DataError: nothing is there, or a file's kind is unknown.
    """
    names = [name for name in FILES if getattr(config, name) is not None]
    files = [file for name in names for file in find_table(getattr(config, name), f"data.{name}", config)]
    return [(file.path, identify_file(file.path)) for file in files if file.table is None]


def existing_interactions(config: DataConfig) -> list[File]:
    """Returns the files of the interactions that a config names, of all splits; none if one of them is not there."""
    given = [getattr(config, name) for name in config.interaction_settings()]
    paths = list(dict.fromkeys(path for one in given for path in (one if isinstance(one, list) else [one])))
    try:
        files = find_table(paths, "data.interactions", config)
    except DataError:
        return []
    return files if all(is_url(file.path) or os.path.exists(file.path) for file in files) else []


def count_rows(files: list[File]) -> int | None:
    """Returns the number of rows where the files tell it without being read, else None."""
    count = 0
    if any(file.layout.format not in ("arrow", "parquet") for file in files):
        return None
    for file in files:
        if file.table is not None:
            count += len(file.table)
            continue
        try:
            with open_file(file.path) as opened:
                count += pyarrow.parquet.read_metadata(opened).num_rows
        except (OSError, pa.ArrowException):
            return None  # the reader says what is wrong
    return count


def find_interactions(config: DataConfig) -> list[File]:
    """Returns the files of the interactions, and with `split: files` those of `validation` and `test` behind them.

    Raises:
        DataError: as `find_table`.
    """
    names = config.interaction_settings()
    return [file for name in names for file in find_table(getattr(config, name), f"data.{name}", config)]


def name_files(files: list[File]) -> str:
    """Returns how messages name a table of some files: by one, or by the first and the last one."""
    return files[0].path if len(files) == 1 else f"{files[0].path} to {files[-1].path}"
