"""A prepared dataset: a folder of Arrow files that every process maps; docs/prepared-data.md specifies them."""

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from jfi.data.batches.batch import Arrays
from jfi.data.batches.choose_events import Engagement, load_policy
from jfi.data.batches.dataset import InteractionDataset
from jfi.data.batches.negatives import NegativeSampler
from jfi.data.config import DataConfig
from jfi.data.errors import DataError
from jfi.data.prepared.manifest import MANIFEST, DatasetManifest, check_sizes, open_checked
from jfi.data.prepared.stages.column_files import map_arrow, write_arrow
from jfi.data.prepared.stages.columns import Columns
from jfi.data.prepared.stages.encode_columns import CONTEXT, check_kind, column_name, id_type, known_items
from jfi.data.prepared.stages.splits import SPLITS
from jfi.data.prepared.stages.statistics import dense_statistics, past_index, statistics_of
from jfi.data.prepared.summary import Summary, count_lengths, describe_lengths
from jfi.data.schema.columns import Categorical
from jfi.data.schema.schema import CODEC, DataSchema, Entity
from jfi.events.events import SortedEvents, index_type
from jfi.utils.files import DamagedFileError, is_storage_fault, naming, read_sums, sha256_of, write_sums
from jfi.utils.jagged import blocks


def event_table(columns: Columns, schema: DataSchema) -> dict[str, np.ndarray | pa.Array]:
    """The columns of events; those that are encoded, the ids and the dense features among them, have zeros."""
    events, config, count = columns.events, columns.config, len(columns.events)
    kind = index_type(count)
    found = {"user": events.user.astype(kind, copy=False), "item": events.item.astype(kind, copy=False)}
    found |= {"time": events.time, "label": events.label, "split": events.split, **events.targets}
    if config.engagement_columns():
        found |= {"dwell": np.zeros(count, np.float32), "surface": np.zeros(count, np.int32)}
        found |= {} if config.session is None else {"session": np.zeros(count, np.int64)}
    for spec in schema.encoded:
        if spec.of == "event" and spec.multi_valued:
            offsets = check_kind(schema, spec.column, columns.categories(spec.column, "event")).offsets
            found[column_name(spec)] = _lists(offsets, np.zeros(offsets[-1], id_type(spec.num_ids)))
        elif spec.of == "event":
            found[column_name(spec)] = np.zeros(count, id_type(spec.num_ids))
    return found | {name: np.zeros(count, np.float32) for name in dense_names(config)["event"]}


def table_of(arrays: Arrays, schema: DataSchema, config: DataConfig, of: Entity) -> dict[str, np.ndarray | pa.Array]:
    """The columns of users or of items."""
    found: dict[str, np.ndarray | pa.Array] = {}
    for spec, ids in zip(schema.features, arrays.columns, strict=False):
        if spec.of == of and spec.slot is None:
            values = ids.ids.astype(id_type(spec.num_ids), copy=False)
            found[column_name(spec)] = values if ids.offsets is None else _lists(ids.offsets, values)
    dense = arrays.dense[("user", "item").index(of)]
    found |= {name: np.ascontiguousarray(dense[:, i]) for i, name in enumerate(dense_names(config)[of])}
    # Without a column the number of rows would be lost.
    return found or {"": pa.nulls(len(dense))}


def dense_names(config: DataConfig) -> dict[Entity, list[str]]:
    """The dense columns in the tables of users, of items and of events."""
    contexts = [CONTEXT + name for name in config.names("context", "number")]
    return {"user": config.names("user", "number"), "item": config.names("item", "number"), "event": contexts}


def _lists(offsets: np.ndarray, values: np.ndarray) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array(offsets.astype(np.int64, copy=False)), pa.array(values))


#: The file's name in a prepared dataset and in a run; it has the layout of SHA256SUMS.
FINGERPRINT = "fingerprint.sha256"
#: Its entries: of all arrays, of the training samples, and of what a user's events are cut into timelines by.
DATA, TRAIN, TIMELINES = "data", "train", "timelines"


