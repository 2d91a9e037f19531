"""A table as read from a file: its columns as strings, numbers or times, with the line of every fault."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data.errors import DataError
from jfi.suggest import suggest

_NUMBER, _MOMENT, _ZONED = pa.float64(), pa.timestamp("us"), pa.timestamp("us", "UTC")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True)
class Table:
    """N rows and the place they come from.

    Args:
        name: the file as the config names it, or the origin of a table without a file.
        data: the columns in use; those of text files are strings, null for an empty field.
        known: names of all columns, for messages.
        line: from a row of `data` to its line (or row) in the file, for messages.
        separators: by multi-valued column that the file's layout declares, the separator of its values.
        parts: of a table of several files, each file's first row, name, and `line` from the file's own row.
    """

    name: str
    data: pa.Table
    known: list[str]
    line: Callable[[int], int]
    separators: dict[str, str] = field(default_factory=dict)
    parts: list[tuple[int, str, Callable[[int], int]]] = field(default_factory=list)

    def __len__(self) -> int:
        return self.data.num_rows

    def fault(self, row: int, what: str) -> DataError:
        first, name, line = 0, self.name, self.line
        if self.parts:
            first, name, line = self.parts[bisect_right(self.parts, row, key=lambda part: part[0]) - 1]
        return DataError(f"{name}:{line(row - first)}: {what}")

    def column(self, name: str) -> pa.Array:
        if name not in self.known:
            raise DataError(f"{self.name}: no column '{name}'; {suggest(name, self.known)}")
        column = self.data.column(name).combine_chunks()
        return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column

    def strings(self, name: str) -> pa.Array:
        """The column as strings, null where empty."""
        column = self.column(name)
        if pa.types.is_nested(column.type):
            raise DataError(f"{self.name}: column '{name}' has type {column.type}, but must have one value per row")
        return column.cast(pa.string())

    def ids(self, name: str) -> pa.Array:
        """The column as strings; an empty field raises DataError."""
        column = self.strings(name)
        if column.null_count:
            raise self.fault(pc.index(column.is_null(), True).as_py(), f"empty '{name}'")
        return column

    def categories(self, name: str, separators: dict[str, str]) -> pa.Array:
        """The column as strings, or as lists of strings if it holds lists or has a separator."""
        column = self.column(name)
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            return column.cast(pa.list_(pa.string()))
        separator = separators.get(name, self.separators.get(name))
        return self.strings(name) if separator is None else pc.split_pattern(self.strings(name), separator)

    def numbers(self, name: str) -> np.ndarray:
        """The column as `[N]` float64, NaN where empty; a value that is not a number raises DataError."""
        column = self.column(name)
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            column = pc.utf8_trim_whitespace(column)
        if (row := _first_fault(column, _NUMBER)) is not None:
            raise self.fault(row, f"'{name}' is '{column[row].as_py()}', not a number")
        return column.cast(_NUMBER, safe=False).to_numpy(zero_copy_only=False)

    def times(self, name: str, unit: str) -> np.ndarray:
        """The column as `[N]` float64 seconds, from numbers in `unit` or from dates; an empty field raises DataError.

        Dates follow ISO 8601, either all without a zone (UTC) or all with an offset.
        """
        column, kind = self.column(name), _NUMBER
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            column = pc.utf8_trim_whitespace(column)
            kind = _kind(column.drop_null()[:1]) or _NUMBER
            if (row := _first_fault(column, kind)) is not None:
                alone = _kind(column[row : row + 1])
                what = "neither a number nor a date" if alone is None else "but the first value is of another kind"
                raise self.fault(row, f"'{name}' is '{column[row].as_py()}', {what}")
        elif pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
            kind = _MOMENT
        if kind != _NUMBER:
            missing = column.is_null().to_numpy(zero_copy_only=False)
            seconds = pc.fill_null(column.cast(kind, safe=False).cast(pa.int64()), 0).to_numpy() * 1e-6
        else:
            seconds = self.numbers(name) * _SECONDS[unit]
            missing = ~np.isfinite(seconds)
        if missing.any():
            raise self.fault(int(missing.argmax()), f"empty '{name}'")
        return seconds


def _kind(value: pa.Array) -> pa.DataType | None:
    return next((kind for kind in (_NUMBER, _MOMENT, _ZONED) if _casts(value, kind)), None)


def _first_fault(column: pa.Array, to: pa.DataType) -> int | None:
    """The first row that does not cast to the type `to`, or None."""
    if _casts(column, to):
        return None
    # A prefix casts as long as it ends before the first fault.
    return bisect_left(range(len(column)), True, key=lambda i: not _casts(column[: i + 1], to))


def _casts(column: pa.Array, to: pa.DataType) -> bool:
    try:
        # A safe cast would refuse integers beyond 2^53.
        column.cast(to, safe=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False
    return True
