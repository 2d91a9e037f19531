"""Learns the schema of a dataset from the training rows, and encodes columns as ids and standardized numbers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data.batches.batch import Dense
from jfi.data.config import AGE, HISTORY, NUM_AGE_BUCKETS, NUM_QUANTILES, SID, DataConfig
from jfi.data.errors import DataError
from jfi.data.prepared.stages.columns import Columns
from jfi.data.prepared.stages.splits import count_training
from jfi.data.schema.columns import Categorical, CodedColumn, cut, encode, learn_edges, learn_vocabulary, moments
from jfi.data.schema.schema import DataSchema, Encodings, Entity, FeatureSpec, LabelSpec, Strings
from jfi.events.events import SortedEvents
from jfi.events.groups import HALF_LIVES, similar_window
from jfi.utils.arguments import module_name
from jfi.utils.encoding import UNKNOWN, HashBuckets, HashedIds, standardize
from jfi.utils.jagged import blocks


def learn_schema(columns: Columns) -> DataSchema:
    """The keys of the batches, and vocabularies, quantiles, means and titles of the training rows alone.

    A user (an item) counts as training's if it has a row there. Of a column that describes contexts alone the
    labelled rows count. A multi-valued column of events has as many slots as the longest list in training, at most
    `max_slots`.

    Raises:
        DataError: a column is missing or malformed, or two columns need the same key.
    """
    config, train = columns.config, columns.train
    counts = {"user": columns.count_training("user"), "item": columns.count_training("item")}
    samples = train & ~np.isnan(columns.events.label)
    window = similar_window(len(columns.events), config.max_history)
    encodings = Encodings(defaults=config.defaults(), window=window)
    users, items, contexts, history = [], [], [], []
    for name in config.names("user", "category"):
        users += _learn_keys(columns, name, "user", counts["user"], encodings)[0]
    for name in (config.item, *config.names("item", "category")):
        targets, events = _learn_keys(columns, name, "item", counts["item"], encodings)
        items, history = items + targets, history + events
    of_events = [*config.names("event", "category"), *config.crosses()]
    for name in config.names("context", "category"):
        if name not in of_events:
            contexts += _learn_keys(columns, name, "event", samples, encodings)[0]
    for name in of_events:
        shown, events = _learn_keys(columns, name, "event", train, encodings)
        history += events
        if name in config.names("context", "category"):
            contexts += shown
    contexts.sort(key=lambda spec: config.names("context", "category").index(spec.column))
    for name in config.names("event", "number"):
        edges = learn_edges(columns.numbers(name, "event"), train, NUM_QUANTILES)
        encodings.edges[name], width = edges, config.feature(name).width
        history.append(
            FeatureSpec(_key(name), "history", name, module_name(name), len(edges) + 2, of="event", width=width)
        )
    if columns.sids is not None:
        whole = {"num_embeddings": 2**63, "of": "item", "semantic": True}
        items.append(FeatureSpec(f"item_{SID}", "item", SID, "", **whole))
        history.append(FeatureSpec(_key(SID), "history", SID, "", **whole))
    for names, of in ((config.names("user", "number"), "user"), (config.names("item", "number"), "item")):
        for name in names:
            # Users and items count as often as they have a row in training.
            encodings.moments[name] = moments(columns.numbers(name, of), counts[of])
    made = config.statistics_columns()  # their moments are added when they are made
    for name in (one for one in config.names("context", "number") if one not in made):
        encodings.moments[name] = moments(columns.numbers(name, "event"), samples)
    if "popularity" in config.statistics_groups():
        times = columns.events.time[samples]
        encodings.half_lives[:] = [max(float(np.ptp(times)) if len(times) else 0.0, 1.0) * part for part in HALF_LIVES]
    ages = [FeatureSpec(_key(AGE), "bucket", config.timestamp, "", NUM_AGE_BUCKETS)]
    features = [*users, *items, *contexts, *_of_histories(history, config), *_of_histories(ages, config)]
    _check_keys(features)
    return DataSchema(
        features=features,
        dense_names=[name for of in ("user", "item", "context") for name in config.names(of, "number")],
        item_key=config.item,
        histories=config.history_lengths(),
        encodings=encodings,
        titles=None if config.title is None else _titles(columns, encodings),
        codec=None if columns.sids is None else columns.sids.codec,
        labels=_learn_labels(columns, samples),
        num_auxiliary=len(config.auxiliary_labels()),
    )


def _key(column: str) -> str:
    """The key of a column of events, of a history that is named "history"."""
    return f"{HISTORY}_{column}"


def _of_histories(specs: list[FeatureSpec], config: DataConfig) -> list[FeatureSpec]:
    """The keys of all histories, made of those of a history that is named "history"."""
    return [
        replace(spec, key=name + spec.key.removeprefix(HISTORY), history=name)
        for name, one in config.named_histories().items()
        for spec in specs
        if one.features is None or spec.role == "bucket" or spec.column in one.features
    ]


def _learn_labels(columns: Columns, samples: np.ndarray) -> list[LabelSpec]:
    config, events, found = columns.config, columns.events, []
    # The predicted labels come first; auxiliary ones are no outputs of a saved model.
    for one, column in zip(config.targets(), config.labels_of(events.label, events.targets), strict=False):
        scale = moments(column, samples) if one.task == "regression" else ()
        found.append(LabelSpec(one.name, one.task, *scale))
    return found


def _learn_keys(
    columns: Columns, name: str, of: Entity, train: np.ndarray, encodings: Encodings
) -> tuple[list[FeatureSpec], list[FeatureSpec]]:
    """The keys of the sample that a categorical column has, and those of the events; adds to the encodings.

    `train` is `[U]`, `[N]` or `[E]`, in how many rows of training each user, item or event is.
    """
    column, feature = columns.categories(name, of), columns.config.feature(name)
    many = column.offsets is not None
    if feature.hash_buckets is not None:
        encodings.buckets[name] = HashBuckets(feature.hash_buckets)
    elif feature.capacity is not None:
        encodings.capacities[name] = HashedIds(feature.capacity, feature.min_count)
    else:
        encodings.vocabularies[name] = learn_vocabulary(
            column, train, feature.min_count, feature.max_values, encodings.defaults.get(name)
        )
    num_ids = encodings.ids_of(name).num_ids
    if many and feature.default is not None:
        raise DataError(f"data.features '{name}' has a default, but its rows are lists; a default is a single value")
    role = "context" if of == "event" else of
    raw = {"width": feature.width, "raw": feature.capacity is not None}
    own = [FeatureSpec(name, role, name, module_name(name), num_ids, many, of, **raw)]
    if many:
        slots = range(min(columns.config.max_slots, column.longest(train > 0)))
        keys = [(_key(f"{name}_{slot}"), slot) for slot in slots]
    else:
        keys = [(_key(name), None)]
    common = {"of": of, **raw}
    history = [FeatureSpec(key, "history", name, module_name(name), num_ids, slot=slot, **common) for key, slot in keys]
    return own, history


def _titles(columns: Columns, encodings: Encodings) -> Strings | None:
    item = columns.config.item
    if item not in encodings.vocabularies:
        return None  # items that share a bucket have no one title, and raw ids have no order
    ids = encode(columns.categories(item, "item"), encodings.vocabularies[item]).ids
    # In the order of the ids, which sort by number where all of training's are integers; the items may not.
    by_id = np.argsort(ids, kind="stable")[np.count_nonzero(ids == UNKNOWN) :]
    titles = columns.categories(columns.config.title, "item").take(by_id)
    if titles.offsets is None:
        texts = titles.values.take(pa.array(titles.codes, mask=titles.codes < 0))
    else:  # such as the words of RecBole's title:token_seq
        words = titles.values.take(pa.array(titles.codes)).to_pylist()
        rows = zip(titles.offsets[:-1], titles.offsets[1:], strict=True)
        texts = pa.array([" ".join(words[begin:end]) or None for begin, end in rows], titles.values.type)
    texts = pc.fill_null(texts, "untitled")
    return Strings(pa.concat_arrays([pa.array(["unseen"], texts.type), texts]))


def _check_keys(specs: list[FeatureSpec]) -> None:
    column_of: dict[str, str] = {}
    for spec in specs:
        if spec.key in column_of:
            columns = f"'{column_of[spec.key]}' and '{spec.column}'"
            raise DataError(f"the columns {columns} both need the key '{spec.key}'; rename one of them")
        column_of[spec.key] = spec.column


#: Before the names of the columns of contexts, which could be those of other columns of events.
CONTEXT = "context_"


def column_name(spec: FeatureSpec) -> str:
    """The column of a key in a file: one for all histories, and of users and items one for all keys of a column."""
    if spec.role == "context":
        return CONTEXT + spec.column
    return HISTORY + spec.key.removeprefix(spec.history) if spec.of == "event" else spec.column


def encode_features(columns: Columns, schema: DataSchema) -> list[Categorical]:
    """The ids of each key of `schema.features` but the age, a row for each user, item or event.

    Raises:
        DataError: a column is missing or malformed, or has lists where the schema has single values, or the reverse.
    """
    known = schema.encodings
    of_entities: dict[str, Categorical] = {}
    found: list[Categorical] = []
    of_events: dict[str, Categorical] = {}
    for number, spec in enumerate(schema.encoded):
        default = known.defaults.get(spec.column)
        if spec.semantic:
            found.append(Categorical(columns.item_sids()))
        elif spec.of == "event" and column_name(spec) in of_events:  # of another history
            found.append(of_events[column_name(spec)])
        elif spec.of == "event":

            def new_array(count: int, number: int = number, spec: FeatureSpec = spec) -> np.ndarray:
                return columns.new(f"key-{number}", id_type(spec.num_ids), count, column_name(spec))

            if spec.column in known.edges:
                numbers = columns.numbers(spec.column, "event")
                found.append(cut(numbers, known.edges[spec.column], new_array, default))
            else:
                column = check_kind(schema, spec.column, columns.categories(spec.column, "event"))
                found.append(encode(column, known.ids_of(spec.column), spec.slot, new_array, default))
            of_events[column_name(spec)] = found[-1]
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
