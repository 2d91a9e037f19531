"""Counts a log as of its end, for an artifact: apart from `jfi.serving.counters`, since a server needs no jfi.data."""

import pyarrow as pa

from jfi.data import DataConfig, DataSchema
from jfi.data.prepared.add_statistics import read_log
from jfi.events.counters import counters_of
from jfi.serving.counters import LogCounters, PastIds, RequestStatistics
from jfi.serving.schema import ItemColumn, PastFields


def read_counters(config: DataConfig, schema: DataSchema) -> LogCounters:
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
            key = next(one.key for one in schema.features if one.role == "item" and one.column == column.key)
            columns[column.key] = ItemColumn(key, column.size, column.ids.shape[1])
        fields = PastFields(
            user=config.user,
            item=config.item,
            names=config.statistics_columns(),
            until=float(index.times[-1]),
            groups=list(made.groups),
            window=made.window,
            half_lives=list(made.half_lives),
            is_implicit=index.is_implicit,
            all_are_events=index.all_are_events,
            num_known=index.num_known,
            categories=list(made.categories),
            columns=columns,
        )
        texts = (ids.cast(pa.large_string()).to_pylist() for ids in (users, items))
        counters = LogCounters(fields, PastIds(*texts), counters_of(index))
    RequestStatistics(counters)  # a fault shows at the export
    return counters
