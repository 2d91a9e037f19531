"""Sampled negatives for implicit feedback."""

import numpy as np

from jfi.data.batches.events import Events
from jfi.utils.encoding import mix

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

    def __init__(self, events: Events, by_item: np.ndarray, candidates: np.ndarray, per_positive: int) -> None:
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
