"""Running counts and rates of the past as dense features of the sample: `data.statistics`.

What a sample of user u, item i and time t gets is made of labeled rows that are strictly older than t, of any split,
since they are known by then; rows of its own time are not among them. A rate is that of positives, as if there were
some more rows of the rate that is expected anyway:

    item        of the item's rows: their rate, and log(1 + n) of their number
    user        of the user's events: the same; and of the newest 3, 10 and 30 how far labels lay above the rates that
                their items had then, which follows the user's mood
    user_item   of the user's events of the same item: the same as of the item, and the rate of the newest 3
    similar     of the user's newest events, weighted by how many users had both items: the sum of the weights as a
                logarithm, the rate, and how far labels of both items go together; see `co_occurrence`

`similar` looks at the 32 newest events, the same in every table, so that a table to score has the scale of training. It
takes the most time. They enter the model like numeric features of the context, under the names of `STATISTICS` in
`jfi.data.config`.
"""

from dataclasses import replace

import numpy as np

from jfi.data.batches.events import Events
from jfi.data.config import STATISTICS
from jfi.data.features.co_occurrence import co_occurrence
from jfi.data.features.past import Older, Past

#: Rows of the expected rate that a rate is smoothed with: of items and users, and of one user's events of one item.
_SMOOTHING, _OF_FEW = 10.0, 2.0
#: The newest events that `similar` compares a target with.
_WINDOW = 32
#: Added to a sum of similarities before its logarithm is taken.
_LEAST_SIMILARITY = 1e-3


def make_statistics(events: Events, names: list[str], max_history: int) -> dict[str, np.ndarray]:
    """Returns by column the statistics `[E]` float64 of all events, in their order."""
    made = _Statistics(events, max_history)
    columns: dict[str, np.ndarray] = {}
    for name in STATISTICS:
        if name in names:
            columns |= getattr(made, name)()
    return columns


class _Statistics:
    def __init__(self, events: Events, max_history: int) -> None:
        self._all, self._window = events, min(_WINDOW, max_history)
        self._item, self._user = events.item.astype(np.int64), events.user.astype(np.int64)
        self._moment = np.unique(events.time, return_inverse=True)[1]
        self._label, self._labeled = np.nan_to_num(events.label), ~np.isnan(events.label)
        in_history = np.ones(len(events), bool)
        if events.rows is not None:
            in_history[:] = False
            in_history[events.rows] = True
        self._events = self._labeled & in_history
        everything = np.zeros(len(events), np.int64)
        of_all, _, older = self._tally(everything, self._labeled)
        self._overall = _rate(of_all, older.count, 0.5, 1.0)
        of_item, _, older = self._tally(self._item, self._labeled)
        self._item_count = older.count
        self._item_rate = _rate(of_item, older.count, self._overall, _SMOOTHING)
        of_user, self._user_past, self._older_of_user = self._tally(self._user, self._events)
        self._user_rate = _rate(of_user, self._older_of_user.count, self._overall, _SMOOTHING)

    def item(self) -> dict[str, np.ndarray]:
        return {"past_item_rate": self._item_rate, "past_item_count": np.log1p(self._item_count)}

    def user(self) -> dict[str, np.ndarray]:
        past, older = self._user_past, self._older_of_user
        columns = {"past_user_rate": self._user_rate, "past_user_count": np.log1p(older.count)}
        surprise = (self._label - self._item_rate)[self._events]
        for most in (3, 10, 30):
            newest = older.newest(most)
            columns[f"past_user_newest_{most}"] = past.sum(surprise, newest) / (newest.count + 1)
        return columns

    def user_item(self) -> dict[str, np.ndarray]:
        both = self._user * (int(self._item.max()) + 1) + self._item
        positives, past, older = self._tally(both, self._events)
        rate = _rate(positives, older.count, self._item_rate, _OF_FEW)
        newest = older.newest(3)
        of_newest = _rate(past.sum(self._label[self._events], newest), newest.count, rate, 1.0)
        return {
            "past_user_item_rate": rate,
            "past_user_item_count": np.log1p(older.count),
            "past_user_item_newest_3": of_newest,
        }

    def similar(self) -> dict[str, np.ndarray]:
        events = replace(self._all, user=self._user, item=self._item)
        expected = np.clip(self._item_rate + self._user_rate - self._overall, 0.0, 1.0)
        surprise = np.where(self._labeled, self._label - expected, 0.0)
        everything = np.arange(len(self._item))
        sums = co_occurrence(events, self._moment, surprise, self._window, everything, self._item)
        return {
            "past_similarity": np.log(sums.similarity + _LEAST_SIMILARITY),
            "past_similar_rate": _rate(sums.liked, sums.labeled, self._user_rate, 1.0),
            "past_agreement": sums.agreement,
        }

    def _tally(self, key: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, Past, Older]:
        """Returns for all rows the number of positives among the `chosen` ones that share their key and are older."""
        past = Past(key[chosen], self._moment[chosen])
        older = past.older(key, self._moment)
        return past.sum(self._label[chosen], older), past, older


def _rate(positives: np.ndarray, count: np.ndarray, expected: np.ndarray | float, smoothing: float) -> np.ndarray:
    return (positives + smoothing * expected) / (count + smoothing)
