"""A table as a file gave it, read as strings or as numbers, with the place of every fault."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data.errors import DataError, nearest

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True)
class Table:
    """N rows and where they come from.

    Args:
        name: the file as the config names it, or what made the table.
        data: the columns; those of text files are strings as written, with null for an empty field.
        line: number of the line (or row) a row of ``data`` stands on, for messages.
        separators: the multi-valued columns that the layout itself declares, and what separates their values.
    """

    name: str
    data: pa.Table
    line: Callable[[int], int]
    separators: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.data.num_rows

    def fault(self, row: int, what: str) -> DataError:
        return DataError(f"{self.name}:{self.line(row)}: {what}")

    def column(self, name: str) -> pa.Array:
        if name not in self.data.column_names:
            raise DataError(f"{self.name}: no column '{name}'; {nearest(name, self.data.column_names)}")
        chunks = self.data.column(name).combine_chunks()
        return chunks.combine_chunks() if isinstance(chunks, pa.ChunkedArray) else chunks

    def strings(self, name: str) -> pa.Array:
        """The column as strings, null where empty."""
        return self.column(name).cast(pa.string())

    def ids(self, name: str) -> pa.Array:
        """The column as strings; an empty field is a fault."""
        column = self.strings(name)
        if column.null_count:
            raise self.fault(pc.index(column.is_null(), True).as_py(), f"empty '{name}'")
        return column

    def numbers(self, name: str) -> np.ndarray:
        """The column as ``[N]`` float64, NaN where empty; anything but a number is a fault."""
        column = self.column(name)
        if pa.types.is_string(column.type):
            column = pc.utf8_trim_whitespace(column)
        if not _casts(column, pa.float64()):
            # A prefix casts until it holds the first fault.
            row = bisect_left(range(len(column)), True, key=lambda i: not _casts(column[: i + 1], pa.float64()))
            raise self.fault(row, f"'{name}' is '{column[row].as_py()}', not a number")
        return column.cast(pa.float64()).to_numpy(zero_copy_only=False)

    def times(self, name: str, unit: str) -> np.ndarray:
        """The column as ``[N]`` float64 seconds, from numbers in ``unit`` or from dates; an empty field is a fault."""
        column, moment = self.column(name), pa.timestamp("us")
        is_date = pa.types.is_temporal(column.type)
        if is_date or (pa.types.is_string(column.type) and not _casts(column, pa.float64()) and _casts(column, moment)):
            seconds = column.cast(moment, safe=False).cast(pa.int64()).to_numpy(zero_copy_only=False) * 1e-6
        else:
            seconds = self.numbers(name) * _SECONDS[unit]
        missing = ~np.isfinite(seconds)
        if missing.any():
            raise self.fault(int(missing.argmax()), f"empty '{name}'")
        return seconds


def _casts(column: pa.Array, to: pa.DataType) -> bool:
    try:
        column.cast(to, safe=not pa.types.is_temporal(to))
    except pa.ArrowInvalid:
        return False
    return True
