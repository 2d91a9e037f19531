"""The interactions in the order of the histories, and the split of each."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from jfi.data import splits
from jfi.data.coded import blocks
from jfi.data.columns import sort_ids
from jfi.data.config import DataConfig
from jfi.data.errors import DataError
from jfi.data.labels import read_labels
from jfi.data.table import Table


@dataclass(frozen=True)
class Rows:
    """All E interactions, sorted by (user, timestamp, item).

    Args:
        user_ids, item_ids: the distinct ids as strings, by number if all are integers.
        user, item: `[E]` int64, indices into them.
        time: `[E]` float64 seconds.
        label: `[E]` float32, 0 or 1, or NaN for a row that is only part of histories.
        split: `[E]` int8, the index in `splits.SPLITS`.
        order: `[E]` int64, the row's place in the table.
    """

    user_ids: pa.Array
    item_ids: pa.Array
    user: np.ndarray
    item: np.ndarray
    time: np.ndarray
    label: np.ndarray
    split: np.ndarray
    order: np.ndarray

    @property
    def train(self) -> np.ndarray:
        """`[E]` bool: the rows that vocabularies, quantiles and means come from."""
        return self.split == splits.SPLITS.index("train")

    def count_training(self, of: Literal["user", "item"]) -> np.ndarray:
        """`[U]` or `[N]` int64, the number of each user's or item's rows in training."""
        index, ids = (self.user, self.user_ids) if of == "user" else (self.item, self.item_ids)
        counts = np.zeros(len(ids), np.int64)
        for begin, end in blocks(len(index)):
            chosen = index[begin:end][self.split[begin:end] == splits.SPLITS.index("train")]
            counts += np.bincount(chosen, minlength=len(ids))
        return counts


def sort_and_split(interactions: Table, config: DataConfig) -> Rows:
    """The rows of the table, sorted, with the split that the config says.

    Raises:
        DataError: the table has no rows, or an id, a time or a label is missing or malformed.
    """
    if not len(interactions):
        raise DataError(f"{interactions.name}: no rows")
    user_ids, user = sort_ids(interactions.ids(config.user))
    item_ids, item = sort_ids(interactions.ids(config.item))
    time = interactions.times(config.timestamp, config.timestamp_unit)
    label = read_labels(interactions, config.label)

    order = np.lexsort((item, time, user))
    user, item, time, label = user[order], item[order], time[order], label[order]
    if config.split == "time":
        split = splits.split_by_time(user, time, item, config.fractions)
    else:
        split = splits.leave_one_out(user, ~np.isnan(label))
    return Rows(user_ids, item_ids, user, item, time, label, split, order)
