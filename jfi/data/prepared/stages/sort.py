"""Second and third stage of preparing a dataset: rows sorted by (user, timestamp, item), and their order in time.

DuckDB sorts, and spills to a folder what memory does not hold.
"""

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from jfi.data.config import DataConfig
from jfi.data.errors import DataError
from jfi.data.io.table import SourceRows
from jfi.data.prepared.stages import splits
from jfi.data.prepared.stages.column_files import SCRATCH, ColumnWriter, map_arrow, new_map, read_columns, write_arrow
from jfi.data.prepared.stages.read import raw_columns, read_values
from jfi.data.schema.columns import sort_values
from jfi.events.events import first_rows, index_type, user_blocks
from jfi.utils.errors import storage_number
from jfi.utils.jagged import BLOCK, blocks

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


#: The column of a row's index in the table.
ROW = "row"

Advance = Callable[[int], None]


def sort_rows(work: Path, config: DataConfig, memory: str | None, advance: Advance) -> None:
    """Sorts the rows of the stage `read` by (user, timestamp, item); equal ones keep the table's order.

    The stage `rows` gets the same columns and `ROW`, users and items by the index of their sorted ids, which are in
    files of the same folder.

    Args:
        work: folder of the stages.
        config: the meaning of the columns.
        memory: as for `sort_batches`.
        advance: called with the number of rows after each block, once as they are given and once as they return.
    """
    source, folder = work / "read", work / "rows"
    columns, ranks = read_columns(source), {}
    for name in ("user", "item"):
        values = read_values(source, name)
        order = sort_values(values)
        ranks[name] = np.empty(len(order), np.int32)
        ranks[name][order] = np.arange(len(order))
        write_arrow(folder / f"{name}_ids.arrow", {"id": values.take(pa.array(order))})
    categories = [column for column in raw_columns(config) if column.kind == "category"]
    offsets = {column.file: column.offsets for column in categories if len(columns[column.offsets])}
    plain = [name for name in columns if name not in offsets and name not in {one.offsets for one in categories}]

    def given() -> Iterator[pa.RecordBatch]:
        for begin, end in blocks(len(columns["user"])):
            batch = {name: columns[name][begin:end] for name in plain}
            for name, rank in ranks.items():
                batch[name] = rank[batch[name]]
            batch[ROW] = np.arange(begin, end)
            for name, bounds in offsets.items():
                ends = columns[bounds][begin : end + 1]
                codes = pa.array(columns[name][ends[0] : ends[-1]])
                batch[name] = pa.ListArray.from_arrays(pa.array(ends - ends[0], pa.int32()), codes)
            yield pa.RecordBatch.from_pydict(batch)
            advance(end - begin)

    types = {name: columns[name].dtype for name in (*plain, *offsets, *offsets.values())}
    writer = ColumnWriter(folder, types | {ROW: np.int64})
    for batch in sort_batches(given(), ["user", "time", "item", ROW], memory, work / SCRATCH):
        for name in (*plain, ROW):
            writer.append(name, batch.column(name).to_numpy())
        for name, bounds in offsets.items():
            values = batch.column(name)
            writer.append(name, values.flatten().to_numpy())
            writer.append_offsets(bounds, np.diff(values.offsets.to_numpy()))
        advance(batch.num_rows)
    writer.close()


def order_and_split(
    work: Path, config: DataConfig, memory: str | None, advance: Advance, tables: Callable[[], Iterable[SourceRows]]
) -> None:
    """Writes the columns `order`, the rows of `sort_rows` by (timestamp, user, item), and `split` of the stage `order`.

    `tables` gives the rows again, to name one whose group is cut; the other arguments are those of `sort_rows`.
    """
    folder, columns = work / "order", read_columns(work / "rows")
    time, count = columns["time"], len(columns["time"])

    def given() -> Iterator[pa.RecordBatch]:
        for begin, end in blocks(count):
            yield pa.RecordBatch.from_pydict({"time": time[begin:end], ROW: np.arange(begin, end)})
            advance(end - begin)

    writer = ColumnWriter(folder, {"order": index_type(count)})
    split = new_map(folder / "split.npy", np.int8, count)
    if config.split in ("column", "files"):
        split[:] = columns["split"]
        if config.request_id is not None:
            _check_groups(columns, split, config.request_id, tables)
    if config.split == "user":
        of_users = splits.split_users(read_ids(work, "user").to_pylist(), config.fractions)
        for begin, end in blocks(count):
            split[begin:end] = of_users[columns["user"][begin:end]]
    if config.split == "leave_one_out":
        for begin, end, group in _users(columns):
            of_block = columns["user"][begin:end] - columns["user"][begin]
            labeled = ~np.isnan(columns["label"][begin:end])
            split[begin:end] = splits.leave_one_out(of_block, labeled, group)
    labeled = sum(int((~np.isnan(columns["label"][begin:end])).sum()) for begin, end in blocks(count))
    cuts, before = splits.time_cuts(labeled, config.fractions), 0
    # The rows are sorted by user and item, so among equal times their number gives this order.
    for batch in sort_batches(given(), ["time", ROW], memory, work / SCRATCH):
        rows = batch.column(ROW).to_numpy()
        writer.append("order", rows)
        if config.split == "time":
            counted = ~np.isnan(columns["label"][rows])
            split[rows] = splits.split_by_time(counted, before, cuts)
            before += int(counted.sum())
        advance(len(rows))
    if config.split == "time" and config.request_id is not None:
        for begin, end, group in _users(columns):
            # A user's rows are in the order of time.
            split[begin:end] = splits.keep_groups_whole(split[begin:end], group, np.arange(end - begin))
    split.flush()
    writer.close()


def _users(columns: dict[str, np.ndarray]) -> Iterator[tuple[int, int, np.ndarray | None]]:
    """Ranges of rows that hold whole users, with a number for each group in them, or None without groups."""
    user = columns["user"]
    for begin, end in user_blocks(first_rows(user)):
        group = None
        if "group" in columns:
            _, group = np.unique(columns["group"][begin:end], return_inverse=True)
            group = (user[begin:end] - user[begin]) * (group.max() + 1) + group
        yield begin, end, group


def _check_groups(
    columns: dict[str, np.ndarray], split: np.ndarray, name: str, tables: Callable[[], Iterable[SourceRows]]
) -> None:
    """Raises DataError for the first row of the table whose group the given split cuts."""
    cut = []
    for begin, end, group in _users(columns):
        row, given = columns[ROW][begin:end], split[begin:end]
        cut.append(row[splits.keep_groups_whole(given, group, np.argsort(row)) != given])
    rows = np.concatenate(cut)
    if not len(rows):
        return
    row = int(rows.min())
    for table in tables():
        if row < len(table):
            value = table.strings(name)[row].as_py()
            raise table.fault(row, f"the rows of '{name}' {value} are in more than one split")
        row -= len(table)
    raise DataError(f"the rows of a value of '{name}' are in more than one split")


def read_order_and_split(work: Path) -> tuple[np.ndarray, np.ndarray]:
    """The columns of `order_and_split`."""
    return read_columns(work / "order")["order"], np.load(work / "order/split.npy", mmap_mode="r")


def read_ids(work: Path, name: str) -> pa.Array:
    """The sorted ids of `sort_rows`, of "user" or "item"."""
    return map_arrow(work / f"rows/{name}_ids.arrow")["id"]
