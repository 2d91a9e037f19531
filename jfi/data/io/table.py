"""A table as read from files: its columns as texts, numbers or times, with the line of every fault."""

import logging
import re
from bisect import bisect_left
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data.errors import DataError
from jfi.data.io.arrays import TEXT, as_float64, as_text, as_type, common_type, flatten, is_list, text_lists
from jfi.utils.encoding import PER_SECOND, finite_numbers, text_of
from jfi.utils.errors import suggest

_log = logging.getLogger(__name__)

#: Rows that are read at a time.
BLOCK = 1 << 18
_NUMBER, _MOMENT, _ZONED = pa.float64(), pa.timestamp("us"), pa.timestamp("us", "UTC")
#: Texts by which programs write a missing value.
_MARKS = pa.array(["\\N", "NULL", "null", "nan", "NaN", "NAN", "None", "NA", "N/A", "<NA>"], TEXT)
_FORMS = "; a date is of ISO 8601, such as 2020-01-31 23:59:00, and may end in an offset such as +01:00, Z or UTC"
# A value longer than this is cut in messages.
_SHOWN = 80


@dataclass(frozen=True)
class SourceReading:
    """State that the tables of one source, read a block after another, share.

    Args:
        missing_values: texts that mean a missing value.
        is_configured: whether a config names the source, so that messages advise on its settings.
        time_kinds: by column of texts the kind of its first time: a number, a time, or a time with an offset.
        warned: columns and values that a warning has named.
    """

    missing_values: tuple[str, ...] = ()
    is_configured: bool = True
    time_kinds: dict[str, pa.DataType] = field(default_factory=dict)
    warned: set[tuple[str, str]] = field(default_factory=set)


