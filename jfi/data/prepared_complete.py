"""Completes a prepared dataset that another program has written: checks it, joins its parts, derives the rest."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from jfi.data.coded import BLOCK, blocks
from jfi.data.column_files import ColumnWriter, map_arrow, new_map, read_columns, write_arrow
from jfi.data.config import DataConfig
from jfi.data.dataset import InteractionDataset
from jfi.data.errors import DataError
from jfi.data.events import Events, index_type, order_by_item
from jfi.data.external_sort import record_batch, sort_batches
from jfi.data.fingerprint import NAME as FINGERPRINT
from jfi.data.fingerprint import Fingerprint
from jfi.data.load import check_fits
from jfi.data.negatives import NegativeSampler
from jfi.data.prepared import (
    COLUMNS,
    Manifest,
    as_numpy,
    check_held,
    column_name,
    dense_names,
    known_items,
    read_dense,
    read_features,
)
from jfi.data.prepared_write import id_type, write_derived, write_manifest
from jfi.data.samples import choose_samples
from jfi.data.schema import DataSchema, Entity
from jfi.data.source import column_settings
from jfi.data.splits import SPLITS
from jfi.display import Display
from jfi.files import is_storage_fault, naming, sync

#: From this number of events on, their order in time is computed outside of memory.
_LARGE = 1 << 22


def complete_dataset(folder: str | Path, memory: str = "1GB", show: bool = True) -> None:
    """Makes a folder that another program has written a complete prepared dataset; one that is complete is left alone.

    `events`, `users` and `items` may each be a file of Arrow or a folder of parts, Parquet or Arrow, whose rows follow
    one another in the order of the parts' names. They become one file of one record batch each, which can be mapped;
    the parts stay. Then the samples of each split and what negatives need are derived.

    Args:
        folder: with manifest.json, the schema, events, users and items, see docs/prepared-data.md.
        memory: most that the sorting engine holds in memory.
        show: whether to show the progress on stderr: a bar on a terminal, and elsewhere a line every 30 seconds.

    Raises:
        DataError: a file is missing, or breaks a rule of the layout; the message names the file and the row.
        OSError: the disk is full, or the folder cannot be written.
    """
    folder = Path(folder)
    manifest = Manifest.load(folder)
    if manifest.complete:
        return
    # The tables that it was made of need no names here.
    replace(manifest.data, prepared=str(folder)).check()
    check_held(manifest.data)
    schema, work = DataSchema.load(folder), folder / ".completing"
    check_fits(replace(schema, max_history=manifest.data.max_history), column_settings(manifest.data))
    with naming(folder):
        _complete(manifest, schema, folder, work, memory, show)


def _complete(manifest: Manifest, schema: DataSchema, folder: Path, work: Path, memory: str, show: bool) -> None:
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        tables = {of: _join_small(folder, of, schema, manifest.data) for of in ("user", "item")}
        with Display("events", None, unit="rows", silent=not show, ticking=True) as display:
            counts = {of: len(next(iter(table.values()))) for of, table in tables.items()}
            columns = _join_events(folder, work, schema, counts, manifest.data.label is None, display)
        write_arrow(work / "events.arrow", columns)
        for of, table in tables.items():
            write_arrow(work / f"{of}s.arrow", table)
        tables = {of: map_arrow(work / f"{of}s.arrow") for of in ("event", "user", "item")}
        events = Events(*(as_numpy(tables["event"][name]) for name in COLUMNS))
        with Display("sort and derive", None, silent=not show, ticking=True):
            dataset = _derive(events, tables, schema, manifest.data, work, memory)
        write_derived(dataset.arrays(), work)
        Fingerprint.of(dataset, manifest.data).save(work / FINGERPRINT)
        for path in [path for path in work.iterdir() if path.suffix in (".arrow", ".json")]:
            sync(path)
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    write_manifest(manifest.data, folder)


def _parts(folder: Path, name: str) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The record batches of a file or of a folder of parts, each with its file's name."""
    whole, parts = folder / f"{name}.arrow", folder / name
    # The parts first: they may have been written again since they were joined.
    files = sorted(path for path in parts.glob("*") if path.suffix in (".arrow", ".parquet"))
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


def _join_small(folder: Path, of: Entity, schema: DataSchema, config: DataConfig) -> dict[str, pa.Array]:
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
        values = column
        if many:
            if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
                raise DataError(f"{of}s: column '{name}' has type {column.type}, but the schema has lists of ids")
            values = column.flatten()
        _check_ids(values, spec.num_embeddings, f"{of}s", name, 0)
        columns[name] = _copied(column, pa.large_list(kind) if many else kind)
    for name in dense_names(config)[of]:
        column = _column(table, name, f"{of}s")
        if column.null_count or not pa.types.is_floating(column.type):
            raise DataError(f"{of}s: column '{name}' must be float32 without nulls, got {column.type}")
        columns[name] = column.cast(pa.float32())
    return columns or {"": pa.nulls(table.num_rows)}


