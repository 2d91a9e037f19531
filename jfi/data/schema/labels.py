"""Columns that a loss reads: labels of 0 and 1 by a column or a rule such as `rating >= 4`, and the weight of a row."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jfi.data.config import DataConfig, LabelConfig, Task
from jfi.data.errors import DataError
from jfi.data.io.table import Table
from jfi.data.schema.rules import describe_values, label_columns, only_column, parse_rule
from jfi.utils.encoding import LARGEST_NUMBER

WEIGHT = "weight"
#: Before the name of a label that is not the first.
LABEL = "label_"


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


def target_names(config: DataConfig) -> list[str]:
    """The names of the columns `[E]` float32 of `Events.targets`."""
    return [*([] if config.weight is None else [WEIGHT]), *_further_labels(config)]


def read_targets(table: Table, config: DataConfig, label: np.ndarray) -> dict[str, np.ndarray]:
    """The columns `target_names`, each `[N]` float32.

    Args:
        table: the interactions.
        config: the section `data`.
        label: `[N]`, the first label. A row without one is no sample, needs no weight, and gets 1.

    Raises:
        DataError: a column is absent, a weight is not positive and finite, or a label is malformed.
    """
    found = {}
    if config.weight is not None:
        values = table.numbers(config.weight).astype(np.float32)
        is_wrong = ~(np.isfinite(values) & (values > 0))
        if (wrong := is_wrong & ~np.isnan(label)).any():
            row = int(wrong.argmax())
            shown = "empty" if np.isnan(values[row]) else f"{table.numbers(config.weight)[row]:g}"
            raise table.fault(row, f"weight '{config.weight}' is {shown}, must be positive and finite")
        found[WEIGHT] = np.where(is_wrong, np.float32(1), values)
    for name, one in _further_labels(config).items():
        found[name] = read_labels(table, one.label, one.task)
    return found


def labels_of(config: DataConfig, label: np.ndarray, targets: dict[str, np.ndarray]) -> Sequence[np.ndarray]:
    """The column `[E]` of each of `config.trained_labels()`."""
    return (label, *(targets[name] for name in _further_labels(config)))


def _further_labels(config: DataConfig) -> dict[str, LabelConfig]:
    """Returns by the name of their column the trained labels but the first."""
    return {LABEL + one.name: one for one in config.trained_labels()[1:]}


def count_labels(values: np.ndarray) -> np.ndarray:
    """`[2]` int64, the number of rows with label 0 and with label 1."""
    return np.array([np.count_nonzero(values == 0), np.count_nonzero(values == 1)])


def check_counts(
    name: str, label: str | None, negatives: int, positives: int, tables: Callable[[], Iterable[Table]]
) -> None:
    """Raises DataError for a rule that holds in every row or in none, with the values of its columns.

    Args:
        name: of the whole table, for messages.
        label: the config's label.
        negatives, positives: the number of rows with each label.
        tables: gives the parts of the table, which are read again to show the values.
    """
    if label is None or only_column(label) is not None or bool(negatives) == bool(positives):
        return
    count = negatives + positives
    how = f"every one of the {count} rows is" if positives else f"none of the {count} rows is"
    raise DataError(f"{name}: label '{label}': {how} positive; {_describe(tables, label_columns(label))}")


def check_history(name: str, rule: str, rows: int, events: int, tables: Callable[[], Iterable[Table]]) -> None:
    """Raises DataError if `data.history` holds in no row, with the values of its columns; arguments as above."""
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
