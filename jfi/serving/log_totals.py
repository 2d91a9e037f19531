"""Counts a log as of its end, for an artifact whose requests have no statistics of the past."""

import pyarrow as pa

from jfi.data import DataConfig, DataSchema
from jfi.data.prepared.add_statistics import read_log
from jfi.events.totals import totals_of
from jfi.serving.past import LogTotals, PastIds
from jfi.serving.schema import ItemColumn, PastFields


def read_totals(config: DataConfig, schema: DataSchema) -> LogTotals:
    """Counts the log of a run, for an artifact.

    Args:
        config: the section `data` of a run with `data.statistics`, whose interactions are the log.
        schema: of the run.

    Raises:
        DataError: the log is missing or malformed.
    """
    with read_log(config, schema) as (made, users, items):
        index = made.index
        columns = {}
        for column in index.item_columns.values():
            keys = [spec.key for spec in schema.features if spec.role == "item" and spec.column == column.key]
            columns[column.key] = ItemColumn(keys, column.size, column.ids.shape[1])
        fields = PastFields(
            config.user,
            config.item,
            config.statistics_columns(),
            float(index.times[-1]),
            list(made.groups),
            made.window,
            list(made.half_lives),
            index.is_implicit,
            index.all_are_events,
            index.num_known,
            list(made.categories),
            columns,
        )
        texts = (ids.cast(pa.large_string()).to_pylist() for ids in (users, items))
        return LogTotals(fields, PastIds(*texts), totals_of(index))
