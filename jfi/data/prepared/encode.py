"""Columns -> ids and standardized numbers, with the encodings of a schema."""

from collections.abc import Callable, Sequence

import numpy as np

from jfi.data.batches.assemble import Dense
from jfi.data.batches.events import Events
from jfi.data.config import DataConfig
from jfi.data.errors import DataError
from jfi.data.prepared.columns import Columns
from jfi.data.prepared.splits import SPLITS
from jfi.data.schema.coded import CodedColumn, blocks
from jfi.data.schema.columns import Categorical, cut, encode
from jfi.data.schema.schema import DataSchema
from jfi.utils.encoding import UNKNOWN, standardize

#: Gives an array of a type and a number of values to write to, such as the map of a file, for a name.
NewColumn = Callable[[str, type, int], np.ndarray]


def encode_features(columns: Columns, schema: DataSchema, new_column: NewColumn) -> list[Categorical]:
    """The ids of each key of `schema.features` but the age, a row for each user, item or event.

    Args:
        columns: the raw columns.
        schema: the encodings.
        new_column: gives arrays for the ids of events, which may be too many for memory.

    Raises:
        DataError: a column is missing or malformed, or has lists where the schema has single values, or the reverse.
    """
    of_entities: dict[str, Categorical] = {}
    defaults = schema.encodings.defaults
    found = []
    for number, spec in enumerate(schema.features[:-1]):
        if spec.semantic:
            found.append(Categorical(columns.item_sids()))
        elif spec.of == "event":
            kind = id_type(spec.num_embeddings)

            def new_array(count: int, name: str = f"key-{number}", kind: type = kind) -> np.ndarray:
                return new_column(name, kind, count)

            if spec.column in schema.encodings.edges:
                numbers = columns.numbers(spec.column, "event")
                found.append(cut(numbers, schema.encodings.edges[spec.column], new_array, defaults.get(spec.column)))
            else:
                column = check_kind(schema, spec.column, columns.categories(spec.column, "event"))
                known, default = schema.encodings.ids_of(spec.column), defaults.get(spec.column)
                found.append(encode(column, known, spec.slot, new_array, default))
        else:
            if spec.column not in of_entities:
                column = check_kind(schema, spec.column, columns.categories(spec.column, spec.of))
                known = schema.encodings.ids_of(spec.column)
                of_entities[spec.column] = encode(column, known, default=defaults.get(spec.column))
            ids = of_entities[spec.column]
            found.append(ids if spec.slot is None else ids.slot(spec.slot))
    return found


def encode_dense(columns: Columns, schema: DataSchema, config: DataConfig, new_column: NewColumn) -> Dense:
    """The dense features of users, of items and of contexts.

    Args:
        columns: the raw columns.
        schema: the means and deviations.
        config: the section `data`.
        new_column: gives arrays for the columns of contexts.
    """

    def stack(names: list[str], of: str) -> np.ndarray:
        dense = np.zeros((columns.count(of), len(names)), np.float32)
        for i, name in enumerate(names):
            dense[:, i] = standardize(columns.numbers(name, of), *schema.encodings.scale(name))
        return dense

    contexts = []
    for i, name in enumerate(config.names("context", "number")):
        numbers = columns.numbers(name, "event")
        contexts.append(new_column(f"dense-{i}", np.float32, len(numbers)))
        for begin, end in blocks(len(numbers)):
            contexts[i][begin:end] = standardize(np.asarray(numbers[begin:end]), *schema.encodings.scale(name))
    return stack(config.names("user", "number"), "user"), stack(config.names("item", "number"), "item"), contexts


def id_type(num_embeddings: int) -> type[np.signedinteger]:
    """The smallest type of ids below `num_embeddings`."""
    return next(kind for kind in (np.int8, np.int16, np.int32, np.int64) if num_embeddings - 1 <= np.iinfo(kind).max)


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
