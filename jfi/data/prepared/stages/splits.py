"""Assigns sorted rows to training, validation and test, and chooses the samples of each, in the order of time."""

import logging
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data.config import DataConfig
from jfi.data.errors import DataError
from jfi.events.events import SortedEvents
from jfi.utils.encoding import hash_text, mix
from jfi.utils.jagged import blocks

SPLITS = ("train", "validation", "test")


_TRAIN, _VALIDATION, _TEST = range(3)
_NAMES = {
    "train": _TRAIN,
    "training": _TRAIN,
    "validation": _VALIDATION,
    "val": _VALIDATION,
    "valid": _VALIDATION,
    "dev": _VALIDATION,
    "test": _TEST,
}


def count_training(index: np.ndarray, split: np.ndarray, count: int) -> np.ndarray:
    """`[count]` int64: how many rows of training each user or item has; of rows `[E]` the index and the split."""
    counts = np.zeros(count, np.int64)
    for begin, end in blocks(len(index)):
        counts += np.bincount(index[begin:end][split[begin:end] == _TRAIN], minlength=count)
    return counts


def time_cuts(count: int, fractions: list[float]) -> np.ndarray:
    """`[2]` int64, the positions among `count` labeled rows in the order of time at which validation and test begin."""
    return np.rint(np.cumsum(fractions[:2]) * count).astype(np.int64)


def split_by_time(labeled: np.ndarray, before: int, cuts: np.ndarray) -> np.ndarray:
    """`[N]` int8, the index in SPLITS of rows in the order of time.

    A row without a label goes with the next labeled one.

    Args:
        labeled: `[N]` bool.
        before: the number of labeled rows before these.
        cuts: the result of `time_cuts`.
    """
    return np.searchsorted(cuts, before + np.cumsum(labeled) - labeled, side="right").astype(np.int8)


def leave_one_out(user: np.ndarray, labeled: np.ndarray, group: np.ndarray | None = None) -> np.ndarray:
    """`[N]` int8, the index in SPLITS of each row: tests on a user's last labeled row, validates on the one before.

    All other rows train, and all rows of a user with fewer than three labeled rows. An unlabeled row goes to the
    split of the next labeled row. A group counts as its first labeled row.

    Args:
        user: `[N]`, sorted.
        labeled: `[N]` bool.
        group: `[N]` int64, a number for each group; those of two users differ. None for no groups.
    """
    if group is not None:
        rows = np.flatnonzero(labeled)
        first = np.zeros(len(user), bool)
        first[rows[np.unique(group[rows], return_index=True)[1]]] = True
        # The first rows come first in the order, so that the others follow them.
        return keep_groups_whole(leave_one_out(user, first), group, np.argsort(~first, kind="stable"))
    counts = np.bincount(user, weights=labeled).astype(np.int64)[user]
    up_to_here = np.cumsum(labeled)
    total_up_to_user = up_to_here[np.append(user[1:] != user[:-1], True)]
    left = total_up_to_user[np.cumsum(np.append(0, user[1:] != user[:-1]))] - up_to_here + labeled
    split = np.where(left <= 1, _TEST, np.where(left == 2, _VALIDATION, _TRAIN))
    return np.where(counts >= 3, split, _TRAIN).astype(np.int8)


def split_users(ids: Sequence[str], fractions: list[float]) -> np.ndarray:
    """`[U]` int8, the index in SPLITS of each user, by a hash of the id.

    A user is in the same split whatever other users there are. The sizes are those of `fractions` on average.
    """
    point = mix(mix(hash_text(ids))) / 2.0**64
    return np.searchsorted(np.cumsum(fractions[:2]), point, side="right").astype(np.int8)


def named_splits(names: pa.Array) -> np.ndarray:
    """`[N]` int8, the index in SPLITS of each name, whatever its case; -1 for an unknown one and for null."""
    encoded = names.dictionary_encode()
    known = [_NAMES.get(name.strip().lower(), -1) for name in encoded.dictionary.to_pylist()]
    return np.append(known, -1).astype(np.int8)[pc.fill_null(encoded.indices, -1).to_numpy()]


def keep_groups_whole(split: np.ndarray, group: np.ndarray, order: np.ndarray) -> np.ndarray:
    """`[N]` int8: every row gets the split of its group's first row in `order`.

    Args:
        split: `[N]` int8.
        group: `[N]` int64.
        order: `[N]`, a permutation of the rows.
    """
    _, first, index = np.unique(group[order], return_index=True, return_inverse=True)
    whole = np.empty_like(split)
    whole[order] = split[order][first][index]
    return whole


