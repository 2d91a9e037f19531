"""Sums over the rows of a key that are strictly older than a moment, for many keys and moments at once.

Rows are sorted by (key, moment). Those of a key that are older than a moment are then a range, which two binary
searches find, and a sum over them is the difference of two prefix sums. With values that are whole numbers, or
multiples of a power of 2, the prefix sums are exact, so that rows outside of the range cannot change a sum's last bit.

Arrays as long as the rows are made by a function `new` that is given, and may be maps of files. Other memory is
bounded: rows are sorted, and values computed, a block at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jfi.events.events import New, index_type
from jfi.utils.jagged import blocks

#: Gives the values of rows `[n]`, which are numbered as those of `Past.sort`.
Values = Callable[[np.ndarray], np.ndarray]

#: Codes of (key, moment) stay below.
_LARGEST = 1 << 62
#: Rows of a block, which are sorted together.
_AT_ONCE = 1 << 21
#: Rows of a block of decayed sums, which stays in the cache, and of those before it that it reads, a power of 2.
_IN_CACHE, _BEFORE = 1 << 16, 1 << 12
#: Rows from which it is learnt where a group of rows begins, for each group.
_SAMPLE = 1 << 12
#: The first rows of all keys are kept in memory if there are no more.
_MANY_KEYS = 1 << 21


@dataclass(frozen=True)
class Tally:
    """Positives among rows, `[B]` float64 each."""

    positives: np.ndarray
    count: np.ndarray

    def rate(self, expected: np.ndarray | float, smoothing: float) -> np.ndarray:
        """`[B]`, the share of positives as if there were `smoothing` more rows, of the rate `expected`."""
        return (self.positives + smoothing * expected) / (self.count + smoothing)


@dataclass(frozen=True)
class Older:
    """Ranges of sorted rows, one for each of B queries.

    Args:
        first, end: `[B]` int64.
    """

    first: np.ndarray
    end: np.ndarray
    position: np.ndarray | None = None

    @property
    def count(self) -> np.ndarray:
        """`[B]` int64, the number of rows of each range."""
        return self.end - self.first if self.position is None else self.position[self.end] - self.position[self.first]

    def newest(self, most: int) -> "Older":
        """The newest rows of each range, at most this many."""
        return Older(np.maximum(self.first, self.end - most), self.end, self.position)

    def sum(self, prefix: np.ndarray) -> np.ndarray:
        """`[B]`, the sums over each range of the values that have these prefix sums `[N + 1]`."""
        return prefix[self.end] - prefix[self.first]


@dataclass(frozen=True)
class Past:
    """N rows, sorted by key and moment. The arrays may be maps of files.

    Args:
        codes: `[N]` int64 ascending, key * moments + moment.
        keys: `[K]` int64, distinct keys whose indices stand for them where `codes` would be too large; else empty.
        order: `[N]` integers, the numbers of the rows in the order of `codes`; None where they are not known. Equal
            rows are in the order in which they were given to `sort`.
        position: `[N + 1]` int64, where not all rows are there: the number of rows before each one that is, and of all.

    Example:
        >>> rows = np.array([7, 7, 3, 7]), np.array([0, 2, 1, 1]), np.arange(4)
        >>> past = Past.sort([rows], count=4, moments=3)
        >>> older = past.older(np.array([7, 7, 3, 8]), np.array([2, 0, 3, 3]))
        >>> older.count, older.sum(past.prefix(np.array([1, 10, 100, 1000]).take))
        (array([2, 0, 1, 0]), array([1001.,    0.,  100.,    0.]))
    """

    codes: np.ndarray
    moments: int
    keys: np.ndarray
    order: np.ndarray | None = None
    position: np.ndarray | None = None

    @classmethod
    def sort(cls, rows: Iterable[Sequence[np.ndarray]], count: int, moments: int, new: New = np.empty) -> "Past":
        """Sorts rows in memory that is bounded, up to the rows of one key and moment, or of one key of very many.

        Args:
            rows: blocks of them: the keys, int64 from 0; the moments, integers in `[0, moments)`, equal for rows of the
                same time and larger for later ones; and numbers that tell rows apart, integers.
        """
        columns: list[np.ndarray] = []
        end = largest = 0
        for block in rows:
            columns = columns or [new(count, one.dtype) for one in block]
            begin, end = end, end + len(block[0])
            for column, values in zip(columns, block, strict=True):
                column[begin:end] = values
            largest = max(largest, int(block[0].max(initial=0)))
        is_large = largest >= _LARGEST // (moments + 1)
        codes, order = new(count, np.int64), new(count, columns[2].dtype if columns else np.int64)
        keys, num_keys, end = new(count if is_large else 0, np.int64), 0, 0

        def code(key: np.ndarray, moment: np.ndarray, _: np.ndarray) -> np.ndarray:
            return key if is_large else key * moments + moment

        for key, moment, number in in_ranges(columns, code):
            by_code = _order(key, moment, moments)
            key, begin, end = key.take(by_code), end, end + len(key)
            if is_large:
                is_first = np.diff(key, prepend=-1) != 0
                keys[num_keys : num_keys + int(is_first.sum())] = key[is_first]
                key = num_keys - 1 + np.cumsum(is_first)
                num_keys = int(key[-1]) + 1
            key *= moments
            key += moment.take(by_code)
            codes[begin:end], order[begin:end] = key, number.take(by_code)
        return cls(codes, moments, keys[:num_keys], order)

    @cached_property
    def _starts(self) -> np.ndarray | None:
        """`[K + 1]` int64, the first row of each key from 0, and N; None if there are too many keys."""
        count = int(self.codes[-1]) // self.moments + 1 if len(self.codes) else 0
        if count > min(_MANY_KEYS, 2 * len(self.codes)):
            return None
        return np.searchsorted(self.codes, np.arange(count + 1) * self.moments)

    def older(self, key: np.ndarray, moment: np.ndarray) -> Older:
        """The rows with a key that are strictly older than a moment, `[B]` int64 each; none with a key below 0."""
        if len(self.keys):
            index = np.minimum(np.searchsorted(self.keys, key), len(self.keys) - 1)
            key = np.where(self.keys[index] == key, index, -1)
        elif len(self.codes):
            key = np.minimum(key, self.codes[-1] // self.moments + 1)
        start = np.maximum(key, -1) * self.moments
        code = start + np.minimum(moment, self.moments)
        if self._starts is not None:
            return Older(self._starts.take(key, mode="clip"), self._search(code), self.position)
        first = self._search(start)
        end = first.copy()
        some = np.flatnonzero(start + self.moments > self.codes.take(first, mode="clip")) if len(self.codes) else []
        end[some] = self._search(code[some])
        return Older(first, end, self.position)

    def _search(self, code: np.ndarray) -> np.ndarray:
        """`[B]` int64, the first row with each code or a larger one."""
        # Searches in the order of the codes find most of the way in the cache.
        order, found = np.argsort(code), np.empty(len(code), np.int64)
        found[order] = np.searchsorted(self.codes, code.take(order))
        return found

    def of_each_row(
        self, prefix: np.ndarray | None = None, new: New = np.empty
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns for each row the number `[N]` of those of its key that are strictly older, and a sum `[N]` of them.

        Rows must have the numbers from 0 to N - 1.

        Args:
            prefix: `[N + 1]`, prefix sums of what is summed; None for nothing.
        """
        size = len(self.codes)
        count, total = new(size, index_type(size)), None if prefix is None else new(size, np.float64)
        first = last = np.zeros(1, np.int64)
        for begin, end in blocks(size, _AT_ONCE):
            # The row before tells whether the first one is equal.
            codes = self.codes[max(begin - 1, 0) : end]
            first = _first_of_equal(codes // self.moments, begin, first[-1])
            last = _first_of_equal(codes, begin, last[-1])
            row = self.order[begin:end]
            count[row] = last - first
            if total is not None:
                total[row] = prefix.take(last) - prefix.take(first)
        return count, total

    def prefix(self, values: Values, new: New = np.empty) -> np.ndarray:
        """`[N + 1]` float64, the prefix sums of values in the order of `codes`."""
        found = new(len(self.codes) + 1, np.float64)
        found[0] = 0.0
        for begin, end in blocks(len(self.codes), _AT_ONCE):
            part = values(self.order[begin:end]).astype(np.float64)
            part[0] += found[begin]
            np.cumsum(part, out=found[begin + 1 : end + 1])
        return found

    def decayed(self, values: Values, seconds: np.ndarray, half_life: float, new: New = np.empty) -> np.ndarray:
        """`[N]` float64, for each sorted row the sum up to it of its key's rows, each halved by half-life of its age.

        Args:
            seconds: `[M]` float64, the times of the moments.
            half_life: in seconds.
        """
        size = len(self.codes)
        total, decay, start, longest = new(size, np.float64), new(size, np.float64), 0, 1
        # total[i] = value[i] + decay[i] * total[i - 1], by doubling: after a step a total covers twice as many rows.
        # The first steps are made a block at a time, with the rows before it that they read.
        for begin, end in blocks(size, _IN_CACHE):
            before = max(begin - _BEFORE, 0)
            codes, own = self.codes[before:end], slice(begin - before, None)
            is_first = np.diff(codes // self.moments, prepend=-1) != 0
            age = np.diff(seconds[codes % self.moments], prepend=0.0)
            sums, step = np.array(values(self.order[before:end]), np.float64), 1
            factors = np.exp2(np.where(is_first, -np.inf, -age / half_life))
            while step < min(_BEFORE, len(sums)):
                sums[step:] += factors[step:] * sums[:-step]
                factors[step:] *= factors[:-step]
                step *= 2
            total[begin:end], decay[begin:end] = sums[own], factors[own]
            starts = np.concatenate([[start], begin + np.flatnonzero(is_first[own]), [end]])
            longest, start = max(longest, int(np.diff(starts).max())), int(starts[-2])
        step = _BEFORE
        while step < longest:
            # The last block is the first, since a row reads those before it as they were.
            for begin, end in reversed(list(blocks(size - step, _IN_CACHE))):
                rows, before = slice(begin + step, end + step), slice(begin, end)
                total[rows] += decay[rows] * total[before]
                decay[rows] *= decay[before]
            step *= 2
        return total


def moments_of(time: np.ndarray, new: New = np.empty) -> tuple[np.ndarray, np.ndarray]:
    """The distinct times `[M]` ascending, and for each of `time [N]` the index among them, `[N]` integers.

    >>> moments_of(np.array([7.0, 3.0, 7.0]))
    (array([3., 7.]), array([1, 0, 1], dtype=int32))
    """
    size, kind, count = len(time), index_type(len(time)), 0
    columns = new(size, np.float64), new(size, kind)
    for begin, end in blocks(size, _AT_ONCE):
        columns[0][begin:end], columns[1][begin:end] = time[begin:end], np.arange(begin, end)
    times, moments = new(size, np.float64), new(size, kind)
    for part, rows in in_ranges(columns, lambda part, _: part):
        distinct, index = np.unique(part, return_inverse=True)
        times[count : count + len(distinct)], moments[rows] = distinct, count + index
        count += len(distinct)
    return times[:count], moments


def in_ranges(columns: Sequence[np.ndarray], code: Callable[..., np.ndarray]) -> Iterator[Sequence[np.ndarray]]:
    """Yields rows in groups of ascending codes: all of a code are in one group. Rows of a group stay in their order.

    Args:
        columns: of the rows, `[N]` each; if there are several groups, blocks of them are put into another order.
        code: gives the codes of rows `[n]`, of the values that they have in the columns.
    """
    size = len(columns[0]) if columns else 0
    groups = -(-size // _AT_ONCE)
    if groups <= 1:
        yield from [columns] * groups
        return
    chosen = np.sort(np.random.default_rng(0).integers(0, size, _SAMPLE * groups))
    sample = np.sort(code(*(one.take(chosen) for one in columns)))
    first = np.unique(sample[_SAMPLE::_SAMPLE])
    bounds = []
    for begin, end in blocks(size, _AT_ONCE):
        part = [one[begin:end] for one in columns]
        group = np.searchsorted(first, code(*part), side="right").astype(np.int16)
        order = np.argsort(group, kind="stable")
        for one in part:
            one[:] = one.take(order)
        bounds.append(begin + np.searchsorted(group.take(order), np.arange(len(first) + 2)))
    for i in range(len(first) + 1):
        if any(bound[i] < bound[i + 1] for bound in bounds):
            yield [np.concatenate([one[bound[i] : bound[i + 1]] for bound in bounds]) for one in columns]


def _order(key: np.ndarray, moment: np.ndarray, moments: int) -> np.ndarray:
    """`[n]` int64, the order of rows by (key, moment); equal ones stay in their order."""
    low, bits = key.min(), len(key).bit_length()
    if (int(key.max()) - int(low) + 1) * moments < _LARGEST >> bits:
        return _stable_order((key - low) * moments + moment)
    order = _stable_order(moment)
    return order.take(_stable_order(key.take(order)))


def _stable_order(values: np.ndarray) -> np.ndarray:
    """`[n]` int64, the order of integers; equal ones stay in their order."""
    low, bits = values.min(), len(values).bit_length()
    if int(values.max()) - int(low) >= _LARGEST >> bits:
        return np.argsort(values, kind="stable")
    # A number that has the value and the index is sorted several times faster than indices by their values.
    packed = (values - low).astype(np.int64) << bits
    packed |= np.arange(len(values))
    packed.sort()
    packed &= (1 << bits) - 1
    return packed


def _first_of_equal(values: np.ndarray, begin: int, before: np.integer) -> np.ndarray:
    """`[n]` int64, for sorted values from index `begin` on the index of the first one that is equal.

    Args:
        values: `[n]`, or `[n + 1]` with the value before them if `begin` is not 0.
        begin: the index of the first one.
        before: the result for the value before.
    """
    first = np.arange(len(values)) + max(begin - 1, 0)
    first[1:][values[1:] == values[:-1]] = 0
    if begin:
        first[0] = before
    np.maximum.accumulate(first, out=first)
    return first[1:] if begin else first