@dataclass(frozen=True)
class SourceRows:
    """N rows and where they come from.

    Args:
        name: the file as the config names it, or the origin of a table without a file.
        data: the columns in use.
        known: names of all columns, for messages.
        line: from a row of `data` to its line (or row) in the file, for messages.
        parts: the blocks of rows that a joined table is made of.
        reading: what the tables of one source have in common.
        left_out: the number of rows of the source that `with_ids` has left out here.
    """

    name: str
    data: pa.Table
    known: list[str]
    line: Callable[[int], int]
    parts: Sequence["SourceRows"] = ()
    reading: SourceReading = field(default_factory=SourceReading)
    left_out: int = 0

    def __len__(self) -> int:
        return self.data.num_rows

    def cut(self, size: int) -> "Iterator[SourceRows]":
        """Yields the rows as tables of at most `size` rows, at least one."""
        for start in range(0, max(len(self), 1), size):
            yield replace(self, data=self.data.slice(start, size), line=lambda row, start=start: self.line(start + row))

    def with_ids(self, names: Sequence[str]) -> "SourceRows":
        """Returns the rows that have a value in each of the columns, as far as the table has them."""
        is_missing = np.zeros(len(self), bool)
        for name in set(names).intersection(self.known):
            is_missing |= self.strings(name).is_null().to_numpy(zero_copy_only=False)
        if not is_missing.any():
            return self
        rows = np.flatnonzero(~is_missing)
        data, left_out = self.data.take(pa.array(rows)), int(is_missing.sum())
        return replace(self, data=data, line=lambda row: self.line(int(rows[row])), left_out=left_out)

    def with_column(self, name: str, value: str | None) -> "SourceRows":
        """Returns the table with a further column, which holds `value` in each row."""
        column = pa.nulls(len(self)) if value is None else pa.repeat(pa.scalar(value, TEXT), len(self))
        return replace(self, data=self.data.append_column(name, column), known=[*self.known, name])

    def location(self, row: int) -> str:
        """Returns `file:line` of a row."""
        for part in self.parts:
            if row < len(part):
                return part.location(row)
            row -= len(part)
        return f"{self.name}:{self.line(row)}"

    def fault(self, row: int, what: str) -> DataError:
        """Returns the error for a row."""
        return DataError(f"{self.location(row)}: {what}")

    def column(self, name: str) -> pa.Array:
        """Returns the column in one piece, without dictionaries; texts are large_string.

        Raises:
            DataError: there is no such column.
        """
        self.require(name)
        return flatten(self.data.column(name))

    def require(self, name: str, note: str = "") -> None:
        """Raises DataError, with the note after the name, if there is no such column."""
        if name not in self.known:
            hint = header_hint(self.known) if self.reading.is_configured else ""
            raise DataError(f"{self.name}: no column '{name}'{note}; {suggest(name, self.known)}{hint}")

    def strings(self, name: str) -> pa.Array:
        """Returns the column as texts (large_string) by the rule of `jfi.utils.encoding.text_of`, null where missing.

        Raises:
            DataError: there is no such column, or it has values without a text.
        """
        column = self.column(name)
        kind = column.type
        if pa.types.is_nested(kind):
            raise DataError(f"{self.name}: column '{name}' has type {kind}, but must have one value per row")
        try:
            return as_text(column, partial(self._known_values, name))
        except pa.ArrowException:
            if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
                row = first_fault(lambda values: values.cast(pa.string()), column)
                raise self.fault(row, f"'{name}' has type {kind}, and this value is not UTF-8 text") from None
            raise DataError(f"{self.name}: column '{name}' has type {kind}, which has no text") from None

    def _known_values(self, name: str, texts: pa.Array) -> pa.Array:
        """Returns distinct texts, null where they mean a missing value; warns of others that probably mean one."""
        missing = [text for value in self.reading.missing_values if (text := text_of(value)) is not None]
        if missing and pc.any(is_missing := pc.is_in(texts, pa.array(missing, TEXT))).as_py():
            texts = pc.if_else(is_missing, None, texts)
        for mark in texts.filter(pc.is_in(texts, _MARKS)).to_pylist():
            if (name, mark) not in self.reading.warned:
                self.reading.warned.add((name, mark))
                cure = "add it to data.missing_values" if self.reading.is_configured else "leave it empty"
                advice = f"if it means a missing value, {cure}"
                _log.warning("%s: column '%s' has the value '%s'; %s", self.name, name, mark, advice)
        return texts

    def ids(self, name: str, advice: str = "") -> pa.Array:
        """Returns the column as `strings` does; a missing value raises DataError.

        Its message ends in the advice where a config names the source.
        """
        column = self.strings(name)
        if column.null_count:
            advice = advice if self.reading.is_configured else ""
            raise self.fault(pc.index(column.is_null(), True).as_py(), f"empty '{name}'{advice}")
        return column

    def unique_ids(self, name: str, advice: str = "") -> pa.Array:
        """Returns the column as `ids` does; a value that appears twice raises DataError."""
        column = self.ids(name, advice)
        first = pc.index_in(column, value_set=column).to_numpy()
        again = first != np.arange(len(first))
        if again.any():
            row = int(again.argmax())
            raise self.fault(row, f"'{name}' {column[row]} is already in {self.location(int(first[row]))}")
        return column

    def categories(self, name: str, separators: dict[str, str]) -> pa.Array:
        """Returns the column as `strings` does, or as lists of texts if it holds lists or has a separator.

        Raises:
            DataError: there is no such column, or it has values without a text.
        """
        column = self.column(name)
        if not is_list(column.type) and name not in separators:
            return self.strings(name)
        try:
            lists = column if is_list(column.type) else pc.split_pattern(as_text(column), separators[name])
            return text_lists(lists, partial(self._known_values, name))
        except pa.ArrowException:
            what = f"has type {column.type}, but it must hold texts or numbers, or lists of these"
            raise DataError(f"{self.name}: column '{name}' {what}") from None

    def numbers(self, name: str, advice: str = "") -> np.ndarray:
        """Returns the column as `[N]` float64, NaN where missing; true is 1 and false is 0.

        Args:
            name: of the column.
            advice: end of the message about a value that is not a number.

        Raises:
            DataError: there is no such column, or a value is not a number.
        """
        column = self._present(name)
        numbers, row = _convert(as_float64, column)
        if row is not None:
            value = _show(column[row])
            if not advice and self.reading.is_configured and value in _MARKS.to_pylist():
                advice = f"; data.missing_values lists texts that mean a missing value, such as [{value}]"
            if re.search(r"\d[.,]\d", value):
                advice += "; a number has digits and one decimal point, without signs for thousands or a currency"
                advice += ", such as 1060.45"
            raise self.fault(row, f"'{name}' is '{value}', not a number{advice}")
        numbers = numbers.to_numpy(zero_copy_only=False)
        missing = finite_numbers(self.reading.missing_values)
        return np.where(np.isin(numbers, missing), np.nan, numbers) if missing else numbers

    def _present(self, name: str) -> pa.Array:
        """Returns the column with null for texts that mean a missing value."""
        column = self.column(name)
        if column.type == TEXT:
            is_missing = pc.is_in(column, pa.array(["", *self.reading.missing_values], TEXT))
            column = pc.if_else(is_missing, None, column) if pc.any(is_missing).as_py() else column
        return column

    def times(self, name: str, unit: str) -> np.ndarray:
        """Returns the column as `[N]` float64 seconds, from numbers in `unit` or from dates.

        Dates follow ISO 8601, either all without a zone (UTC) or all with an offset; " UTC" at the end is one. A
        fraction is cut after microseconds.

        Raises:
            DataError: there is no such column, a value is missing, is no time, or is of another kind than the first.
        """
        column, kind = self._present(name), _NUMBER
        if column.null_count:
            raise self.fault(pc.index(column.is_null(), True).as_py(), f"empty '{name}'")
        if not len(column):
            return np.zeros(0)
        if column.type == TEXT:
            kind = _kind(column[:1]) or _NUMBER
        elif pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
            kind = _ZONED if pa.types.is_timestamp(column.type) and column.type.tz else _MOMENT
        first = self.reading.time_kinds.setdefault(name, kind)
        if first != kind:
            raise self.fault(0, f"'{name}' is '{_show(column[0])}', {_differs(kind, first)}")
        if kind == _NUMBER and column.type != TEXT:
            seconds = self.numbers(name) / PER_SECOND[unit]
        else:
            times, row = _convert(partial(_as_time, kind=first), column)
            if row is not None:
                alone = _kind(column[row : row + 1])
                what = f"neither a number nor a date{_FORMS}" if alone is None else _differs(alone, first)
                raise self.fault(row, f"'{name}' is '{_show(column[row])}', {what}")
            times = times.to_numpy(zero_copy_only=False)
            seconds = times / (PER_SECOND[unit] if kind == _NUMBER else 1e6)
        wrong = ~np.isfinite(seconds)
        if wrong.any():
            row = int(wrong.argmax())
            raise self.fault(row, f"'{name}' is '{_show(column[row])}', which is no time")
        return seconds


