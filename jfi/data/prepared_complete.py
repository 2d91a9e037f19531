"""Completes a prepared dataset that another program has written: checks it, joins its parts, derives the rest."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from jfi.data.arrange import members
from jfi.data.coded import blocks
from jfi.data.column_files import ColumnWriter, map_arrow, new_map, read_columns, write_arrow, write_true_rows
from jfi.data.config import DataConfig
from jfi.data.dataset import InteractionDataset
from jfi.data.errors import DataError
from jfi.data.events import Events, index_type, order_by_item
from jfi.data.external_sort import check_memory, record_batch, sort_batches
from jfi.data.fingerprint import NAME as FINGERPRINT
from jfi.data.fingerprint import Fingerprint
from jfi.data.load import check_fits
from jfi.data.manifest import Manifest
from jfi.data.negatives import NegativeSampler
from jfi.data.prepared import (
    IN_HISTORY,
    as_numpy,
    known_items,
    read_dense,
    read_events,
    read_features,
)
from jfi.data.prepared_parts import join_events, join_small
from jfi.data.prepared_write import write_derived, write_manifest
from jfi.data.samples import choose_samples
from jfi.data.schema import DataSchema, Entity
from jfi.data.source import column_settings
from jfi.data.splits import SPLITS
from jfi.data.summarize import summarize
from jfi.utils.display import Display
from jfi.utils.files import naming, sync
from jfi.utils.lock import locking_folder

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
        DataError: a file is missing, or breaks a rule of the layout; the message names the file and the row. Or another
            process is completing the folder.
        OSError: the disk is full, or the folder cannot be written.
    """
    folder = Path(folder)
    Manifest.load(folder)
    check_memory(memory)
    with locking_folder(folder) as is_first:
        if not is_first:
            raise DataError(f"{folder}: another process is completing this dataset")
        manifest = Manifest.load(folder)
        if not manifest.complete:
            with naming(folder):
                _complete(folder, manifest, memory, show)


def _complete(folder: Path, manifest: Manifest, memory: str, show: bool) -> None:
    # The tables that it was made of need no names here.
    replace(manifest.data, prepared=str(folder)).check()
    if manifest.data.engagement_columns():
        what = "data.dwell, data.surface and data.session are only for datasets that examples/prepare_data.py makes"
        raise DataError(f"{folder}: {what}")
    schema, work = DataSchema.load(folder), folder / ".completing"
    check_fits(replace(schema, max_history=manifest.data.max_history), column_settings(manifest.data))
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        tables = {of: join_small(folder, of, schema, manifest.data) for of in ("user", "item")}
        with Display("events", None, unit="rows", silent=not show, ticking=True) as display:
            counts = {of: len(next(iter(table.values()))) for of, table in tables.items()}
            columns = join_events(folder, work, schema, counts, manifest.data, display)
        write_arrow(work / "events.arrow", columns)
        for of, table in tables.items():
            write_arrow(work / f"{of}s.arrow", table)
        tables = {of: map_arrow(work / f"{of}s.arrow") for of in ("event", "user", "item")}
        histories = None
        if manifest.data.history is not None:
            histories = write_true_rows(work / "histories", as_numpy(tables["event"][IN_HISTORY]))
        events = read_events(tables["event"], manifest.data, histories)
        with Display("sort and derive", None, silent=not show, ticking=True):
            dataset = _derive(events, tables, schema, manifest.data, work, memory)
        write_derived(dataset, work)
        Fingerprint.of(dataset, manifest.data).save(work / FINGERPRINT)
        for path in [path for path in work.iterdir() if path.suffix in (".arrow", ".json")]:
            sync(path)
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    write_manifest(manifest.data, folder)


def _derive(
    events: Events, tables: dict[Entity, dict], schema: DataSchema, config: DataConfig, work: Path, memory: str
) -> InteractionDataset:
    columns = read_features(schema, tables)
    items = known_items(schema, columns, events)
    known = members(items, len(next(iter(tables["item"].values()))))
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
    dataset = InteractionDataset(events, schema, columns, read_dense(tables, config), samples, negatives)
    dataset.summary = summarize(dataset, config)
    return dataset


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
