"""The order of an epoch's samples."""

import numpy as np

from jfi.encoding import mix

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
        """`[B]` int64, the samples at a slice of places without a step."""
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