def _join_events(
    folder: Path, work: Path, schema: DataSchema, counts: dict[Entity, int], is_implicit: bool, display: Display
) -> dict:
    """The columns of events as maps of files in `work`, checked."""
    ids = {spec.key: spec.num_embeddings for spec in schema.features[:-1] if spec.of == "event"}
    index = index_type(max(counts.values()))
    types = {"user": index, "item": index, "time": np.float64, "label": np.float32, "split": np.int8}
    writer = ColumnWriter(work, types | {name: id_type(count) for name, count in ids.items()})
    check, start = _OrderCheck(counts, is_implicit), 0
    for file, batch in _parts(folder, "events"):
        for name, is_right in COLUMNS.items():
            column = _column(batch, name, file)
            if not is_right(column.type):
                raise DataError(f"{file}: column '{name}' has type {column.type}, see docs/prepared-data.md")
            if column.null_count and name != "label":
                raise DataError(f"{file}: column '{name}' has nulls")
        values = {name: batch.column(name).to_numpy(zero_copy_only=False) for name in COLUMNS}
        check.add(file, start, values)
        for name, column in values.items():
            writer.append(name, column)
        for name, count in ids.items():
            column = _column(batch, name, file)
            _check_ids(column, count, file, name, start)
            writer.append(name, column.to_numpy())
        start += len(batch)
        display.update(len(batch))
    check.finish(start)
    writer.close()
    return read_columns(work)


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
            (~((label == 0) | (label == 1) | np.isnan(label)), "'label' is not 0, 1 or missing"),
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


def _derive(
    events: Events, tables: dict[Entity, dict], schema: DataSchema, config: DataConfig, work: Path, memory: str
) -> InteractionDataset:
    columns = read_features(schema, tables)
    items = known_items(schema, columns, events)
    known = np.zeros(len(next(iter(tables["item"].values()))), bool)
    known[items] = True
    kind = index_type(len(events))
    writers = {}
    for name in ("order", *SPLITS):
        (work / name).mkdir()
        writers[name] = ColumnWriter(work / name, {"event": kind})
    for rows in _time_order(events, memory, work):
        writers["order"].append("event", rows)
    writers["order"].close()
    order = read_columns(work / "order")["event"]
    choose_samples(events, order, known, config, lambda name, rows: writers[name].append("event", rows))
    for name in SPLITS:
        writers[name].close()
    samples = {name: read_columns(work / name)["event"] for name in SPLITS}
    negatives = None
    if config.label is None:
        out = new_map(work / "by_item.npy", kind, len(events))
        negatives = NegativeSampler(events, order_by_item(events, out), items, config.negatives)
    dense = tuple(read_dense(tables[of], names) for of, names in dense_names(config).items())
    return InteractionDataset(events, schema, columns, dense, samples, negatives)


def _time_order(events: Events, memory: str, work: Path) -> Iterator[np.ndarray]:
    """The rows in the order of (timestamp, user, item), a block at a time."""
    if len(events) < _LARGE:
        yield np.argsort(events.time, kind="stable")
        return
    given = (
        record_batch({"time": events.time[begin:end], "row": np.arange(begin, end)})
        for begin, end in blocks(len(events))
    )
    schema = pa.schema([("time", pa.float64()), ("row", pa.int64())])
    for batch in sort_batches(given, schema, ["time", "row"], memory, work):
        yield batch.column("row").to_numpy()


def _column(table: pa.Table | pa.RecordBatch, name: str, file: str) -> pa.Array:
    if name not in table.schema.names:
        raise DataError(f"{file}: no column '{name}', see docs/prepared-data.md")
    column = table.column(name)
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _check_ids(column: pa.Array, count: int, file: str, name: str, start: int) -> None:
    if not pa.types.is_integer(column.type) or column.null_count:
        raise DataError(f"{file}: column '{name}' must be of integers without nulls, got {column.type}")
    values = column.to_numpy()
    wrong = (values < 0) | (values >= count)
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(f"{file}: '{name}' is {values[row]} in row {start + row}; ids are from 0 to {count - 1}")


def _copied(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """The column in another type, and from its first row on, so that its offsets start at 0."""
    column = column.cast(kind)
    return pa.concat_arrays([column]) if column.offset else column
