"""Learns from the training rows: the schema of a dataset."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data.config import AGE, HISTORY, NUM_AGE_BUCKETS, NUM_QUANTILES, SID
from jfi.data.errors import DataError
from jfi.data.prepared.stages.columns import Columns
from jfi.data.schema.columns import encode, learn_edges, learn_vocabulary, moments
from jfi.data.schema.labels import labels_of
from jfi.data.schema.schema import DataSchema, Encodings, Entity, FeatureSpec, LabelSpec, Strings
from jfi.events.groups import HALF_LIVES, similar_window
from jfi.utils.arguments import module_name
from jfi.utils.encoding import UNKNOWN, HashBuckets, HashedIds


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
            FeatureSpec(HISTORY + name, "history", name, module_name(name), len(edges) + 2, of="event", width=width)
        )
    if columns.sids is not None:
        whole = {"num_embeddings": 2**63, "of": "item", "semantic": True}
        items.append(FeatureSpec(f"item_{SID}", "item", SID, "", **whole))
        history.append(FeatureSpec(HISTORY + SID, "history", SID, "", **whole))
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
    age = FeatureSpec(HISTORY + AGE, "bucket", config.timestamp, "", NUM_AGE_BUCKETS)
    features = [*users, *items, *contexts, *history, age]
    _check_keys(features)
    return DataSchema(
        features=features,
        dense_names=[name for of in ("user", "item", "context") for name in config.names(of, "number")],
        item_key=config.item,
        max_history=config.max_history,
        encodings=encodings,
        titles=None if config.title is None else _titles(columns, encodings),
        codec=None if columns.sids is None else columns.sids.codec,
        labels=_learn_labels(columns, samples),
        num_auxiliary=len(config.auxiliary_labels()),
    )


def _learn_labels(columns: Columns, samples: np.ndarray) -> list[LabelSpec]:
    config, events, found = columns.config, columns.events, []
    # The predicted labels come first; auxiliary ones are no outputs of a saved model.
    for one, column in zip(config.targets(), labels_of(config, events.label, events.targets), strict=False):
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
        keys = [(f"{HISTORY}{name}_{slot}", slot) for slot in slots]
    else:
        keys = [(HISTORY + name, None)]
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
