"""Ranges of rows, flattened; needs NumPy alone."""

import numpy as np


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the integers of each range `[start, start + length)`, concatenated.

    >>> ranges(np.array([7, 3]), np.array([2, 3]))
    array([7, 8, 3, 4, 5])
    """
    rows = (starts - (lengths.cumsum() - lengths)).repeat(lengths)
    rows += np.arange(len(rows))
    return rows
