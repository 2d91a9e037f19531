"""Writes a dataset as a prepared one; its arrays may be maps of files, and no column of events is held in memory."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from jfi.data.batches.assemble import Arrays
from jfi.data.batches.dataset import InteractionDataset
from jfi.data.batches.events import index_type
from jfi.data.config import DataConfig
from jfi.data.prepared.checksums import write_checksums
from jfi.data.prepared.column_files import write_arrow
from jfi.data.prepared.fingerprint import NAME as FINGERPRINT
from jfi.data.prepared.fingerprint import Fingerprint
from jfi.data.prepared.manifest import MANIFEST, Manifest
from jfi.data.prepared.open_dataset import LENGTHS, SUMMARY, SURFACES, column_name, dense_names
from jfi.data.prepared.source import column_settings
from jfi.data.prepared.splits import SPLITS
from jfi.data.prepared.summarize import count_lengths
from jfi.data.schema.columns import Categorical
from jfi.data.schema.schema import CODEC, Entity
from jfi.utils.files import sync

_FILES = [
    *(f"{name}.arrow" for name in ("events", "users", "items", *SPLITS, "histories", "by_item")),
    *(LENGTHS, SUMMARY, SURFACES, FINGERPRINT, "schema.json", "vocabularies.parquet", CODEC),
]


def write_prepared(dataset: InteractionDataset, config: DataConfig, folder: Path, temporary: bool = False) -> None:
    """Writes all files of a prepared dataset into an existing folder, the manifest last.

    Args:
        dataset: the dataset.
        config: that it was made with.
        folder: to write to; the caller renames it when all files are there.
        temporary: leaves out the fingerprint, which takes about a second per million events, and the checksums.
    """
    arrays = dataset.arrays()
    write_derived(dataset, folder)
    for of in ("event", "user", "item"):
        write_arrow(folder / f"{of}s.arrow", _table(dataset, arrays, column_settings(config), of))
    if arrays.engagement is not None:
        write_arrow(folder / SURFACES, {"surface": pa.array(arrays.engagement.surfaces, pa.string())})
    dataset.schema.write(folder)
    if not temporary:
        Fingerprint.of(dataset, config).save(folder / FINGERPRINT)
    write_manifest(config, folder, temporary)


def write_derived(dataset: InteractionDataset, folder: Path) -> None:
    """Writes the files that follow from the others: the samples of each split, the summary and what batches need."""
    arrays = dataset.arrays()
    kind = index_type(len(arrays.events))
    lengths, counts = count_lengths(arrays.events, arrays.samples)
    write_arrow(folder / LENGTHS, {"length": lengths, "samples": counts})
    dataset.summary.save(folder / SUMMARY)
    for name, rows in arrays.samples.items():
        write_arrow(folder / f"{name}.arrow", {"event": rows.astype(kind, copy=False)})
    if arrays.events.rows is not None:
        write_arrow(folder / "histories.arrow", {"event": arrays.events.rows.astype(kind, copy=False)})
    if arrays.negatives is not None:
        write_arrow(folder / "by_item.arrow", {"event": arrays.negatives.by_item.astype(kind, copy=False)})


def write_manifest(config: DataConfig, folder: Path, temporary: bool = False) -> None:
    """Flushes the files of a complete dataset and writes the manifest and, unless it is temporary, the checksums."""
    files = [path for name in _FILES if (path := folder / name).is_file()]
    for path in files:
        sync(path)
    sizes = {path.name: path.stat().st_size for path in files}
    unfinished = folder / f".{MANIFEST}"
    unfinished.write_text(Manifest(column_settings(config), sizes).text(), encoding="utf-8")
    sync(unfinished)
    if not temporary:
        write_checksums(folder, {path.name: path for path in files} | {MANIFEST: unfinished})
    unfinished.replace(folder / MANIFEST)
    sync(folder)


def id_type(num_embeddings: int) -> type[np.signedinteger]:
    """The smallest type of ids below `num_embeddings`."""
    return next(kind for kind in (np.int8, np.int16, np.int32, np.int64) if num_embeddings - 1 <= np.iinfo(kind).max)


def _table(
    dataset: InteractionDataset, arrays: Arrays, config: DataConfig, of: Entity
) -> dict[str, np.ndarray | pa.Array]:
    """The columns of the file of events, users or items."""
    events, columns = arrays.events, {}
    if of == "event":
        columns["user"] = events.user.astype(index_type(len(events)), copy=False)
        columns["item"] = events.item.astype(index_type(len(events)), copy=False)
        columns |= {"time": events.time, "label": events.label, "split": events.split}
        columns |= events.targets
        if (fields := arrays.engagement) is not None:
            columns |= {"dwell": fields.dwell, "surface": fields.surface}
            columns |= {} if fields.session is None else {"session": fields.session}
    for spec, ids in zip(dataset.features, arrays.columns, strict=False):
        if spec.of == of and (of == "event" or spec.slot is None):
            columns[column_name(spec)] = _ids(ids, id_type(spec.num_embeddings))
    users, items, contexts = arrays.dense
    dense = {"user": users.T, "item": items.T, "event": contexts}[of]
    columns |= {name: np.ascontiguousarray(dense[i]) for i, name in enumerate(dense_names(config)[of])}
    if not columns:
        # Without a column the number of rows would be lost.
        columns[""] = pa.nulls(len(users if of == "user" else items))
    return columns


def _ids(column: Categorical, kind: type[np.signedinteger]) -> np.ndarray | pa.Array:
    ids = column.ids.astype(kind, copy=False)
    if column.offsets is None:
        return ids
    return pa.LargeListArray.from_arrays(pa.array(column.offsets.astype(np.int64, copy=False)), pa.array(ids))
