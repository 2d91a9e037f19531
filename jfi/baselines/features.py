"""The features of samples as columns: logits of rates, logarithms of counts and ages, and the dense columns.

For implicit feedback every row is a positive. An item's rows are then counted with the number of sampled negatives that
is expected of it, since all candidates have the same chance of being drawn. A user's share of positives says nothing
there, as every positive has as many negatives; a user's events of a category are compared with all events instead.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jfi.baselines.samples import Samples
from jfi.data import InteractionDataset
from jfi.data.features.past_index import past_index
from jfi.events.co_occurrence import CoOccurrence, co_occurrence, window_of
from jfi.events.past import Tally
from jfi.events.point_in_time import Tallies
from jfi.utils.encoding import UNKNOWN

#: The weight of the user's own rate next to the similarities of labeled events, which are at most about 1 each.
_RATE_WEIGHT = 1.0
_SMALL = 1e-3
#: The newest events of a user whose labels are counted.
_NEWEST = 10


@dataclass(frozen=True)
class Smoothing:
    """Settings that are chosen on the validation split.

    Args:
        item: rows of the rate that is expected otherwise, which are added to those of an item.
        user: the same for events of a user.
        half_life: of the popularity by time, in seconds.
    """

    item: float
    user: float
    half_life: float


class Features:
    """The features of samples, each made of rows that are strictly older; `jfi.events.point_in_time` has them.

    Args:
        dataset: of a training run; its arrays are read into memory.
        samples: B samples of it.

    Example:
        >>> from jfi.data import DataConfig, load_dataset
        >>> dataset = load_dataset(DataConfig(source="synthetic"))
        >>> features = Features(dataset, Samples.of(dataset))
        >>> list(features.item_and_user(Smoothing(item=10.0, user=10.0, half_life=86400.0)))
        ['item rate', 'user rate']
    """

    def __init__(self, dataset: InteractionDataset, samples: Samples) -> None:
        arrays, schema = dataset.arrays(), dataset.schema
        self.samples, self._negatives = samples, arrays.negatives
        index = past_index(arrays.events, schema, arrays.columns, dataset.is_implicit, contexts=True)
        self._index, self._tallies = index, Tallies(index, index.questions(samples.events, samples.item))
        self._overall = self._tallies.overall
        if self._negatives is not None:
            self._overall = np.full(len(samples.item), 1 / (1 + self._negatives.per_positive))
        self._window, self._item_key = window_of(len(arrays.events), schema.max_history), schema.item_key
        users, items, contexts = arrays.dense
        columns = [*users[samples.user].T, *items[samples.item].T, *(one[samples.events] for one in contexts)]
        self._dense = dict(zip(schema.dense_names, columns, strict=False))
        seconds = self._tallies.seconds[samples.splits["train"]]
        #: Seconds from the first to the last training sample, at least 1.
        self.span = max(float(seconds.max() - seconds.min()), 1.0)

    def item(self, smoothing: Smoothing) -> dict[str, np.ndarray]:
        """The target's rate."""
        return {"item rate": self._rate(self._item_tally, smoothing)}

    def item_and_user(self, smoothing: Smoothing) -> dict[str, np.ndarray]:
        """The target's and the user's rate; for implicit feedback there is no rate of the user."""
        if self._negatives is not None:
            return self.item(smoothing)
        return self.item(smoothing) | {"user rate": _logit(self._user_rate(smoothing))}

    def popularity(self, smoothing: Smoothing) -> dict[str, np.ndarray]:
        """The target's rate in the recent past."""
        return {"recent item rate": self._rate(self._recent(smoothing.half_life), smoothing)}

    def co_occurrence(self, smoothing: Smoothing) -> dict[str, np.ndarray]:
        """Returns what the items of the history, and the labels they have there, say about the target."""
        sums = self._co_occurrence
        columns = {"similarity": np.log(sums.similarity + _SMALL)}
        if self._negatives is None:
            rate = (sums.liked + _RATE_WEIGHT * self._user_rate(smoothing)) / (sums.labeled + _RATE_WEIGHT)
            columns |= {"rate of similar events": _logit(rate), "agreement": sums.agreement}
        return columns

    def all(self, smoothing: Smoothing) -> dict[str, np.ndarray]:
        """Every feature, `[B]` float64 each; NaN is a missing value."""
        tallies, is_labeled = self._tallies, self._negatives is None
        columns = self.item_and_user(smoothing) | self.popularity(smoothing) | self.co_occurrence(smoothing)
        columns["item count"] = np.log1p(self._item_tally.count)
        columns["recent item count"] = np.log1p(self._recent(smoothing.half_life).count)
        columns["user count"] = np.log1p(tallies.num_rows("history", ("user",)))
        columns["age of the newest event"] = np.log1p(tallies.age("history", ("user",)))
        if is_labeled:
            newest = tallies.tally("history", ("user",), _NEWEST)
            columns["rate of the user's newest events"] = _logit(newest.rate(self._user_rate(smoothing), 1.0))
        for part, column in self._index.columns.items():
            if column.of == "item" or is_labeled:  # negatives share the user and the context of their positive
                columns[f"{column.key}: rate"] = self._rate(self._with_negatives((part,)), smoothing)
        items = {"item": self._item_key, **{part: one.key for part, one in self._index.item_columns.items()}}
        for part, name in items.items():
            if is_labeled:
                tally, expected = tallies.tally("history", ("user", part)), self._user_rate(smoothing)
            else:
                tally, expected = tallies.user_share(part)
            count = tally.count if is_labeled else tally.positives
            columns[f"{name}: rate in the history"] = _logit(tally.rate(expected, smoothing.user))
            columns[f"{name}: count in the history"] = np.log1p(count)
        return columns | self._dense

    @cached_property
    def _co_occurrence(self) -> CoOccurrence:
        return co_occurrence(self._tallies, self._window)

    @cached_property
    def _item_tally(self) -> Tally:
        return self._with_negatives(("item",))

    def _recent(self, half_life: float) -> Tally:
        tally = self._tallies.decayed(("item",), half_life)
        if self._negatives is None:
            return tally
        return self._add_negatives(tally, self._tallies.decayed((), half_life).count, 1)

    def _with_negatives(self, key: tuple[str, ...]) -> Tally:
        """Labeled rows of a key; of implicit feedback with the negatives that are expected to have been drawn."""
        tally, negatives, candidates = self._tallies.tally("labeled", key), self._negatives, 1
        if negatives is None:
            return tally
        if key != ("item",):
            values = self._index.columns[key[0]].ids
            among = np.bincount(values[negatives.candidates].ravel(), minlength=int(values.max()) + 1)
            among[UNKNOWN] = 0
            candidates = among[values[self.samples.item]].sum(axis=1)
        return self._add_negatives(tally, self._tallies.num_rows("labeled"), candidates)

    def _add_negatives(self, tally: Tally, positives: np.ndarray, candidates: np.ndarray | int) -> Tally:
        expected = self._negatives.per_positive * positives * candidates / len(self._negatives.candidates)
        return Tally(tally.positives, tally.count + expected)

    def _rate(self, tally: Tally, smoothing: Smoothing) -> np.ndarray:
        return _logit(tally.rate(self._overall, smoothing.item))

    def _user_rate(self, smoothing: Smoothing) -> np.ndarray:
        return self._tallies.tally("history", ("user",)).rate(self._overall, smoothing.user)


def _logit(rate: np.ndarray) -> np.ndarray:
    rate = np.clip(rate, _SMALL / 1000, 1 - _SMALL / 1000)
    return np.log(rate / (1 - rate))
