"""The label column, or a rule such as `rating >= 4` -> labels of 0 and 1."""

import operator
import re

import numpy as np
import pyarrow.compute as pc

from jfi.data.errors import DataError
from jfi.data.table import Table

_RULE = re.compile(r"\s*(?P<column>.+?)\s*(?P<compare>>=|<=|==|!=|>|<)\s*(?P<value>.+?)\s*")
_COMPARE = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


def label_column(label: str) -> str:
    """The column that a label names or that its rule compares."""
    rule = _RULE.fullmatch(label)
    return label if rule is None else rule["column"]


def read_labels(table: Table, label: str | None) -> np.ndarray:
    """`[N]` float32, 0 or 1, or NaN for a row that is history only.

    Args:
        label: None (every row is a positive), a column, or a rule `<column> <comparison> <value>`. A value that is not
            a number is compared as a string, with == or !=.
    """
    if label is None:
        return np.ones(len(table), np.float32)
    rule = _RULE.fullmatch(label)
    if rule is None:
        values = table.numbers(label)
        outside = ~((values == 0) | (values == 1) | np.isnan(values))
        if outside.any():
            row = int(outside.argmax())
            rule = f"{label} >= {values[row]:g}"
            raise table.fault(
                row, f"label '{label}' is {values[row]:g}, not 0 or 1; did you mean a rule such as '{rule}'?"
            )
        return values.astype(np.float32)
    column, compare, value = rule["column"], rule["compare"], rule["value"]
    try:
        threshold = float(value)
    except ValueError:
        if compare not in ("==", "!="):
            raise DataError(f"label rule '{label}': '{value}' is not a number; compare it with == or !=") from None
        strings = table.strings(column)
        hit = _COMPARE[compare](strings.to_numpy(zero_copy_only=False), value)
        return np.where(pc.is_null(strings).to_numpy(zero_copy_only=False), np.nan, hit).astype(np.float32)
    values = table.numbers(column)
    return np.where(np.isnan(values), np.nan, _COMPARE[compare](values, threshold)).astype(np.float32)
