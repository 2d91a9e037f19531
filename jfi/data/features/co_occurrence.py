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

from jfi.data.batches.events import Events
from jfi.data.features.past import Past
from jfi.data.schema.coded import blocks
from jfi.data.schema.columns import ranges

#: Pairs that are in memory together beside the log of all pairs, and pairs that the log has, about.
_AT_ONCE, _LARGEST_LOG = 1 << 22, 1 << 24
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
    in_history = np.arange(len(events)) if events.rows is None else np.asarray(events.rows, np.int64)
    later, earlier = _with_history(events, in_history, window)
    later = in_history[later]
    item_of = np.asarray(events.item, np.int64)
    num_items = int(item_of.max()) + 1
    pairs = Past(_pair(item_of[later], item_of[earlier], num_items), moment[later])
    total = pairs.prefix(surprise[later] * surprise[earlier])
    alone = Past(item_of[in_history], moment[in_history])
    of_target = alone.older(item, moment[rows]).count
    label = np.nan_to_num(events.label)
    has_label = ~np.isnan(events.label)
    sums = np.zeros((4, len(rows)))
    for begin, end in blocks(len(rows), max(1, _AT_ONCE // window)):
        part = slice(begin, end)
        sample, event = _with_history(events, rows[part], window)
        now, target, other = moment[rows[part]][sample], item[part][sample], item_of[event]
        older = pairs.older(_pair(target, other, num_items), now)
        count = older.count
        weight = count / np.sqrt(np.maximum(of_target[part][sample] * alone.older(other, now).count, 1))
        agreement = (total[older.end] - total[older.first]) / (count + _FEW_PAIRS)
        for i, values in enumerate(
            (weight, weight * has_label[event], weight * label[event], agreement * surprise[event])
        ):
            sums[i, part] = np.bincount(sample, weights=values, minlength=end - begin)
    return CoOccurrence(*sums)


def _with_history(events: Events, rows: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """The places in `rows` and the events of their histories, for all pairs of a row and an event of its history."""
    start, length = events.histories(rows, window)
    history = ranges(start, length)
    if events.rows is not None:
        history = events.rows[history].astype(np.int64, copy=False)
    return np.repeat(np.arange(len(rows)), length), history


def _pair(one: np.ndarray, other: np.ndarray, num_items: int) -> np.ndarray:
    """A number for each pair of items, whatever their order."""
    return np.minimum(one, other) * num_items + np.maximum(one, other)
