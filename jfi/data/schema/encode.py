"""Columns -> ids and standardized numbers, with the encodings of a schema."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from jfi.data.batches.assemble import Dense
from jfi.data.config import DataConfig
from jfi.data.errors import DataError
from jfi.data.prepared.source import RawColumns
from jfi.data.schema.coded import CodedColumn, blocks
from jfi.data.schema.columns import Categorical, cut, encode, is_multi_valued
from jfi.data.schema.schema import DataSchema, Entity, FeatureSpec
from jfi.utils.encoding import standardize


def encode_features(
    columns: RawColumns, schema: DataSchema, encode_event: Callable[[FeatureSpec], Categorical] | None = None
) -> list[Categorical]:
    """The ids of each key of `schema.features` but the age, a row for each user, item or event.

    Args:
        columns: the raw columns.
        schema: the encodings.
        encode_event: makes the ids of a key of events, where these are too many for memory.

    Raises:
        DataError: a column is missing or malformed, or has lists where the schema has single values, or the reverse.
    """
    encoded: dict[str, Categorical] = {}
    slots: dict[str, list[Categorical]] = {}
    ids = []
    for spec in schema.features[:-1]:
        name = spec.column
        if spec.semantic:
            ids.append(Categorical(columns.item_sids()))
            continue
        if spec.of == "event" and encode_event is not None:
            ids.append(encode_event(spec))
            continue
        if name not in encoded:
            encoded[name] = _encode(columns, schema, name, spec.of)
        if spec.slot is None:
            ids.append(encoded[name])
            continue
        if name not in slots:
            slots[name] = encoded[name].slots(sum(s.column == name and s.slot is not None for s in schema.features))
        ids.append(slots[name][spec.slot])
    return ids


def encode_dense(
    columns: RawColumns, schema: DataSchema, config: DataConfig, new_column: Callable[[int], np.ndarray] | None = None
) -> Dense:
    """The dense features of users, of items and of contexts.

    Args:
        columns: the raw columns.
        schema: the means and deviations.
        config: the section `data`.
        new_column: by the number of a column of contexts `[E]` float32 to write to, where these are too long for
            memory.
    """
    defaults = schema.encodings.defaults
    user = [
        standardize(columns.numbers(name, "user"), *schema.encodings.moments[name], defaults.get(name))
        for name in config.names("user", "number")
    ]
    item = [
        standardize(columns.numbers(name, "item"), *schema.encodings.moments[name], defaults.get(name))
        for name in config.names("item", "number")
    ]
    users, items = columns.count("user"), columns.count("item")
    contexts = []
    for i, name in enumerate(config.names("context", "number")):
        numbers = columns.numbers(name, "event")
        contexts.append(np.empty(len(numbers), np.float32) if new_column is None else new_column(i))
        for begin, end in blocks(len(numbers)):
            scale = (*schema.encodings.moments[name], defaults.get(name))
            contexts[i][begin:end] = standardize(np.asarray(numbers[begin:end]), *scale)
    return (
        np.stack(user, axis=1) if user else np.zeros((users, 0), np.float32),
        np.stack(item, axis=1) if item else np.zeros((items, 0), np.float32),
        contexts,
    )


def _encode(columns: RawColumns, schema: DataSchema, name: str, of: Entity) -> Categorical:
    if name in schema.encodings.edges:
        return cut(columns.numbers(name, of), schema.encodings.edges[name], schema.encodings.defaults.get(name))
    column = columns.categories(name, of)
    check_kind(schema, name, column)
    return encode(column, schema.encodings.ids_of(name), schema.encodings.defaults.get(name))


def has_lists(schema: DataSchema, name: str) -> bool:
    """Returns whether a categorical column has a list of values a row."""
    return any(s.column == name and (s.multi_valued or s.slot is not None) for s in schema.features)


def check_kind(schema: DataSchema, name: str, column: pa.Array | CodedColumn) -> None:
    """Raises DataError if a column has lists where the schema has single values, or the reverse."""
    many = has_lists(schema, name)
    if is_multi_valued(column) != many:
        kinds = ("one value a row", "lists of values")
        raise DataError(f"column '{name}' has {kinds[not many]}, but in training it had {kinds[many]}")
