"""Makes the statistics of a dataset: the index of its past, columns of its events, what they are standardized with."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from jfi.data.batches.negatives import NegativeSampler
from jfi.data.config import DataConfig
from jfi.data.prepared.stages.columns import Columns, read_sessions
from jfi.data.prepared.stages.splits import SPLITS
from jfi.data.schema.columns import Categorical, moments
from jfi.data.schema.schema import DataSchema, Encodings, FeatureSpec
from jfi.events.events import New, SortedEvents, event_values
from jfi.events.groups import SESSIONS
from jfi.events.point_in_time import KeyColumn, PastIndex
from jfi.events.statistics import DenseStatistics, StatisticColumns, Statistics
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
    of_events = [(one, ids[index]) for index, one in schema.of_events()]
    spec, items = next(one for one in features if one[0].key == schema.item_key)
    slots: dict[str, list[tuple[Categorical, FeatureSpec]]] = {}
    for one, own in of_events:
        if one.of == "item" and not one.semantic and one.column != schema.item_key:
            slots.setdefault(one.column, []).append((own, one))
    columns = {
        f"column {name}": KeyColumn("item", *_matrix([own for own, _ in of], of[0][1]), name)
        for name, of in slots.items()
    }
    for one, own in features if contexts else []:
        if one.role in ("user", "context"):
            values = _matrix([own] if own.offsets is None else [*map(own.slot, range(_MAX_VALUES))], one)
            columns[f"{one.role} {one.key}"] = KeyColumn("user" if one.of == "user" else "event", *values, one.key)
    numbers, values = {}, {}
    for one, own in of_events:
        if one.of == "event" and one.column in schema.encodings.edges:
            numbers[one.column] = own.ids
        elif one.of == "event":
            values.setdefault(one.column, []).append(own.ids)
    known = event_values(numbers, values)
    return PastIndex(
        events, columns, len(items.ids), spec.num_embeddings, is_implicit, session, arrays, new, values=known
    )


def statistics_of(index: PastIndex, config: DataConfig, encodings: Encodings) -> Statistics:
    """Returns what makes the statistics of a resolved config of an index."""
    categories = config.names("item", "category")
    made = config.statistics_groups(), categories, encodings.window, encodings.half_lives
    return Statistics(index, *made, *config.event_values())


def dense_statistics(statistics: Statistics, schema: DataSchema, config: DataConfig) -> DenseStatistics:
    """Returns what fills the columns of the dense features of a batch that statistics make."""
    names = config.statistics_columns()
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


#: Of implicit feedback the training samples, positives and negatives, that means and deviations come from, about.
_SAMPLES = 1 << 16
#: Rows that bounds and shares outside of them come from, about.
_ROWS = 1 << 20
#: The quantiles of the training samples that values are clipped to: too few rows are beyond them to learn from, and the
#: first rows of a log, of which nothing is known, do not widen the range.
_BOUNDS = (0.001, 0.999)
#: A statistic of which a larger share of the validation samples is outside of these quantiles is left out. The value is
#: in the gap of the tables of docs/quality.md: their columns have either at most .11 or at least .36.
_MOST_OUTSIDE = 0.2
#: Validation samples from which on a share tells enough to leave a statistic out.
_LEAST_ROWS = 100
#: The least share outside that is worth a word; it is .002 where nothing changes.
_NOTED = 0.01


def compute_statistics(
    columns: Columns,
    schema: DataSchema,
    ids: list[Categorical],
    negatives: NegativeSampler | None = None,
    rows: np.ndarray | None = None,
    repeated: np.ndarray | None = None,
) -> DenseStatistics:
    """Adds the columns of `data.statistics` to the computed ones, and to the schema the scales that it lacks.

    Args:
        columns: of the dataset.
        schema: of the dataset.
        ids: the result of `encode_features`.
        negatives: draws the negatives of implicit feedback, for the moments; None for labels.
        rows: `[N]` int64, the events whose statistics are needed, all if None.
        repeated: `[R]` int64, events that are there twice and do not count, or None.

    Returns:
        What gives the statistics of other targets; its arrays are maps of temporary files.
    """
    config, events = columns.config, columns.events
    if repeated is not None and len(repeated):
        label = columns.new("counted", np.float32, len(events))
        label[:] = events.label
        label[repeated] = np.nan
        events = replace(events, label=label)
    session = read_sessions(columns) if {*SESSIONS} & {*config.statistics_groups()} else None
    index = past_index(events, schema, ids, config.is_implicit, session, new=columns.temporary)
    encodings = schema.encodings
    statistics = statistics_of(index, config, encodings)
    columns.computed |= statistics.of_rows(rows, columns.new)
    if missing := [name for name in config.statistics_columns() if name not in schema.encodings.moments]:
        labeled, training, validation = ~np.isnan(events.label), columns.computed, columns.computed
        trained, held_out = columns.train & labeled, (events.split == SPLITS.index("validation")) & labeled
        if negatives is not None:
            training = _with_negatives(statistics, np.flatnonzero(trained), negatives)
            trained = np.ones(len(training[missing[0]]), bool)
            held_out &= np.isin(events.item, negatives.candidates)  # others are no samples
            validation = _with_negatives(statistics, np.flatnonzero(held_out), negatives)
            held_out = np.ones(len(validation[missing[0]]), bool)
        encodings.moments.update({name: moments(training[name], trained) for name in missing})
        trained, held_out = (_spread(np.flatnonzero(one), _ROWS) for one in (trained, held_out))
        values = ((name, training[name][trained], validation[name][held_out]) for name in missing)
        columns.notes.extend(_learn_scales(values, encodings))
    return dense_statistics(statistics, schema, config)


def _learn_scales(values: Iterable[tuple[str, np.ndarray, np.ndarray]], encodings: Encodings) -> list[str]:
    """Learns how statistics are standardized, clipped or left out; returns a line of what validation changed, or none.

    Args:
        values: the name of each statistic, and its values of some samples of training and of validation.
        encodings: are added to.
    """
    noted: dict[str, list[str]] = {"left out": [], "clipped": []}
    for name, training, validation in values:
        known = training[np.isfinite(training)]
        mean = encodings.moments[name][0]
        low, high = np.quantile(known, _BOUNDS).tolist() if len(known) else (mean, mean)
        outside = float(np.mean((validation < low) | (validation > high))) if len(validation) else 0.0
        is_left_out = outside > _MOST_OUTSIDE and len(validation) >= _LEAST_ROWS
        encodings.bounds[name] = (mean, mean) if is_left_out else (low, high)
        if outside >= _NOTED:
            noted["left out" if is_left_out else "clipped"].append(f"{name} {outside:.1%}")
    lines = [f"{what} {', '.join(of)}" for what, of in noted.items() if of]
    return [f"statistics outside of training's range in validation: {'; '.join(lines)}"] if lines else []


def _spread(rows: np.ndarray, most: int) -> np.ndarray:
    """At most so many of the rows, spread evenly."""
    count = min(len(rows), most)
    return rows[np.arange(count) * len(rows) // max(count, 1)]


def _with_negatives(statistics: Statistics, samples: np.ndarray, negatives: NegativeSampler) -> StatisticColumns:
    """The statistics of some samples, spread evenly, and of as many negatives as a run draws."""
    events, per = statistics.index.events, negatives.per_positive
    rows = _spread(samples, max(1, _SAMPLES // (1 + per)))
    drawn = np.repeat(rows, per)
    item = negatives.draw(events.user[drawn].astype(np.int64), events.time[drawn], np.arange(len(drawn)), 0, 0)
    positives, others = statistics.of(rows), statistics.of(drawn, item)
    return {name: np.concatenate([positives[name], others[name]]) for name in positives}