def fingerprint_of(dataset: InteractionDataset) -> dict[str, str]:
    """SHA-256 by entry of the arrays of a dataset that is a map of files; reads each array once.

    They are of the values as the schema encodes them, which is all that training sees: another file format, or a value
    that is unknown before and after, makes no difference. Those of a prepared dataset were computed when it was
    prepared.
    """
    if dataset.folder is not None and (dataset.folder / FINGERPRINT).is_file():
        return read_fingerprint(dataset.folder)
    arrays, events = dataset.arrays(), dataset.arrays().events
    rows, train = [*([] if events.rows is None else [events.rows]), *events.of_histories], arrays.samples["train"]
    own = (events.user, events.item, events.time, events.label)
    samples = (part[train[begin:end]] for part in own for begin, end in blocks(len(train)))
    timelines = (events.user, events.time, *rows)
    every = list(_all_of(arrays))
    kinds = np.frombuffer(str([(part.dtype.str, part.shape) for part in every]).encode(), np.uint8)
    return {DATA: _digest([kinds, *every]), TRAIN: _digest(samples), TIMELINES: _digest(timelines)}


def read_fingerprint(folder: Path) -> dict[str, str]:
    """The fingerprint of a prepared dataset, or that in a run.

    Raises:
        DataError: the file is missing or damaged.
    """
    try:
        return read_sums(folder, FINGERPRINT)
    except DamagedFileError as fault:
        raise DataError(str(fault)) from None


def _all_of(arrays: Arrays) -> Iterator[np.ndarray]:
    events, (users, items, contexts) = arrays.events, arrays.dense
    yield from (events.user, events.item, events.time, events.label, *events.targets.values(), *arrays.samples.values())
    yield from [*([] if events.rows is None else [events.rows]), *events.of_histories]
    for column in arrays.columns:
        yield from [column.ids] if column.offsets is None else [column.ids, column.offsets]
    yield from (users, items, *contexts)
    if (fields := arrays.engagement) is not None:
        yield from (fields.dwell, fields.surface, *([] if fields.session is None else [fields.session]))


