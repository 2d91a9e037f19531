"""Assigns rows to training, validation and test, and finds the history of each row.

Rows are sorted by (user, timestamp, item), so the history of a row is a range of rows: it starts at the first row of
the user, or `max_history` rows before its end, and ends before the first row of the same user and timestamp.
"""

import numpy as np

SPLITS = ("train", "validation", "test")


def history_ranges(user: np.ndarray, time: np.ndarray, max_history: int) -> tuple[np.ndarray, np.ndarray]:
    """`start, end [N]`: rows `start[i]:end[i]` are the newest `max_history` events of the user strictly before row i.

    >>> history_ranges(np.array([0, 0, 0, 1]), np.array([5.0, 7.0, 7.0, 9.0]), max_history=10)
    (array([0, 0, 0, 3]), array([0, 1, 1, 3]))
    """
    new_user = np.append(True, user[1:] != user[:-1])
    new_time = new_user | np.append(True, time[1:] != time[:-1])
    first, end = _last_true(new_user), _last_true(new_time)
    return np.maximum(first, end - max_history), end


def split_by_time(user: np.ndarray, time: np.ndarray, item: np.ndarray, fractions: list[float]) -> np.ndarray:
    """`[N]` int8, the index in SPLITS of each row: the rows ordered by (timestamp, user, item) are cut in three."""
    cuts = np.rint(np.cumsum(fractions[:2]) * len(user)).astype(np.int64)
    split = np.empty(len(user), np.int8)
    split[time_order(user, time, item)] = np.searchsorted(cuts, np.arange(len(user)), side="right")
    return split


def leave_one_out(user: np.ndarray, labeled: np.ndarray) -> np.ndarray:
    """`[N]` int8, the index in SPLITS of each row: tests on a user's last labeled row, validates on the one before.

    All other rows train, and all rows of a user with fewer than three labeled rows. An unlabeled row goes to the
    split of the next labeled row.
    """
    counts = np.bincount(user, weights=labeled).astype(np.int64)[user]
    up_to_here = np.cumsum(labeled)
    total_up_to_user = up_to_here[np.append(user[1:] != user[:-1], True)]
    left = total_up_to_user[np.cumsum(np.append(0, user[1:] != user[:-1]))] - up_to_here + labeled
    split = np.where(left <= 1, 2, np.where(left == 2, 1, 0))
    return np.where(counts >= 3, split, 0).astype(np.int8)


def time_order(user: np.ndarray, time: np.ndarray, item: np.ndarray) -> np.ndarray:
    """The rows in the order of (timestamp, user, item)."""
    return np.lexsort((item, user, time))


def _last_true(flags: np.ndarray) -> np.ndarray:
    """For each position the last true position at or before it; the first must be true."""
    return np.maximum.accumulate(np.where(flags, np.arange(len(flags)), 0))
