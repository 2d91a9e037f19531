"""Second and third stage of preparing a dataset: rows sorted by (user, timestamp, item), and their order in time."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from jfi.data.config import DataConfig
from jfi.data.errors import DataError
from jfi.data.io.table import Table
from jfi.data.prepared.stages import splits
from jfi.data.prepared.stages.column_files import ColumnWriter, map_arrow, new_map, read_columns, write_arrow
from jfi.data.prepared.stages.external_sort import sort_batches
from jfi.data.prepared.stages.read import raw_columns, read_values
from jfi.data.schema.columns import sort_values
from jfi.events.events import first_rows, index_type, user_blocks
from jfi.utils.jagged import blocks

#: The column of a row's place in the table.
ROW = "row"

Advance = Callable[[int], None]


def sort_rows(
    source: Path, folder: Path, config: DataConfig, memory: str | None, scratch: Path, advance: Advance
) -> None:
    """Sorts the rows of `read_rows` by (user, timestamp, item); equal ones keep the table's order.

    `folder` gets the same columns and `ROW`, users and items by the index of their sorted ids, which are in
    files of the same folder.

    Args:
        source: folder of the first stage.
        folder: of this stage, empty.
        config: the meaning of the columns.
        memory: most that the engine holds in memory; None is half of what is free.
        scratch: folder for the engine's temporary files.
        advance: called with the number of rows after each block, once as they are given and once as they return.
    """
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
    for batch in sort_batches(given(), ["user", "time", "item", ROW], memory, scratch):
        for name in (*plain, ROW):
            writer.append(name, batch.column(name).to_numpy())
        for name, bounds in offsets.items():
            values = batch.column(name)
            writer.append(name, values.flatten().to_numpy())
            writer.append_offsets(bounds, np.diff(values.offsets.to_numpy()))
        advance(batch.num_rows)
    writer.close()


def order_and_split(
    source: Path,
    folder: Path,
    config: DataConfig,
    memory: str | None,
    scratch: Path,
    advance: Advance,
    tables: Callable[[], Iterable[Table]],
) -> None:
    """Writes the columns `order`, the rows of `sort_rows` by (timestamp, user, item), and `split`.

    Args:
        source: folder of the second stage.
        folder: of this stage, empty.
        config: the split.
        memory, scratch, advance: as for `sort_rows`.
        tables: gives the rows again, to name one whose group is cut.
    """
    columns = read_columns(source)
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
        of_users = splits.split_users(read_ids(source, "user").to_pylist(), config.fractions, config.split_seed)
        for begin, end in blocks(count):
            split[begin:end] = of_users[columns["user"][begin:end]]
    if config.split == "leave_one_out":
        for begin, end, group in _users(columns):
            of_block = columns["user"][begin:end] - columns["user"][begin]
            labeled = ~np.isnan(columns["label"][begin:end])
            split[begin:end] = splits.leave_one_out(of_block, labeled, group)
    labeled = sum(int((~np.isnan(columns["label"][begin:end])).sum()) for begin, end in blocks(count))
    cuts, place = splits.time_cuts(labeled, config.fractions), 0
    # The rows are sorted by user and item, so among equal times their number gives this order.
    for batch in sort_batches(given(), ["time", ROW], memory, scratch):
        rows = batch.column(ROW).to_numpy()
        writer.append("order", rows)
        if config.split == "time":
            counted = ~np.isnan(columns["label"][rows])
            split[rows] = splits.split_by_time(counted, place, cuts)
            place += int(counted.sum())
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
    columns: dict[str, np.ndarray], split: np.ndarray, name: str, tables: Callable[[], Iterable[Table]]
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


def read_order_and_split(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The columns of `order_and_split`."""
    return read_columns(folder)["order"], np.load(folder / "split.npy", mmap_mode="r")


def read_ids(folder: Path, name: str) -> pa.Array:
    """The sorted ids of `sort_rows`, of "user" or "item"."""
    return map_arrow(folder / f"{name}_ids.arrow")["id"]
