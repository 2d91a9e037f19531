"""Sorts columns that are too long for memory, with DuckDB, which spills to a folder."""

import errno
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from jfi.data.errors import DataError
from jfi.utils.errors import storage_number
from jfi.utils.jagged import BLOCK

if TYPE_CHECKING:
    import duckdb

#: More threads want more memory, and two of them sort a million rows in half a second.
_MAX_THREADS = 8


class MemoryLimitError(DataError):
    """The engine needs more memory than it may hold."""


def check_memory(memory: str) -> None:
    """Raises DataError if `memory` is not an amount that `sort_batches` takes."""
    _connect({"memory_limit": memory}).close()


def sort_batches(
    batches: Iterable[pa.RecordBatch], by: list[str], memory: str, folder: Path
) -> Iterator[pa.RecordBatch]:
    """The rows of all batches, sorted in ascending order.

    Rows that one batch holds are sorted in memory.

    Args:
        batches: at least one, of equal columns of numbers or of lists of them; read once, a batch at a time.
        by: the columns to sort by. The last should number the rows, so that no two are equal.
        memory: most that the engine holds in memory, such as "1GB"; what exceeds it is written to `folder`.
        folder: for temporary files.

    Raises:
        DataError: `memory` is malformed, or it is too little (`MemoryLimitError`).
        OSError: the disk is full, or fails.
    """
    batches = iter(batches)
    first = next(batches)
    second = next(batches, None)
    if second is None:
        yield first.take(pa.array(np.lexsort([first.column(name).to_numpy() for name in reversed(by)])))
        return
    import duckdb

    settings = {
        "memory_limit": memory,
        "temp_directory": str(folder),
        "threads": min(_MAX_THREADS, os.cpu_count() or 1),
        # The rows' own number is a column, so the engine need not keep their order.
        "preserve_insertion_order": False,
    }
    names = first.schema.names
    with _connect(settings) as connection:
        # DuckDB's names make no difference between upper and lower case, so columns have numbers there.
        numbered = pa.schema([field.with_name(f"c{i}") for i, field in enumerate(first.schema)])
        parts = chain([first, second], batches)
        given = (pa.RecordBatch.from_arrays(batch.columns, schema=numbered) for batch in parts)
        connection.register("rows", pa.RecordBatchReader.from_batches(numbered, given))
        order = ", ".join(f"c{names.index(name)}" for name in by)
        try:
            for batch in connection.sql(f"SELECT * FROM rows ORDER BY {order}").to_arrow_reader(BLOCK):
                yield pa.RecordBatch.from_arrays(batch.columns, names=names)
        except duckdb.IOException as error:
            raise OSError(storage_number(str(error)) or errno.EIO, f"sorting in {folder}: {error}") from error
        except duckdb.OutOfMemoryException as error:
            if "max_temp_directory_size" in str(error):  # nearly all of the space that the disk has left
                raise OSError(errno.ENOSPC, f"sorting needs more space in {folder}: {error}") from error
            raise MemoryLimitError(
                f"sorting the table needs more memory than {memory}; `jfi prepare --memory` names more"
            ) from error


def _connect(settings: dict) -> "duckdb.DuckDBPyConnection":
    import duckdb

    try:
        return duckdb.connect(config=settings)
    except (duckdb.InvalidInputException, duckdb.ParserException, duckdb.CatalogException) as error:
        raise DataError(f"--memory {settings['memory_limit']}: not an amount of memory such as 1GB") from error
