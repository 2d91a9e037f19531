"""Columns as codes of their distinct values; what the training rows determine of them, and with it their ids."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data.io.arrays import is_list
from jfi.data.schema.schema import Strings, as_array
from jfi.utils.encoding import LARGEST_NUMBER, UNKNOWN, HashBuckets, HashedIds, Vocabulary, mix, quantile_ids
from jfi.utils.jagged import BLOCK, blocks, nth_values, ranges


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


#: Quantiles are those of at most about this many rows, spread evenly over the training rows.
_QUANTILE_ROWS = 1 << 22

#: Gives an array of a number of integers to write to, such as the map of a file.
NewArray = Callable[[int], np.ndarray]
_in_memory = partial(np.empty, dtype=np.int64)


@dataclass(frozen=True)
class Categorical:
    """Ids of a column; id 0 is for a value that is missing or absent from the training rows.

    Args:
        ids: integers; `[N]`, one id a row, or `[sum of counts]` for a multi-valued column. May be the map of a file.
        offsets: `[N + 1]` integers, the range of each row's ids, or None for one id a row.
    """

    ids: np.ndarray
    offsets: np.ndarray | None = None

    def counts(self, rows: np.ndarray) -> np.ndarray:
        """The number of ids of each of `rows`."""
        return np.ones_like(rows) if self.offsets is None else self.offsets[rows + 1] - self.offsets[rows]

    def known_counts(self, rows: np.ndarray) -> np.ndarray:
        """The number of ids of each of `rows` that are not that of an unknown value."""
        counts = self.counts(rows)
        ids = np.empty(counts.sum(), self.ids.dtype)
        self.fill(rows, ids)
        known, ends = np.append(0, np.cumsum(ids != UNKNOWN)), np.cumsum(counts)
        return known[ends] - known[ends - counts]

    def fill(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Writes the ids of `rows`, concatenated, to `out [sum of counts]`."""
        if self.offsets is not None:
            rows = ranges(self.offsets[rows], self.counts(rows))
        # mode="clip" skips the bounds check, and lets NumPy write to `out` without a buffer.
        if self.ids.dtype == out.dtype:
            self.ids.take(rows, out=out, mode="clip")
        else:
            out[:] = self.ids.take(rows, mode="clip")

    def slot(self, number: int) -> "Categorical":
        """A column of one id a row: of a multi-valued one the id of that number, 0 where a row has fewer."""
        return Categorical(nth_values(self.ids, self.offsets, number, UNKNOWN))


def sort_values(values: pa.Array) -> np.ndarray:
    """`[V]` int64, the order of distinct strings: by number if all are integers, else by text."""
    try:
        numbers = values.cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid:
        return pc.array_sort_indices(values).to_numpy().astype(np.int64)
    order = np.argsort(numbers, kind="stable")
    if (np.diff(numbers[order]) == 0).any():  # "7" and "07"
        by_text = pc.array_sort_indices(values).to_numpy().astype(np.int64)
        order = by_text[np.argsort(numbers[by_text], kind="stable")]
    return order


def learn_vocabulary(
    column: CodedColumn,
    count: np.ndarray,
    min_count: int = 1,
    max_values: int | None = None,
    default: str | None = None,
) -> Vocabulary:
    """The values of a column in the training rows.

    Args:
        column: `[N]`.
        count: `[N]` integers or bool, the training rows that have each row of the column.
        min_count: values with fewer training rows are left out.
        max_values: the most values; those with the most training rows stay, the first of as many. None is no limit.
        default: a value that the vocabulary has in any case, or None.
    """
    rows = column.count_values(count)
    kept = np.flatnonzero(rows >= min_count)
    values = column.values.take(pa.array(kept))
    order = sort_values(values)
    if max_values is not None and len(order) > max_values:
        most = np.argsort(-rows[kept[order]], kind="stable")[:max_values]
        order = order[np.sort(most)]
    values = values.take(pa.array(order))
    if default is not None and not pc.is_in(pa.scalar(default, values.type), value_set=values).as_py():
        values = pa.concat_arrays([values, pa.array([default], values.type)])
        values = values.take(pa.array(sort_values(values)))
    return Vocabulary(Strings(values))


def encode(
    column: CodedColumn,
    known: Vocabulary | HashBuckets | HashedIds,
    slot: int | None = None,
    new_array: NewArray = _in_memory,
    default: str | None = None,
) -> Categorical:
    """Ids of a column; a value that a vocabulary lacks gets id 0.

    Args:
        column: `[N]`.
        known: the encoding.
        slot: of a multi-valued column the number of the value that is encoded, or None for all.
        new_array: gives integers to write to.
        default: the value that stands for a missing one; None gives it id 0.
    """
    offsets = column.offsets if slot is None else None
    out = new_array(len(column.codes) if slot is None else len(column))
    if not isinstance(known, Vocabulary):
        ids = [known.ids(column.values[begin:end].to_pylist()) for begin, end in blocks(len(column.values))]
    else:
        found = pc.index_in(column.values.cast(pa.large_string()), value_set=as_array(known.values))
        ids = [pc.fill_null(found, -1).to_numpy() + 1]
    ids = np.concatenate([*ids, known.ids([default])]).astype(out.dtype)  # the last one is of a missing value
    for begin, end in blocks(len(out)):
        if slot is None:
            out[begin:end] = ids[column.codes[begin:end]]
        else:
            out[begin:end] = ids[nth_values(column.codes, column.offsets[begin : end + 1], slot, missing=-1)]
    return Categorical(out, offsets)


def learn_edges(values: np.ndarray, train: np.ndarray, num_quantiles: int) -> np.ndarray:
    """`[E]` ascending, E below `num_quantiles`: the inner quantiles of the finite values where `train [N]` is true.

    Of a long column they are those of some four million rows, which are spread evenly.
    """
    step = max(1, len(values) // _QUANTILE_ROWS)
    known = np.array(values[::step])[train[::step]]
    known = known[np.isfinite(known)]
    return np.unique(np.quantile(known, np.linspace(0, 1, num_quantiles + 1)[1:-1])) if len(known) else np.empty(0)


def cut(
    values: np.ndarray, edges: np.ndarray, new_array: NewArray = _in_memory, default: float | None = None
) -> Categorical:
    """Ids of a numeric column by the quantile they fall in; NaN is missing, and `default` stands for it."""
    out = new_array(len(values))
    for begin, end in blocks(len(out)):
        out[begin:end] = quantile_ids(np.array(values[begin:end]), edges, default)
    return Categorical(out)


def moments(values: np.ndarray, weights: np.ndarray, size: int = BLOCK) -> tuple[float, float]:
    """Mean and standard deviation of the finite values in float32's range; a deviation of 0 becomes 1.

    Args:
        values: `[N]` float64; may be the map of a file.
        weights: `[N]` integers or bool, how often each value counts.
        size: of the blocks that are summed one after another. Another size gives other roundings.
    """

    def parts() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for begin, end in blocks(len(values), size):
            part, weight = np.asarray(values[begin:end], np.float64), weights[begin:end]
            chosen = (np.abs(part) <= LARGEST_NUMBER) & (weight > 0)
            yield part[chosen], weight[chosen]

    count = sum(int(weight.sum()) for _, weight in parts())
    if not count:
        return 0.0, 1.0
    mean = sum((part * weight).sum() for part, weight in parts()) / count
    deviation = np.sqrt(sum(((part - mean) ** 2 * weight).sum() for part, weight in parts()) / count)
    return float(mean), float(deviation) or 1.0
