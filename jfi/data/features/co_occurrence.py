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

from jfi.data.batches.events import Events, Histories
from jfi.data.features.past import Past
from jfi.data.schema.columns import ranges

#: Pairs that are computed together, and stay in the cache; and pairs that the log has, about.
_AT_ONCE, _LARGEST_LOG = 1 << 17, 1 << 24
_LONGEST, _SHORTEST = 128, 8
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


def window_of(num_events: int, max_history: int) -> int:
    """The number of newest events that are compared with a target; fewer for tables with very many events.

    >>> window_of(100_000, 200), window_of(1_000_000, 200), window_of(1_000_000, 5)
    (128, 16, 5)
    """
    return min(max_history, max(_SHORTEST, min(_LONGEST, _LARGEST_LOG // max(num_events, 1))))


def co_occurrence(
    events: Events,
    moment: np.ndarray,
    surprise: np.ndarray,
    window: int,
    rows: np.ndarray,
    item: np.ndarray,
) -> CoOccurrence:
    """The sums for the samples `rows [B]` with targets `item [B]`.

    Args:
        events: all E events.
        moment: `[E]` int64, the rank of each event's time.
        surprise: `[E]` float64 in [-1, 1], 0 without a label.
        window: the number of newest events of a history that count.
        rows: `[B]` int64, the samples' events.
        item: `[B]` int64, the samples' targets.
    """
    # Multiples of 2**-10, so that sums of products are exact.
    surprise = np.rint(surprise * 1024) / 1024
    item_of, label = np.asarray(events.item, np.int64), np.nan_to_num(events.label)
    of_event = np.stack([~np.isnan(events.label), label, surprise])
    num_items = int(max(item_of.max(), item.max())) + 1
    in_history = np.arange(len(events)) if events.rows is None else np.asarray(events.rows, np.int64)
    in_history = in_history[np.argsort(moment[in_history], kind="stable")]
    histories = _newest(events, in_history, window)
    count = int(histories.lengths.sum())
    (key, when), product = np.empty((2, count), np.int64), np.empty(count)
    for own, place, event in histories.blocks(events, _AT_ONCE):
        later = in_history[own].repeat(histories.lengths[own])
        when[place] = moment[later]
        key[place] = _pair(item_of[later], item_of[event], num_items)
        product[place] = surprise[later] * surprise[event]
    pairs = Past(key, when)
    made = pairs.of_each_row(product)
    alone = Past(item_of[in_history], moment[in_history])
    of_target = alone.older(item, moment[rows]).count
    # A sample that is an event of histories, with its own item, asks for the pairs that it made.
    place = np.full(len(events), -1)
    place[in_history] = np.arange(len(in_history))
    place = np.where(item_of[rows] == item, place[rows], -1)

    first, sums = histories.lengths.cumsum() - histories.lengths, np.zeros((4, len(rows)))
    for is_own in (True, False):
        chosen = np.flatnonzero((place >= 0) == is_own)
        if not len(chosen):
            continue  # saves the sums over all pairs where every sample is an event
        chosen = chosen[np.argsort(moment[rows[chosen]], kind="stable")]
        asked = _newest(events, rows[chosen], window)
        total = None if is_own else pairs.prefix(product)
        for own, _, event in asked.blocks(events, _AT_ONCE):
            part, count = chosen[own], asked.lengths[own]
            now, other = moment[rows[part]].repeat(count), item_of[event]
            if is_own:
                own_pairs = ranges(first[place[part]], count)
                found, agreed = (one.take(own_pairs) for one in made)
            else:
                older = pairs.older(_pair(item[part].repeat(count), other, num_items), now)
                found, agreed = older.count, total[older.end] - total[older.first]
            weight = found / np.sqrt(np.maximum(of_target[part].repeat(count) * alone.older(other, now).count, 1))
            agreement = agreed / (found + _FEW_PAIRS)
            labeled, liked, surprising = of_event.take(event, axis=1)
            sample = np.arange(len(part)).repeat(count)
            for i, values in enumerate((weight, weight * labeled, weight * liked, agreement * surprising)):
                sums[i, part] = np.bincount(sample, weights=values, minlength=len(part))
    return CoOccurrence(*sums)


def _newest(events: Events, rows: np.ndarray, window: int) -> Histories:
    """The newest `window` events of the histories of rows `[N]`."""
    start, lengths = events.histories(rows, window)
    return Histories(lengths, start)


def _pair(one: np.ndarray, other: np.ndarray, num_items: int) -> np.ndarray:
    """A number for each pair of items, whatever their order."""
    return np.minimum(one, other) * num_items + np.maximum(one, other)