def columns_in(data: pa.Table, wanted: Container[str]) -> pa.Table:
    """Returns the columns that are in `wanted`, or a column of nulls where none is: the number of rows stays."""
    names = [name for name in data.column_names if name in wanted]
    return data.select(names) if names else pa.table({"": pa.nulls(len(data))})


def of_other_kind(has_lists: bool) -> str:
    """Returns what is wrong with a list among single values, or with a single value among lists."""
    here, there = ("a list", "a single value") if has_lists else ("a single value", "a list")
    return f"is {here} here and {there} in other rows; it must be of one kind"


def join_tables(tables: Sequence[SourceRows]) -> SourceRows:
    """Returns one table of the rows of several, at least one, which have the same columns."""
    first, last = tables[0], tables[-1]
    if len(tables) == 1:
        return first
    data = {name: _join(tables, name) for name in first.data.column_names if name in first.known}
    joined = pa.table(data or {"": pa.nulls(sum(map(len, tables)))}).replace_schema_metadata(first.data.schema.metadata)
    name = first.name if first.name == last.name else f"{first.name} to {last.name}"
    left_out = sum(table.left_out for table in tables)
    return replace(first, name=name, data=joined, parts=tables, left_out=left_out)


def _join(tables: Sequence[SourceRows], name: str) -> pa.ChunkedArray:
    columns = [table.data.column(name) for table in tables]
    kind = common_type({column.type for column in columns})
    return pa.chunked_array([as_type(chunk, kind) for column in columns for chunk in column.chunks], kind)


def header_hint(names: Sequence[str]) -> str:
    """Returns advice for messages where names of columns look like values, else ""."""
    if not finite_numbers(names):
        return ""
    return "; the first line seems to be a row: name the columns by data.header if the file has no header"


def _show(value: pa.Scalar) -> str:
    text = str(value.as_py())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _as_time(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Returns numbers as float64, and dates as int64 microseconds."""
    if kind == _NUMBER:
        return column.cast(kind)
    if pa.types.is_timestamp(column.type) and column.type.unit == "ns":
        column = pc.floor_temporal(column, unit="microsecond")
    if column.type == TEXT and not _works(partial(column.cast, kind)):
        # At most six digits of a fraction, and Z for UTC, which is all that Arrow takes.
        column = pc.replace_substring_regex(column, r"(\.[0-9]{6})[0-9]{1,3}($|[^0-9])", r"\1\2")
        column = pc.replace_substring_regex(pc.utf8_trim_whitespace(column), r" ?(?:UTC|GMT|Z)$", "Z")
    return column.cast(kind, safe=False).cast(pa.int64())


def _differs(kind: pa.DataType, first: pa.DataType) -> str:
    """Returns how the kind of a time differs from that of the column's first value."""
    if _NUMBER in (kind, first):
        names = ("a number" if one == _NUMBER else "a date" for one in (kind, first))
        return "{}; the first value is {}".format(*names)
    has = ("has a time zone offset", "has none") if kind == _ZONED else ("has no time zone offset", "has one")
    return "which {}; the first value {}".format(*has)


def _kind(value: pa.Array) -> pa.DataType | None:
    """Returns the kind of a single text: a number, a time, a time with an offset, or None."""
    return next((kind for kind in (_NUMBER, _MOMENT, _ZONED) if _works(partial(_as_time, value, kind))), None)


def _convert(convert: Callable[[pa.Array], pa.Array], column: pa.Array) -> tuple[pa.Array | None, int | None]:
    """Returns the converted column, or the first row that does not convert."""
    try:
        return convert(column), None
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None, first_fault(convert, column)


def first_fault(convert: Callable[[pa.Array], Any], column: pa.Array | pa.ChunkedArray) -> int:
    """Returns the first row of a column for which `convert`, which fails for the column, fails."""
    # A prefix converts as long as it ends before the first fault.
    prefixes = range(1, len(column) + 1)
    return bisect_left(prefixes, True, key=lambda count: not _works(partial(convert, column[:count])))


def _works(convert: Callable[[], Any]) -> bool:
    try:
        convert()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False
    return True
