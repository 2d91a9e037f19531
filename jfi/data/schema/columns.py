"""Columns -> what the training rows determine (vocabularies, quantiles, means), and with it columns -> ids."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data.io.arrays import is_list
from jfi.data.schema.coded import BLOCK, CodedColumn, blocks, quantiles
from jfi.data.schema.schema import Strings, as_array
from jfi.utils.encoding import LARGEST_NUMBER, UNKNOWN, HashBuckets, Vocabulary, quantile_ids
from jfi.utils.ranges import ranges


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
        ends = np.cumsum(counts)
        ids = np.empty(ends[-1] if len(ends) else 0, self.ids.dtype)
        self.fill(rows, ids)
        known = np.append(0, np.cumsum(ids != UNKNOWN))
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

    def slots(self, num_slots: int) -> list["Categorical"]:
        """A multi-valued column as columns of one id a row: the first ids of each row, 0 where a row has fewer."""
        counts = np.diff(self.offsets)
        row = np.repeat(np.arange(len(counts)), counts)
        position = np.arange(len(self.ids)) - np.repeat(self.offsets[:-1], counts)
        slots = np.full((num_slots, len(counts)), UNKNOWN, self.ids.dtype)
        kept = position < num_slots
        slots[position[kept], row[kept]] = self.ids[kept]
        return [Categorical(slot) for slot in slots]


def sort_ids(column: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """The distinct ids of a column without nulls, by number if all are integers, and each row's index among them."""
    encoded = column.dictionary_encode()
    distinct = encoded.dictionary
    order = np.argsort(_sortable(distinct), kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return distinct.take(pa.array(order)), rank[encoded.indices.to_numpy()]


def is_multi_valued(column: pa.Array | CodedColumn) -> bool:
    """Returns whether a categorical column has a list of values a row."""
    if isinstance(column, CodedColumn):
        return column.offsets is not None
    return is_list(column.type)


def learn_vocabulary(
    column: pa.Array | CodedColumn,
    count: np.ndarray,
    min_count: int = 1,
    max_values: int | None = None,
    default: str | None = None,
) -> Vocabulary:
    """The values of a column of strings, or of lists of strings, in the training rows.

    Args:
        column: `[N]`.
        count: `[N]`, the training rows that have each row of the column.
        min_count: values with fewer training rows are left out.
        max_values: the most values; those with the most training rows stay, the first of as many. None is no limit.
        default: a value that the vocabulary has in any case, or None.
    """
    if isinstance(column, CodedColumn):
        values, rows = column.seen(count)
        values, index = sort_ids(values)
        return _most_frequent(values, rows[np.argsort(index)], min_count, max_values, default)
    column, count = column.filter(pa.array(count > 0)), count[count > 0]
    if is_multi_valued(column):
        column, offsets = present(column)
        count = np.repeat(count, np.diff(offsets))
    known = column.is_valid()
    values, index = sort_ids(column.filter(known))
    rows = np.bincount(index, weights=count[known.to_numpy(zero_copy_only=False)], minlength=len(values))
    return _most_frequent(values, rows, min_count, max_values, default)


def _most_frequent(
    values: pa.Array, rows: np.ndarray, min_count: int, max_values: int | None, default: str | None
) -> Vocabulary:
    """Returns the vocabulary of the values whose numbers of rows `[V]` suffice, in the order of the values."""
    kept = rows >= min_count
    if max_values is not None and kept.sum() > max_values:
        kept[np.argsort(np.where(kept, -rows, 0), kind="stable")[max_values:]] = False
    values = values.filter(pa.array(kept))
    if default is not None and not pc.is_in(pa.scalar(default, values.type), value_set=values).as_py():
        values = sort_ids(pa.concat_arrays([values, pa.array([default], values.type)]))[0]
    return Vocabulary(Strings(values))


def count_slots(column: pa.Array | CodedColumn, train: np.ndarray, max_slots: int) -> int:
    """The largest number of values of a row where `train [N]` is true, from 1 to `max_slots`."""
    if isinstance(column, CodedColumn):
        return min(max_slots, column.longest(train))
    counts = np.diff(present(column)[1])[train]
    return int(min(max_slots, counts.max(initial=1)))


def encode(column: pa.Array, known: Vocabulary | HashBuckets, default: str | None = None) -> Categorical:
    """Ids of a column of strings, or of lists of strings; a value that a vocabulary lacks gets id 0.

    A missing one gets the id of `default`, or 0.
    """
    offsets = None
    if is_multi_valued(column):
        column, offsets = present(column)
    # Each distinct value is looked up once; nulls, which are not in the dictionary, read the id that is appended.
    encoded, missing = column.dictionary_encode(), known.ids([default])
    if isinstance(known, HashBuckets):
        ids = np.append(known.ids(encoded.dictionary.to_pylist()), missing)
    else:
        found = pc.index_in(encoded.dictionary.cast(pa.large_string()), value_set=as_array(known.values))
        ids = np.append(pc.fill_null(found, -1).to_numpy().astype(np.int64) + 1, missing)
    return Categorical(ids[pc.fill_null(encoded.indices, -1).to_numpy()], offsets)


def present(column: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """The values of a column of lists without the empty ones, and the `[N + 1]` offsets of the rows."""
    counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    values = column.flatten()
    present = pc.fill_null(pc.not_equal(values, ""), False)
    offsets = np.append(0, np.cumsum(present))[np.append(0, np.cumsum(counts))]
    return values.filter(present), offsets


def learn_edges(values: np.ndarray, train: np.ndarray, num_quantiles: int) -> np.ndarray:
    """`[E]` ascending, E below `num_quantiles`: the inner quantiles of the finite values where `train [N]` is true."""
    inner = np.linspace(0, 1, num_quantiles + 1)[1:-1]
    if (
        len(values) > BLOCK
        and len(inner)
        and any(np.isfinite(values[begin:end][train[begin:end]]).any() for begin, end in blocks(len(values)))
    ):
        return np.unique(quantiles(values, train, inner))
    known = values[train & np.isfinite(values)]
    return np.unique(np.quantile(known, inner)) if len(known) else np.empty(0)


def cut(values: np.ndarray, edges: np.ndarray, default: float | None = None) -> Categorical:
    """Ids of a numeric column by the quantile they fall in; NaN is missing, and `default` stands for it."""
    return Categorical(quantile_ids(values, edges, default))


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


def _sortable(values: pa.Array) -> np.ndarray:
    try:
        return values.cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid:
        return values.to_numpy(zero_copy_only=False).astype(str)