def _digest(parts: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


EVENTS, BY_ITEM = "events.arrow", "by_item.arrow"
_SUMMARY, _LENGTHS, _SURFACES = "summary.json", "history_lengths.arrow", "surfaces.arrow"
_PAST = "past.arrow"
_FILES = [
    *(f"{name}.arrow" for name in ("events", "users", "items", *SPLITS, "histories", "by_item")),
    *(_LENGTHS, _SUMMARY, _SURFACES, _PAST, FINGERPRINT, "schema.json", "vocabularies.parquet", CODEC),
]


def _history_file(name: str) -> str:
    """The name of the file of the rows of one of several histories."""
    return f"history-{name}"


def write_files(
    folder: Path, arrays: Arrays, schema: DataSchema, summary: Summary, config: DataConfig, durable: bool
) -> None:
    """Writes what a prepared dataset has beside its events and `by_item`.

    Args:
        folder: to write to; the caller flushes the files to the disk, and then gives it its name.
        arrays: of the dataset; they may be maps of files.
        schema: of the dataset.
        summary: of the dataset.
        config: that it was made with, with the meaning of its columns.
        durable: False for files that a process leaves to itself: they have no manifest, fingerprint or checksums.
    """
    kind = index_type(len(arrays.events))
    for of in ("user", "item"):
        write_arrow(folder / f"{of}s.arrow", table_of(arrays, schema, config, of))
    lengths, counts = count_lengths(arrays.events, arrays.samples)
    write_arrow(folder / _LENGTHS, {"length": lengths, "samples": counts})
    of_histories = dict(zip(map(_history_file, schema.histories), arrays.events.of_histories, strict=False))
    for name, rows in {**arrays.samples, "histories": arrays.events.rows, **of_histories}.items():
        if rows is not None:
            write_arrow(folder / f"{name}.arrow", {"event": rows.astype(kind, copy=False)})
    if arrays.engagement is not None:
        write_arrow(folder / _SURFACES, {"surface": pa.array(arrays.engagement.surfaces, pa.string())})
    if arrays.statistics is not None and arrays.negatives is not None:
        kept = arrays.statistics.statistics.index.stored_arrays()
        # Each is one list, so that columns of several lengths are one record batch.
        write_arrow(folder / _PAST, {name: _lists(np.array([0, len(one)]), one) for name, one in kept.items()})
    schema.write(folder)
    summary.save(folder / _SUMMARY)
    if not durable:
        return
    opened = open_prepared(dataclasses.replace(config, prepared=str(folder)), False, schema)
    write_sums(folder, fingerprint_of(opened), FINGERPRINT)
    names = [*_FILES, *(f"{name}.arrow" for name in of_histories)]
    files = [path for name in names if (path := folder / name).is_file()]
    DatasetManifest(config, {path.name: path.stat().st_size for path in files}).save(folder)
    write_sums(folder, {path.name: sha256_of(path) for path in (*files, folder / MANIFEST)})


def open_prepared(config: DataConfig, verified: bool = True, schema: DataSchema | None = None) -> InteractionDataset:
    """The dataset in the folder `config.prepared`, whose arrays are maps of its files.

    Args:
        config: the result of `resolve`.
        verified: whether to verify the checksums of the files, those above 16 MiB in the background.
        schema: of the dataset, where it is known already.

    Raises:
        DataError: the folder is not a complete prepared dataset, or is damaged.
    """
    folder = Path(config.prepared)
    verification = open_checked(folder, check_sizes(folder)) if verified else None
    schema = schema or dataclasses.replace(DataSchema.load(folder, verified), histories=config.history_lengths())
    tables = {of: _read(folder / f"{of}s.arrow") for of in ("event", "user", "item")}
    columns = tables["event"]
    histories, of_histories = None, []
    if config.history_rules():
        histories = _numpy(_read(folder / "histories.arrow")["event"])
        names = map(_history_file, config.histories)
        of_histories = [_numpy(_read(folder / f"{name}.arrow")["event"]) for name in names]
    own = [_numpy(columns[name]) for name in ("user", "item", "time", "label", "split")]
    targets = {name: _numpy(columns[name]) for name in config.target_names()}
    events = SortedEvents(*own, histories, targets, config.label_delay, of_histories)
    ids = _features(schema, tables)
    negatives = None
    if config.is_implicit:
        by_item = _numpy(_read(folder / "by_item.arrow")["event"])
        negatives = NegativeSampler(events, by_item, known_items(schema, ids, events), config.negatives)
    engagement = None
    # A policy goes by dwell and surface; datasets with data.session alone had no fields at first.
    has_fields = config.policy is None or config.dwell is not None or config.surface is not None
    if has_fields and (folder / _SURFACES).is_file():
        surfaces = _read(folder / _SURFACES)["surface"].to_pylist()
        session = None if config.session is None else _numpy(columns["session"])
        engagement = Engagement(_numpy(columns["dwell"]), _numpy(columns["surface"]), surfaces, session)
    dense = {of: [_numpy(tables[of][name]) for name in names] for of, names in dense_names(config).items()}
    users, items = (
        np.stack(dense[of], axis=1) if dense[of] else np.zeros((len(next(iter(tables[of].values()))), 0), np.float32)
        for of in ("user", "item")
    )
    samples = {name: _numpy(_read(folder / f"{name}.arrow")["event"]) for name in SPLITS}
    statistics = None
    if negatives is not None and config.statistics_groups():
        past = {name: _numpy(column.values) for name, column in _read(folder / _PAST).items()}
        index = past_index(events, schema, ids, is_implicit=True, arrays=past)
        statistics = dense_statistics(statistics_of(index, config, schema.encodings), schema, config)
    arrays = Arrays(events, ids, (users, items, dense["event"]), samples, negatives, engagement, statistics)
    policy = None if config.policy is None else load_policy(config.policy)
    dataset = InteractionDataset(arrays, schema, config.batching, policy)
    lengths = describe_lengths(*map(_numpy, _read(folder / _LENGTHS).values()), config.max_history)
    dataset.summary = dataclasses.replace(Summary.load(folder / _SUMMARY), history_lengths=lengths)
    dataset.folder, dataset.verification = folder, verification
    return dataset


def _features(schema: DataSchema, tables: dict[Entity, dict[str, pa.Array]]) -> list[Categorical]:
    """The ids of each key of the schema but the age."""
    found = []
    for spec in schema.encoded:
        column = tables[spec.of][column_name(spec)]
        is_list = pa.types.is_large_list(column.type)
        ids = Categorical(_numpy(column.values), _numpy(column.offsets)) if is_list else Categorical(_numpy(column))
        found.append(ids.slot(spec.slot) if is_list and spec.slot is not None else ids)
    return found


def _read(path: Path) -> dict[str, pa.Array]:
    """The columns of a file of a complete dataset."""
    try:
        with naming(path):
            return map_arrow(path)
    except FileNotFoundError:
        raise DataError(f"{path.parent}: damaged, {path.name} is missing") from None
    except (OSError, ValueError) as error:
        if is_storage_fault(error):
            raise
        raise DataError(f"{path}: damaged: {error}") from None


def _numpy(column: pa.Array) -> np.ndarray:
    """A column without nulls, not copied."""
    return column.to_numpy(zero_copy_only=True)
