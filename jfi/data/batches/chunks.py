"""The samples of a split by user: rows of a user that share a timeline are a chunk, and a batch consists of chunks."""

from dataclasses import dataclass, replace

import numpy as np

from jfi.data.batches.balance import assign_timelines
from jfi.data.batches.order import BatchPart, Order
from jfi.events.events import SortedEvents, index_type
from jfi.utils.jagged import blocks, ranges


@dataclass(frozen=True)
class Chunks:
    """The rows of a split, cut so that a chunk has one user, and neither too many rows nor too many events.

    Args:
        events: all events.
        max_history: a row sees at most this many of the newest events.
        rows: `[N]` integers, the events that are samples, in the order of the split.
        order: `[N]` integers, the positions of `rows` that sort them.
        first: `[C + 1]` int64: chunk c has the rows at the positions `order[first[c]:first[c + 1]]`.
    """

    events: SortedEvents
    max_history: int
    rows: np.ndarray
    order: np.ndarray
    first: np.ndarray

    def __len__(self) -> int:
        return len(self.first) - 1

    def timelines(self, chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`start, length` of the events that the rows of chunks see, ranges as those of `Events.histories`."""
        ends = (self.rows[self.order[self.first[chunks + i] - i]] for i in (0, 1))
        return timeline_ranges(self.events, *ends, self.max_history)

    def positions(self, chunks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the positions in the split of the rows of chunks `[C]`, int64, and the number of rows of each."""
        first = self.first[chunks]
        sizes = self.first[chunks + 1] - first
        return self.order[ranges(first, sizes)].astype(np.int64, copy=False), sizes

    def with_at_most(self, max_rows: int) -> "Chunks":
        """The same, chunks of more than `max_rows` rows cut into parts of `max_rows` and a rest."""
        sizes = np.diff(self.first)
        if sizes.max(initial=0) <= max_rows:
            return self
        parts = -(-sizes // max_rows)
        place = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
        first = np.repeat(self.first[:-1], parts) + place * max_rows
        return replace(self, first=np.append(first, self.first[-1]))


def timeline_ranges(
    events: SortedEvents, first: np.ndarray, last: np.ndarray, max_history: int
) -> tuple[np.ndarray, np.ndarray]:
    """`start, length [U]` of the events that the rows from `first` to `last` see, `[U]` each and of one user."""
    start, length = events.histories(np.concatenate([first, last], dtype=np.int64), max_history)
    start, end = start[: len(first)], (start + length)[len(first) :]
    return start, end - start


def cut_chunks(events: SortedEvents, rows: np.ndarray, max_history: int, max_timeline: int) -> Chunks:
    """Chunks whose rows see at most `max_timeline` events together.

    A user's events are cut into windows of equal length, and the rows whose history ends in one window are a chunk: its
    timeline has that window and the events that its oldest row still sees before it.

    Args:
        events: all events.
        rows: `[N]`, the events that are samples, in the order of the split.
        max_history: the newest events that a row sees.
        max_timeline: the most events of a chunk, at least `max_history`.

    Example:
        >>> user, time = np.array([0, 0, 0, 0, 1]), np.array([1.0, 2.0, 2.0, 3.0, 1.0])
        >>> events = SortedEvents(user, np.zeros(5, int), time, np.ones(5), np.zeros(5, np.int8))
        >>> chunks = cut_chunks(events, np.array([4, 3, 1, 2]), max_history=2, max_timeline=2)
        >>> chunks.order.tolist(), chunks.first
        ([2, 3, 1, 0], array([0, 2, 3, 4]))
        >>> chunks.timelines(np.arange(3))
        (array([0, 1, 4]), array([1, 2, 0]))
    """
    order = np.argsort(rows, kind="stable").astype(index_type(len(rows)), copy=False)
    window, last, first = max_timeline - max_history + 1, np.full((2, 1), -1), []
    for begin, end in blocks(len(rows)):
        block = rows[order[begin:end]].astype(np.int64, copy=False)
        _, older = events.histories(block, len(events))
        place = np.stack([events.user[block], np.maximum(older - 1, 0) // window])
        changes = (np.diff(place, axis=1, prepend=last) != 0).any(axis=0)
        first.append(begin + np.flatnonzero(changes))
        last = place[:, -1:]
    return Chunks(events, max_history, rows, order, np.concatenate([*first, [len(rows)]]).astype(np.int64))


class ChunkOrder(Order):
    """An epoch's chunks in batches: a batch has the chunks that begin within `batch_size` samples of each other.

    Args:
        chunks: of a split.
        samples_per_row: of implicit feedback a positive and its negatives.
        batch_size: about the samples of a batch. A chunk has at most as many, or a single row.
        shuffle: seed and epoch of the order of the chunks; None for that of `chunks`.
    """

    _assign = staticmethod(assign_timelines)

    def __init__(self, chunks: Chunks, samples_per_row: int, batch_size: int, shuffle: tuple[int, int] | None) -> None:
        self._chunks, self._per_row = chunks.with_at_most(max(1, batch_size // samples_per_row)), samples_per_row
        count = len(self._chunks)
        self._order = np.arange(count) if shuffle is None else np.random.default_rng(shuffle).permutation(count)
        sizes = np.diff(self._chunks.first)[self._order] * samples_per_row
        self._ends = np.cumsum(sizes)
        batch = (self._ends - sizes) // batch_size
        self._bounds = np.append(np.flatnonzero(np.diff(batch, prepend=-1)), count)
        self.num_batches = len(self._bounds) - 1

    def samples_before(self, batch: int) -> int:
        first = self._bounds[min(batch, self.num_batches)]
        return int(self._ends[first - 1]) if first else 0

    def _units(self, batch: int) -> np.ndarray:
        return self._order[self._bounds[batch] : self._bounds[batch + 1]]

    def _part(self, units: np.ndarray, total: int) -> BatchPart:
        samples, sizes = self._chunks.positions(units)
        if self._per_row > 1:
            samples = (samples[:, None] * self._per_row + np.arange(self._per_row)).ravel()
        return BatchPart(samples, total, np.append(0, np.cumsum(sizes * self._per_row)))

    def _work(self, units: np.ndarray) -> np.ndarray:
        """`[C, 3]` int64: of chunks the events that their targets see, the events of their timelines, the samples."""
        positions, sizes = self._chunks.positions(units)
        rows = self._chunks.rows[positions].astype(np.int64, copy=False)
        seen = self._chunks.events.histories(rows, self._chunks.max_history)[1]
        seen = np.add.reduceat(seen, np.cumsum(sizes) - sizes)  # a chunk has at least one row
        return np.stack([seen * self._per_row, self._chunks.timelines(units)[1], sizes * self._per_row], axis=1)
