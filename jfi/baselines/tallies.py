"""Counts of each sample's past: rows and positives by item, by user, and by the values of columns.

The past of a sample is the running one: all rows with an earlier time, of any user and in any split, with their labels.
Rows of the sample's own time are not in it. What counts a user's own rows counts the events of the user's histories, so
that `data.history` holds here too.

For implicit feedback every row is a positive. An item's rows are then counted with the number of sampled negatives that
is expected of it, since all candidates have the same chance of being drawn. A user's share of positives says nothing
there, as every positive has as many negatives; a user's events of a category are compared with all events instead.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jfi.baselines.samples import Samples
from jfi.data import InteractionDataset
from jfi.data.features.co_occurrence import CoOccurrence, co_occurrence, window_of
from jfi.data.features.past import Older, Past
from jfi.data.schema.columns import Categorical
from jfi.data.schema.schema import FeatureSpec
from jfi.utils.encoding import UNKNOWN

#: Values of a multi-valued column of the user or the context that are used.
_MOST_VALUES = 8
#: The newest events of a user whose labels are counted by themselves.
_NEWEST = 10
#: Smoothing of the rates that an event's label is compared with, see `co_occurrence`.
_SMOOTHING = 10.0


@dataclass(frozen=True)
class Tally:
    """Positives among rows, `[B]` float64 each."""

    positives: np.ndarray
    count: np.ndarray

    def rate(self, expected: np.ndarray, smoothing: float) -> np.ndarray:
        """`[B]`, the share of positives as if there were `smoothing` more rows, of the rate `expected`."""
        return (self.positives + smoothing * expected) / (self.count + smoothing)


class Tallies:
    """The tallies of samples; each is made when it is first read.

    Args:
        dataset: of a training run.
        samples: B samples of that dataset.

    Example:
        >>> from jfi.data import DataConfig, load_dataset
        >>> dataset = load_dataset(DataConfig(source="synthetic"))
        >>> samples = Samples.of(dataset)
        >>> Tallies(dataset, samples).item.count.shape == samples.item.shape
        True
    """

    def __init__(self, dataset: InteractionDataset, samples: Samples) -> None:
        arrays, schema = dataset.arrays(), dataset.schema
        events = arrays.events
        self._events, self._samples, self._negatives = events, samples, arrays.negatives
        self._window = window_of(len(events), schema.max_history)
        self._features = list(zip(schema.features, arrays.columns, strict=False))
        self._item_key = schema.item_key

        self._item, self._user = (np.asarray(one, np.int64) for one in (events.item, events.user))
        self._label, self._has_label = np.nan_to_num(events.label), ~np.isnan(events.label)
        self._labeled = np.flatnonzero(self._has_label)
        self._history = np.arange(len(events)) if events.rows is None else np.asarray(events.rows, np.int64)
        self._moments = np.unique(events.time, return_inverse=True)[1]
        self.seconds, self._moment = events.time[samples.events], self._moments[samples.events]

    @property
    def is_implicit(self) -> bool:
        """Returns whether negatives are sampled."""
        return self._negatives is not None

    @cached_property
    def overall(self) -> np.ndarray:
        """`[B]`, the share of positives of the past; with sampled negatives what it is by their number."""
        if self.is_implicit:
            return np.full(len(self._moment), 1 / (1 + self._negatives.per_positive))
        return self._by_key(np.zeros((len(self._item), 1), np.int64), self._zeros).rate(0.5, 1.0)

    @cached_property
    def item(self) -> Tally:
        """Labeled rows of the target."""
        tally = self._by_key(self._item[:, None], self._samples.item[:, None])
        return self._with_negatives(tally, np.ones(len(self._moment)))

    def recent(self, half_life: float) -> Tally:
        """Labeled rows of the target, which count half for every half-life, in seconds, of their age."""
        rows, now, decay = self._labeled, self.seconds, (self._events.time[self._labeled], half_life)

        def sums(key: np.ndarray, asked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            past = Past(key, self._moments[rows])
            older = past.older(asked, self._moment)
            values = self._label[rows], np.ones(len(rows))
            return tuple(past.decayed_sum(one, *decay, older, now) for one in values)

        tally = Tally(*sums(self._item[rows], self._samples.item))
        if not self.is_implicit:
            return tally
        total = sums(np.zeros(len(rows), np.int64), np.zeros_like(self._samples.item))[1]
        return Tally(tally.positives, tally.count + self._expected_negatives(total, np.ones(len(total))))

    @cached_property
    def _user_past(self) -> tuple[Past, Older]:
        past = Past(self._user[self._history], self._moments[self._history])
        return past, past.older(self._samples.user, self._moment)

    @cached_property
    def num_events(self) -> np.ndarray:
        """`[B]`, the events of the user."""
        return self._user_past[1].count

    @cached_property
    def user(self) -> Tally:
        """Labeled events of the user."""
        past, older = self._user_past
        return Tally(*(past.sum(one[self._history], older) for one in (self._label, self._has_label)))

    @cached_property
    def user_newest(self) -> Tally:
        """The user's newest events."""
        past, older = self._user_past
        older = older.newest(_NEWEST)
        return Tally(*(past.sum(one[self._history], older) for one in (self._label, self._has_label)))

    @cached_property
    def age(self) -> np.ndarray:
        """`[B]` seconds since the user's newest event, NaN without one."""
        past, older = self._user_past
        age = np.full(len(self._moment), np.nan)
        some = older.count > 0
        newest = self._history[past.order[older.end[some] - 1]]
        age[some] = self.seconds[some] - self._events.time[newest]
        return age

    @cached_property
    def columns(self) -> dict[str, Tally]:
        """Counts labeled rows with a value of the sample, by categorical column of the item, the user or the row."""
        tallies = {}
        for name, values in self._item_columns():
            if name == self._item_key:
                continue
            tally = self._by_key(_keys(values[self._item]), _keys(values[self._samples.item]))
            if self.is_implicit:
                among = np.bincount(values[self._negatives.candidates].ravel(), minlength=int(values.max()) + 1)
                among[UNKNOWN] = 0
                tally = self._with_negatives(tally, among[values[self._samples.item]].sum(axis=1))
            tallies[name] = tally
        if self.is_implicit:  # negatives share the user and the context of their positive
            return tallies
        for spec, ids in self._features:
            if spec.role in ("user", "context"):
                values = _matrix([ids] if ids.offsets is None else map(ids.slot, range(_MOST_VALUES)))
                own, asked = (self._user, self._samples.user) if spec.of == "user" else (None, self._samples.events)
                tallies[spec.key] = self._by_key(_keys(values if own is None else values[own]), _keys(values[asked]))
        return tallies

    @cached_property
    def in_history(self) -> dict[str, tuple[Tally, np.ndarray | None]]:
        """Counts by column of the item, its id included, the user's events that share a value with the target.

        Of labels a tally and None. For implicit feedback `positives` are the events that share the value (the mean over
        values), `count` all events of the user, and beside it the share that all users' events with the value have.
        """
        found, rows = {}, self._history
        labels, ones = (self._label, self._has_label), (np.ones(len(self._label)),)
        for name, values in self._item_columns():
            own, asked = _keys(values[self._item[rows]]), _keys(values[self._samples.item])
            largest = int(values.max()) + 1
            by_user = [
                np.where(keys < 0, keys, user[:, None] * largest + keys)
                for keys, user in ((own, self._user[rows]), (asked, self._samples.user))
            ]
            tally = Tally(*self._sum(rows, *by_user, labels))
            share = None
            if self.is_implicit:
                known = np.maximum((asked >= 0).sum(axis=1), 1)
                tally = Tally(tally.positives / known, self.num_events.astype(np.float64))
                (everybody,) = self._sum(rows, own, asked, ones)
                (total,) = self._sum(rows, np.zeros((len(rows), 1), np.int64), self._zeros, ones)
                share = everybody / known / np.maximum(total, 1)
            found[name] = tally, share
        return found

    @cached_property
    def co_occurrence(self) -> CoOccurrence:
        """Counts co-occurrences of the target with the history."""
        events, samples = self._events, self._samples
        return co_occurrence(events, self._moments, self._surprise(), self._window, samples.events, samples.item)

    def _surprise(self) -> np.ndarray:
        """`[E]`, how far each event's label is above what its item's and its user's past let expect; 0 without one."""
        rows = self._labeled
        tallies = []
        for of, key in ((rows, self._item), (rows, np.zeros_like(self._item)), (self._history, self._user)):
            past = Past(key[of], self._moments[of])
            older = past.older(key[rows], self._moments[rows])
            tallies.append(Tally(*(past.sum(one[of], older) for one in (self._label, self._has_label))))
        item, overall, user = tallies
        mean = overall.rate(0.5, 1.0)
        expected = item.rate(mean, _SMOOTHING) + user.rate(mean, _SMOOTHING) - mean
        surprise = np.zeros(len(self._label))
        surprise[rows] = self._label[rows] - np.clip(expected, 0.0, 1.0)
        return surprise

    def _item_columns(self) -> Iterator[tuple[str, np.ndarray]]:
        """Returns by column of the item `[I, K]`, the values that its events keep; first the item itself."""
        count = int(self._item.max()) + 1
        yield self._item_key, 1 + np.arange(count)[:, None]
        by_column: dict[str, list[Categorical]] = {}
        for spec, ids in self._features:
            if _is_item_column(spec) and spec.column != self._item_key:
                by_column.setdefault(spec.column, []).append(ids)
        for name, columns in by_column.items():
            yield name, _matrix(columns)

    @property
    def _zeros(self) -> np.ndarray:
        """`[B, 1]`, a key that all rows share."""
        return np.zeros((len(self._moment), 1), np.int64)

    def _by_key(self, own: np.ndarray, asked: np.ndarray) -> Tally:
        """Labeled rows that share a key with the sample, of `own [E, K]` and `asked [B, K]`, -1 for none."""
        return Tally(*self._sum(self._labeled, own[self._labeled], asked, (self._label, self._has_label)))

    def _sum(
        self, rows: np.ndarray, own: np.ndarray, asked: np.ndarray, values: tuple[np.ndarray, ...]
    ) -> list[np.ndarray]:
        """`[B]` each: sums of `values [E]` over the older of `rows [N]` whose keys are among those of the sample.

        Args:
            rows: `[N]` events.
            own: `[N, K]` their keys, -1 for none.
            asked: `[B, K]` those of the samples, -1 for none.
            values: `[E]` each.
        """
        place, _ = kept = np.nonzero(own >= 0)
        past = Past(own[kept], self._moments[rows[place]])
        prefixes = [past.prefix(one[rows[place]]) for one in values]
        sums = [np.zeros(len(asked)) for _ in values]
        for key in asked.T:
            older = past.older(key, self._moment)
            for total, prefix in zip(sums, prefixes, strict=True):
                total += prefix[older.end] - prefix[older.first]
        return sums

    def _with_negatives(self, tally: Tally, candidates: np.ndarray) -> Tally:
        """The tally with the negatives that were drawn of `candidates [B]` items, by expectation."""
        if not self.is_implicit:
            return tally
        zeros = np.zeros((len(self._labeled), 1), np.int64)
        (total,) = self._sum(self._labeled, zeros, self._zeros, (self._has_label,))
        return Tally(tally.positives, tally.count + self._expected_negatives(total, candidates))

    def _expected_negatives(self, positives: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        negatives = self._negatives
        return negatives.per_positive * positives * candidates / len(negatives.candidates)


def _is_item_column(spec: FeatureSpec) -> bool:
    return spec.role == "history" and spec.of == "item" and not spec.semantic


def _matrix(columns: Iterable[Categorical]) -> np.ndarray:
    """`[N, K]` int64, the ids of columns of one id a row."""
    return np.stack([np.asarray(one.ids, np.int64) for one in columns], axis=1)


def _keys(values: np.ndarray) -> np.ndarray:
    """Values as keys: -1 for an unknown one."""
    return np.where(values == UNKNOWN, -1, values)
