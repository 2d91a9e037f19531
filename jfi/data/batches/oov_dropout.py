"""Out-of-vocabulary dropout: training replaces some known ids by that of an unknown value, to train its embedding."""

import numpy as np

from jfi.utils.encoding import mix

_BITS = 1 << 20


class OovDropout:
    """The ids of an epoch that are replaced.

    Each key reads a table of random bits from an offset of its own, so a batch costs no random numbers, and the ids of
    a batch do not depend on the process that assembles it.

    Args:
        probability: with which an id is replaced.
        seed, epoch: another pair replaces other ids.

    Example:
        >>> dropout = OovDropout(0.25, seed=0, epoch=0)
        >>> float(dropout(0, np.arange(100_000)).mean().round(2))
        0.25
    """

    def __init__(self, probability: float, seed: int, epoch: int) -> None:
        # 1 keeps the numbers apart from those of the order, which has the same seed and epoch.
        generator = np.random.default_rng((seed, epoch, 1))
        self._bits = generator.random(_BITS, np.float32) < probability
        self._start = generator.integers(1 << 62, dtype=np.uint64)

    def __call__(self, key: int, index: np.ndarray) -> np.ndarray:
        """Returns `[N]` bool, true for the ids that are replaced.

        Args:
            key: number of the key.
            index: `[N]` int64, number of the sample or of the event that has the id.
        """
        offset = int(mix(self._start + np.uint64([key]))[0] % np.uint64(_BITS))
        return self._bits[(index + offset) & (_BITS - 1)]
