"""Columns of records as Arrow arrays."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import pyarrow as pa

from jfi.state.columns import Stored
from jfi.state.layout import Column

TYPES = {
    "text": pa.large_string(),
    "texts": pa.large_list(pa.large_string()),
    "number": pa.float64(),
    "sid": pa.int64(),
    "session": pa.uint64(),
}


class Texts(Protocol):
    """Reads the dictionaries of a state."""

    def __call__(self, values: str, numbers: Iterable[int]) -> list[str | None]:
        """Returns the texts of numbers of a dictionary, None for 0."""


def as_arrow(column: Column, values: Stored, texts: Texts) -> pa.Array:
    """Returns the values `[N]` of a column of events, items or users.

    Args:
        column: of the records.
        values: `[N]`, of lists `[N, size]` or the numbers of all lists and how many `[N]` each has.
        texts: reads the dictionaries.

    Raises:
        StateError: the column's dictionary has no such number.
    """
    if column.kind not in ("text", "texts"):
        is_missing = values == 0 if column.kind == "session" else np.isnan(values)
        return pa.array(values, TYPES[column.kind], mask=is_missing)
    numbers, counts = values if isinstance(values, tuple) else (values, None)
    if counts is None and column.kind == "texts":
        counts, numbers = (numbers > 0).sum(axis=1), numbers[numbers > 0]
    distinct, index = np.unique(numbers, return_inverse=True)
    flat = pa.array(texts(column.name, distinct.tolist()), pa.large_string()).take(pa.array(index.ravel()))
    if counts is None:
        return flat
    return pa.LargeListArray.from_arrays(np.append(0, np.cumsum(counts)), flat)
