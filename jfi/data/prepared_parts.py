"""The events, users and items of a prepared dataset that another program has written: read, checked and joined."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
import torch

from jfi.data.coded import BLOCK, blocks
from jfi.data.column_files import ColumnWriter, read_columns
from jfi.data.config import DataConfig
from jfi.data.errors import DataError
from jfi.data.events import index_type
from jfi.data.prepared import COLUMNS, IN_HISTORY, column_name, dense_names
from jfi.data.prepared_write import id_type
from jfi.data.schema import DataSchema, Entity
from jfi.data.splits import SPLITS
from jfi.data.targets import check_target, target_names
from jfi.sid.codec import Codec
from jfi.utils.display import Display
from jfi.utils.files import by_number, is_storage_fault


def _parts(folder: Path, name: str) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The record batches of a file or of a folder of parts, each with its file's name."""
    whole, parts = folder / f"{name}.arrow", folder / name
    # The parts first: they may have been written again since they were joined.
    files = sorted((path for path in parts.glob("*") if path.suffix in (".arrow", ".parquet")), key=by_number)
    files = files or [path for path in (whole,) if path.is_file()]
    if not files:
        raise DataError(f"{folder}: neither {name}.arrow nor a folder {name} with parts in Parquet or Arrow")
    for path in files:
        shown = str(path.relative_to(folder))
        try:
            if path.suffix == ".parquet":
                with pyarrow.parquet.ParquetFile(path) as file:
                    yield from ((shown, batch) for batch in file.iter_batches(BLOCK))
            else:
                with pa.memory_map(str(path)) as source:
                    file = pa.ipc.open_file(source)
                    batches = (file.get_batch(i) for i in range(file.num_record_batches))
                    yield from (
                        (shown, b.slice(first)[: last - first]) for b in batches for first, last in blocks(len(b))
                    )
        except (OSError, pa.ArrowInvalid) as error:
            if is_storage_fault(error):
                raise
            raise DataError(f"{path}: damaged: {error}") from error


def join_small(folder: Path, of: Entity, schema: DataSchema, config: DataConfig) -> dict[str, pa.Array]:
    """The columns of users or items, checked."""
    batches = [batch for _, batch in _parts(folder, f"{of}s")]
    if not sum(len(batch) for batch in batches):
        raise DataError(f"{folder}: {of}s has no rows")
    table = pa.Table.from_batches(batches).combine_chunks()
    columns: dict[str, pa.Array] = {}
    for spec in schema.features[:-1]:
        name = column_name(spec)
        if spec.of != of or name in columns:
            continue
        many = any(s.column == spec.column and (s.multi_valued or s.slot is not None) for s in schema.features)
        column = _column(table, name, f"{of}s")
        kind = pa.from_numpy_dtype(id_type(spec.num_embeddings))
        if spec.semantic:
            _check_sids(column, schema.codec, f"{of}s", name)
        else:
            (_check_lists if many else _check_ids)(column, spec.num_embeddings, f"{of}s", name, 0)
        columns[name] = _copied(column, pa.large_list(kind) if many else kind)
    for name in dense_names(config)[of]:
        columns[name] = _checked_numbers(_column(table, name, f"{of}s"), f"{of}s", name, 0)
    return columns or {"": pa.nulls(table.num_rows)}


def join_events(
    folder: Path, work: Path, schema: DataSchema, counts: dict[Entity, int], config: DataConfig, display: Display
) -> dict:
    """The columns of events as maps of files in `work`, checked."""
    specs = {column_name(spec): spec for spec in schema.features[:-1] if spec.of == "event"}
    ids = {name: spec.num_embeddings for name, spec in specs.items()}
    lists = {name: 0 for name, spec in specs.items() if spec.multi_valued}  # the number of values so far
    dense = dense_names(config)["event"]
    index = index_type(max(counts.values()))
    types = {"user": index, "item": index, "time": np.float64, "label": np.float32, "split": np.int8}
    targets = target_names(config)
    types |= dict.fromkeys(targets, np.float32)
    types |= {name: id_type(count) for name, count in ids.items()} | dict.fromkeys(dense, np.float32)
    types |= {_offsets(name): np.int64 for name in lists}
    if config.history is not None:
        ids[IN_HISTORY], types[IN_HISTORY] = 2, np.int8
    writer = ColumnWriter(work, types)
    for name in lists:
        writer.append(_offsets(name), np.zeros(1, np.int64))
    check, start = _OrderCheck(counts, config.label is None), 0
    for file, batch in _parts(folder, "events"):
        for name, is_right in COLUMNS.items():
            column = _column(batch, name, file)
            if not is_right(column.type):
                raise DataError(f"{file}: column '{name}' has type {column.type}, see docs/prepared-data.md")
            if column.null_count and name != "label":
                raise DataError(f"{file}: column '{name}' has nulls")
        values = {name: batch.column(name).to_numpy(zero_copy_only=False) for name in COLUMNS}
        check.add(file, start, values)
        for name in targets:
            column = _column(batch, name, file)
            if not pa.types.is_float32(column.type):
                raise DataError(f"{file}: column '{name}' has type {column.type}, see docs/prepared-data.md")
            values[name] = column.to_numpy(zero_copy_only=False)
        for name in ("label", *targets):
            check_target(name, values[name], config, file, start)
        for name, column in values.items():
            writer.append(name, column)
        for name, count in ids.items():
            column = _column(batch, name, file)
            if name == IN_HISTORY and pa.types.is_boolean(column.type):
                column = column.cast(pa.int8())
            if name in lists:
                lengths = _check_lists(column, count, file, name, start)
                writer.append(_offsets(name), lists[name] + np.cumsum(lengths))
                lists[name] += int(lengths.sum())
                column = column.flatten()
            else:
                _check_ids(column, count, file, name, start)
            writer.append(name, column.to_numpy())
        for name in dense:
            writer.append(name, _checked_numbers(_column(batch, name, file), file, name, start).to_numpy())
        start += len(batch)
        display.update(len(batch))
    check.finish(start)
    writer.close()
    columns = read_columns(work)
    for name in lists:
        offsets = pa.array(columns.pop(_offsets(name)))
        columns[name] = pa.LargeListArray.from_arrays(offsets, pa.array(columns[name]))
    return columns