_log = logging.getLogger(__name__)


def choose_samples(
    events: SortedEvents,
    order: np.ndarray,
    known_items: np.ndarray,
    config: DataConfig,
    put: Callable[[str, np.ndarray], None],
) -> list[str]:
    """Chooses the labeled events of each split; returns a line of those that are left out, or none.

    With `split: time` an event is no sample of training if the window of a label reaches into the time of validation.

    Without a label, held-out positives whose item is not in the training split are dropped, since negatives are items
    of the training split and the id of an unseen item would reveal a positive.

    Args:
        events: all events with their splits.
        order: `[E]`, the rows in the order of (timestamp, user, item); it may be the map of a file.
        known_items: `[N]` bool, whether the item is in the training split.
        config: the label and the split.
        put: called with the name of a split and its next samples.

    Raises:
        DataError: a split is empty, or all its labels are equal, those of any label.
    """
    labeled, seen = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    columns = config.labels_of(events.label, events.targets)
    delay, purged = max([0.0, *(one.seconds for one in config.label_windows().values())]), 0
    until = _begin(events) if config.split == "time" and delay else np.inf
    low, high = ({name: np.full(len(columns), bound) for name in SPLITS} for bound in (np.inf, -np.inf))
    for begin, end in blocks(len(order)):
        rows = order[begin:end]
        label, split = events.label[rows], events.split[rows]
        for i, name in enumerate(SPLITS):
            chosen = rows[(split == i) & ~np.isnan(label)]
            if name == "train" and until < np.inf:
                is_over = events.time[chosen] + delay < until
                chosen, purged = chosen[is_over], purged + int(np.count_nonzero(~is_over))
            labeled[name] += len(chosen)
            if config.is_implicit:
                chosen = chosen[known_items[events.item[chosen]]]
            if len(chosen):
                seen[name] += len(chosen)
                for number, column in enumerate(columns):
                    low[name][number] = np.fmin.reduce(column[chosen], initial=low[name][number])
                    high[name][number] = np.fmax.reduce(column[chosen], initial=high[name][number])
                put(name, chosen)
    total = sum(labeled.values())
    if not total:
        raise DataError(f"label '{config.targets()[0].label}' is empty in every row")
    for name in SPLITS:
        if not labeled[name]:
            what = f"; the labels' windows of {purged} rows of training reach into validation" if purged else ""
            raise DataError(f"the {name} split is empty: {total} labeled rows, split by {_how(config)}{what}")
        if config.is_implicit:
            dropped = f"dropped {labeled[name] - seen[name]} of {labeled[name]} positives of the {name} split"
            least = config.feature(config.item).min_count
            where = "in the training split" if least == 1 else f"in {least} rows of the training split"
            why = f"whose items are not {where}"
            if not seen[name]:
                raise DataError(f"the {name} split is empty: {dropped}, {why}")
            if seen[name] < labeled[name]:
                _log.warning("%s, %s", dropped, why)
            continue
        for number, (one, least, most) in enumerate(zip(config.trained_labels(), low[name], high[name], strict=True)):
            is_read = name == "train" or number < len(config.targets())  # auxiliary labels are of training alone
            if least >= most and is_read:
                what = f"are {least:g}" if least == most else "are empty"
                raise DataError(f"label '{one.label}': all {labeled[name]} labels of the {name} split {what}")
    what = "samples of training are left out: their label's window reaches into the time of validation"
    return [f"{purged:,} of {purged + labeled['train']:,} {what}"] if purged else []


def _begin(events: SortedEvents) -> float:
    """The time of the first labeled event of validation."""
    found = np.inf
    for begin, end in blocks(len(events)):
        is_sample = (events.split[begin:end] == _VALIDATION) & ~np.isnan(events.label[begin:end])
        found = min(found, float(events.time[begin:end][is_sample].min(initial=np.inf)))
    return found


def _how(config: DataConfig) -> str:
    return {
        "time": f"data.fractions {config.fractions}",
        "user": f"data.fractions {config.fractions} of the users",
        "leave_one_out": "users with 3 labeled rows or more",
        "column": f"the column '{config.split_column}'",
        "files": "data.validation and data.test",
    }[config.split]
