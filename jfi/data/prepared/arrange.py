"""The interactions in the order of the histories, and the split of each."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data.config import DataConfig
from jfi.data.errors import DataError
from jfi.data.io.table import Table
from jfi.data.prepared import splits
from jfi.data.schema.coded import blocks
from jfi.data.schema.columns import sort_ids
from jfi.data.schema.labels import check_history, check_labels, read_history, read_labels
from jfi.data.schema.targets import labels_of, read_targets


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
        event: `[E]` bool, the rows that histories consist of; None means all.
        targets: as in `Events`.
    """

    user_ids: pa.Array
    item_ids: pa.Array
    user: np.ndarray
    item: np.ndarray
    time: np.ndarray
    label: np.ndarray
    split: np.ndarray
    order: np.ndarray
    event: np.ndarray | None = None
    targets: dict[str, np.ndarray] = field(default_factory=dict)

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


def sort_and_split(interactions: Table, config: DataConfig, given: np.ndarray | None = None) -> Rows:
    """The rows of the table, sorted, with the split that the config says.

    Args:
        interactions: the table.
        config: the section `data`.
        given: `[E]` int8, the index in `splits.SPLITS` of each row of the table, with `split: files`.

    Raises:
        DataError: the table has no rows, or an id, a time, a label or a split is missing or malformed.
    """
    if not len(interactions):
        raise DataError(f"{interactions.name}: no rows")
    user_ids, user = sort_ids(interactions.ids(config.user))
    item_ids, item = sort_ids(interactions.ids(config.item))
    time = interactions.times(config.timestamp, config.timestamp_unit)
    label = read_labels(interactions, config.label, config.task)
    targets = read_targets(interactions, config, label)
    for one, values in zip(config.trained_labels(), labels_of(config, label, targets), strict=True):
        check_labels(interactions, one.label, values)
    if config.split == "column":
        given = given_splits(interactions, config.split_column)
    group = None if config.group is None else _groups(interactions, config.group, user)
    if given is not None and group is not None:
        _check_groups(interactions, given, group, config.group)
    event = None
    if config.history is not None:
        event = read_history(interactions, config.history)
        check_history(interactions.name, config.history, len(event), int(event.sum()), lambda: [interactions])

    order = np.lexsort((item, time, user))
    user, item, time, label = user[order], item[order], time[order], label[order]
    labeled = ~np.isnan(label)
    if given is not None:
        split = given[order]
    elif config.split == "user":
        split = splits.split_users(user_ids.to_pylist(), config.fractions, config.split_seed)[user]
    else:
        group = None if group is None else group[order]
        split = _cut(user, item, time, labeled, group, config)
    if event is not None:
        event = event[order]
    targets = {name: column[order] for name, column in targets.items()}
    return Rows(user_ids, item_ids, user, item, time, label, split, order, event, targets)


def _cut(
    user: np.ndarray,
    item: np.ndarray,
    time: np.ndarray,
    labeled: np.ndarray,
    group: np.ndarray | None,
    config: DataConfig,
) -> np.ndarray:
    """`[E]` int8, the split by time or by leaving one out, of groups as a whole."""
    if config.split == "time":
        split, order = splits.split_by_time(user, time, item, labeled, config.fractions), None
        if group is not None:
            order = splits.time_order(user, time, item)
        return split if group is None else splits.keep_groups_whole(split, group, order)
    return splits.leave_one_out(user, labeled) if group is None else splits.leave_one_out_groups(user, labeled, group)


def given_splits(interactions: Table, name: str) -> np.ndarray:
    """`[N]` int8, the index in `splits.SPLITS` that the column `name` says.

    Raises:
        DataError: a value is no name of a split.
    """
    column = interactions.ids(name)
    split = splits.named_splits(column)
    if (split < 0).any():
        row = int((split < 0).argmax())
        raise interactions.fault(row, f"'{name}' is '{column[row].as_py()}', must be train, validation or test")
    return split


def _groups(interactions: Table, name: str, user: np.ndarray) -> np.ndarray:
    """`[E]` int64, equal for the rows of a user with the same value; a row without a value is alone."""
    codes = interactions.strings(name).dictionary_encode().indices
    alone = codes.is_null().to_numpy(zero_copy_only=False)
    codes = pc.fill_null(codes, 0).to_numpy().astype(np.int64)
    group = user * (codes.max(initial=0) + 1) + codes
    group[alone] = -1 - np.flatnonzero(alone)
    return group


def _check_groups(interactions: Table, split: np.ndarray, group: np.ndarray, name: str) -> None:
    """Raises DataError for a group that the given split cuts."""
    cut = np.flatnonzero(splits.keep_groups_whole(split, group, np.arange(len(group))) != split)
    if len(cut):
        raise fault_of_group(interactions, int(cut[0]), name)


def fault_of_group(interactions: Table, row: int, name: str) -> DataError:
    """The error for a row whose group the given split cuts."""
    return interactions.fault(
        row, f"the rows of '{name}' {interactions.strings(name)[row].as_py()} are in more than one split"
    )


def members(index: np.ndarray, count: int) -> np.ndarray:
    """`[count]` bool, true at the values of `index`."""
    found = np.zeros(count, bool)
    found[index] = True
    return found
