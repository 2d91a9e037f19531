"""Parquet files -> tables with the types that the files declare."""

import os
from collections.abc import Callable, Container, Iterator
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from jfi.data.errors import DataError
from jfi.data.io.table import Table

_T = TypeVar("_T")
#: The first and the last bytes of a Parquet file.
_MAGIC = b"PAR1"


def read_parquet(path: str, wanted: Container[str]) -> Table:
    """The columns of a Parquet file that are in `wanted`."""
    with _open(path) as file:
        known, used = _columns(path, file, wanted)
        data = _try(path, lambda: file.read(columns=used))
    return _table(path, data.select(used), known)


def iterate_parquet(path: str, wanted: Container[str], size: int) -> Iterator[Table]:
    """`read_parquet` as tables of at most `size` rows, whose lines count from each one's first row."""
    with _open(path) as file:
        known, used = _columns(path, file, wanted)
        batches = file.iter_batches(size, columns=used)
        while (batch := _try(path, lambda: next(batches, None))) is not None:
            yield _table(path, pa.Table.from_batches([batch]).select(used), known)


def _open(path: str) -> pyarrow.parquet.ParquetFile:
    # A damaged file makes pyarrow raise errors of many kinds: those of Arrow, OSError, ValueError, UnicodeDecodeError.
    with open(path, "rb") as stream:
        begin = stream.read(len(_MAGIC))
        if not begin:
            raise DataError(f"{path}: not a Parquet file: it is empty")
        stream.seek(-len(begin), os.SEEK_END)
        end = stream.read()
    if begin == _MAGIC != end:
        raise DataError(f"{path}: an incomplete Parquet file: its end is missing")
    return _try(path, lambda: pyarrow.parquet.ParquetFile(path, page_checksum_verification=True))


def _columns(path: str, file: pyarrow.parquet.ParquetFile, wanted: Container[str]) -> tuple[list[str], list[str]]:
    """The names of all columns, and of those to read."""
    known = _try(path, lambda: file.schema_arrow.names)
    # Without a column the number of rows would be lost.
    used = [name for name in known if name in wanted] or known[:1]
    for name in used:
        if known.count(name) > 1:
            raise DataError(f"{path}: column '{name}' appears twice")
    return known, used


def _table(path: str, data: pa.Table, known: list[str]) -> Table:
    for name in data.column_names:
        _check(path, name, data.column(name))
    return Table(path, data, known, line=lambda row: row + 1)


def _try(path: str, read: Callable[[], _T]) -> _T:
    try:
        return read()
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        if isinstance(error, pa.ArrowInvalid) and "magic bytes" in str(error):
            raise DataError(f"{path}: not a Parquet file") from error
        raise DataError(f"{path}: a damaged Parquet file, or one that Arrow cannot read: {error}") from error


def _check(path: str, name: str, column: pa.ChunkedArray) -> None:
    """Raises DataError for content that does not fit its type, such as text that is not UTF-8."""
    row = 0
    for chunk in column.chunks:
        try:
            if not _is_ascii(chunk):
                chunk.validate(full=True)
        except pa.ArrowInvalid as error:
            if pa.types.is_string(chunk.type) or pa.types.is_large_string(chunk.type):
                row += next(i for i in range(len(chunk)) if not _valid(chunk[i : i + 1]))
                raise DataError(f"{path}:{row + 1}: '{name}' is not UTF-8") from error
            raise DataError(f"{path}: column '{name}' is damaged: {error}") from error
        row += len(chunk)


def _is_ascii(chunk: pa.Array) -> bool:
    """True for text of ASCII alone, which needs no slower check; false for other types."""
    wide = pa.types.is_large_string(chunk.type)
    if not (wide or pa.types.is_string(chunk.type)) or not len(chunk):
        return False
    _, offsets, content = chunk.buffers()
    ends = np.frombuffer(offsets, np.int64 if wide else np.int32)[[chunk.offset, chunk.offset + len(chunk)]]
    return content is None or np.frombuffer(content, np.int8)[ends[0] : ends[1]].min(initial=0) >= 0


def _valid(array: pa.Array) -> bool:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True
