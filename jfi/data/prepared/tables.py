"""The tables of events, users and items that a prepared dataset consists of."""

import numpy as np
import pyarrow as pa

from jfi.data.batches.dataset import InteractionDataset
from jfi.data.config import DataConfig
from jfi.data.prepared.stages.encode_columns import id_type
from jfi.data.schema.columns import Categorical
from jfi.data.schema.schema import Entity, FeatureSpec
from jfi.events.events import index_type

#: Before the names of the columns of contexts, which could be those of other columns of events.
_CONTEXT = "context_"


def table_of(dataset: InteractionDataset, config: DataConfig, of: Entity) -> dict[str, np.ndarray | pa.Array]:
    """The columns of events, users or items; not copied where they have the type of the file.

    Args:
        dataset: the dataset.
        config: the meaning of the columns.
        of: whose table.
    """
    arrays, columns = dataset.arrays(), {}
    events = arrays.events
    if of == "event":
        kind = index_type(len(events))
        columns |= {"user": events.user.astype(kind, copy=False), "item": events.item.astype(kind, copy=False)}
        columns |= {"time": events.time, "label": events.label, "split": events.split, **events.targets}
        if (fields := arrays.engagement) is not None:
            columns |= {"dwell": fields.dwell, "surface": fields.surface}
            columns |= {} if fields.session is None else {"session": fields.session}
    for spec, ids in zip(dataset.features, arrays.columns, strict=False):
        if spec.of == of and (of == "event" or spec.slot is None):
            columns[column_name(spec)] = _ids(ids, id_type(spec.num_ids))
    users, items, contexts = arrays.dense
    dense = {"user": users.T, "item": items.T, "event": contexts}[of]
    columns |= {name: np.ascontiguousarray(dense[i]) for i, name in enumerate(dense_names(config)[of])}
    if not columns:
        # Without a column the number of rows would be lost.
        columns[""] = pa.nulls(len(users if of == "user" else items))
    return columns


def column_name(spec: FeatureSpec) -> str:
    """The column of a key: its own for events and contexts, else one for all keys of the user's or item's column."""
    if spec.role == "context":
        return _CONTEXT + spec.column
    return spec.key if spec.of == "event" else spec.column


def dense_names(config: DataConfig) -> dict[Entity, list[str]]:
    """The dense columns in the tables of users, of items and of events."""
    contexts = [_CONTEXT + name for name in config.names("context", "number")]
    return {"user": config.names("user", "number"), "item": config.names("item", "number"), "event": contexts}


def _ids(column: Categorical, kind: type[np.signedinteger]) -> np.ndarray | pa.Array:
    ids = column.ids.astype(kind, copy=False)
    if column.offsets is None:
        return ids
    return pa.LargeListArray.from_arrays(pa.array(column.offsets.astype(np.int64, copy=False)), pa.array(ids))
