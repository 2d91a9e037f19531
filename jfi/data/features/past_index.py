"""The index of a dataset's past: `jfi.events` with the columns of a schema."""

from collections.abc import Sequence

import numpy as np

from jfi.data.schema.columns import Categorical
from jfi.data.schema.schema import DataSchema, FeatureSpec
from jfi.events.events import SortedEvents, event_values
from jfi.events.past import New
from jfi.events.point_in_time import Column, PastIndex
from jfi.events.statistics import DenseStatistics, Statistics
from jfi.utils.encoding import UNKNOWN

#: Values of a multi-valued column of the user or the context that are used.
_MAX_VALUES = 8


def past_index(
    events: SortedEvents,
    schema: DataSchema,
    ids: Sequence[Categorical],
    is_implicit: bool,
    session: np.ndarray | None = None,
    arrays: dict[str, np.ndarray] | None = None,
    new: New = np.empty,
    contexts: bool = False,
) -> PastIndex:
    """Returns the index of events.

    Args:
        events: all events.
        schema: of the dataset.
        ids: by key of `schema.features`, except the age, the ids of each user, item or event.
        is_implicit: whether every row is a positive.
        session, arrays, new: see `PastIndex`.
        contexts: whether keys may have columns of users and contexts.
    """
    features = list(zip(schema.features, ids, strict=False))
    spec, items = next(one for one in features if one[0].key == schema.item_key)
    slots: dict[str, list[tuple[Categorical, FeatureSpec]]] = {}
    for one, own in features:
        if one.role == "history" and one.of == "item" and not one.semantic and one.column != schema.item_key:
            slots.setdefault(one.column, []).append((own, one))
    columns = {
        f"column {name}": Column("item", *_matrix([own for own, _ in of], of[0][1]), name) for name, of in slots.items()
    }
    for one, own in features if contexts else []:
        if one.role in ("user", "context"):
            values = _matrix([own] if own.offsets is None else [*map(own.slot, range(_MAX_VALUES))], one)
            columns[f"{one.role} {one.key}"] = Column("user" if one.of == "user" else "event", *values, one.key)
    numbers, values = {}, {}
    for one, own in features:
        if one.role == "history" and one.of == "event" and one.column in schema.encodings.edges:
            numbers[one.column] = own.ids
        elif one.role == "history" and one.of == "event":
            values.setdefault(one.column, []).append(own.ids)
    known = event_values(numbers, values)
    return PastIndex(
        events, columns, len(items.ids), spec.num_embeddings, is_implicit, session, arrays, new, values=known
    )


def dense_statistics(statistics: Statistics, schema: DataSchema, names: list[str]) -> DenseStatistics:
    """Returns what fills the columns `names` of the dense features of a batch."""
    return DenseStatistics(
        statistics, [(name, schema.dense_names.index(name), schema.encodings.scale(name)) for name in names]
    )


def _matrix(columns: Sequence[Categorical], spec: FeatureSpec) -> tuple[np.ndarray, int]:
    """`[N, K]` integers, the ids of columns of one id a row, and what all are below; raw ids are numbered here."""
    ids = np.stack([one.ids for one in columns], axis=1)
    if not spec.raw:
        return ids, spec.num_embeddings
    known = np.unique(np.append(ids.ravel(), UNKNOWN))
    return np.searchsorted(known, ids), len(known)
