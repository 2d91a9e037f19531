"""Parquet files -> tables with the types that the files declare."""

import os
from collections.abc import Callable, Container, Iterator
from typing import IO, TypeVar

import pyarrow as pa
import pyarrow.parquet

from jfi.data.errors import DataError
from jfi.data.io.arrays import is_text
from jfi.data.io.paths import is_url, open_file
from jfi.data.io.table import Reading, Table, columns_in
from jfi.utils.memory import memory_cause

_T = TypeVar("_T")
#: The first and the last bytes of a Parquet file.
_MAGIC = b"PAR1"


def iterate_parquet(path: str, wanted: Container[str], size: int, reading: Reading) -> Iterator[Table]:
    """Yields the columns of a Parquet file that are in `wanted` as tables of at most `size` rows."""
    with open_file(path) as stream:
        file = _open(path, stream)
        known = _try(path, lambda: file.schema_arrow.names)
        # Without a column the number of rows would be lost.
        used = [name for name in known if name in wanted] or known[:1]
        for name in used:
            if known.count(name) > 1:
                raise DataError(f"{path}: column '{name}' appears twice")
        batches, start = file.iter_batches(size, columns=used), 0
        while (batch := _try(path, lambda: next(batches, None))) is not None:
            data = columns_in(pa.Table.from_batches([batch]), wanted)
            data = data.replace_schema_metadata(file.schema_arrow.metadata)
            for name in data.column_names:
                check_values(path, name, data.column(name), start)
            yield Table(path, data, known, _line_from(start), reading=reading)
            start += len(data)
        if not start:
            empty = columns_in(file.schema_arrow.empty_table(), wanted)
            yield Table(path, empty, known, _line_from(0), reading=reading)


def _line_from(start: int) -> Callable[[int], int]:
    return lambda row: start + row + 1


def _open(path: str, stream: IO[bytes]) -> pyarrow.parquet.ParquetFile:
    # A damaged file makes pyarrow raise errors of many kinds: those of Arrow, OSError, ValueError, UnicodeDecodeError.
    begin = stream.read(len(_MAGIC))
    if not begin:
        raise DataError(f"{path}: not a Parquet file: it is empty")
    stream.seek(-len(begin), os.SEEK_END)
    if begin == _MAGIC != stream.read():
        raise DataError(f"{path}: an incomplete Parquet file: its end is missing")
    source = stream if is_url(path) else path
    # Other units would wrap INT96 times that are far from 1970.
    settings = {"coerce_int96_timestamp_unit": "us", "page_checksum_verification": True}
    return _try(path, lambda: pyarrow.parquet.ParquetFile(source, **settings))


def _try(path: str, read: Callable[[], _T]) -> _T:
    try:
        return read()
    except Exception as error:
        if (isinstance(error, OSError) and error.errno is not None) or memory_cause(error) is not None:
            raise
        if isinstance(error, pa.ArrowInvalid) and "magic bytes" in str(error):
            raise DataError(f"{path}: not a Parquet file") from error
        raise DataError(f"{path}: a damaged Parquet file, or one that Arrow cannot read: {error}") from error


def check_values(path: str, name: str, column: pa.ChunkedArray, row: int) -> None:
    """Raises DataError for content that does not fit its type, such as text that is not UTF-8.

    Args:
        path: of the file.
        name: of the column.
        column: some rows of it.
        row: the number of rows before them.
    """
    for chunk in column.chunks:
        try:
            chunk.validate(full=True)
        except pa.ArrowInvalid as error:
            if is_text(chunk.type):
                row += next(i for i in range(len(chunk)) if not _valid(chunk[i : i + 1]))
                raise DataError(f"{path}:{row + 1}: '{name}' is not UTF-8") from error
            raise DataError(f"{path}: column '{name}' is damaged: {error}") from error
        row += len(chunk)


def _valid(array: pa.Array) -> bool:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True
