"""Makes the statistics of a dataset: columns of its events, and what they are standardized with."""

from dataclasses import replace

import numpy as np

from jfi.data.batches.negatives import NegativeSampler
from jfi.data.features.past_index import dense_statistics, past_index
from jfi.data.prepared.stages.columns import Columns as RawColumns
from jfi.data.prepared.stages.engagement import read_sessions
from jfi.data.schema.columns import Categorical, moments
from jfi.data.schema.schema import DataSchema
from jfi.events.groups import SESSIONS
from jfi.events.statistics import Columns, DenseStatistics, Statistics

#: Of implicit feedback the training samples, positives and negatives, that means and deviations come from, about.
_SAMPLES = 1 << 16


def compute_statistics(
    columns: RawColumns,
    schema: DataSchema,
    ids: list[Categorical],
    negatives: NegativeSampler | None = None,
    rows: np.ndarray | None = None,
    repeated: np.ndarray | None = None,
) -> DenseStatistics:
    """Adds the columns of `data.statistics` to the computed ones, and to the schema the moments that it lacks.

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
    index = past_index(events, schema, ids, config.label is None, session, new=columns.temporary)
    categories, encodings = config.names("item", "category"), schema.encodings
    made = config.statistics_groups(), categories, encodings.window, encodings.half_lives
    statistics = Statistics(index, *made, *config.event_values())
    columns.computed |= statistics.of_rows(rows, columns.new)
    names = config.statistics_columns()
    if missing := [name for name in names if name not in schema.encodings.moments]:
        found, weights = columns.computed, columns.train & ~np.isnan(events.label)
        if negatives is not None:
            found = _with_negatives(statistics, np.flatnonzero(weights), negatives)
            weights = np.ones(len(found[missing[0]]), bool)
        schema.encodings.moments.update({name: moments(found[name], weights) for name in missing})
    return dense_statistics(statistics, schema, names)


def _with_negatives(statistics: Statistics, samples: np.ndarray, negatives: NegativeSampler) -> Columns:
    """The statistics of some training samples, spread evenly, and of as many negatives as a run draws."""
    events, per = statistics.index.events, negatives.per_positive
    count = min(len(samples), max(1, _SAMPLES // (1 + per)))
    rows = samples[np.arange(count) * len(samples) // count]
    drawn = np.repeat(rows, per)
    item = negatives.draw(events.user[drawn].astype(np.int64), events.time[drawn], np.arange(len(drawn)), 0, 0)
    positives, others = statistics.of(rows), statistics.of(drawn, item)
    return {name: np.concatenate([positives[name], others[name]]) for name in positives}
