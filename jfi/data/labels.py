"""The label column, or a rule such as `rating >= 4` -> labels of 0 and 1."""

from collections.abc import Callable, Iterable

import numpy as np

from jfi.data.errors import DataError
from jfi.data.rules import describe_values, only_column, parse_rule
from jfi.data.table import Table


def label_columns(label: str) -> list[str]:
    """The column that a label names, or those that its rule compares.

    Raises:
        DataError: the label is neither a column nor a rule.
    """
    column = only_column(label)
    return parse_rule(label).columns if column is None else [column]


def read_labels(table: Table, label: str | None) -> np.ndarray:
    """`[N]` float32, 0 or 1, or NaN for a row that is history only.

    Args:
        label: None (every row is a positive), a column of 0 and 1, or a rule as `jfi.data.rules` defines it.

    Raises:
        DataError: a wrong rule, an absent column, or a value that is not 0 or 1.
    """
    if label is None:
        return np.ones(len(table), np.float32)
    column = only_column(label)
    if column is None:
        return parse_rule(label).holds(table)
    values = table.numbers(column)
    outside = ~((values == 0) | (values == 1) | np.isnan(values))
    if outside.any():
        row = int(outside.argmax())
        rule = f"{label} >= {values[row]:g}"
        raise table.fault(row, f"label '{label}' is {values[row]:g}, not 0 or 1; did you mean a rule such as '{rule}'?")
    return values.astype(np.float32)


def check_labels(table: Table, label: str | None, values: np.ndarray) -> None:
    """Raises DataError for a rule that holds in every row or in none, with the values of its columns.

    Args:
        values: `[N]`, the labels that `read_labels` gave.
    """
    check_counts(table.name, label, *count_labels(values), lambda: [table])


def count_labels(values: np.ndarray) -> np.ndarray:
    """`[2]` int64, the number of rows with label 0 and with label 1."""
    return np.bincount(values[~np.isnan(values)].astype(np.int64), minlength=2)


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
    known = "; ".join(f"values of '{column}': {describe_values(tables(), column)}" for column in label_columns(label))
    raise DataError(f"{name}: label '{label}': {how} positive; {known}")
