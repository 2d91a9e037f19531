"""The order of an epoch's samples, its batches, and which rank gets which samples or timelines of a batch.

Rows of a user that share a timeline are a chunk, and a batch consists of chunks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from jfi.events.events import SortedEvents, index_type
from jfi.utils.encoding import mix
from jfi.utils.jagged import blocks, ranges

#: Work of the busiest rank over that of the mean rank that is balanced enough.
_BALANCED = 1.01
#: Most swaps of samples in a batch: a few dozen microseconds each.
_MOST_SWAPS = 64


def assign_samples(work: np.ndarray, world_size: int) -> np.ndarray:
    """`[B]` int64, the rank of each sample: their numbers differ by at most one, and their work by little.

    In descending order of their work, to rank after rank, forwards and then backwards; swaps even out what is left.

    Args:
        work: `[B]` numbers, not negative.
        world_size: number of ranks.

    Example:
        >>> assign_samples(np.array([9, 1, 5, 5]), 2)
        array([0, 0, 1, 1])
    """
    turn, rank = np.divmod(np.arange(len(work)), world_size)
    assigned = np.empty(len(work), np.int64)
    assigned[np.argsort(-work, kind="stable")] = np.where(turn % 2, world_size - 1 - rank, rank)
    _swap(work, assigned, world_size)
    return assigned


def _swap(work: np.ndarray, rank: np.ndarray, world_size: int) -> None:
    """Swaps samples of the busiest and the idlest rank, in place, while it helps: few samples may have most work."""
    load = np.bincount(rank, weights=work, minlength=world_size)
    for _ in range(_MOST_SWAPS):
        busiest, idlest = int(load.argmax()), int(load.argmin())
        if load[busiest] <= _BALANCED * load.mean():
            return
        give, take = (np.flatnonzero(rank == one) for one in (busiest, idlest))
        take = take[np.argsort(work[take], kind="stable")]
        if not len(take):
            return
        # Of each sample the one to swap it with that comes closest to evening the two out, but not beyond.
        half = (load[busiest] - load[idlest]) / 2
        position = np.minimum(np.searchsorted(work[take], work[give] - half), len(take) - 1)
        moved = work[give] - work[take[position]]
        moved = np.where(moved <= half, moved, 0)
        best = int(moved.argmax())
        if moved[best] <= 0:
            return
        rank[give[best]], rank[take[position[best]]] = idlest, busiest
        load[busiest] -= moved[best]
        load[idlest] += moved[best]


def assign_timelines(work: np.ndarray, world_size: int) -> np.ndarray:
    """`[C]` int64, the rank of each timeline, so that the ranks have about as much of each kind of work.

    The timeline with the largest part of any kind first, each to the rank whose largest part is the smallest with it:
    the greedy schedule of Graham, "Bounds on Multiprocessing Timing Anomalies" (1969), for several kinds of work.

    Args:
        work: `[C, K]` numbers, not negative: of each timeline its work of K kinds.
        world_size: number of ranks.

    Example:
        >>> assign_timelines(np.array([[2], [5], [3], [3]]), 2)
        array([0, 0, 1, 1])
    """
    parts = work / np.maximum(work.sum(0), 1)
    rank, load = np.empty(len(work), np.int64), np.zeros((world_size, work.shape[1]))
    for timeline in np.argsort(-parts.max(1), kind="stable"):
        least = (load + parts[timeline]).max(1).argmin()
        rank[timeline] = least
        load[least] += parts[timeline]
    return rank


#: From this number of samples on, the order is computed batch by batch: a permutation of them all would take 8 bytes a
#: sample in every process, and seconds at the start of an epoch.
_LARGE = 1 << 24
_ROUNDS = 6


class Shuffled:
    """A permutation of `[0, count)` that depends on `seed` and `epoch` alone; a slice of it is computed when asked for.

    The permutation of many numbers is a Feistel network over the next even number of bits, whose results outside of
    the range are permuted again (Black, Rogaway: "Ciphers with Arbitrary Finite Domains", 2002).

    Args:
        count: number of samples.
        seed, epoch: origin of the permutation.
        large: the count from which on the permutation is computed in slices.

    Example:
        >>> sorted(Shuffled(5, seed=1, epoch=0)[0:5].tolist())
        [0, 1, 2, 3, 4]
    """

    def __init__(self, count: int, seed: int, epoch: int, large: int = _LARGE) -> None:
        self._count = count
        self._all = np.random.default_rng((seed, epoch)).permutation(count) if count < large else None
        self._half = np.uint64(max(1, -(-(count - 1).bit_length() // 2)))
        self._keys = np.random.SeedSequence((seed, epoch)).generate_state(_ROUNDS, np.uint64)

    def __getitem__(self, position: slice) -> np.ndarray:
        """`[B]` int64, the samples at a slice of positions without a step."""
        if self._all is not None:
            return self._all[position]
        value = np.arange(position.start, min(position.stop, self._count)).astype(np.uint64)
        todo = np.arange(len(value))
        while len(todo):
            value[todo] = self._permute(value[todo])
            todo = todo[value[todo] >= self._count]
        return value.astype(np.int64)

    def _permute(self, value: np.ndarray) -> np.ndarray:
        """A bijection of the numbers of `2 * half` bits."""
        low = np.uint64((1 << int(self._half)) - 1)
        left, right = value >> self._half, value & low
        for key in self._keys:
            left, right = right, left ^ (mix(right + key) & low)
        return (left << self._half) | right


@dataclass(frozen=True)
class BatchPart:
    """A rank's part of a batch.

    Args:
        samples: `[B]` int64, the samples by their position in the split.
        total: samples of the batch, on all ranks.
        offsets: `[U + 1]` int64, of a batch by user: the samples of timeline u are `offsets[u]:offsets[u + 1]`.
        counts: False for an empty part, whose samples stand for those that it lacks, see `Batch`.
    """

    samples: np.ndarray
    total: int
    offsets: np.ndarray | None = None
    counts: bool = True


class Order:
    """The batches of an epoch, of samples (`SampleOrder`) or of timelines (`ChunkOrder`), which are its units.

    `_units(batch)` are the units of a batch, `_work(units)` is the work that `_assign` divides among ranks, and
    `_part(units, total)` is the part of a batch of `total` samples that has these units.
    """

    #: The number of batches, the same on every rank.
    num_batches: int

    def samples_before(self, batch: int) -> int:
        """Returns the number of samples of the batches before this one."""
        raise NotImplementedError

    def part(self, batch: int, rank: int, world_size: int) -> BatchPart:
        """Returns a rank's part of a batch; all ranks have about as much work."""
        units, total = self._units(batch), self.samples_before(batch + 1) - self.samples_before(batch)
        own = units if world_size == 1 else units[self._assign(self._work(units), world_size) == rank]
        return self._part(own, total) if len(own) else replace(self._part(units[:1], total), counts=False)

    def imbalance(self, world_size: int) -> float:
        """Returns the work of the busiest ranks of the first 100 batches over that of the mean ranks."""
        busiest = total = 0.0
        for batch in range(min(100, self.num_batches)):
            work = self._work(self._units(batch))
            # Of several kinds of work the first one counts.
            load = np.bincount(self._assign(work, world_size), work.reshape(len(work), -1)[:, 0], world_size)
            busiest, total = busiest + load.max(), total + load.sum()
        return float(busiest * world_size / total) if total else 1.0


