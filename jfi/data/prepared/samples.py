"""The events that are samples of each split, in the order of time, chosen a block at a time."""

import logging
from collections.abc import Callable

import numpy as np

from jfi.data.config import DataConfig
from jfi.data.errors import DataError
from jfi.data.prepared.stages.splits import SPLITS
from jfi.data.schema.labels import labels_of
from jfi.events.events import SortedEvents
from jfi.utils.jagged import blocks

_log = logging.getLogger(__name__)


def choose_samples(
    events: SortedEvents,
    order: np.ndarray,
    known_items: np.ndarray,
    config: DataConfig,
    put: Callable[[str, np.ndarray], None],
) -> None:
    """Chooses the labeled events of each split.

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
    columns = list(labels_of(config, events.label, events.targets))
    low, high = ({name: np.full(len(columns), bound) for name in SPLITS} for bound in (np.inf, -np.inf))
    for begin, end in blocks(len(order)):
        rows = order[begin:end]
        label, split = events.label[rows], events.split[rows]
        for i, name in enumerate(SPLITS):
            chosen = rows[(split == i) & ~np.isnan(label)]
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
            raise DataError(f"the {name} split is empty: {total} labeled rows, split by {_how(config)}")
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


def _how(config: DataConfig) -> str:
    return {
        "time": f"data.fractions {config.fractions}",
        "user": f"data.fractions {config.fractions} of the users",
        "leave_one_out": "users with 3 labeled rows or more",
        "column": f"the column '{config.split_column}'",
        "files": "data.validation and data.test",
    }[config.split]
