"""The order of an epoch's samples, and its batches."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from jfi.data.batches.balance import assign_samples
from jfi.utils.encoding import mix

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

    def __getitem__(self, place: slice) -> np.ndarray:
        """`[B]` int64, the samples at a slice of positions without a step."""
        if self._all is not None:
            return self._all[place]
        value = np.arange(place.start, min(place.stop, self._count)).astype(np.uint64)
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
        samples: `[B]` int64, the samples by their place in the split.
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

    def imbalance(self, world_size: int, num_batches: int = 100) -> float:
        """Returns the work of the busiest ranks of the first batches over that of the mean ranks."""
        busiest = total = 0.0
        for batch in range(min(num_batches, self.num_batches)):
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
