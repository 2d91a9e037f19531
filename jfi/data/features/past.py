"""Sums over the rows of a key that are strictly older than a moment, for many keys and moments at once.

Rows are sorted by (key, moment). Those of a key that are older than a moment are then a range, which two binary
searches find, and a sum over them is the difference of two prefix sums. With values that are whole numbers, or
multiples of a power of 2, the prefix sums are exact, so that rows outside of the range cannot change a sum's last bit.
"""

from dataclasses import dataclass

import numpy as np

#: Keys up to this many times the number of rows are their own codes.
_DENSE = 4


@dataclass(frozen=True)
class Older:
    """Ranges of sorted rows, one for each of B questions.

    Args:
        first, end: `[B]` int64.
    """

    first: np.ndarray
    end: np.ndarray

    @property
    def count(self) -> np.ndarray:
        """`[B]` int64, the number of rows of each range."""
        return self.end - self.first

    def newest(self, most: int) -> "Older":
        """The newest rows of each range, at most this many."""
        return Older(np.maximum(self.first, self.end - most), self.end)


class Past:
    """N rows, sorted by key and moment.

    Args:
        key: `[N]` int64 from 0.
        moment: `[N]` int64 from 0, equal for rows of the same time and larger for later ones.

    Example:
        >>> past = Past(key=np.array([7, 7, 3, 7]), moment=np.array([0, 2, 1, 1]))
        >>> older = past.older(np.array([7, 7, 3, 8]), np.array([2, 0, 5, 5]))
        >>> older.count, past.sum(np.array([1, 10, 100, 1000]), older)
        (array([2, 0, 1, 0]), array([1001.,    0.,  100.,    0.]))
    """

    def __init__(self, key: np.ndarray, moment: np.ndarray) -> None:
        self._keys, code = None, key
        if len(key) and key.max() > _DENSE * len(key):
            self._keys, code = np.unique(key, return_inverse=True)
        self._moments = int(moment.max()) + 1 if len(moment) else 1
        # The codes are below a few times N, and so are the moments, so that the product does not overflow.
        place = code * self._moments + moment
        #: `[N]` the rows in the order of (key, moment).
        self.order = np.argsort(place, kind="stable")
        self._places = place[self.order]
        self._starts = np.append(0, np.cumsum(np.bincount(code)))

    def older(self, key: np.ndarray, moment: np.ndarray) -> Older:
        """The rows with a key that are strictly older than a moment, `[B]` int64 each; none with a key below 0."""
        code = self._codes(key)
        known = code >= 0
        # Beyond the last moment of the rows all of them are older.
        place = code * self._moments + np.minimum(moment, self._moments)
        # Searches in the order of the places find most of the way in the cache: 4 times faster, the sort included.
        order, end = np.argsort(place), np.empty(len(place), np.int64)
        end[order] = np.searchsorted(self._places, place[order])
        return Older(np.where(known, self._starts[code], 0), np.where(known, end, 0))

    def _codes(self, key: np.ndarray) -> np.ndarray:
        """The codes of keys, -1 for one that no row has."""
        if self._keys is None:
            return np.where((key >= 0) & (key < len(self._starts) - 1), key, -1)
        code = np.minimum(np.searchsorted(self._keys, key), len(self._keys) - 1)
        return np.where(self._keys[code] == key, code, -1)

    def sum(self, values: np.ndarray, older: Older) -> np.ndarray:
        """`[B]` float64, the sums of `values [N]` over the rows of each range."""
        prefix = self.prefix(values)
        return prefix[older.end] - prefix[older.first]

    def prefix(self, values: np.ndarray) -> np.ndarray:
        """`[N + 1]` float64: `prefix[end] - prefix[first]` is the sum over a range; for many questions in parts."""
        return np.append(0.0, np.cumsum(values[self.order], dtype=np.float64))

    def decayed_sum(
        self, values: np.ndarray, seconds: np.ndarray, half_life: float, older: Older, now: np.ndarray
    ) -> np.ndarray:
        """`[B]` float64, sums in which a row counts half for every half-life of its age.

        Args:
            values: `[N]`.
            seconds: `[N]` float64, the times of the rows.
            half_life: in seconds.
            older: the result of `older`.
            now: `[B]` float64, the times that ages are counted up to.
        """
        total, seconds = values[self.order].astype(np.float64), seconds[self.order]
        starts = np.diff(self._places // self._moments, prepend=-1) != 0
        # total[i] = value[i] + decay[i] * total[i - 1], by doubling: after a step a total covers twice as many rows.
        decay = np.exp2(np.where(starts, -np.inf, -np.diff(seconds, prepend=0.0) / half_life))
        longest = int(np.diff(np.append(np.flatnonzero(starts), len(starts))).max(initial=1))
        step = 1
        while step < longest:
            total[step:] += decay[step:] * total[:-step]
            decay[step:] *= decay[:-step]
            step *= 2
        result, some = np.zeros(len(now)), older.end > older.first
        last = older.end[some] - 1
        result[some] = total[last] * np.exp2((seconds[last] - now[some]) / half_life)
        return result
