"""Known ids that training batches replace by that of an unknown value, so that its embedding is trained."""

import numpy as np

from jfi.utils.encoding import mix

_BITS = 1 << 20


class UnknownIds:
    """Which ids of an epoch become unknown.

    It is a table of random bits that each key reads from an offset of its own, so a batch costs no random numbers, and
    the ids of a batch do not depend on the process that assembles it.

    Args:
        share: probability with which an id becomes unknown.
        seed, epoch: another pair gives other ids.

    Example:
        >>> unknown = UnknownIds(0.25, seed=0, epoch=0)
        >>> float(unknown(0, np.arange(100_000)).mean().round(2))
        0.25
    """

    def __init__(self, share: float, seed: int, epoch: int) -> None:
        # 1 keeps the numbers apart from those of the order, which has the same seed and epoch.
        generator = np.random.default_rng((seed, epoch, 1))
        self._bits = generator.random(_BITS, np.float32) < share
        self._start = generator.integers(1 << 62, dtype=np.uint64)

    def __call__(self, key: int, place: np.ndarray) -> np.ndarray:
        """`[N]` bool, true for the ids that become unknown.

        Args:
            key: number of the key.
            place: `[N]` int64, number of the sample or of the event that has the id.
        """
        offset = int(mix(self._start + np.uint64([key]))[0] % np.uint64(_BITS))
        return self._bits[(place + offset) & (_BITS - 1)]
