"""Candidates that a held-out positive is ranked among, for implicit feedback."""

from typing import Literal

import numpy as np

from jfi.data.batches.negatives import NegativeSampler

Kind = Literal["sampled", "full"]


class Candidates:
    """P positives, each with C other items to rank it among: sampled ones, or all that training knows.

    Items that the user has interacted with by then do not count: sampled ones are others, and of all items they are
    left out, like the positive itself.

    Args:
        rows: `[P]` int64, the interactions of the positives.
        user, item, time: `[P]`, their users, items and times.
        sampler: of the negatives.
        kind: "sampled" or "full".
        num_sampled: C of sampled candidates. They are the same in every call.
        numbers: `[P]` int64, distinct numbers that the draws follow from; `rows` if None.
    """

    def __init__(
        self,
        rows: np.ndarray,
        user: np.ndarray,
        item: np.ndarray,
        time: np.ndarray,
        sampler: NegativeSampler,
        kind: Kind,
        num_sampled: int,
        numbers: np.ndarray | None = None,
    ) -> None:
        self.rows, self.items = rows, item
        self._user, self._time = user, time
        self._numbers = rows if numbers is None else numbers
        self._sampler, self._kind = sampler, kind
        self.per_positive = num_sampled if kind == "sampled" else len(sampler.candidates)

    def __len__(self) -> int:
        """The number of pairs of a positive and a candidate, P · C."""
        return len(self.rows) * self.per_positive

    def pairs(self, number: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For pairs by number `[n]`: the positive's index, the candidate item, and whether it counts, `[n]` each."""
        positive, place = number // self.per_positive, number % self.per_positive
        user, time = self._user[positive], self._time[positive]
        if self._kind == "sampled":
            # Epoch 1, since training's negatives of epoch 0 and seed 0 would be those of AUC.
            drawn = self._sampler.draw(user, time, self._numbers[positive] * self.per_positive + place, seed=0, epoch=1)
            return positive, drawn, drawn != self.items[positive]
        item = self._sampler.candidates[place]
        return positive, item, (item != self.items[positive]) & ~self._sampler.knows(user, item, time)
