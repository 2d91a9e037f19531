"""How raw values become the ids and numbers that a model reads; needs NumPy alone.

Training (`jfi.data`) encodes whole columns and serving (`jfi.serving`) encodes requests with these same functions, so
that a value has one id in both.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import repeat

import numpy as np

#: Id of a value that is missing or that the training rows do not have.
UNKNOWN = 0


class Vocabulary:
    """The known values of a categorical column; ids count from 1 in their order.

    Args:
        values: distinct strings; a list, or another sequence.

    Example:
        >>> Vocabulary(["drama", "war"]).ids(["war", None, "opera", "drama"])
        array([2, 0, 0, 1])
    """

    def __init__(self, values: Sequence[str]) -> None:
        self.values = values

    @property
    def num_ids(self) -> int:
        """All ids are below it."""
        return len(self.values) + 1

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {value: i for i, value in enumerate(self.values, 1)}

    def ids(self, values: Sequence[str | None]) -> np.ndarray:
        """`[N]` int64 ids of N values; `UNKNOWN` for None and for a value that is not in the vocabulary."""
        return np.fromiter(map(self._ids.get, values, repeat(UNKNOWN)), np.int64, len(values))


def quantile_ids(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """`[N]` int64 ids of numbers by the interval they fall in.

    Args:
        values: `[N]` float64; NaN and the infinities get `UNKNOWN`.
        edges: `[E]` ascending. Id 1 is for values below the first edge, id `E + 1` for values from the last one on.

    Example:
        >>> quantile_ids(np.array([0.5, 1.0, np.nan, 7.0]), np.array([1.0, 5.0]))
        array([1, 2, 0, 3])
    """
    ids = np.searchsorted(edges, values, side="right") + 1
    return np.where(np.isfinite(values), ids, UNKNOWN).astype(np.int64)


def standardize(values: np.ndarray, mean: float, deviation: float) -> np.ndarray:
    """`[N]` float32 of numbers `[N]` float64, less the mean and over the standard deviation of the training rows.

    A missing value (NaN or infinite) becomes 0, the mean.
    """
    return np.nan_to_num((values - mean) / deviation, posinf=0.0, neginf=0.0).astype(np.float32)


def age_buckets(seconds: np.ndarray, num_buckets: int) -> np.ndarray:
    """`[N]` int64 buckets `1 + floor(log2(age))` of ages, clipped to `[0, num_buckets)`.

    Args:
        seconds: `[N]` float64, at least 0. An age below one second is in bucket 0.
        num_buckets: number of buckets.

    Example:
        >>> age_buckets(np.array([0.0, 0.5, 1.0, 3.9, 4.0, 1e9]), 8)
        array([0, 0, 1, 2, 3, 7])
    """
    buckets = np.right_shift(seconds.view(np.int64), 52)  # sign and exponent of a float64, the exponent biased by 1023
    buckets -= 1022
    return buckets.clip(0, num_buckets - 1, out=buckets)
