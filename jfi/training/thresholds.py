"""Rules beside that of a label: its column compared with a smaller and with a greater number."""

import re
from collections.abc import Iterable

import numpy as np

from jfi.data.io.table import Table
from jfi.data.schema.rules import only_column, parse_rule, single_threshold


def rules_beside(label: str, tables: Iterable[Table]) -> list[str]:
    """At most two rules that split the rows on either side of the label's threshold most evenly.

    Args:
        label: `data.label`.
        tables: the parts of the interactions.

    Returns:
        No rule for a side with fewer than two values. An empty list for a label that is not one comparison of a column
        with a number by >=, >, <= or <.

    Example:
        >>> import pyarrow as pa
        >>> ratings = pa.table({"rating": [1, 2, 3, 3, 4, 4, 5]})
        >>> rules_beside("rating >= 4", [Table("ratings", ratings, ["rating"], line=int)])
        ['rating >= 3', 'rating >= 5']
    """
    found = None if only_column(label) is not None else single_threshold(parse_rule(label))
    if found is None:
        return []
    column, compare, threshold = found
    values, counts = np.zeros(0), np.zeros(0, np.int64)
    for table in tables:
        numbers = table.numbers(column)
        more, times = np.unique(numbers[np.isfinite(numbers)], return_counts=True)
        joined, place = np.unique(np.concatenate([values, more]), return_inverse=True)
        values, counts = joined, np.bincount(place, np.concatenate([counts, times])).astype(np.int64)
    # Rows from values[cut] on are on one side, the others on the other one.
    from_value = compare in (">=", "<")
    cut = int(np.searchsorted(values, threshold, "left" if from_value else "right"))
    cuts = [_middle(counts, begin, end) for begin, end in ((0, cut), (cut, len(values)))]
    numbers = [values[one if from_value else one - 1] for one in cuts if one is not None]
    return [f"{_quoted(column)} {compare} {repr(float(number)).removesuffix('.0')}" for number in numbers]


def _middle(counts: np.ndarray, begin: int, end: int) -> int | None:
    """Returns where a cut leaves the most even numbers of rows on its sides; None if there is one value at most."""
    if end - begin < 2:
        return None
    below = counts[begin:end].cumsum()
    return begin + 1 + int(np.abs(2 * below[:-1] - below[-1]).argmin())


def _quoted(column: str) -> str:
    if re.fullmatch(r"[A-Za-z_]\w*", column) and column not in ("and", "or", "in", "not"):
        return column
    return f"'{column}'" if '"' in column else f'"{column}"'
