"""The label column, or a rule such as `rating >= 4` -> labels of 0 and 1."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from jfi.data.errors import DataError
from jfi.data.io.table import Table
from jfi.data.schema.rules import describe_values, only_column, parse_rule
from jfi.data.settings import Task
from jfi.utils.encoding import LARGEST_NUMBER


def label_columns(label: str) -> list[str]:
    """The column that a label names, or those that its rule compares.

    Raises:
        DataError: the label is neither a column nor a rule.
    """
    column = only_column(label)
    return parse_rule(label).columns if column is None else [column]


def read_labels(table: Table, label: str | None, task: Task = "binary") -> np.ndarray:
    """`[N]` float32, 0 or 1, or NaN for a row that is history only.

    Args:
        table: the interactions.
        label: None (every row is a positive), a column of 0 and 1, or a rule as `jfi.data.schema.rules` defines it.
        task: with "regression" the label is a column of finite numbers.

    Raises:
        DataError: a wrong rule, an absent column, or a value that is not 0 or 1, or not finite.
    """
    if label is None:
        return np.ones(len(table), np.float32)
    column = only_column(label)
    if column is None:
        return parse_rule(label).holds(table)
    values = table.numbers(column)
    if task == "regression":
        wrong = np.abs(values) > LARGEST_NUMBER
        if wrong.any():
            row = int(wrong.argmax())
            raise table.fault(row, f"label '{label}' is {values[row]:g}, not a finite number of float32")
        return values.astype(np.float32)
    outside = ~((values == 0) | (values == 1) | np.isnan(values))
    if outside.any():
        row = int(outside.argmax())
        rule = f"{label} >= {values[row]:g}"
        what = f"label '{label}' is {values[row]:g}, not 0 or 1"
        raise table.fault(row, f"{what}; did you mean a rule such as '{rule}'? data.task: regression predicts numbers")
    return values.astype(np.float32)


def check_labels(table: Table, label: str | None, values: np.ndarray) -> None:
    """Raises DataError for a rule that holds in every row or in none, with the values of its columns.

    Args:
        values: `[N]`, the labels that `read_labels` gave.
    """
    check_counts(table.name, label, *count_labels(values), lambda: [table])


def count_labels(values: np.ndarray) -> np.ndarray:
    """`[2]` int64, the number of rows with label 0 and with label 1."""
    return np.array([np.count_nonzero(values == 0), np.count_nonzero(values == 1)])


def check_counts(
    name: str, label: str | None, negatives: int, positives: int, tables: Callable[[], Iterable[Table]]
) -> None:
    """`check_labels` of a table in parts.

    Args:
        name: of the whole table, for messages.
        label: the config's label.
        negatives, positives: the number of rows with each label.
        tables: gives the parts, which are read again to show the values.
    """
    if label is None or only_column(label) is not None or bool(negatives) == bool(positives):
        return
    count = negatives + positives
    how = f"every one of the {count} rows is" if positives else f"none of the {count} rows is"
    raise DataError(f"{name}: label '{label}': {how} positive; {_describe(tables, label_columns(label))}")


def read_history(table: Table, rule: str) -> np.ndarray:
    """`[N]` bool, the rows that are events of histories.

    Args:
        table: the interactions.
        rule: `data.history`.

    Raises:
        DataError: a wrong rule, or an absent column.
    """
    return parse_rule(rule).holds(table) == 1


def check_history(name: str, rule: str, rows: int, events: int, tables: Callable[[], Iterable[Table]]) -> None:
    """Raises DataError for a rule that holds in no row, with the values of its columns.

    Args:
        name: of the table, for messages.
        rule: `data.history`.
        rows, events: the number of rows, and of those where the rule holds.
        tables: as of `check_counts`.
    """
    if rows and not events:
        known = _describe(tables, parse_rule(rule).columns)
        raise DataError(f"{name}: history '{rule}': none of the {rows} rows is an event; {known}")


@dataclass(frozen=True)
class AbsentValue:
    """A value that a setting's rule compares a column with and that no row has: probably misspelt."""

    setting: str
    rule: str
    column: str
    value: str

    def describe(self, tables: Callable[[], Iterable[Table]]) -> str:
        """A line for the summary."""
        known = _describe(tables, [self.column])
        return f"{self.setting} '{self.rule}': no row has the value '{self.value}'; {known}"


def absent_values(table: Table, rules: Iterable[tuple[str, str]]) -> list[AbsentValue]:
    """Returns the values that rules compare a column with and that no row of the table has.

    Args:
        table: the interactions.
        rules: the settings and their rules, as `DataConfig.rules` gives them.
    """
    return [
        AbsentValue(setting, rule, column, value)
        for setting, rule in rules
        for column, value in parse_rule(rule).absent_values(table)
    ]


def _describe(tables: Callable[[], Iterable[Table]], columns: list[str]) -> str:
    return "; ".join(f"values of '{name}': {describe_values(tables(), name)}" for name in columns)
