"""Sampled negatives of implicit feedback, and the candidates that a held-out positive is ranked among."""

from typing import Literal

import numpy as np

from jfi.events.events import SortedEvents
from jfi.utils.encoding import mix

Kind = Literal["sampled", "full"]
_MAX_DRAWS = 64


class NegativeSampler:
    """Draws items uniformly from those that the user has not interacted with by the time of the sample.

    A draw is a hash of (seed, epoch, sample), so it does not depend on earlier draws. An item that the user already
    knows is drawn again. After 64 draws the last one is kept; only a user who knows nearly all items needs so many.

    Args:
        events: all interactions.
        by_item: `[E]`, the result of `order_by_item(events)`; it may be the map of a file.
        candidates: `[C]`, the items to draw from.
        per_positive: negatives per positive.
    """

    def __init__(self, events: SortedEvents, by_item: np.ndarray, candidates: np.ndarray, per_positive: int) -> None:
        self.per_positive = per_positive
        self.by_item = by_item
        self._events = events
        self.candidates = candidates

    def draw(self, user: np.ndarray, time: np.ndarray, sample: np.ndarray, seed: int, epoch: int) -> np.ndarray:
        """`[B]` int64 items for users `[B]` at times `[B]`; `sample [B]` numbers the samples within their split."""
        key = np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint64)
        state = mix(sample.astype(np.uint64) + key)
        item = np.empty(len(user), np.int64)
        todo = np.arange(len(user))
        for _ in range(_MAX_DRAWS):
            state[todo] = mix(state[todo])
            # The bias of the remainder is below 2^-40 for up to 2^24 items.
            item[todo] = self.candidates[state[todo] % np.uint64(len(self.candidates))]
            todo = todo[self.knows(user[todo], item[todo], time[todo])]
            if not len(todo):
                break
        return item

    def knows(self, user: np.ndarray, item: np.ndarray, time: np.ndarray) -> np.ndarray:
        """`[B]` bool: whether the user has interacted with the item by that time."""
        # A binary search among the user's own events for the first one with the item; it is the oldest of them.
        low, end = self._events.first[user], self._events.first[user + 1]
        high = end
        while np.any(low < high):
            middle = (low + high) // 2
            # A search that is done has middle = low = high, which may be one beyond the last row.
            below = self._events.item[self.by_item[np.minimum(middle, end - 1)]] < item
            low, high = np.where(below & (low < high), middle + 1, low), np.where(below, high, middle)
        row = self.by_item[np.minimum(low, end - 1)]
        return (low < end) & (self._events.item[row] == item) & (self._events.time[row] <= time)


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
        positive, index = number // self.per_positive, number % self.per_positive
        user, time = self._user[positive], self._time[positive]
        if self._kind == "sampled":
            # Epoch 1, since training's negatives of epoch 0 and seed 0 would be those of AUC.
            drawn = self._sampler.draw(user, time, self._numbers[positive] * self.per_positive + index, seed=0, epoch=1)
            return positive, drawn, drawn != self.items[positive]
        item = self._sampler.candidates[index]
        return positive, item, (item != self.items[positive]) & ~self._sampler.knows(user, item, time)
