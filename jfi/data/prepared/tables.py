"""The tables of events, users and items that a prepared dataset consists of."""

import numpy as np
import pyarrow as pa

from jfi.data.batches.assemble import Arrays
from jfi.data.config import DataConfig
from jfi.data.prepared.stages.columns import Columns
from jfi.data.prepared.stages.encode_columns import CONTEXT, check_kind, column_name, id_type
from jfi.data.schema.columns import Categorical
from jfi.data.schema.schema import DataSchema, Entity
from jfi.events.events import index_type


def event_table(columns: Columns, schema: DataSchema) -> dict[str, np.ndarray | pa.Array]:
    """The columns of events; those that are encoded, the ids and the dense features among them, have zeros."""
    events, config, count = columns.events, columns.config, len(columns.events)
    kind = index_type(count)
    found = {"user": events.user.astype(kind, copy=False), "item": events.item.astype(kind, copy=False)}
    found |= {"time": events.time, "label": events.label, "split": events.split, **events.targets}
    if config.engagement_columns():
        found |= {"dwell": np.zeros(count, np.float32), "surface": np.zeros(count, np.int32)}
        found |= {} if config.session is None else {"session": np.zeros(count, np.int64)}
    for spec in schema.features[:-1]:
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
            found[column_name(spec)] = _ids(ids, id_type(spec.num_ids))
    dense = arrays.dense[("user", "item").index(of)]
    found |= {name: np.ascontiguousarray(dense[:, i]) for i, name in enumerate(dense_names(config)[of])}
    # Without a column the number of rows would be lost.
    return found or {"": pa.nulls(len(dense))}


def dense_names(config: DataConfig) -> dict[Entity, list[str]]:
    """The dense columns in the tables of users, of items and of events."""
    contexts = [CONTEXT + name for name in config.names("context", "number")]
    return {"user": config.names("user", "number"), "item": config.names("item", "number"), "event": contexts}


def _ids(column: Categorical, kind: type[np.signedinteger]) -> np.ndarray | pa.Array:
    ids = column.ids.astype(kind, copy=False)
    return ids if column.offsets is None else _lists(column.offsets, ids)


def _lists(offsets: np.ndarray, values: np.ndarray) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array(offsets.astype(np.int64, copy=False)), pa.array(values))
