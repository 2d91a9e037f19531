"""Sorts columns that are too long for memory, with DuckDB, which spills to a folder."""

import errno
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
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
#: Bytes that sorting may hold though less of the machine's memory is free: the engine does not start with fewer.
_MIN_MEMORY = 1 << 28
#: By version of control groups the folder of memory's, and the files of the limit, of what is held, and their share in
#: `memory.stat` of pages of files that are dropped where memory is short.
_GROUPS = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": (
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
}


class MemoryLimitError(DataError):
    """The engine needs more memory than it may hold."""


def check_memory(memory: str) -> None:
    """Raises DataError if `memory` is not an amount that `sort_batches` takes."""
    _connect({"memory_limit": memory}).close()


def free_memory(root: Path = Path("/")) -> int:
    """Returns the bytes of memory that this process can take: what the machine has free, or its control group, if less.

    Args:
        root: folder of `proc` and `sys`.
    """
    found = re.search(r"MemAvailable: *(\d+) kB", (root / "proc/meminfo").read_text())
    free = [int(found[1]) << 10]
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        if (kind := next((one for one in kinds.split(",") if one in _GROUPS), None)) is None:
            continue
        top, limit, held, dropped = _GROUPS[kind]
        group = root / top / path.strip("/")
        # A container may show its group as the top folder, whatever its path.
        for folder in [group, *group.parents][: len(group.parts) - len((root / top).parts) + 1]:
            with suppress(OSError, ValueError):  # no such file, or no limit: "max"
                pages = re.search(rf"^{dropped} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
                most, used = (int((folder / name).read_text()) for name in (limit, held))
                free.append(most - used + int(pages[1] if pages else 0))
    return max(min(free), 0)


def sort_batches(
    batches: Iterable[pa.RecordBatch], by: list[str], memory: str | None, folder: Path
) -> Iterator[pa.RecordBatch]:
    """The rows of all batches, sorted in ascending order.

    Rows that one batch holds are sorted in memory.

    Args:
        batches: at least one, of equal columns of numbers or of lists of them; read once, a batch at a time.
        by: the columns to sort by. The last should number the rows, so that no two are equal.
        memory: most that the engine holds in memory, such as "1GB"; None is half of what is free. What exceeds it is
            written to `folder`.
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

    limit = memory or f"{max(free_memory() // 2, _MIN_MEMORY) >> 20}MiB"
    settings = {
        "memory_limit": limit,
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
            advice = (
                "; name more by --memory" if memory else ", half of what is free here; free more, or give fewer rows"
            )
            raise MemoryLimitError(f"sorting the table needs more memory than {limit}{advice}") from error


def _connect(settings: dict) -> "duckdb.DuckDBPyConnection":
    import duckdb

    try:
        return duckdb.connect(config=settings)
    except (duckdb.InvalidInputException, duckdb.ParserException, duckdb.CatalogException) as error:
        raise DataError(f"--memory {settings['memory_limit']}: not an amount of memory such as 1GB") from error
