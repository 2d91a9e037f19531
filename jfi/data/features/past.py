"""Sums over the rows of a key that are strictly older than a moment, for many keys and moments at once.

Rows are sorted by (key, moment). Those of a key that are older than a moment are then a range, which two binary
searches find, and a sum over them is the difference of two prefix sums. With values that are whole numbers, or
multiples of a power of 2, the prefix sums are exact, so that rows outside of the range cannot change a sum's last bit.
"""

from dataclasses import dataclass

import numpy as np

#: Codes of (key, moment) stay below.
_LARGEST = 1 << 62


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

    def sum(self, prefix: np.ndarray) -> np.ndarray:
        """`[B]`, the sums over each range of the values that have these prefix sums `[N + 1]`."""
        return prefix[self.end] - prefix[self.first]


@dataclass(frozen=True)
class Past:
    """N rows, sorted by key and moment. The arrays may be maps of files.

    Args:
        codes: `[N]` int64 ascending, key * moments + moment.
        moments: the number of moments.
        keys: `[K]` int64, distinct keys whose indices stand for them where `codes` would be too large; else empty.
        order: `[N]` integers, the rows as they were given to `sort`, in the order of `codes`; None where it is not
            known. Equal rows are in the order in which they were given.

    Example:
        >>> past = Past.sort(key=np.array([7, 7, 3, 7]), moment=np.array([0, 2, 1, 1]), moments=3)
        >>> older = past.older(np.array([7, 7, 3, 8]), np.array([2, 0, 3, 3]))
        >>> older.count, older.sum(past.prefix(np.array([1, 10, 100, 1000])))
        (array([2, 0, 1, 0]), array([1001.,    0.,  100.,    0.]))
    """

    codes: np.ndarray
    moments: int
    keys: np.ndarray
    order: np.ndarray | None = None

    @classmethod
    def sort(cls, key: np.ndarray, moment: np.ndarray, moments: int) -> "Past":
        """Sorts rows.

        Args:
            key: `[N]` int64 from 0.
            moment: `[N]` integers in `[0, moments)`, equal for rows of the same time and larger for later ones.
            moments: the number of moments.
        """
        keys = np.empty(0, np.int64)
        if len(key) and int(key.max()) >= _LARGEST // (moments + 1):
            keys, key = np.unique(key, return_inverse=True)
        codes = key * moments + moment
        if (codes[1:] >= codes[:-1]).all():
            return cls(codes, moments, keys, np.arange(len(codes)))
        bits = len(key).bit_length()
        # A number that has the key and the row is sorted several times faster than rows by their keys.
        if int(key.max()) < _LARGEST >> bits and (moment[1:] >= moment[:-1]).all():
            packed = key << bits
            packed |= np.arange(len(key))
            packed.sort()
            order = packed & ((1 << bits) - 1)
        else:
            order = np.argsort(codes, kind="stable")
        return cls(codes.take(order), moments, keys, order)

    def older(self, key: np.ndarray, moment: np.ndarray) -> Older:
        """The rows with a key that are strictly older than a moment, `[B]` int64 each; none with a key below 0."""
        if len(self.keys):
            index = np.minimum(np.searchsorted(self.keys, key), len(self.keys) - 1)
            key = np.where(self.keys[index] == key, index, -1)
        elif len(self.codes):
            key = np.minimum(key, self.codes[-1] // self.moments + 1)
        start = np.maximum(key, -1) * self.moments
        code = start + np.minimum(moment, self.moments)
        # Searches in the order of the codes find most of the way in the cache.
        order = np.argsort(code)
        first, end = np.empty(len(code), np.int64), np.empty(len(code), np.int64)
        end[order] = np.searchsorted(self.codes, code.take(order))
        first[order] = np.searchsorted(self.codes, start.take(order))
        return Older(first, end)

    def of_each_row(self, values: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray | None]:
        """For each of the N rows those of its key that are strictly older: `[N]` int64 their number, and the sum.

        Args:
            values: `[N]`, what is summed; None for nothing.
        """
        first, end, total = _first_of_equal(self.codes // self.moments), _first_of_equal(self.codes), None
        if values is not None:
            prefix, total = self.prefix(values), np.empty(len(end))
            total[self.order] = prefix.take(end) - prefix.take(first)
        count = np.empty(len(end), np.int64)
        count[self.order] = np.subtract(end, first, out=end)
        return count, total

    def prefix(self, values: np.ndarray) -> np.ndarray:
        """`[N + 1]` float64, the prefix sums of `values [N]`, which are in the order that `sort` was given."""
        return np.append(0.0, np.cumsum(values[self.order], dtype=np.float64))

    def decayed(self, values: np.ndarray, seconds: np.ndarray, half_life: float) -> np.ndarray:
        """`[N]` float64, for each sorted row the sum up to it of its key's rows, each halved by half-life of its age.

        Args:
            values: `[N]`, of the sorted rows.
            seconds: `[N]` float64, the times of the sorted rows.
            half_life: in seconds.
        """
        total = values.astype(np.float64)
        starts = np.diff(self.codes // self.moments, prepend=-1) != 0
        # total[i] = value[i] + decay[i] * total[i - 1], by doubling: after a step a total covers twice as many rows.
        decay = np.exp2(np.where(starts, -np.inf, -np.diff(seconds, prepend=0.0) / half_life))
        longest = int(np.diff(np.append(np.flatnonzero(starts), len(starts))).max(initial=1))
        step = 1
        while step < longest:
            total[step:] += decay[step:] * total[:-step]
            decay[step:] *= decay[:-step]
            step *= 2
        return total


def _first_of_equal(values: np.ndarray) -> np.ndarray:
    """`[N]` int64, for sorted values the index of the first one that is equal."""
    first = np.arange(len(values))
    first[1:][values[1:] == values[:-1]] = 0
    return np.maximum.accumulate(first, out=first)
