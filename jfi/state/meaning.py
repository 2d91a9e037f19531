"""Reads labels, which rows are events of histories, and dates from the columns of a log, as training does."""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from jfi.data import DataError
from jfi.data.io.table import SourceRows
from jfi.data.schema.rules import label_columns, parse_rule, read_labels
from jfi.serving.validation import BadRequestError
from jfi.state.layout import Log
from jfi.utils.encoding import text_of


class Meaning:
    """Reads the labels of rows, and which are events of histories.

    Args:
        log: says what the columns mean.

    Raises:
        DataError: a rule is malformed.
    """

    def __init__(self, log: Log) -> None:
        self._label, self._task = log.label, log.task
        self._of_label = [] if log.label is None else label_columns(log.label)
        self._history = None if log.history is None else parse_rule(log.history)
        #: The columns that tell which rows are events of histories.
        self.of_history = [] if self._history is None else self._history.columns

    def __call__(self, columns: Mapping[str, Sequence | np.ndarray], count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the labels `[N]` float32, NaN for none, and whether rows are events of histories, `[N]` bool.

        Args:
            columns: by name the values of N rows. Without all columns of the label no row has one.
            count: the number of rows.

        Raises:
            BadRequestError: a value is none that the label or the rule can be read from.
        """
        labels, in_history = np.ones(count, np.float32), np.ones(count, bool)
        try:
            names = [name for name in {*self._of_label, *self.of_history} if name in columns]
            table = _as_table({name: columns[name] for name in names}, count)
            if self._label is not None:
                has_label = all(name in columns for name in self._of_label)
                labels = read_labels(table, self._label, self._task) if has_label else np.full_like(labels, np.nan)
            if self._history is not None:
                in_history = self._history.holds(table) == 1
        except DataError as fault:
            raise BadRequestError(str(fault)) from None
        return labels, in_history


def times(name: str, dates: Sequence[str], unit: str) -> np.ndarray:
    """Returns the seconds `[N]` float64 of dates, as a table's are read; a fault is a BadRequestError."""
    try:
        return _as_table({name: dates}, len(dates)).times(name, unit)
    except DataError as fault:
        raise BadRequestError(str(fault)) from None


def _as_table(columns: Mapping[str, Sequence | np.ndarray], count: int) -> SourceRows:
    arrays = {"": pa.nulls(count)}
    for name, values in columns.items():
        try:
            arrays[name] = pa.array(values)
        except (pa.ArrowException, TypeError, OverflowError):  # of several types
            arrays[name] = pa.array(map(text_of, values), pa.large_string())
    return SourceRows("events", pa.table(arrays), list(columns), lambda row: row)
