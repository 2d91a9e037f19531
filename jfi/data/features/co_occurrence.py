"""Similarity of a target to the events of its user's history, by which users had both before that moment.

A user who has two items within `window` events makes a pair of them, at the time of the later one. With c the number of
pairs of items i and j that are strictly older than a sample, and n_i and n_j those of events,

    w_ij = c / sqrt(n_i n_j)                 similarity
    a_ij = sum of r_i r_j / (c + 10)         agreement, over the pairs, of the surprise r in the labels of both events

where the surprise of an event is its label minus what the item and the user let expect. Sums over the history's newest
`window` events j then say how much the target resembles the history, and whether users like both.
"""

from dataclasses import dataclass

import numpy as np

from jfi.data.batches.events import Histories
from jfi.data.errors import DataError
from jfi.data.features.past import Past
from jfi.data.features.point_in_time import PastIndex
from jfi.utils.jagged import ranges

#: Pairs that are computed together, and stay in the cache; and pairs that the log has, about.
_AT_ONCE, _LARGEST_LOG = 1 << 17, 1 << 24
_LONGEST, _SHORTEST = 128, 8
_FEW_PAIRS = 10.0
#: More pairs than these are not sorted in memory, which takes some 50 bytes of each.
_MAX_PAIRS = 1 << 28


@dataclass(frozen=True)
class CoOccurrence:
    """Sums over the newest events j of each sample's history, `[B]` float64 each.

    Args:
        similarity: of w.
        labeled: of w over the events with a label.
        liked: of w times the label.
        agreement: of a times the event's surprise.
    """

    similarity: np.ndarray
    labeled: np.ndarray
    liked: np.ndarray
    agreement: np.ndarray


def window_of(num_events: int, max_history: int) -> int:
    """The number of newest events that are compared with a target; fewer for tables with very many events.

    >>> window_of(100_000, 200), window_of(1_000_000, 200), window_of(1_000_000, 5)
    (128, 16, 5)
    """
    return min(max_history, max(_SHORTEST, min(_LONGEST, _LARGEST_LOG // max(num_events, 1))))


def co_occurrence(index: PastIndex, window: int, rows: np.ndarray, item: np.ndarray) -> CoOccurrence:
    """The sums for the samples `rows [B]` with targets `item [B]`.

    Args:
        index: of the dataset; it keeps the pairs. In implicit feedback no label is surprising.
        window: the number of newest events of a history that count.
        rows: `[B]` int64, the samples' events.
        item: `[B]` int64, the samples' targets.
    """
    events, name, with_labels = index.events, f"pairs of {window}", not index.is_implicit
    if f"{name}: codes" not in index.arrays:
        _make_pairs(index, window, name)
    pairs = Past(index.arrays[f"{name}: codes"], len(index.times), index.arrays[f"{name}: keys"])
    alone, moment = index.past("history", ("item",)), index.moment(rows)
    of_target = alone.older(item, moment).count
    # A sample that is an event of histories, with its own item, asks for the pairs that it made.
    place, first = np.full(len(rows), -1), index.arrays.get(f"{name}: first")
    if first is not None:
        in_history = index.rows("history")
        found = np.minimum(np.searchsorted(in_history, rows), len(in_history) - 1)
        place = np.where((in_history[found] == rows) & (events.item[rows] == item), found, -1)
    sums = np.zeros((4, len(rows)))
    for is_own in (True, False):
        chosen = np.flatnonzero((place >= 0) == is_own)
        chosen = chosen[np.argsort(moment[chosen], kind="stable")]
        asked = _newest(index, rows[chosen], window)
        for own, _, event in asked.blocks(events, _AT_ONCE):
            part, count = chosen[own], asked.lengths[own]
            now, other, agreed = moment[part].repeat(count), events.item[event].astype(np.int64), 0.0
            if is_own:
                own_pairs = ranges(first[place[part]], count)
                found = index.arrays[f"{name}: older"][own_pairs]
                if with_labels:
                    agreed = index.arrays[f"{name}: agreement"][own_pairs]
            else:
                older = pairs.older(_pair(item[part].repeat(count), other, index.num_items), now)
                found = older.count
                if with_labels:
                    agreed = older.sum(index.arrays[f"{name}: products"])
            weight = found / np.sqrt(np.maximum(of_target[part].repeat(count) * alone.older(other, now).count, 1))
            agreement, label = agreed / (found + _FEW_PAIRS), events.label[event]
            labeled, liked = ~np.isnan(label), np.nan_to_num(label)
            surprising = _surprise(index)[event] if with_labels else 0.0
            sample = np.arange(len(part)).repeat(count)
            for i, values in enumerate((weight, weight * labeled, weight * liked, agreement * surprising)):
                sums[i, part] = np.bincount(sample, weights=values, minlength=len(part))
    return CoOccurrence(*sums)


def _make_pairs(index: PastIndex, window: int, name: str) -> None:
    events, in_history = index.events, index.rows("history")
    by_time = np.argsort(index.moment(in_history), kind="stable")
    later_rows = in_history[by_time]
    histories, moment = _newest(index, later_rows, window), index.moment(slice(None))
    count = int(histories.lengths.sum())
    if count > _MAX_PAIRS:
        raise DataError(
            f"data.statistics: similar compares {count:,} pairs of events, and {_MAX_PAIRS:,} is the most; leave it "
            f"out, or set data.max_history to {max(1, window * _MAX_PAIRS // count)}"
        )
    (key, when), product = np.empty((2, count), np.int64), np.empty(0 if index.is_implicit else count)
    for own, place, event in histories.blocks(events, _AT_ONCE):
        later = later_rows[own].repeat(histories.lengths[own])
        when[place] = moment[later]
        key[place] = _pair(events.item[later].astype(np.int64), events.item[event].astype(np.int64), index.num_items)
        if not index.is_implicit:
            product[place] = _surprise(index)[later] * _surprise(index)[event]
    pairs = Past.sort(key, when, len(index.times))
    del key, when
    first = np.empty(len(in_history), np.int64)
    first[by_time] = histories.lengths.cumsum() - histories.lengths
    older, agreement = pairs.of_each_row(None if index.is_implicit else product)
    made = {"codes": pairs.codes, "keys": pairs.keys, "first": first, "older": older}
    if not index.is_implicit:
        made |= {"agreement": agreement, "products": pairs.prefix(product)}
    for part, values in made.items():
        index.array(f"{name}: {part}", lambda values=values: values)


def _surprise(index: PastIndex) -> np.ndarray:
    """The surprises, as multiples of 2**-10, so that sums of products are exact."""
    return index.array("rounded surprise", lambda: np.rint(index.surprise * 1024) / 1024)


def _newest(index: PastIndex, rows: np.ndarray, window: int) -> Histories:
    """The newest `window` events of the histories of rows `[N]`."""
    start, lengths = index.events.histories(rows, window)
    return Histories(lengths, start)


def _pair(one: np.ndarray, other: np.ndarray, num_items: int) -> np.ndarray:
    """A number for each pair of items, whatever their order."""
    return np.minimum(one, other) * num_items + np.maximum(one, other)
