"""A table as read from a file: its columns as strings, numbers or times, with the line of every fault."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data.errors import DataError
from jfi.data.io.arrays import as_text, flatten, is_list, is_text, text_lists
from jfi.utils.suggest import suggest

_NUMBER, _MOMENT, _ZONED = pa.float64(), pa.timestamp("us"), pa.timestamp("us", "UTC")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


# A value longer than this is cut in messages.
_SHOWN = 80


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

    def place(self, row: int, beside: int | None = None) -> str:
        """`file:line` of a row; with `beside`, a row of the same file is only `line 7`."""
        first, name, line = self._part(row)
        if beside is not None and self._part(beside)[:2] == (first, name):
            return f"line {line(row - first)}"
        return f"{name}:{line(row - first)}"

    def _part(self, row: int) -> tuple[int, str, Callable[[int], int]]:
        if not self.parts:
            return 0, self.name, self.line
        return self.parts[bisect_right(self.parts, row, key=lambda part: part[0]) - 1]

    def fault(self, row: int, what: str) -> DataError:
        return DataError(f"{self.place(row)}: {what}")

    def column(self, name: str) -> pa.Array:
        """The column in one piece; dictionaries are decoded, and text over 2 GiB is large_string."""
        if name not in self.known:
            raise DataError(f"{self.name}: no column '{name}'; {suggest(name, self.known)}")
        return flatten(self.data.column(name))

    def strings(self, name: str) -> pa.Array:
        """The column as strings, null where empty. Floating-point numbers that are whole read like integers."""
        column = self.column(name)
        kind = column.type
        if pa.types.is_nested(kind):
            raise DataError(f"{self.name}: column '{name}' has type {kind}, but must have one value per row")
        try:
            return as_text(column)
        except pa.ArrowException:
            if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
                row = _first_fault(column, pa.string(), safe=True)
                raise self.fault(row, f"'{name}' has type {kind}, and this value is not UTF-8 text") from None
            raise DataError(f"{self.name}: column '{name}' has type {kind}, which has no text") from None

    def ids(self, name: str) -> pa.Array:
        """The column as strings; an empty field raises DataError."""
        column = self.strings(name)
        if column.null_count:
            raise self.fault(pc.index(column.is_null(), True).as_py(), f"empty '{name}'")
        return column

    def categories(self, name: str, separators: dict[str, str]) -> pa.Array:
        """The column as strings, or as lists of strings if it holds lists or has a separator."""
        column = self.column(name)
        if is_list(column.type):
            try:
                return text_lists(column)
            except pa.ArrowException:
                what = f"has type {column.type}, but its lists must hold texts or numbers"
                raise DataError(f"{self.name}: column '{name}' {what}") from None
        separator = separators.get(name, self.separators.get(name))
        return self.strings(name) if separator is None else pc.split_pattern(self.strings(name), separator)

    def numbers(self, name: str) -> np.ndarray:
        """The column as `[N]` float64, NaN where empty; a value that is not a number raises DataError."""
        return self._as_numbers(name, self._trimmed(name))

    def _trimmed(self, name: str) -> pa.Array:
        column = self.column(name)
        return pc.utf8_trim_whitespace(column) if is_text(column.type) else column

    def _as_numbers(self, name: str, column: pa.Array) -> np.ndarray:
        if (row := _first_fault(column, _NUMBER)) is not None:
            raise self.fault(row, f"'{name}' is '{_show(column[row])}', not a number")
        return column.cast(_NUMBER, safe=False).to_numpy(zero_copy_only=False)

    def times(self, name: str, unit: str) -> np.ndarray:
        """The column as `[N]` float64 seconds, from numbers in `unit` or from dates; an empty field raises DataError.

        Dates follow ISO 8601, either all without a zone (UTC) or all with an offset.
        """
        column, kind = self._trimmed(name), _NUMBER
        if column.null_count:
            raise self.fault(pc.index(column.is_null(), True).as_py(), f"empty '{name}'")
        if is_text(column.type):
            kind = _kind(column[:1]) or _NUMBER
            if (row := _first_fault(column, kind)) is not None:
                alone = _kind(column[row : row + 1])
                what = "neither a number nor a date" if alone is None else "but the first value is of another kind"
                raise self.fault(row, f"'{name}' is '{_show(column[row])}', {what}")
        elif pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
            kind = _MOMENT
        if kind != _NUMBER:
            return column.cast(kind, safe=False).cast(pa.int64()).to_numpy() * 1e-6
        seconds = self._as_numbers(name, column) * _SECONDS[unit]
        wrong = ~np.isfinite(seconds)
        if wrong.any():
            row = int(wrong.argmax())
            raise self.fault(row, f"'{name}' is '{_show(column[row])}', which is no time")
        return seconds


def _show(value: pa.Scalar) -> str:
    text = str(value.as_py())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _kind(value: pa.Array) -> pa.DataType | None:
    return next((kind for kind in (_NUMBER, _MOMENT, _ZONED) if _casts(value, kind)), None)


def _first_fault(column: pa.Array, to: pa.DataType, safe: bool = False) -> int | None:
    """The first row that does not cast to the type `to`, or None."""
    if _casts(column, to, safe):
        return None
    # A prefix casts as long as it ends before the first fault.
    return bisect_left(range(len(column)), True, key=lambda i: not _casts(column[: i + 1], to, safe))


def _casts(column: pa.Array, to: pa.DataType, safe: bool = False) -> bool:
    try:
        # A safe cast to float64 would refuse integers beyond 2^53.
        column.cast(to, safe=safe)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False
    return True
