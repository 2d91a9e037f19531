"""A prepared dataset: a folder of Arrow files that every process maps; docs/prepared-data.md specifies it.

manifest.json                            the format and the section `data` of the config that made it
schema.json, vocabularies.parquet        the schema, see `jfi.data.schema.schema`
codec.safetensors                        of the schema, with semantic IDs
events.arrow                             user, item, time, label, split, a column for each key of contexts and each
                                         history key of events, dense features, and dwell, surface and session
                                         where the config has them
users.arrow, items.arrow                 a row for each user and item: ids, or lists of ids, and dense features
train.arrow, validation.arrow, test.arrow  the events that are samples, in the order of time
surfaces.arrow                           with `data.dwell` or `data.surface`: the names of the events' surfaces
histories.arrow                          with `data.history`: the events that histories consist of
by_item.arrow                            without a label: the events in the order (user, item, timestamp)
summary.json                             see `jfi.data.prepared.summary`
history_lengths.arrow                    the lengths of the samples' histories without a limit, and the samples of each
fingerprint.json                         see `jfi.data.prepared.fingerprint`
SHA256SUMS                               the checksums of these files
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from jfi.data.batches.assemble import Dense
from jfi.data.batches.choose_events import load_policy
from jfi.data.batches.dataset import InteractionDataset
from jfi.data.batches.engagement import Engagement
from jfi.data.batches.events import Events
from jfi.data.batches.negatives import NegativeSampler
from jfi.data.config import DataConfig
from jfi.data.errors import DataError
from jfi.data.prepared.checksums import open_checked, verify
from jfi.data.prepared.column_files import map_arrow
from jfi.data.prepared.manifest import MANIFEST, Manifest
from jfi.data.prepared.splits import SPLITS
from jfi.data.prepared.summary import Summary, describe_lengths
from jfi.data.schema.coded import blocks
from jfi.data.schema.columns import Categorical
from jfi.data.schema.schema import DataSchema, Entity, FeatureSpec
from jfi.data.schema.targets import target_names
from jfi.utils.encoding import UNKNOWN
from jfi.utils.files import is_storage_fault, naming

SUMMARY, LENGTHS, SURFACES = "summary.json", "history_lengths.arrow", "surfaces.arrow"
#: Before the names of the columns of contexts, which could be those of other columns of events.
CONTEXT = "context_"
COLUMNS = {"user": pa.types.is_integer, "item": pa.types.is_integer, "time": pa.types.is_float64}
COLUMNS |= {"label": pa.types.is_float32, "split": pa.types.is_int8}


def open_prepared(config: DataConfig, verify: bool = True) -> InteractionDataset:
    """The dataset in the folder `config.prepared`, whose arrays are maps of its files.

    Args:
        config: the result of `resolve`.
        verify: whether to verify the checksums of the files, those above 16 MiB in the background.

    Raises:
        DataError: the folder is not a complete prepared dataset, or is damaged.
    """
    folder = Path(config.prepared)
    sizes = _check_sizes(folder)
    verification = open_checked(folder, sizes) if verify else None
    schema = dataclasses.replace(DataSchema.load(folder), max_history=config.max_history)
    tables = {of: read_arrow(folder / f"{of}s.arrow") for of in ("event", "user", "item")}
    histories = None if config.history is None else as_numpy(read_arrow(folder / "histories.arrow")["event"])
    events = read_events(tables["event"], config, histories)
    columns = read_features(schema, tables)
    samples = {name: as_numpy(read_arrow(folder / f"{name}.arrow")["event"]) for name in SPLITS}
    negatives = None
    if config.label is None:
        by_item = as_numpy(read_arrow(folder / "by_item.arrow")["event"])
        negatives = NegativeSampler(events, by_item, known_items(schema, columns, events), config.negatives)
    dense = read_dense(tables, config)
    choices = (config.unknown_share, config.batching, config.longest_timeline)
    fields = read_engagement_fields(folder, tables["event"], config), load_policy(config)
    dataset = InteractionDataset(events, schema, columns, dense, samples, negatives, *choices, *fields)
    dataset.folder, dataset.summary, dataset.verification = folder, _summary(folder, config), verification
    return dataset


def read_events(columns: dict[str, pa.Array], config: DataConfig, histories: np.ndarray | None) -> Events:
    """The events, whose columns are not copied.

    Raises:
        DataError: a column is missing.
    """
    for name in (*COLUMNS, *target_names(config)):
        if name not in columns:
            raise DataError(f"events.arrow: no column '{name}'")
    targets = {name: as_numpy(columns[name]) for name in target_names(config)}
    return Events(*(as_numpy(columns[name]) for name in COLUMNS), histories, targets)


def verify_dataset(folder: Path) -> None:
    """Verifies the SHA-256 of all files of a complete dataset, as `sha256sum -c SHA256SUMS` does.

    Raises:
        DataError: the folder is not a complete prepared dataset, or a file of it is missing or damaged.
    """
    verify(folder, list(_check_sizes(folder)))


def _check_sizes(folder: Path) -> dict[str, int]:
    """Checks the sizes of all files, and returns them with that of the manifest."""
    sizes = Manifest.load(folder).sizes
    for name, size in sizes.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise DataError(f"{folder}: damaged, {name} {what}")
    return {MANIFEST: (folder / MANIFEST).stat().st_size, **sizes}


def read_engagement_fields(folder: Path, events: dict[str, pa.Array], config: DataConfig) -> Engagement | None:
    """The dwell, surfaces and sessions of the events; not copied. None where the config names none.

    Raises:
        DataError: a file or a column is missing.
    """
    if config.dwell is None and config.surface is None:
        return None
    names = ["dwell", "surface", *(["session"] if config.session is not None else [])]
    for name in names:
        if name not in events:
            raise DataError(f"events.arrow: no column '{name}'")
    surfaces = read_arrow(folder / SURFACES)["surface"].to_pylist()
    dwell, surface, *session = (as_numpy(events[name]) for name in names)
    return Engagement(dwell, surface, surfaces, *session)


def _summary(folder: Path, config: DataConfig) -> Summary:
    """The summary of the dataset, with the lengths of histories that the config gives."""
    lengths, counts = (as_numpy(column) for column in read_arrow(folder / LENGTHS).values())
    lengths = describe_lengths(lengths, counts, config.max_history)
    return dataclasses.replace(Summary.load(folder / SUMMARY), history_lengths=lengths)


def read_features(schema: DataSchema, tables: dict[Entity, dict[str, pa.Array]]) -> list[Categorical]:
    """The ids of each key of the schema but the age.

    Raises:
        DataError: a column is missing.
    """
    slots: dict[str, list[Categorical]] = {}
    columns = []
    for spec in schema.features[:-1]:
        name = column_name(spec)
        if name not in tables[spec.of]:
            raise DataError(f"{spec.of}s.arrow: no column '{name}'")
        column = as_categorical(tables[spec.of][name])
        if spec.slot is not None and spec.of != "event":
            if name not in slots:
                slots[name] = column.slots(sum(s.column == spec.column and s.slot is not None for s in schema.features))
            column = slots[name][spec.slot]
        columns.append(column)
    return columns


def column_name(spec: FeatureSpec) -> str:
    """The column of a key: its own for events and contexts, else one for all keys of the user's or item's column."""
    if spec.role == "context":
        return CONTEXT + spec.column
    return spec.key if spec.of == "event" else spec.column


def known_items(schema: DataSchema, columns: Sequence[Categorical], events: Events) -> np.ndarray:
    """The items of the training split that have an id of their own, or with hash buckets all of them."""
    if schema.item_key in schema.encodings.buckets:  # any value has a bucket
        found = [np.empty(0, np.int64)]
        for begin, end in blocks(len(events)):
            chosen = events.split[begin:end] == SPLITS.index("train")
            found.append(np.unique(events.item[begin:end][chosen]))
        return np.unique(np.concatenate(found)).astype(np.int64)
    ids = next(ids.ids for spec, ids in zip(schema.features, columns, strict=False) if spec.key == schema.item_key)
    return np.flatnonzero(ids != UNKNOWN)


def dense_names(config: DataConfig) -> dict[Entity, list[str]]:
    """The dense columns in the file of users, of items and of events."""
    contexts = [CONTEXT + name for name in config.names("context", "number")]
    return {"user": config.names("user", "number"), "item": config.names("item", "number"), "event": contexts}


def read_dense(tables: dict[Entity, dict[str, pa.Array]], config: DataConfig) -> Dense:
    """The dense features; those of contexts are not copied.

    Raises:
        DataError: a column is missing.
    """
    columns: dict[Entity, list[np.ndarray]] = {}
    for of, names in dense_names(config).items():
        for name in names:
            if name not in tables[of]:
                raise DataError(f"{of}s.arrow: no column '{name}'")
        columns[of] = [as_numpy(tables[of][name]) for name in names]

    def stack(of: Entity) -> np.ndarray:
        count = len(next(iter(tables[of].values())))
        return np.stack(columns[of], axis=1) if columns[of] else np.zeros((count, 0), np.float32)

    return stack("user"), stack("item"), columns["event"]


def read_arrow(path: Path) -> dict[str, pa.Array]:
    """The columns of a file of a complete dataset.

    Raises:
        DataError: it is missing or damaged.
    """
    try:
        with naming(path):
            return map_arrow(path)
    except FileNotFoundError:
        raise DataError(f"{path.parent}: damaged, {path.name} is missing") from None
    except (OSError, ValueError) as error:
        if is_storage_fault(error):
            raise
        raise DataError(f"{path}: damaged: {error}") from None


def as_numpy(column: pa.Array) -> np.ndarray:
    """A column without nulls, not copied."""
    return column.to_numpy(zero_copy_only=True)


def as_categorical(column: pa.Array) -> Categorical:
    """A column of ids or of lists of ids, not copied."""
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return Categorical(as_numpy(column.values), as_numpy(column.offsets))
    return Categorical(as_numpy(column))
