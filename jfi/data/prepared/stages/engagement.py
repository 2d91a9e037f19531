"""Reads dwell times, surfaces and conversions of events, and the log that a policy is fitted to."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data.batches.engagement import ONLY_SURFACE, Engagement
from jfi.data.errors import DataError
from jfi.data.prepared.stages.columns import Columns
from jfi.utils.encoding import LARGEST_NUMBER
from jfi.utils.jagged import blocks

#: Seconds by `data.dwell_unit`.
SECONDS = {"s": 1.0, "ms": 1e-3}


def read_engagement(columns: Columns) -> Engagement | None:
    """The fields of all events, in the order of the rows; None where the config names none of them.

    Raises:
        DataError: a column is missing or holds something else than numbers (dwell) or single values (the others).
    """
    config, count = columns.config, columns.count("event")
    if not config.engagement_columns():
        return None
    dwell, surface = (
        columns.new(name, kind, count, name) for name, kind in (("dwell", np.float32), ("surface", np.int32))
    )
    numbers = None if config.dwell is None else columns.numbers(config.dwell, "event")
    for begin, end in blocks(count):
        part = np.nan if numbers is None else np.asarray(numbers[begin:end]) * SECONDS[config.dwell_unit]
        dwell[begin:end] = np.clip(part, -LARGEST_NUMBER, LARGEST_NUMBER)
    surface[:], names = 0, [ONLY_SURFACE]
    if config.surface is not None:
        names = _fill_codes(columns, config.surface, "surface", surface)
    return Engagement(dwell, surface, names, read_sessions(columns))


def read_sessions(columns: Columns) -> np.ndarray | None:
    """`[E]` int64, equal for the events of a session; None where the config names no column of it."""
    config, count = columns.config, columns.count("event")
    if config.session is None:
        return None
    session = columns.new("session", np.int64, count, "session")
    _fill_codes(columns, config.session, "session", session)
    for begin, end in blocks(count):
        alone = begin + np.flatnonzero(session[begin:end] < 0)
        session[alone] = -1 - alone  # an event without a session is one of its own
    return session


def _fill_codes(columns: Columns, name: str, setting: str, out: np.ndarray) -> list[str]:
    """Writes the indices of a column's values, sorted, to `out [E]`, -1 where one is missing; returns the values."""
    column = columns.categories(name, "event")
    if column.offsets is not None:
        raise DataError(f"data.{setting} is '{name}', whose rows are lists; it must have one value a row")
    order = pc.array_sort_indices(column.values).to_numpy()
    rank = np.full(len(order) + 1, -1, out.dtype)  # the last is that of code -1
    rank[order] = np.arange(len(order))
    for begin, end in blocks(len(column)):
        out[begin:end] = rank[column.codes[begin:end]]
    return column.values.take(pa.array(order)).to_pylist() if setting == "surface" else []
