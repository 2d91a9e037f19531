"""The label column, or a rule such as `rating >= 4` -> labels of 0 and 1."""

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
    if label is None or only_column(label) is not None:
        return
    labels = values[~np.isnan(values)]
    if not len(labels) or labels.min() != labels.max():
        return
    how = f"every one of the {len(labels)} rows is" if labels[0] else f"none of the {len(labels)} rows is"
    raise DataError(f"{table.name}: label '{label}': {how} positive; {_describe(table, label_columns(label))}")


def read_history(table: Table, rule: str) -> np.ndarray:
    """`[N]` bool, the rows that are events of histories.

    Args:
        table: the interactions.
        rule: `data.history`.

    Raises:
        DataError: a wrong rule, an absent column, or a rule that holds in no row, with the values of its columns.
    """
    parsed = parse_rule(rule)
    events = parsed.holds(table) == 1
    if not events.any():
        known = _describe(table, parsed.columns)
        raise DataError(f"{table.name}: history '{rule}': none of the {len(table)} rows is an event; {known}")
    return events


def warn_of_absent_values(table: Table, label: str | None, history: str | None) -> list[str]:
    """A line for each value that `data.label` or `data.history` compares a column with and that no row has."""
    rules = {"label": None if label is None or only_column(label) is not None else label, "history": history}
    return [
        f"{name} '{rule}': no row has the value '{value}'; {_describe(table, [column])}"
        for name, rule in rules.items()
        if rule is not None
        for column, value in parse_rule(rule).absent_values(table)
    ]


def _describe(table: Table, columns: list[str]) -> str:
    return "; ".join(f"values of '{name}': {describe_values(table, name)}" for name in columns)
