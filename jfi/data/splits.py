"""Assigns rows, which are sorted by (user, timestamp, item), to training, validation and test."""

import numpy as np

SPLITS = ("train", "validation", "test")


def split_by_time(user: np.ndarray, time: np.ndarray, item: np.ndarray, fractions: list[float]) -> np.ndarray:
    """`[N]` int8, the index in SPLITS of each row: the rows ordered by (timestamp, user, item) are cut in three."""
    cuts = time_cuts(len(user), fractions)
    split = np.empty(len(user), np.int8)
    split[time_order(user, time, item)] = np.searchsorted(cuts, np.arange(len(user)), side="right")
    return split


def time_cuts(count: int, fractions: list[float]) -> np.ndarray:
    """`[2]` int64, the places in the order of time at which validation and test begin."""
    return np.rint(np.cumsum(fractions[:2]) * count).astype(np.int64)


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
