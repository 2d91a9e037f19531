"""Sampled negatives for implicit feedback."""

import numpy as np

from jfi.encoding import mix

_MAX_DRAWS = 64


class NegativeSampler:
    """Draws items uniformly from those that the user has not interacted with by the time of the sample.

    A draw is a hash of (seed, epoch, sample), so it does not depend on earlier draws. An item that the user already
    knows is drawn again. After 64 draws the last one is kept; only a user who knows nearly all items needs so many.

    Args:
        user, item, time: `[E]`, one entry for each interaction.
        candidates: `[C]`, the items to draw from.
        per_positive: negatives per positive.
    """

    def __init__(
        self, user: np.ndarray, item: np.ndarray, time: np.ndarray, candidates: np.ndarray, per_positive: int
    ) -> None:
        self.per_positive = per_positive
        self.candidates = candidates
        self._num_items = int(item.max()) + 1
        pair = user * self._num_items + item
        order = np.lexsort((time, pair))
        self._pairs, first = np.unique(pair[order], return_index=True)
        self._since = time[order][first]

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
        pair = user * self._num_items + item
        at = np.minimum(np.searchsorted(self._pairs, pair), len(self._pairs) - 1)
        return (self._pairs[at] == pair) & (self._since[at] <= time)
