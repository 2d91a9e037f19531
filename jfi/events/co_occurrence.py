"""Similarity of a target to the events of its user's history, by which users had both before that moment.

A user who has two items within `window` events makes a pair of them, at the time of the later one. With c the number of
pairs of items i and j that are strictly older than a sample, and n_i and n_j those of events,

    w_ij = c / sqrt(n_i n_j)                 similarity
    a_ij = sum of r_i r_j / (c + 10)         agreement, over the pairs, of the surprise r in the labels of both events

where the surprise of an event is its label minus what the item and the user let expect. Sums over the history's newest
`window` events j then say how much the target resembles the history, and whether users like both.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jfi.events.events import Histories, index_type
from jfi.events.past import Past
from jfi.events.point_in_time import PastIndex, Tallies
from jfi.utils.jagged import blocks, ranges

#: Pairs that are computed together, and stay in the cache.
_AT_ONCE = 1 << 17
_FEW_PAIRS = 10.0


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


def co_occurrence(asked: Tallies, window: int) -> CoOccurrence:
    """The sums for questions.

    Args:
        asked: the questions; their index keeps the pairs. In implicit feedback no label is surprising.
        window: the number of newest events of a history that count.
    """
    index, item, rows, moment = asked.index, asked.questions.item, asked.questions.events, asked.moment
    events, name, with_labels = index.events, f"pairs of {window}", not index.is_implicit
    pairs, alone = _pairs(index, window, name), index.past("history", ("item",))
    of_target = alone.older(item, moment).count
    # A sample that is an event of histories, with its own item, asks for the pairs that it made.
    place, first = np.full(len(item), -1), index.arrays.get(f"{name}: first")
    if rows is not None and first is not None and len(first):
        found = rows
        if events.rows is not None:  # values of another type would convert all of the array
            found = np.searchsorted(events.rows, rows.astype(events.rows.dtype))
            found = np.minimum(found, len(events.rows) - 1)
        place = np.where((events.rows_at(found) == rows) & (events.item[rows] == item), found, -1)
    if rows is None:
        (newest,) = (one.newest(window) for one in asked.older("history", ("user",)))
        start, lengths = newest.first, newest.end - newest.first
    else:
        start, lengths = events.histories(rows, window)
    sums, surprise = np.zeros((4, len(item))), _surprise(index) if with_labels else None
    for is_own in (True, False):
        chosen = np.flatnonzero((place >= 0) == is_own)
        histories = Histories(lengths[chosen], start[chosen])
        for own, _, event in histories.blocks(events, _AT_ONCE):
            part, count = chosen[own], histories.lengths[own]
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
            surprising = 0.0 if surprise is None else surprise[event]
            sample = np.arange(len(part)).repeat(count)
            for i, values in enumerate((weight, weight * labeled, weight * liked, agreement * surprising)):
                sums[i, part] = np.bincount(sample, weights=values, minlength=len(part))
    return CoOccurrence(*sums)


def _pairs(index: PastIndex, window: int, name: str) -> Past:
    """The pairs, sorted by both items and the moment of the later event."""
    arrays, events = index.arrays, index.events
    if f"{name}: codes" not in arrays:
        first, begin, count = index.new(len(events) if events.rows is None else len(events.rows), np.int64), 0, 0
        for rows in index.rows("history"):
            ends = count + np.cumsum(_newest(index, rows, window).lengths)
            first[begin] = count
            first[begin + 1 : begin + len(rows)] = ends[:-1]
            count, begin = int(ends[-1]), begin + len(rows)
        product = None if index.is_implicit else index.new(count, np.float64)
        pairs = Past.sort(_unsorted(index, window, product, count), count, len(index.times), index.new)
        arrays |= {f"{name}: codes": pairs.codes, f"{name}: keys": pairs.keys, f"{name}: first": first}
        products = None
        if product is not None:
            products = arrays[f"{name}: products"] = pairs.prefix(product.take, index.new)
        arrays[f"{name}: older"], agreement = pairs.of_each_row(products, index.new)
        if agreement is not None:
            arrays[f"{name}: agreement"] = agreement
    return index.sorted_rows(name)


def _unsorted(
    index: PastIndex, window: int, product: np.ndarray | None, count: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields the keys, the later moments and the numbers of pairs, and writes the products of their surprises."""
    events, end, kind = index.events, 0, index_type(count)
    for rows in index.rows("history"):
        histories, item, moment = _newest(index, rows, window), events.item[rows].astype(np.int64), index.moment(rows)
        for own, _, event in histories.blocks(events, _AT_ONCE):
            begin, end, each = end, end + len(event), histories.lengths[own]
            key = _pair(item[own].repeat(each), events.item[event].astype(np.int64), index.num_items)
            if product is not None:
                product[begin:end] = _surprise(index)[rows[own]].repeat(each) * _surprise(index)[event]
            yield key, moment[own].repeat(each), np.arange(begin, end, dtype=kind)


def _surprise(index: PastIndex) -> np.ndarray:
    """The surprises, as multiples of 2**-10, so that sums of products are exact."""

    def make() -> np.ndarray:
        found, surprise = index.new(len(index.events), np.float64), index.surprise
        for begin, end in blocks(len(found), _AT_ONCE):
            found[begin:end] = np.rint(surprise[begin:end] * 1024) / 1024
        return found

    return index.array("rounded surprise", make)


def _newest(index: PastIndex, rows: np.ndarray, window: int) -> Histories:
    """The newest `window` events of the histories of rows `[N]`."""
    start, lengths = index.events.histories(rows, window)
    return Histories(lengths, start)


def _pair(one: np.ndarray, other: np.ndarray, num_items: int) -> np.ndarray:
    """A number for each pair of items, whatever their order."""
    return np.minimum(one, other) * num_items + np.maximum(one, other)
