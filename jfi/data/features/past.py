"""Sums over the rows of a key that are strictly older than a moment, for many keys and moments at once.

Rows are sorted by (key, moment). Those of a key that are older than a moment are then a range, which two binary
searches find, and a sum over them is the difference of two prefix sums. With values that are whole numbers, or
multiples of a power of 2, the prefix sums are exact, so that rows outside of the range cannot change a sum's last bit.
"""

from dataclasses import dataclass

import numpy as np

#: What places stay below.
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
        self._moments = int(moment.max()) + 1 if len(moment) else 1
        if len(key) and int(key.max()) >= _LARGEST // (self._moments + 1):
            self._keys, code = np.unique(key, return_inverse=True)
        #: `[N]` the rows in the order of (key, moment).
        self.order, self._sorted, self._places = _sort(code, moment, self._moments)
        # [N], where the rows of each row's key begin.
        self._starts = _first_of_equal(self._sorted)

    def older(self, key: np.ndarray, moment: np.ndarray) -> Older:
        """The rows with a key that are strictly older than a moment, `[B]` int64 each; none with a key below 0.

        Questions in the order of their moments take half of the time.
        """
        if not len(self.order):
            return Older(np.zeros_like(key), np.zeros_like(key))
        # Searches in the order of the places find most of the way in the cache. One more than the last moment of the
        # rows is the first place of the next key: all rows of the key are older.
        order, code, place = _sort(self._codes(key), np.minimum(moment, self._moments), self._moments)
        found = np.searchsorted(self._places, place)
        last = np.maximum(found - 1, 0)
        some = (found > 0) & (self._sorted.take(last) == code)
        first, end = np.empty(len(place), np.int64), np.empty(len(place), np.int64)
        first[order], end[order] = np.where(some, self._starts.take(last), 0), np.where(some, found, 0)
        return Older(first, end)

    def of_each_row(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each of the N rows those of its key that are strictly older: `[N]` int64 their number, and the sum.

        Args:
            values: `[N]`, what is summed.
        """
        end, prefix = _first_of_equal(self._places), self.prefix(values)
        count, total = np.empty(len(end), np.int64), np.empty(len(end))
        count[self.order] = end - self._starts
        total[self.order] = prefix.take(end) - prefix.take(self._starts)
        return count, total

    def _codes(self, key: np.ndarray) -> np.ndarray:
        """The codes of keys, -1 for one that no row has."""
        if self._keys is None:
            return np.minimum(key, self._sorted[-1] + 1)
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


def _sort(key: np.ndarray, moment: np.ndarray, moments: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sorts rows by (key, moment), equal ones in their order.

    Returns:
        The order `[N]` int64, and in this order the keys and key * moments + moment, `[N]` int64 each.
    """
    # A number that has the key and the row is sorted several times faster than rows by their keys.
    bits = len(key).bit_length()
    if len(key) and int(key.max()) < _LARGEST >> bits and (moment[1:] >= moment[:-1]).all():
        packed = key.astype(np.int64)
        packed <<= bits
        packed |= np.arange(len(key))
        packed.sort()
        order = packed & ((1 << bits) - 1)
        packed >>= bits
        return order, packed, packed * moments + moment.take(order)
    place = key * moments + moment
    order = np.argsort(place, kind="stable")
    return order, key.take(order).astype(np.int64, copy=False), place.take(order)


def _first_of_equal(values: np.ndarray) -> np.ndarray:
    """`[N]` int64, for sorted values the index of the first one that is equal."""
    first = np.arange(len(values))
    first[1:][values[1:] == values[:-1]] = 0
    return np.maximum.accumulate(first, out=first)