class SampleOrder(Order):
    """An epoch's samples in batches of equal size, but for the last.

    Args:
        count: number of samples.
        batch_size: samples of a batch.
        shuffle: seed and epoch of the order; None for that of the split.
        work: of samples `[B]` the events of their histories, `[B]` int64.
    """

    _assign = staticmethod(assign_samples)

    def __init__(
        self,
        count: int,
        batch_size: int,
        shuffle: tuple[int, int] | None,
        work: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        self._count, self._batch_size, self._work = count, batch_size, work
        self._shuffled = None if shuffle is None else Shuffled(count, *shuffle)
        self.num_batches = -(-count // batch_size)

    def samples_before(self, batch: int) -> int:
        return min(batch * self._batch_size, self._count)

    def _units(self, batch: int) -> np.ndarray:
        first, last = self.samples_before(batch), self.samples_before(batch + 1)
        return np.arange(first, last) if self._shuffled is None else self._shuffled[first:last]

    def _part(self, units: np.ndarray, total: int) -> BatchPart:
        return BatchPart(units, total)


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
        """`start, length` of the events that the rows of chunks see, ranges as those of `SortedEvents.histories`."""
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
        position = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
        first = np.repeat(self.first[:-1], parts) + position * max_rows
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
        position = np.stack([events.user[block], np.maximum(older - 1, 0) // window])
        changes = (np.diff(position, axis=1, prepend=last) != 0).any(axis=0)
        first.append(begin + np.flatnonzero(changes))
        last = position[:, -1:]
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