def _offsets(name: str) -> str:
    """The name of the offsets of a column of lists among the files of columns."""
    return f"offsets {name}"


class _OrderCheck:
    """Checks that rows are sorted by (user, time, item), and that their values are possible."""

    def __init__(self, counts: dict[Entity, int], is_implicit: bool) -> None:
        self._counts, self._is_implicit = counts, is_implicit
        self._last: dict[str, np.ndarray] = {"user": np.array([-1]), "time": np.array([0.0]), "item": np.array([0])}

    def add(self, file: str, start: int, values: dict[str, np.ndarray]) -> None:
        if not len(values["user"]):
            return
        user, time, item = (np.append(last, values[name]) for name, last in self._last.items())
        step = np.diff(user)
        later = (time[1:] > time[:-1]) | ((time[1:] == time[:-1]) & (item[1:] >= item[:-1]))
        label, split = values["label"], values["split"]
        for wrong, what in (
            ((step < 0) | ((step == 0) & ~later), "rows are not sorted by (user, time, item)"),
            (step > 1, "a user before this one has no event"),
            (user[1:] >= self._counts["user"], "'user' is not a row of users"),
            ((item[1:] < 0) | (item[1:] >= self._counts["item"]), "'item' is not a row of items"),
            (~np.isfinite(time[1:]), "'time' is not finite"),
            (
                self._is_implicit & (label != 1),
                "'label' is not 1, but the manifest has no label: every row is a positive",
            ),
            ((split < 0) | (split >= len(SPLITS)), "'split' is not 0, 1 or 2"),
        ):
            if wrong.any():
                raise DataError(f"{file}: row {start + int(wrong.argmax())} of the events: {what}")
        self._last = {name: values[name][-1:].copy() for name in self._last}

    def finish(self, rows: int) -> None:
        if not rows:
            raise DataError("events: no rows")
        if self._last["user"][0] + 1 != self._counts["user"]:
            raise DataError(f"users has {self._counts['user']} rows, but only {self._last['user'][0] + 1} have events")


def _column(table: pa.Table | pa.RecordBatch, name: str, file: str) -> pa.Array:
    if name not in table.schema.names:
        raise DataError(f"{file}: no column '{name}', see docs/prepared-data.md")
    column = table.column(name)
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _check_ids(column: pa.Array, count: int, file: str, name: str, start: int | np.ndarray) -> None:
    """Checks ids, whose rows count from `start`, or are given."""
    if not pa.types.is_integer(column.type) or column.null_count:
        raise DataError(f"{file}: column '{name}' must be of integers without nulls, got {column.type}")
    values = column.to_numpy()
    wrong = (values < 0) | (values >= count)
    if wrong.any():
        first = int(wrong.argmax())
        row = start[first] if isinstance(start, np.ndarray) else start + first
        raise DataError(f"{file}: '{name}' is {values[first]} in row {row}; ids are from 0 to {count - 1}")


def _check_sids(column: pa.Array, codec: Codec, file: str, name: str) -> None:
    if column.type != pa.int64() or column.null_count:
        raise DataError(f"{file}: column '{name}' must be int64 without nulls, got {column.type}")
    try:
        codec.layout.check(torch.from_numpy(column.to_numpy().copy()))
    except ValueError as error:
        raise DataError(f"{file}: column '{name}': {error}") from None


def _check_lists(column: pa.Array, count: int, file: str, name: str, start: int) -> np.ndarray:
    """The number of ids of each row of a column of lists, which are checked."""
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        raise DataError(f"{file}: column '{name}' has type {column.type}, but the schema has lists of ids")
    if column.null_count:
        raise DataError(f"{file}: column '{name}' has nulls; a row without values has an empty list")
    lengths = pc.list_value_length(column).to_numpy()
    _check_ids(column.flatten(), count, file, name, start + np.repeat(np.arange(len(column)), lengths))
    return lengths


def _checked_numbers(column: pa.Array, file: str, name: str, start: int) -> pa.Array:
    """A column of dense features as float32."""
    if column.null_count or not pa.types.is_floating(column.type):
        what = "nulls" if column.null_count else str(column.type)
        raise DataError(f"{file}: column '{name}' must be float32 without nulls, got {what}")
    numbers = column.cast(pa.float32(), safe=False)
    finite = np.isfinite(numbers.to_numpy())
    if not finite.all():
        row = int(finite.argmin())
        place = f"row {start + row}"
        raise DataError(f"{file}: '{name}' is {column[row].as_py()} in {place}, not finite; a missing value is 0")
    return numbers


def _copied(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """The column in another type, and from its first row on, so that its offsets start at 0."""
    column = column.cast(kind)
    return pa.concat_arrays([column]) if column.offset else column
