"""Columns that a loss reads: labels of 0 and 1 by a column or a rule such as `rating >= 4`, and the weight of a row."""

from collections.abc import Sequence

import numpy as np

from jfi.data.config import DataConfig, LabelConfig
from jfi.data.io.table import Table
from jfi.data.schema.rules import only_column, parse_rule
from jfi.utils.encoding import LARGEST_NUMBER

WEIGHT = "weight"
#: Before the name of a label that is not the first.
LABEL = "label_"


def read_labels(table: Table, one: LabelConfig) -> np.ndarray:
    """`[N]` float32, 0 or 1, or NaN for a row that is history only.

    Args:
        table: the interactions.
        one: the label. Its `label` is None (every row is a positive), a column of 0 and 1, or of finite numbers in a
            regression, or a rule as `jfi.data.schema.rules` defines it.

    Raises:
        DataError: a wrong rule, an absent column, or a value that is not 0 or 1, or not finite.
    """
    label, task = one.label, one.task
    if label is None:
        return np.ones(len(table), np.float32)
    column = only_column(label)
    if column is None:
        return parse_rule(label).holds(table)
    advice = f"; did you mean a rule such as '{label} == VALUE'?" if task != "regression" else ""
    values = table.numbers(column, advice)
    if task == "regression":
        wrong = np.abs(values) > LARGEST_NUMBER
    else:
        wrong = ~((values == 0) | (values == 1) | np.isnan(values))
    if wrong.any():
        row = int(wrong.argmax())
        value, advice = f"{values[row]:g}", "a label with task: regression predicts numbers"
        must = f"0 or 1; did you mean a rule such as '{label} >= {value}'? {advice}"
        must = "a finite number of float32" if task == "regression" else must
        raise table.fault(row, f"label '{label}' is {value}, not {must}")
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
        found[name] = read_labels(table, one)
    return found


def labels_of(config: DataConfig, label: np.ndarray, targets: dict[str, np.ndarray]) -> Sequence[np.ndarray]:
    """The column `[E]` of each of `config.trained_labels()`."""
    return (label, *(targets[name] for name in _further_labels(config)))


def _further_labels(config: DataConfig) -> dict[str, LabelConfig]:
    """Returns by the name of their column the trained labels but the first."""
    return {LABEL + one.name: one for one in config.trained_labels()[1:]}
