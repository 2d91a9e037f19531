"""The features of samples as columns: logits of rates, logarithms of counts and ages, and the dense columns."""

from dataclasses import dataclass

import numpy as np

from jfi.baselines.samples import Samples
from jfi.baselines.tallies import Tallies
from jfi.data import InteractionDataset

#: The weight of the user's own rate beside the similarities of labeled events, which are at most about 1 each.
_RATE_WEIGHT = 1.0
_SMALL = 1e-3


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
    """The features of samples, each made of rows that are strictly older; `jfi.baselines.tallies` has the definition.

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
        self.samples = samples
        self._tallies = Tallies(dataset, samples)
        users, items, contexts = dataset.arrays().dense
        rows = samples.events
        columns = [*users[samples.user].T, *items[samples.item].T, *(one[rows] for one in contexts)]
        self._dense = dict(zip(dataset.schema.dense_names, columns, strict=False))
        seconds = self._tallies.seconds[samples.splits["train"]]
        #: Seconds from the first to the last training sample, at least 1.
        self.span = max(float(seconds.max() - seconds.min()), 1.0)

    def item(self, smoothing: Smoothing) -> dict[str, np.ndarray]:
        """The target's rate."""
        return {"item rate": _logit(self._item_rate(smoothing))}

    def item_and_user(self, smoothing: Smoothing) -> dict[str, np.ndarray]:
        """The target's and the user's rate; for implicit feedback there is no rate of the user."""
        if self._tallies.is_implicit:
            return self.item(smoothing)
        return self.item(smoothing) | {"user rate": _logit(self._user_rate(smoothing))}

    def popularity(self, smoothing: Smoothing) -> dict[str, np.ndarray]:
        """The target's rate in the recent past."""
        tally = self._tallies.recent(smoothing.half_life)
        return {"recent item rate": _logit(tally.rate(self._tallies.overall, smoothing.item))}

    def co_occurrence(self, smoothing: Smoothing) -> dict[str, np.ndarray]:
        """Returns what the items of the history, and the labels they have there, say about the target."""
        sums = self._tallies.co_occurrence
        columns = {"similarity": np.log(sums.similarity + _SMALL)}
        if not self._tallies.is_implicit:
            rate = (sums.liked + _RATE_WEIGHT * self._user_rate(smoothing)) / (sums.labeled + _RATE_WEIGHT)
            columns |= {"rate of similar events": _logit(rate), "agreement": sums.agreement}
        return columns

    def all(self, smoothing: Smoothing) -> dict[str, np.ndarray]:
        """Every feature, `[B]` float64 each; NaN is a missing value."""
        tallies = self._tallies
        columns = self.item_and_user(smoothing) | self.popularity(smoothing) | self.co_occurrence(smoothing)
        columns["item count"] = np.log1p(tallies.item.count)
        columns["recent item count"] = np.log1p(tallies.recent(smoothing.half_life).count)
        columns["user count"] = np.log1p(tallies.num_events)
        columns["age of the newest event"] = np.log1p(tallies.age)
        if not tallies.is_implicit:
            user = self._user_rate(smoothing)
            columns["rate of the user's newest events"] = _logit(tallies.user_newest.rate(user, 1.0))
        for name, tally in tallies.columns.items():
            columns[f"{name}: rate"] = _logit(tally.rate(tallies.overall, smoothing.item))
        for name, (tally, share) in tallies.in_history.items():
            expected = self._user_rate(smoothing) if share is None else share
            columns[f"{name}: rate in the history"] = _logit(tally.rate(expected, smoothing.user))
            columns[f"{name}: count in the history"] = np.log1p(tally.count if share is None else tally.positives)
        return columns | self._dense

    def _item_rate(self, smoothing: Smoothing) -> np.ndarray:
        return self._tallies.item.rate(self._tallies.overall, smoothing.item)

    def _user_rate(self, smoothing: Smoothing) -> np.ndarray:
        return self._tallies.user.rate(self._tallies.overall, smoothing.user)


def _logit(rate: np.ndarray) -> np.ndarray:
    rate = np.clip(rate, _SMALL / 1000, 1 - _SMALL / 1000)
    return np.log(rate / (1 - rate))
