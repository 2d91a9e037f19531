"""Sorts columns that are too long for memory, with DuckDB, which spills to a folder."""

import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from jfi.data.errors import DataError
from jfi.data.schema.coded import BLOCK

if TYPE_CHECKING:
    import duckdb

#: More threads want more memory, and two of them sort a million rows in half a second.
_MAX_THREADS = 8


class MemoryLimitError(DataError):
    """The engine needs more memory than it may hold."""


def check_memory(memory: str) -> None:
    """Raises DataError if `memory` is not an amount that `sort_batches` takes, or DuckDB is not installed."""
    _connect({"memory_limit": memory}).close()


def sort_batches(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, by: list[str], memory: str, folder: Path
) -> Iterator[pa.RecordBatch]:
    """The rows of all batches, sorted in ascending order.

    Args:
        batches: of the given schema; read once, a batch at a time.
        schema: of the batches.
        by: the columns to sort by. The order of equal rows is undefined, so the last should number the rows.
        memory: most that the engine holds in memory, such as "1GB"; what exceeds it is written to `folder`.
        folder: for temporary files.

    Raises:
        DataError: DuckDB is not installed, `memory` is malformed, or it is too little (`MemoryLimitError`).
        OSError: the disk is full.
    """
    settings = {
        "memory_limit": memory,
        "temp_directory": str(folder),
        "threads": min(_MAX_THREADS, os.cpu_count() or 1),
        # The rows' own number is a column, so the engine need not keep their order.
        "preserve_insertion_order": False,
    }
    with _connect(settings) as connection:
        # DuckDB's names make no difference between upper and lower case, so columns have numbers there.
        numbered = pa.schema([field.with_name(f"c{i}") for i, field in enumerate(schema)])
        given = (pa.RecordBatch.from_arrays(batch.columns, schema=numbered) for batch in batches)
        connection.register("rows", pa.RecordBatchReader.from_batches(numbered, given))
        order = ", ".join(f"c{schema.get_field_index(name)}" for name in by)
        try:
            for batch in connection.sql(f"SELECT * FROM rows ORDER BY {order}").to_arrow_reader(BLOCK):
                yield pa.RecordBatch.from_arrays(batch.columns, names=schema.names)
        except Exception as error:
            import duckdb

            if isinstance(error, duckdb.IOException):
                raise OSError(errno.ENOSPC, f"sorting needs more space in {folder}: {error}") from error
            if isinstance(error, duckdb.OutOfMemoryException):
                raise MemoryLimitError(f"--memory {memory} is too little to sort the table; name more") from error
            raise


def _connect(settings: dict) -> "duckdb.DuckDBPyConnection":
    try:
        import duckdb
    except ImportError:
        raise DataError("preparing a table needs DuckDB: pip install duckdb") from None
    try:
        return duckdb.connect(config=settings)
    except (duckdb.InvalidInputException, duckdb.ParserException, duckdb.CatalogException) as error:
        raise DataError(f"--memory {settings['memory_limit']}: not an amount of memory such as 1GB") from error


def record_batch(columns: Mapping[str, np.ndarray | pa.Array]) -> pa.RecordBatch:
    """A record batch of columns of equal length."""
    arrays = [column if isinstance(column, pa.Array) else pa.array(column) for column in columns.values()]
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))
