"""Second and third stage of preparing a dataset: rows sorted by (user, timestamp, item), and their order in time."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from jfi.data.batches.events import first_rows, index_type, user_blocks
from jfi.data.config import DataConfig
from jfi.data.io.blocks import iterate_tables
from jfi.data.prepared import splits
from jfi.data.prepared.arrange import fault_of_group
from jfi.data.prepared.column_files import ColumnWriter, map_arrow, new_map, read_columns, write_arrow
from jfi.data.prepared.external_sort import record_batch, sort_batches
from jfi.data.prepared.read import RawColumn, raw_columns, read_values
from jfi.data.schema.coded import blocks
from jfi.data.schema.columns import sort_ids

#: A row's place in the table.
_ROW = "row"


def sort_rows(
    source: Path, folder: Path, config: DataConfig, memory: str, scratch: Path, advance: Callable[[int], None]
) -> None:
    """Sorts the rows of `read_rows` by (user, timestamp, item); equal ones keep the table's order.

    `folder` gets the same columns, users and items by the index of their sorted ids, which are in files beside them;
    a multi-valued column has offsets instead of counts.

    Args:
        source: folder of the first stage.
        folder: of this stage, empty.
        config: the meaning of the columns.
        memory: most that the engine holds in memory.
        scratch: folder for the engine's temporary files.
        advance: called with the number of rows after each block, once as they are given and once as they return.
    """
    columns, ranks = read_columns(source), {}
    for name in ("user", "item"):
        ids, ranks[name] = sort_ids(read_values(source, name))
        ranks[name] = ranks[name].astype(np.int32)
        write_arrow(folder / f"{name}_ids.arrow", {"id": ids})
    lists = [column for column in raw_columns(config) if column.counts in columns and column.kind == "category"]
    counts = {column.counts for column in lists}
    plain = [name for name in columns if name not in counts and name not in {column.file for column in lists}]
    types = {name: columns[name].dtype for name in plain}
    if checks_groups(config):
        types[_ROW] = np.dtype(np.int64)
    types |= {column.file: np.dtype(np.int32) for column in lists}
    types |= {offsets_name(column): np.dtype(np.int64) for column in lists}

    def given() -> Iterator[pa.RecordBatch]:
        starts = dict.fromkeys(counts, 0)
        for begin, end in blocks(len(columns["user"])):
            batch = {name: columns[name][begin:end] for name in plain}
            for name, rank in ranks.items():
                batch[name] = rank[batch[name]]
            for column in lists:
                ends = np.append(0, np.cumsum(columns[column.counts][begin:end]))
                start = starts[column.counts]
                codes = columns[column.file][start : start + ends[-1]]
                batch[column.file] = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(codes))
                starts[column.counts] = start + int(ends[-1])
            batch[_ROW] = np.arange(begin, end)
            yield record_batch(batch)
            advance(end - begin)

    item = [pa.field(name, pa.from_numpy_dtype(types[name])) for name in plain]
    item += [pa.field(column.file, pa.list_(pa.int32())) for column in lists]
    schema = pa.schema([*item, pa.field(_ROW, pa.int64())])
    writer = ColumnWriter(folder, types)
    ends = {column.file: 0 for column in lists}
    for column in lists:
        writer.append(offsets_name(column), np.zeros(1, np.int64))
    for batch in sort_batches(given(), schema, ["user", "time", "item", _ROW], memory, scratch):
        for name in types.keys() & {*plain, _ROW}:
            writer.append(name, batch.column(name).to_numpy())
        for column in lists:
            values = batch.column(column.file)
            writer.append(column.file, values.flatten().to_numpy())
            offsets = ends[column.file] + np.cumsum(np.diff(values.offsets.to_numpy()), dtype=np.int64)
            writer.append(offsets_name(column), offsets)
            ends[column.file] = int(offsets[-1])
        advance(batch.num_rows)
    writer.close()


def checks_groups(config: DataConfig) -> bool:
    """Returns whether a given split may cut a group, which is a fault."""
    return config.group is not None and config.split in ("column", "files")


def offsets_name(column: RawColumn) -> str:
    """The name of the offsets of a multi-valued column among the sorted column files, which are a file of their own."""
    return f"offsets {column.name}"


def order_and_split(
    source: Path, folder: Path, config: DataConfig, memory: str, scratch: Path, advance: Callable[[int], None]
) -> None:
    """Writes the columns `order`, the rows of `sort_rows` by (timestamp, user, item), and `split`.

    Args:
        source: folder of the second stage.
        folder: of this stage, empty.
        config: the split.
        memory, scratch, advance: as for `sort_rows`.
    """
    columns = read_columns(source)
    time, count = columns["time"], len(columns["time"])

    def given() -> Iterator[pa.RecordBatch]:
        for begin, end in blocks(count):
            yield record_batch({"time": time[begin:end], _ROW: np.arange(begin, end)})
            advance(end - begin)

    writer = ColumnWriter(folder, {"order": index_type(count)})
    split = new_map(folder / "split.npy", np.int8, count)
    if config.split in ("column", "files"):
        split[:] = columns["split"]
        if checks_groups(config):
            _check_groups(columns, split, config)
    if config.split == "user":
        of_users = splits.split_users(read_ids(source, "user").to_pylist(), config.fractions, config.split_seed)
        for begin, end in blocks(count):
            split[begin:end] = of_users[columns["user"][begin:end]]
    if config.split == "leave_one_out":
        for begin, end, group in _users(columns):
            of_block = columns["user"][begin:end] - columns["user"][begin]
            labeled = ~np.isnan(columns["label"][begin:end])
            if group is None:
                split[begin:end] = splits.leave_one_out(of_block, labeled)
            else:
                split[begin:end] = splits.leave_one_out_groups(of_block, labeled, group)
    labeled = sum(int((~np.isnan(columns["label"][begin:end])).sum()) for begin, end in blocks(count))
    cuts, place = splits.time_cuts(labeled, config.fractions), 0
    # The rows are sorted by user and item, so among equal times their number gives this order.
    schema = pa.schema([("time", pa.float64()), (_ROW, pa.int64())])
    for batch in sort_batches(given(), schema, ["time", _ROW], memory, scratch):
        rows = batch.column(_ROW).to_numpy()
        writer.append("order", rows)
        if config.split == "time":
            counted = ~np.isnan(columns["label"][rows])
            split[rows] = np.searchsorted(cuts, place + np.cumsum(counted) - counted, side="right")
            place += int(counted.sum())
        advance(len(rows))
    if config.split == "time" and config.group is not None:
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


def _check_groups(columns: dict[str, np.ndarray], split: np.ndarray, config: DataConfig) -> None:
    """Raises DataError for the first row of the table whose group the given split cuts."""
    cut = []
    for begin, end, group in _users(columns):
        row, given = columns[_ROW][begin:end], split[begin:end]
        cut.append(row[splits.keep_groups_whole(given, group, np.argsort(row)) != given])
    rows = np.concatenate(cut)
    if not len(rows):
        return
    row = int(rows.min())
    for _, table in iterate_tables(config):
        if row < len(table):
            raise fault_of_group(table, row, config.group)
        row -= len(table)


def read_order_and_split(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The columns of `order_and_split`."""
    return read_columns(folder)["order"], np.load(folder / "split.npy", mmap_mode="r")


def read_ids(folder: Path, name: str) -> pa.Array:
    """The sorted ids of `sort_rows`, of "user" or "item"."""
    return map_arrow(folder / f"{name}_ids.arrow")["id"]
