"""Reads labels, which rows are events of histories, and dates from the columns of a log, as training does."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from jfi.data import DataError
from jfi.data.io.table import SourceReading, SourceRows
from jfi.data.schema.rules import label_columns, parse_rule, read_labels
from jfi.serving.validation import BadRequestError, Place
from jfi.state.layout import Log
from jfi.utils.encoding import text_of


class Meaning:
    """Reads the labels of rows, and which are events of histories.

    Raises:
        DataError: a rule is malformed.
    """

    def __init__(self, log: Log) -> None:
        self._log, self._warned = log, set[tuple[str, str]]()
        self._of_label = [] if log.label is None else label_columns(log.label)
        self._history = None if log.history is None else parse_rule(log.history)
        #: The columns that tell which rows are events of histories, and all that are read.
        self.of_history = [] if self._history is None else self._history.columns
        self.columns = list(dict.fromkeys([*self._of_label, *self.of_history]))

    def __call__(
        self, columns: Mapping[str, Sequence | np.ndarray | pa.Array], count: int, place: Place
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the labels `[N]` float32, NaN for none, and whether rows are events of histories, `[N]` bool.

        Args:
            columns: by name the values of N rows. Without all columns of the label no row has one.

        Raises:
            BadRequestError: a value is none that the label or the rule can be read from.
        """
        own = {name: columns[name] for name in self.columns if name in columns}
        try:
            return self.of_table(_as_table(own, self._log, place, count, self._warned))
        except DataError as fault:
            raise BadRequestError(str(fault)) from None

    def of_table(self, table: SourceRows) -> tuple[np.ndarray, np.ndarray]:
        """Returns the same of rows of a table; a fault is a DataError."""
        log, labels, in_history = self._log, np.ones(len(table), np.float32), np.ones(len(table), bool)
        if log.label is not None:
            has_label = all(name in table.known for name in self._of_label)
            labels = read_labels(table, log.label, log.task) if has_label else np.full_like(labels, np.nan)
        if self._history is not None:
            in_history = self._history.holds(table) == 1
        return labels, in_history


def times(dates: Sequence[str], log: Log, place: Place) -> np.ndarray:
    """Returns the seconds `[N]` float64 of dates, as a table's are read; a fault is a BadRequestError."""
    try:
        return _as_table({log.time: dates}, log, place, len(dates)).times(log.time, log.unit)
    except DataError as fault:
        raise BadRequestError(str(fault)) from None


@dataclass(frozen=True)
class _SentRows(SourceRows):
    """Rows of a body, whose faults have the place in it."""

    place: Place = field(default=lambda row, name: f"events[{row}].{name}")

    def fault(self, row: int, what: str) -> DataError:
        """See SourceRows."""
        for name in self.known:
            if match := re.match(rf"(label |empty )?'{re.escape(name)}' ?", what):
                told = what[match.end() :] or "is empty"
                return DataError(f"{self.place(row, name)} {told}")
        return DataError(f"{self.place(row, '')}: {what}")


def array_of(values: Sequence | np.ndarray | pa.Array) -> pa.Array:
    """Returns values as a table in memory would have them; those of several types as texts."""
    if isinstance(values, pa.Array):
        return values
    try:
        return pa.array(values)
    except (pa.ArrowException, TypeError, OverflowError):  # of several types
        return pa.array(map(text_of, values), pa.large_string())


def _as_table(
    columns: Mapping[str, Sequence | np.ndarray | pa.Array],
    log: Log,
    place: Place,
    count: int,
    warned: set | None = None,
) -> SourceRows:
    arrays = {"": pa.nulls(count)} | {name: array_of(values) for name, values in columns.items()}
    reading = SourceReading(tuple(log.missing_values), False, {}, set() if warned is None else warned)
    return _SentRows("events", pa.table(arrays), list(columns), lambda row: row, reading=reading, place=place)
