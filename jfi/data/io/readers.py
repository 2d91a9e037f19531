"""The files that a config names -> one table."""

import codecs
import contextlib
from collections.abc import Container
from dataclasses import replace

import pyarrow as pa

from jfi.data.errors import DataError
from jfi.data.io.arrays import as_text, flatten, is_list, is_text
from jfi.data.io.decode import UTF8
from jfi.data.io.json_lines import read_json
from jfi.data.io.layouts import Layout
from jfi.data.io.parquet import read_parquet
from jfi.data.io.paths import File, find_files
from jfi.data.io.table import Table
from jfi.data.io.text import read_text
from jfi.utils.files import reading_file


def read_table(
    paths: str | list[str],
    wanted: Container[str],
    encoding: str = UTF8,
    quoting: bool = True,
    setting: str = "data.interactions",
) -> Table:
    """The columns in `wanted` of a file, or of several files one after another; a file's name tells its layout.

    Args:
        paths: a file, a folder, a glob, or a list of these.
        wanted: the names of the columns to read.
        encoding: of text files; UTF-8 leaves it to the layout, which for MovieLens' files allows latin-1 too.
        quoting: whether `"` quotes a field of CSV and TSV.
        setting: the config's field that gave `paths`, for messages.

    Raises:
        DataError: a file cannot be read, its name has no known layout, a row is malformed, or the files differ in the
            columns that are in use.
        OSError: the storage gives no rights, or fails.
    """
    files = find_files(paths, setting)
    tables = [read_file(file, wanted, encoding, quoting) for file in files]
    return tables[0] if len(tables) == 1 else join_tables(tables, wanted)


def read_file(file: File, wanted: Container[str], encoding: str, quoting: bool) -> Table:
    """`read_table` of one file."""
    path, layout = file.path, file_layout(file, encoding, quoting)
    with reading_file(path, DataError):
        if layout.format == "parquet":
            table = read_parquet(path, wanted)
        else:
            table = (read_json if layout.format == "json" else read_text)(path, layout, wanted)
    return add_partitions(table, file, wanted)


def file_layout(file: File, encoding: str, quoting: bool) -> Layout:
    """The layout of a file with the config's settings of text files."""
    layout = file.layout
    if codecs.lookup(encoding).name != UTF8:
        layout = replace(layout, encodings=(encoding,))
    return layout if quoting else replace(layout, quote=None)


def add_partitions(table: Table, file: File, wanted: Container[str]) -> Table:
    """The table with the columns that the names of the file's folders give."""
    for name, value in file.partitions.items():
        if name not in table.known:
            column = pa.DictionaryArray.from_arrays(
                pa.repeat(pa.scalar(0 if value is not None else None, pa.int32()), len(table)), pa.array([value or ""])
            )
            data = table.data.append_column(name, column) if name in wanted else table.data
            table = replace(table, data=data, known=[*table.known, name])
    return table


def join_tables(tables: list[Table], wanted: Container[str]) -> Table:
    """One table of the rows of all."""
    first, last = tables[0], tables[-1]
    used = [name for name in first.known if name in wanted]
    for table in tables[1:]:
        for one, other in ((first, table), (table, first)):
            for name in one.known:
                if name in wanted and name not in other.known:
                    raise DataError(f"{other.name}: no column '{name}', which {one.name} has")
        if table.separators != first.separators:
            raise DataError(f"{table.name}: other multi-valued columns than in {first.name}")
    parts, rows = [], 0
    for table in tables:
        inner = table.parts or [(0, table.name, table.line)]
        parts += [(rows + first, name, line) for first, name, line in inner]
        rows += len(table)
    data = {name: _concat([(table.name, table.data.column(name)) for table in tables], name) for name in used}
    name = f"{first.name} to {last.name}"
    # Without a column the number of rows would be lost.
    data = pa.table(data or {"": pa.nulls(rows)})
    return Table(name, data, first.known, lambda row: row + 1, first.separators, parts)


def _concat(columns: list[tuple[str, pa.ChunkedArray]], name: str) -> pa.ChunkedArray:
    """The column `name` of several files; `columns` holds each file's name and column."""
    # A file whose fields are all empty says nothing of the type: JSON Lines with null alone read as text.
    filled = [one for one in columns if one[1].null_count < len(one[1])] or columns
    types = {column.type: file for file, column in filled if not pa.types.is_null(column.type)}
    to = _common_type(list(types)) if types else pa.null()
    chunks = []
    for file, column in columns:
        try:
            chunks += column.chunks if column.type == to else [_cast(column, to)]
        except pa.ArrowException as error:
            other = next(one for kind, one in types.items() if kind != column.type)
            what = f"column '{name}' has type {column.type}, which does not go with that of {other}"
            raise DataError(f"{file}: {what}") from error
    return pa.chunked_array(chunks, to)


def _cast(column: pa.ChunkedArray, to: pa.DataType) -> pa.Array:
    if column.null_count == len(column):
        return pa.nulls(len(column), to)
    flat = flatten(column)
    return (as_text(flat) if is_text(to) else flat).cast(to)


def _common_type(types: list[pa.DataType]) -> pa.DataType:
    """The type to which the columns of several files are cast: the widest of a kind, else text."""
    if len(types) == 1:
        return types[0]
    for kind in (pa.types.is_signed_integer, pa.types.is_floating, pa.types.is_timestamp, is_list):
        if all(map(kind, types)):
            with contextlib.suppress(pa.ArrowException):
                schemas = [pa.schema([("", one)]) for one in types]
                return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    return pa.large_string()
