"""Columns -> ids and standardised numbers, learnt from the training rows alone."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


@dataclass(frozen=True)
class Learnt:
    """What the training rows say of raw values, by column: enough to encode others as these were.

    Args:
        vocabularies: of categorical columns, as in `Categorical`.
        edges: of numeric columns cut at quantiles, as in `Categorical`.
        moments: mean and deviation of those that are standardised.
    """

    vocabularies: dict[str, pa.Array]
    edges: dict[str, np.ndarray]
    moments: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Categorical:
    """Ids of a categorical column; 0 stands for a value that is missing or absent from the training rows.

    Args:
        ids: int64; ``[N]``, one id a row, or ``[sum of counts]`` where the column is multi-valued.
        offsets: ``[N + 1]`` int64, the range of each row's ids, or None for one id a row.
        num_embeddings: all ids are below it.
        vocabulary: the values whose ids are 1, 2, ..., where the column is of values, and
        edges: ascending, where ids 2, 3, ... begin, where it is a numeric one cut at quantiles.
    """

    ids: np.ndarray
    offsets: np.ndarray | None
    num_embeddings: int
    vocabulary: pa.Array | None = None
    edges: np.ndarray | None = None

    def counts(self, rows: np.ndarray) -> np.ndarray:
        """The number of ids of each of ``rows``."""
        return np.ones_like(rows) if self.offsets is None else self.offsets[rows + 1] - self.offsets[rows]

    def fill(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Writes the ids of ``rows``, one row's after the other's, to ``out [sum of counts]``."""
        if self.offsets is not None:
            rows = ranges(self.offsets[rows], self.counts(rows))
        # "clip" promises valid rows: numpy then writes straight to `out`.
        np.take(self.ids, rows, out=out, mode="clip")

    def slots(self, max_slots: int) -> list["Categorical"]:
        """The column as columns of one id a row: the first ids of each row, 0 where a row has fewer."""
        if self.offsets is None:
            return [self]
        counts = np.diff(self.offsets)
        row = np.repeat(np.arange(len(counts)), counts)
        position = np.arange(len(self.ids)) - np.repeat(self.offsets[:-1], counts)
        slots = np.zeros((min(max_slots, counts.max(initial=1)), len(counts)), np.int64)
        kept = position < len(slots)
        slots[position[kept], row[kept]] = self.ids[kept]
        return [Categorical(slot, None, self.num_embeddings) for slot in slots]


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The integers of ``[start, start + length)`` of each range, behind one another.

    >>> ranges(np.array([7, 3]), np.array([2, 3]))
    array([7, 8, 3, 4, 5])
    """
    ends = np.cumsum(lengths)
    rows = np.repeat(starts - (ends - lengths), lengths)
    rows += np.arange(len(rows))
    return rows


def sort_ids(column: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """The distinct ids of a column without nulls, by number if all are integers, and each row's index among them."""
    encoded = column.dictionary_encode()
    distinct = encoded.dictionary
    order = np.argsort(_sortable(distinct), kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return distinct.take(pa.array(order)), rank[encoded.indices.to_numpy()]


def encode(column: pa.Array, train: np.ndarray) -> Categorical:
    """Ids of a column of strings, or of lists of strings, numbered from 1 by the rows where ``train [N]`` is true."""
    offsets = None
    if pa.types.is_list(column.type):
        counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
        column, train = column.flatten(), np.repeat(train, counts)
        present = pc.fill_null(pc.not_equal(column, ""), False)
        offsets = np.append(0, np.cumsum(present))[np.append(0, np.cumsum(counts))]
        column, train = column.filter(present), train[present.to_numpy(zero_copy_only=False)]
    vocabulary = sort_ids(column.filter(pa.array(train)).drop_null())[0]
    ids = pc.fill_null(pc.index_in(column, value_set=vocabulary), -1).to_numpy().astype(np.int64)
    return Categorical(ids + 1, offsets, len(vocabulary) + 1, vocabulary=vocabulary)


def bucketize(values: np.ndarray, train: np.ndarray, num_quantiles: int) -> Categorical:
    """Ids of a numeric column cut at the quantiles of its rows where ``train`` is true; NaN is missing."""
    known = values[train & np.isfinite(values)]
    inner = np.linspace(0, 1, num_quantiles + 1)[1:-1]
    edges = np.unique(np.quantile(known, inner)) if len(known) else np.empty(0)
    ids = np.where(np.isfinite(values), np.searchsorted(edges, values, side="right") + 1, 0)
    return Categorical(ids.astype(np.int64), None, len(edges) + 2, edges=edges)


def moments(values: np.ndarray) -> tuple[float, float]:
    """Mean and deviation of the finite values; 1 in place of a deviation of 0."""
    known = values[np.isfinite(values)]
    return (float(known.mean()), float(known.std()) or 1.0) if len(known) else (0.0, 1.0)


def standardise(values: np.ndarray, mean: float, deviation: float) -> np.ndarray:
    """``values [N]`` as float32, by the mean and deviation of the training rows; a missing one (NaN) gives 0."""
    return np.nan_to_num((values - mean) / deviation, posinf=0.0, neginf=0.0).astype(np.float32)


def _sortable(values: pa.Array) -> np.ndarray:
    try:
        return values.cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid:
        return values.to_numpy(zero_copy_only=False).astype(str)
