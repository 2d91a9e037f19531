"""Columns of events that are too long for memory: what the training rows determine, computed a block at a time.

The functions give the same bits as those of `jfi.data.schema.columns` do for a column in memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from jfi.utils.encoding import mix

#: Rows that are in memory together.
BLOCK = 1 << 20


@dataclass(frozen=True)
class CodedColumn:
    """A categorical column of N rows, as codes of its distinct values; the arrays may be maps of files.

    Args:
        values: the distinct strings.
        codes: int32 indices into `values`; `[N]`, -1 where a value is missing, or `[sum of counts]` for lists.
        offsets: `[N + 1]` int64, the range of each row's codes, or None for one code a row.
    """

    values: pa.Array
    codes: np.ndarray
    offsets: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.codes) if self.offsets is None else len(self.offsets) - 1

    def seen(self, train: np.ndarray) -> tuple[pa.Array, np.ndarray]:
        """The values of the rows where `train [N]` is true, in the order of their first occurrence, and their counts.

        The counts are numbers of rows, int64.
        """
        rows, found = np.zeros(len(self.values), np.int64), [np.empty(0, np.int64)]
        for begin, end in blocks(len(self)):
            codes, chosen = self.codes[begin:end], train[begin:end]
            if self.offsets is not None:
                codes = self.codes[self.offsets[begin] : self.offsets[end]]
                chosen = np.repeat(chosen, np.diff(self.offsets[begin : end + 1]))
            codes, first, counts = np.unique(codes[chosen & (codes >= 0)], return_index=True, return_counts=True)
            new = rows[codes] == 0
            rows[codes] += counts
            found.append(codes[new][np.argsort(first[new])])
        codes = np.concatenate(found)
        return self.values.take(pa.array(codes)), rows[codes]

    def longest(self, train: np.ndarray) -> int:
        """The largest number of values of a row where `train [N]` is true, at least 1."""
        return max(
            (int(np.diff(self.offsets[begin : end + 1])[train[begin:end]].max(initial=1)))
            for begin, end in [*blocks(len(self)), (0, 0)]
        )

    def slot(self, number: int, begin: int, end: int) -> np.ndarray:
        """`[end - begin]` the codes of the rows' values of that number, -1 where a row has fewer."""
        start, stop = self.offsets[begin:end] + number, self.offsets[begin + 1 : end + 1]
        codes = np.full(end - begin, -1, np.int32)
        codes[start < stop] = self.codes[start[start < stop]]
        return codes

    def counts(self, rows: np.ndarray) -> np.ndarray:
        """`[B]` int64: the number of values of each of `rows [B]`, 0 where it is missing."""
        if self.offsets is None:
            return (self.codes[rows] >= 0).astype(np.int64)
        return self.offsets[rows + 1] - self.offsets[rows]

    def numbers(self, rows: np.ndarray) -> np.ndarray:
        """`[B]` a number for each of `rows [B]`, equal for equal values: a row's code, or a hash of its codes."""
        if self.offsets is None:
            return self.codes[rows]
        codes, counts = self._lists(rows)
        ends = np.cumsum(counts)
        within = (np.arange(len(codes)) - np.repeat(ends - counts, counts)).astype(np.uint64)
        hashes = np.append(np.uint64(0), np.cumsum(mix(mix(codes.astype(np.uint64)) + within)))
        return hashes[ends] - hashes[ends - counts]

    def _lists(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The codes of a few rows, concatenated, and `[B]` the number of each."""
        start, counts = self.offsets[rows], self.offsets[rows + 1] - self.offsets[rows]
        ends = np.cumsum(counts)
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
        return self.codes[np.repeat(start, counts) + within], counts

    def take(self, rows: np.ndarray) -> pa.Array:
        """The strings, or lists of strings, of a few rows."""
        if self.offsets is None:
            codes = self.codes[rows]
            return self.values.take(pa.array(codes, mask=codes < 0))
        codes, counts = self._lists(rows)
        values, ends = self.values.take(pa.array(codes)), np.append(0, np.cumsum(counts))
        return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values.cast(pa.string()))


def blocks(count: int, size: int = BLOCK) -> Iterator[tuple[int, int]]:
    """The ranges of `count` rows, `size` each and the rest.

    >>> list(blocks(5, 2))
    [(0, 2), (2, 4), (4, 5)]
    """
    return ((begin, min(begin + size, count)) for begin in range(0, count, size))


def quantiles(values: np.ndarray, train: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Returns what `np.quantile(values[train & np.isfinite(values)], at)` gives, in memory that does not grow with N.

    Args:
        values: `[N]` float64.
        train: `[N]` bool; at least one finite value must be chosen.
        at: `[Q]` in [0, 1].

    Example:
        >>> quantiles(np.array([1.0, 9.0, 3.0, np.nan]), np.array([True, True, True, True]), np.array([0.25]))
        array([2.])
    """
    count = sum(len(keys) for keys in _keys(values, train))
    place = (count - 1) * at
    below = np.floor(place).astype(np.int64)
    low, high = _sorted_values(values, train, below), _sorted_values(values, train, np.minimum(below + 1, count - 1))
    # NumPy's own interpolation, so that its rounding is the same.
    return np.array([np.quantile([a, b], p) for a, b, p in zip(low, high, place - below, strict=True)])


def _sorted_values(values: np.ndarray, train: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """`[R]` the chosen values at `ranks` of their order, found 16 bits at a time from the most significant on."""
    prefix, rest = np.zeros(len(ranks), np.uint64), ranks.copy()
    for shift in (48, 32, 16, 0):
        wanted, which = np.unique(prefix, return_inverse=True)
        counts = np.zeros((len(wanted), 1 << 16), np.int64)
        for keys in _keys(values, train):
            digit = (keys >> np.uint64(shift)) & np.uint64(0xFFFF)
            upper = keys >> np.uint64(shift + 16) if shift < 48 else np.zeros_like(keys)
            row = np.minimum(np.searchsorted(wanted, upper), len(wanted) - 1)
            hit = wanted[row] == upper
            cells = row[hit] * (1 << 16) + digit[hit].astype(np.int64)
            counts += np.bincount(cells, minlength=counts.size).reshape(counts.shape)
        ends = np.cumsum(counts, axis=1)[which]
        digits = (ends <= rest[:, None]).sum(axis=1)
        rest -= np.where(digits > 0, ends[np.arange(len(rest)), np.maximum(digits - 1, 0)], 0)
        prefix = (prefix << np.uint64(16)) | digits.astype(np.uint64)
    negative = prefix < np.uint64(1 << 63)
    return np.where(negative, ~prefix, prefix ^ np.uint64(1 << 63)).view(np.float64)


def _keys(values: np.ndarray, train: np.ndarray) -> Iterator[np.ndarray]:
    """The chosen finite values, a block at a time, as uint64 in the same order."""
    for begin, end in blocks(len(values)):
        chosen = np.array(values[begin:end])[train[begin:end]]
        bits = chosen[np.isfinite(chosen)].view(np.uint64)
        yield np.where(bits >> np.uint64(63) == 1, ~bits, bits ^ np.uint64(1 << 63))
