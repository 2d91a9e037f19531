"""Table columns -> ids and standardized numbers, with vocabularies, quantiles and means of the training rows."""

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data.arrays import is_list
from jfi.encoding import UNKNOWN, Vocabulary, quantile_ids


@dataclass(frozen=True)
class Encodings:
    """What the training rows determine, by column: enough to encode other values in the same way.

    Args:
        vocabularies: of categorical columns.
        edges: quantiles of the numeric columns that become ids, as `jfi.encoding.quantile_ids` takes them.
        moments: mean and standard deviation of the numeric columns that become dense features.
    """

    vocabularies: dict[str, Vocabulary] = field(default_factory=dict)
    edges: dict[str, np.ndarray] = field(default_factory=dict)
    moments: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Categorical:
    """Ids of a column; id 0 is for a value that is missing or absent from the training rows.

    Args:
        ids: int64; `[N]`, one id a row, or `[sum of counts]` for a multi-valued column.
        offsets: `[N + 1]` int64, the range of each row's ids, or None for one id a row.
        num_embeddings: all ids are below it.
        vocabulary: the known values, or None for a numeric column cut at quantiles.
        edges: the quantiles, or None for a column with a vocabulary.
    """

    ids: np.ndarray
    offsets: np.ndarray | None
    num_embeddings: int
    vocabulary: Vocabulary | None = None
    edges: np.ndarray | None = None

    def counts(self, rows: np.ndarray) -> np.ndarray:
        """The number of ids of each of `rows`."""
        return np.ones_like(rows) if self.offsets is None else self.offsets[rows + 1] - self.offsets[rows]

    def fill(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Writes the ids of `rows`, concatenated, to `out [sum of counts]`."""
        if self.offsets is not None:
            rows = ranges(self.offsets[rows], self.counts(rows))
        # mode="clip" skips the bounds check, and lets NumPy write to `out` without a buffer.
        np.take(self.ids, rows, out=out, mode="clip")

    def slots(self, max_slots: int) -> list["Categorical"]:
        """The column as columns of one id a row: the first `max_slots` ids of each row, 0 where a row has fewer."""
        if self.offsets is None:
            return [self]
        counts = np.diff(self.offsets)
        row = np.repeat(np.arange(len(counts)), counts)
        position = np.arange(len(self.ids)) - np.repeat(self.offsets[:-1], counts)
        slots = np.full((min(max_slots, counts.max(initial=1)), len(counts)), UNKNOWN, np.int64)
        kept = position < len(slots)
        slots[position[kept], row[kept]] = self.ids[kept]
        return [Categorical(slot, None, self.num_embeddings) for slot in slots]


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The integers of each range `[start, start + length)`, concatenated.

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
    """Ids of a column of strings, or of lists of strings, with the vocabulary of the rows where `train [N]` is true."""
    offsets = None
    if is_list(column.type):
        counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
        column, train = column.flatten(), np.repeat(train, counts)
        present = pc.fill_null(pc.not_equal(column, ""), False)
        offsets = np.append(0, np.cumsum(present))[np.append(0, np.cumsum(counts))]
        column, train = column.filter(present), train[present.to_numpy(zero_copy_only=False)]
    values = sort_ids(column.filter(pa.array(train)).drop_null())[0].to_pylist()
    # Each distinct value is looked up once; nulls, which are not in the dictionary, read the id that is appended.
    encoded = column.dictionary_encode()
    ids = np.append(Vocabulary(values).ids(encoded.dictionary.to_pylist()), UNKNOWN)
    ids = ids[pc.fill_null(encoded.indices, -1).to_numpy()]
    # Another Vocabulary, so that the look-up dictionary of this one is released.
    vocabulary = Vocabulary(values)
    return Categorical(ids, offsets, vocabulary.num_ids, vocabulary=vocabulary)


def cut_at_quantiles(values: np.ndarray, train: np.ndarray, num_quantiles: int) -> Categorical:
    """Ids of a numeric column, cut at the quantiles of its rows where `train` is true; NaN is missing."""
    known = values[train & np.isfinite(values)]
    inner = np.linspace(0, 1, num_quantiles + 1)[1:-1]
    edges = np.unique(np.quantile(known, inner)) if len(known) else np.empty(0)
    return Categorical(quantile_ids(values, edges), None, len(edges) + 2, edges=edges)


def moments(values: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation of the finite values; a deviation of 0 becomes 1."""
    known = values[np.isfinite(values)]
    return (float(known.mean()), float(known.std()) or 1.0) if len(known) else (0.0, 1.0)


def _sortable(values: pa.Array) -> np.ndarray:
    try:
        return values.cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid:
        return values.to_numpy(zero_copy_only=False).astype(str)
