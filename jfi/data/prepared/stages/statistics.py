"""Makes the statistics of a dataset: columns of its events, and what they are standardized with."""

import numpy as np

from jfi.data.features.point_in_time import PastIndex
from jfi.data.features.statistics import make_statistics
from jfi.data.prepared.stages.columns import Columns
from jfi.data.schema.columns import Categorical, moments
from jfi.data.schema.schema import DataSchema


def compute_statistics(columns: Columns, schema: DataSchema, ids: list[Categorical]) -> PastIndex:
    """Adds the columns of `data.statistics` to the computed ones, and to the schema the moments that it lacks.

    Args:
        columns: of the dataset.
        schema: of the dataset.
        ids: the result of `encode_features`.

    Returns:
        The index that the columns were made with; its arrays are maps of temporary files.
    """
    config, events = columns.config, columns.events

    def keep(values: np.ndarray) -> np.ndarray:
        kept = columns.new(f"past-{len(index.arrays)}", values.dtype, values.shape)
        kept[...] = values
        return kept

    index = PastIndex(events, schema, ids, config.label is None, keep=keep)
    columns.computed |= make_statistics(index, config.statistics, config.max_history, columns.new)
    samples = columns.train & ~np.isnan(events.label)
    for name in config.statistics_columns():
        if name not in schema.encodings.moments:
            schema.encodings.moments[name] = moments(columns.computed[name], samples)
    return index
