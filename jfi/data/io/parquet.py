"""Parquet files and tables in memory -> tables with the types that they declare."""

from collections.abc import Callable, Container, Iterator
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet

from jfi.data.errors import DataError
from jfi.data.io.arrays import is_text
from jfi.data.io.paths import File, is_url, open_file
from jfi.data.io.table import BLOCK, Reading, Table, columns_in, first_fault
from jfi.utils.errors import memory_cause

_T = TypeVar("_T")


def iterate_parquet(file: File, wanted: Container[str], reading: Reading) -> Iterator[Table]:
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


def iterate_memory(file: File, wanted: Container[str], reading: Reading) -> Iterator[Table]:
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


def _table(path: str, data: pa.Table, known: list[str], wanted: Container[str], start: int, reading: Reading) -> Table:
    """Returns the table of some rows, after `start` others.

    Raises:
        DataError: content does not fit its type, such as text that is not UTF-8.
    """
    table = Table(path, columns_in(data, wanted), known, lambda row: start + row + 1, reading=reading)
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
