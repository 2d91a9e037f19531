"""All interactions of a dataset, sorted, with their splits."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from jfi.data.batches.events import Events
from jfi.data.prepared.splits import SPLITS
from jfi.data.schema.coded import blocks


@dataclass(frozen=True)
class Rows:
    """All E interactions, sorted by (user, timestamp, item), and the ids of their users and items.

    Args:
        user_ids, item_ids: the distinct ids as strings, by number if all are integers.
        events: the interactions; the arrays may be maps of files.
    """

    user_ids: pa.Array
    item_ids: pa.Array
    events: Events

    @property
    def label(self) -> np.ndarray:
        """`[E]` float32, the first label."""
        return self.events.label

    @property
    def train(self) -> np.ndarray:
        """`[E]` bool: the rows that vocabularies, quantiles and means come from."""
        return self.events.split == SPLITS.index("train")

    def count_training(self, of: Literal["user", "item"]) -> np.ndarray:
        """`[U]` or `[N]` int64, the number of each user's or item's rows in training."""
        events = self.events
        index, ids = (events.user, self.user_ids) if of == "user" else (events.item, self.item_ids)
        counts = np.zeros(len(ids), np.int64)
        for begin, end in blocks(len(index)):
            chosen = index[begin:end][events.split[begin:end] == SPLITS.index("train")]
            counts += np.bincount(chosen, minlength=len(ids))
        return counts
