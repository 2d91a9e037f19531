"""Categorical columns as codes of their distinct values, read a block of rows at a time from maps of files."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data.io.arrays import is_list
from jfi.utils.encoding import mix
from jfi.utils.jagged import BLOCK, blocks, ranges


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

    @classmethod
    def of(cls, column: pa.Array) -> "CodedColumn":
        """The codes of strings, or of lists of strings, in memory; null and empty values of lists are left out."""
        values, offsets = (column, None) if not is_list(column.type) else flat_lists(column)
        encoded = values.cast(pa.large_string()).dictionary_encode()
        return cls(encoded.dictionary, pc.fill_null(encoded.indices, -1).to_numpy(), offsets)

    def __len__(self) -> int:
        return len(self.codes) if self.offsets is None else len(self.offsets) - 1

    def count_values(self, weights: np.ndarray) -> np.ndarray:
        """`[V]` int64, the sums of the weights `[N]` (integers or bool) of the rows that have each value."""
        counts = np.zeros(len(self.values), np.int64)
        for begin, end in blocks(len(self)):
            weight = weights[begin:end]
            if self.offsets is None:
                codes = self.codes[begin:end]
            else:
                codes = self.codes[self.offsets[begin] : self.offsets[end]]
                weight = np.repeat(weight, np.diff(self.offsets[begin : end + 1]))
            chosen = (codes >= 0) & (weight > 0)
            codes, weight = codes[chosen], weight[chosen]
            counts += np.bincount(codes, weight, minlength=len(counts)).astype(np.int64)
        return counts

    def longest(self, train: np.ndarray) -> int:
        """The largest number of values of a row where `train [N]` is true, at least 1."""
        parts = ((np.diff(self.offsets[begin : end + 1]), train[begin:end]) for begin, end in blocks(len(self)))
        return max((int(counts[chosen].max(initial=1)) for counts, chosen in parts), default=1)

    def counts(self, rows: np.ndarray) -> np.ndarray:
        """`[B]` int64: the number of values of each of `rows [B]`, 0 where it is missing."""
        if self.offsets is None:
            return (self.codes[rows] >= 0).astype(np.int64)
        return self.offsets[rows + 1] - self.offsets[rows]

    def numbers(self, rows: np.ndarray) -> np.ndarray:
        """`[B]` a number for each of `rows [B]`, equal for equal values: a row's code, or a hash of its codes."""
        if self.offsets is None:
            return self.codes[rows]
        part = self.take(rows)
        ends, counts = part.offsets[1:], np.diff(part.offsets)
        within = (np.arange(len(part.codes)) - np.repeat(ends - counts, counts)).astype(np.uint64)
        hashes = np.append(np.uint64(0), np.cumsum(mix(mix(part.codes.astype(np.uint64)) + within)))
        return hashes[ends] - hashes[ends - counts]

    def take(self, rows: np.ndarray) -> "CodedColumn":
        """The column of some rows `[B]` int64, in memory; row -1 is missing."""
        absent = rows < 0
        if not len(self):
            codes = np.full(len(rows) if self.offsets is None else 0, -1, np.int32)
            return CodedColumn(self.values, codes, None if self.offsets is None else np.zeros(len(rows) + 1, np.int64))
        if self.offsets is None:
            return CodedColumn(self.values, np.where(absent, -1, self.codes[rows]))
        counts = np.where(absent, 0, self.offsets[rows + 1] - self.offsets[rows])
        offsets = np.append(0, np.cumsum(counts))
        return CodedColumn(self.values, self.codes[ranges(self.offsets[rows], counts)], offsets)


class Dictionary:
    """Numbers the distinct values of a column that arrives in blocks, in the order of their first occurrence.

    Blocks wait until they have as many rows as there are values, and are numbered together then. So memory grows with
    the distinct values alone, and the cost of a row does not grow with their number.

    Args:
        write: called with the codes of rows, int32, -1 for null, in their order.

    Example:
        >>> found = []
        >>> dictionary = Dictionary(found.extend)
        >>> dictionary.add(pa.array(["b", "a", None, "b"]))
        >>> dictionary.add(pa.array(["c", "a"]))
        >>> dictionary.flush().to_pylist(), [int(code) for code in found]
        (['b', 'a', 'c'], [0, 1, -1, 0, 2, 1])
    """

    def __init__(self, write: Callable[[np.ndarray], None]) -> None:
        self._write, self._values = write, pa.array([], pa.large_string())
        self._pending: list[pa.DictionaryArray] = []
        self._rows = 0

    def add(self, column: pa.Array) -> None:
        """Adds the strings of further rows; null is a missing value."""
        self._pending.append(column.cast(pa.large_string()).dictionary_encode())
        self._rows += len(column)
        if self._rows >= max(BLOCK, len(self._values)):
            self.flush()

    def flush(self) -> pa.Array:
        """Numbers and writes all rows so far; returns the distinct values, large_string, by code."""
        parts = [self._values, *(encoded.dictionary for encoded in self._pending)]
        merged = pa.concat_arrays(parts).dictionary_encode()
        codes, start = merged.indices.to_numpy(), len(self._values)
        for encoded in self._pending:
            end = start + len(encoded.dictionary)
            # Nulls, which are not in the dictionary, read the code that is appended.
            self._write(np.append(codes[start:end], np.int32(-1))[pc.fill_null(encoded.indices, -1).to_numpy()])
            start = end
        self._values, self._pending, self._rows = merged.dictionary, [], 0
        return self._values


def flat_lists(column: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """The values of a column of lists without missing ones, and the `[N + 1]` int64 offsets of the rows."""
    counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    values = column.flatten()
    present = pc.fill_null(pc.not_equal(values, ""), False)
    offsets = np.append(0, np.cumsum(present))[np.append(0, np.cumsum(counts))]
    return values.filter(present), offsets


def nth_values(values: np.ndarray, offsets: np.ndarray, number: int, missing: int) -> np.ndarray:
    """`[N]` the value of that number of each of N rows, `missing` where a row has fewer.

    >>> nth_values(np.array([4, 5, 6]), np.array([0, 2, 2, 3]), 1, missing=-1)
    array([ 5, -1, -1])
    """
    positions = offsets[:-1] + number
    found = positions < offsets[1:]
    result = np.full(len(positions), missing, values.dtype)
    result[found] = values[positions[found]]
    return result
