"""Columns -> ids and standardized numbers, with the encodings of a schema."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from jfi.data.batches.assemble import Dense
from jfi.data.errors import DataError
from jfi.data.prepared.stages.columns import Columns
from jfi.data.prepared.stages.splits import count_training
from jfi.data.schema.coded import CodedColumn
from jfi.data.schema.columns import Categorical, cut, encode
from jfi.data.schema.schema import DataSchema, FeatureSpec
from jfi.events.events import SortedEvents
from jfi.utils.encoding import UNKNOWN, standardize
from jfi.utils.jagged import blocks

#: Before the names of the columns of contexts, which could be those of other columns of events.
CONTEXT = "context_"


def column_name(spec: FeatureSpec) -> str:
    """The column of a key in a file: its own for events and contexts, else one for all keys of a column."""
    if spec.role == "context":
        return CONTEXT + spec.column
    return spec.key if spec.of == "event" else spec.column


def encode_features(columns: Columns, schema: DataSchema) -> list[Categorical]:
    """The ids of each key of `schema.features` but the age, a row for each user, item or event.

    Raises:
        DataError: a column is missing or malformed, or has lists where the schema has single values, or the reverse.
    """
    known = schema.encodings
    of_entities: dict[str, Categorical] = {}
    found = []
    for number, spec in enumerate(schema.features[:-1]):
        default = known.defaults.get(spec.column)
        if spec.semantic:
            found.append(Categorical(columns.item_sids()))
        elif spec.of == "event":

            def new_array(count: int, number: int = number, spec: FeatureSpec = spec) -> np.ndarray:
                return columns.new(f"key-{number}", id_type(spec.num_ids), count, column_name(spec))

            if spec.column in known.edges:
                numbers = columns.numbers(spec.column, "event")
                found.append(cut(numbers, known.edges[spec.column], new_array, default))
            else:
                column = check_kind(schema, spec.column, columns.categories(spec.column, "event"))
                found.append(encode(column, known.ids_of(spec.column), spec.slot, new_array, default))
        else:
            if spec.column not in of_entities:
                column = check_kind(schema, spec.column, columns.categories(spec.column, spec.of))
                of_entities[spec.column] = encode(column, known.ids_of(spec.column), default=default)
            ids = of_entities[spec.column]
            found.append(ids if spec.slot is None else ids.slot(spec.slot))
    return found


def encode_dense(columns: Columns, schema: DataSchema) -> Dense:
    """The dense features of users, of items and of contexts."""

    def stack(of: Literal["user", "item"]) -> np.ndarray:
        names = columns.config.names(of, "number")
        dense = np.zeros((columns.count(of), len(names)), np.float32)
        for i, name in enumerate(names):
            dense[:, i] = standardize(columns.numbers(name, of), *schema.encodings.scale(name))
        return dense

    contexts = []
    for i, name in enumerate(columns.config.names("context", "number")):
        numbers = columns.numbers(name, "event")
        contexts.append(columns.new(f"dense-{i}", np.float32, len(numbers), CONTEXT + name))
        for begin, end in blocks(len(numbers)):
            contexts[i][begin:end] = standardize(np.asarray(numbers[begin:end]), *schema.encodings.scale(name))
    return stack("user"), stack("item"), contexts


def id_type(num_ids: int) -> type[np.signedinteger]:
    """The smallest type of ids below `num_ids`."""
    return next(kind for kind in (np.int8, np.int16, np.int32, np.int64) if num_ids - 1 <= np.iinfo(kind).max)


def known_items(schema: DataSchema, columns: Sequence[Categorical], events: SortedEvents) -> np.ndarray:
    """The items of the training split that have an id of their own, or all of them where ids are hashed."""
    if schema.item_key not in schema.encodings.vocabularies:
        return np.flatnonzero(count_training(events.item, events.split, int(events.item.max()) + 1))
    ids = next(ids.ids for spec, ids in zip(schema.features, columns, strict=False) if spec.key == schema.item_key)
    return np.flatnonzero(ids != UNKNOWN)


def has_lists(schema: DataSchema, name: str) -> bool:
    """Returns whether a categorical column has a list of values a row."""
    return any(s.column == name and (s.multi_valued or s.slot is not None) for s in schema.features)


def check_kind(schema: DataSchema, name: str, column: CodedColumn) -> CodedColumn:
    """Returns a categorical column; one without a value has lists where the schema has them.

    Raises:
        DataError: the column has lists where the schema has single values, or the reverse.
    """
    many = has_lists(schema, name)
    if (column.offsets is not None) == many:
        return column
    if len(column.values):
        kinds = ("one value a row", "lists of values")
        raise DataError(f"column '{name}' has {kinds[not many]}, but in training it had {kinds[many]}")
    count = len(column)
    if many:
        return CodedColumn(column.values, np.empty(0, np.int32), np.zeros(count + 1, np.int64))
    return CodedColumn(column.values, np.full(count, -1, np.int32))
