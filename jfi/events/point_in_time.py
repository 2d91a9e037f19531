"""Point-in-time features of users and items: counts, labels, ages and sessions from strictly older rows.

A query is an event and a target. The event gives the user, the time and the context; the target is the event's own
item, or another one, such as a sampled negative. Its past are all rows with an earlier time, of any user and in any
split, with their labels. Rows of its own time are not in it, so that neither is the event itself.

`PastIndex` has the rows sorted by key and time, and prefix sums over them; `Tallies` looks up queries. Sets of rows
that are counted:

    labeled             rows with a label; of implicit feedback all rows. A label of what comes later is known, and its
                        row in this set, once the window is over, `SortedEvents.label_delay` after the row
    history             the events of histories, which `data.history` chooses

Keys are tuples of parts, such as `("user", "item")` or `("user", "column genres")`. A row or a
target with several values of a column has a key for each of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from jfi.events.events import PAUSE, EventValues, New, SortedEvents, index_type, session_starts
from jfi.events.past import Older, Past, Tally, moments_of
from jfi.utils.encoding import UNKNOWN
from jfi.utils.jagged import blocks

RowSet = Literal["labeled", "history"]
Key = tuple[str, ...]

#: Rows of the rate that is expected otherwise, for the rates that an event's label is compared with.
_SMOOTHING = 10.0
_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class KeyColumn:
    """A categorical column of items, users or events.

    Args:
        ids: `[N, K]` integers, K values of each, 0 for none.
        size: all ids are below it.
        key: in the batches; of an item's column its name.
    """

    of: Literal["item", "user", "event"]
    ids: np.ndarray
    size: int
    key: str


@dataclass(frozen=True)
class Queries:
    """B users, times and targets whose past is looked up.

    Args:
        user: `[B]` int64, -1 for one without rows.
        seconds: `[B]` float64.
        item: `[B]` int64, -1 for one without rows.
        events: `[B]` int64, the events of the dataset that these are, whose columns of users and contexts they have; or
            None for none.
        ids: by part of a key the ids `[B, K]` of a column of the target, 0 for none; without it those of the item.
    """

    user: np.ndarray
    seconds: np.ndarray
    item: np.ndarray
    events: np.ndarray | None = None
    ids: dict[str, np.ndarray] = field(default_factory=dict)


class PastIndex:
    """Sorted arrays over the events of a dataset, each made when it is first needed.

    Args:
        events: all events.
        columns: by name of the part of a key, those of the item first; counters have no ids of them.
        num_items: the number of items.
        num_known: of these the items that training knows.
        is_implicit: whether every row is a positive.
        session: `[E]` integers, equal for the events of a session of a user, or None without a column of it.
        arrays: those that are made already, by name.
        new: makes arrays, also temporary ones; they may be maps of files.
        sets: for each set of rows the one that has the same rows, see `sets`; None finds them.
        values: what can be summed over rows, in addition to what their labels say.
    """

    def __init__(
        self,
        events: SortedEvents,
        columns: dict[str, KeyColumn],
        num_items: int,
        num_known: int,
        is_implicit: bool,
        session: np.ndarray | None = None,
        arrays: dict[str, np.ndarray] | None = None,
        new: New = np.empty,
        sets: dict[RowSet, RowSet] | None = None,
        values: EventValues | None = None,
    ) -> None:
        self.values: EventValues = values or {}
        self.events, self.is_implicit, self._session, self.new = events, is_implicit, session, new
        self.columns, self.num_items, self.num_known = columns, num_items, num_known
        self.item_columns = {part: one for part, one in columns.items() if one.of == "item"}
        #: The arrays that were made so far, by name.
        self.arrays = {} if arrays is None else arrays
        #: The rows that were sorted so far, by name; and the keys of all but pairs of items.
        self.pasts: dict[str, Past] = {}
        self.sorted_by: dict[str, Key] = {}
        if sets is not None:
            self.sets = sets

    def array(self, name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        """Returns the array of this name, made if there is none yet."""
        if name not in self.arrays:
            self.arrays[name] = make()
        return self.arrays[name]

    def name(self, rows: RowSet, key: Key) -> str:
        """The name of sorted rows, one for all sets that have the same rows."""
        return f"{self.sets[rows]} by {' x '.join(key) or 'nothing'}"

    @cached_property
    def sets(self) -> dict[RowSet, RowSet]:
        """For each set of rows the first one of those that have the same rows: sorted once, searched once."""
        if self.events.label_delay:  # what is older differs
            return {"history": "history", "labeled": "labeled"}
        are_labeled = self.is_implicit or sum(map(len, self.rows("labeled"))) == len(self.events)
        return {"history": "history", "labeled": "history" if self.events.rows is None and are_labeled else "labeled"}

    def stored_arrays(self) -> dict[str, np.ndarray]:
        """Returns the arrays that queries need; the others are needed to make arrays alone."""
        ends = ("times", "session starts", ": codes", ": keys", *(f": {one}" for one in self.values))
        return {name: one for name, one in self.arrays.items() if name.endswith(ends) or ": rows by " in name}

    @property
    def times(self) -> np.ndarray:
        """`[M]` float64 ascending, the distinct times; their indices are the moments."""
        if "times" not in self.arrays:
            self.arrays["times"], self.arrays["moments"] = moments_of(self.events.time, self.new)
        return self.arrays["times"]

    def moment(self, events: np.ndarray) -> np.ndarray:
        """`[n]` int64, the moments of events."""
        times = self.times
        if "moments" in self.arrays:
            return self.arrays["moments"][events].astype(np.int64)
        return np.searchsorted(times, self.events.time[events])

    def known_moment(self, seconds: np.ndarray) -> np.ndarray:
        """`[B]` int64, the number of moments whose labels are known strictly before times `[B]`."""
        return np.searchsorted(self.times + self.events.label_delay, seconds)

    def rows(self, rows: RowSet) -> Iterator[np.ndarray]:
        """Yields the events that a set of rows consists of, int64 ascending, a block at a time."""
        of = self.events
        for begin, end in blocks(len(of) if rows == "labeled" or of.rows is None else len(of.rows), _AT_ONCE):
            found = np.arange(begin, end)
            found = found if rows == "labeled" else of.rows_at(found)
            yield found if rows == "history" else found[~np.isnan(of.label[found])]

    def past(self, rows: RowSet, key: Key) -> Past:
        """Returns the rows of a set, sorted by key and moment, which have the numbers of their events."""
        name = self.name(rows, key)
        self.sorted_by[name] = key
        if f"{name}: codes" not in self.arrays:
            count = sum(len(keys) for keys, _, _ in self._keyed(rows, key))
            past = Past.sort(self._keyed(rows, key), count, len(self.times), self.new)
            self.arrays |= {f"{name}: codes": past.codes, f"{name}: keys": past.keys, f"{name}: events": past.order}
        return self.sorted_rows(name)

    def sorted_rows(self, name: str) -> Past:
        """Returns the sorted rows of this name, whose arrays are there."""
        if name not in self.pasts:
            parts = ("codes", "keys", "events", "position")
            codes, keys, order, position = (self.arrays.get(f"{name}: {part}") for part in parts)
            self.pasts[name] = Past(codes, len(self.times), keys, order, position)
        return self.pasts[name]

    def _keyed(self, rows: RowSet, key: Key) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yields the keys, the moments and the events of a set of rows, as `Past.sort` takes them."""
        for events in self.rows(rows):
            keys = self.keys(key, self.queries(events))
            index, _ = kept = np.nonzero(keys >= 0)
            yield keys[kept], self.moment(events)[index], events[index].astype(index_type(len(self.events)))

    def prefix(self, rows: RowSet, key: Key, values: str) -> np.ndarray:
        """`[N + 1]` float64, prefix sums of values of the rows.

        Args:
            values: "label", "item surprise" or one of `self.values`.
        """

        def make() -> np.ndarray:
            known = {"label": lambda one: np.nan_to_num(self.events.label[one]), **self.values}
            return self.past(rows, key).prefix(known.get(values) or self.item_surprise.take, self.new)

        return self.array(f"{self.name(rows, key)}: {values}", make)

    def decayed(self, key: Key, half_life: float, label: bool) -> np.ndarray:
        """`[N]` float64, sums of labels, or of ones, at each labeled row; see `Past.decayed`."""
        past, kind = self.past("labeled", key), "labels" if label else "rows"
        values = self.events.label.take if label else lambda events: np.ones(len(events))
        name = f"{self.name('labeled', key)}: {kind} by {half_life!r}"
        return self.array(name, lambda: past.decayed(values, self.times, half_life, self.new))

    @property
    def session_starts(self) -> np.ndarray:
        """`[H]` integers, for each row of histories the first one of its session, which has all of its first moment."""
        return self.array("session starts", lambda: session_starts(self.events, self._session, self.new, _AT_ONCE))

    @property
    def surprise(self) -> np.ndarray:
        """`[E]`, how far each event's label is above what its item's and its user's past let expect; 0 without one."""
        return self.array("surprise", lambda: self._differences(lambda one: one.expected))

    @property
    def item_surprise(self) -> np.ndarray:
        """`[E]`, how far each event's label is above the rate of its item; 0 without one."""
        return self.array("item surprise", lambda: self._differences(lambda one: one.item_rate))

    def _differences(self, expected: Callable[["Tallies"], np.ndarray]) -> np.ndarray:
        found = self.new(len(self.events), np.float64)
        found[:] = 0.0
        for events in self.rows("labeled"):
            found[events] = self.events.label[events] - expected(Tallies(self, self.queries(events)))
        return found

    def queries(self, events: np.ndarray, item: np.ndarray | None = None) -> Queries:
        """Returns the queries of events, `[B]` int64, with other targets `[B]` int64 or None for their own items."""
        of = self.events
        item = of.item[events] if item is None else item
        return Queries(of.user[events].astype(np.int64), of.time[events], item.astype(np.int64), events)

    def keys(self, key: Key, queries: Queries) -> np.ndarray:
        """`[n, K]` int64, the keys of queries, -1 for none; of a user's rows "user" is the first part."""
        found = np.zeros((len(queries.item), 1), np.int64)
        for part in key:
            values, size = self._values(part, queries)
            found = np.where((found < 0) | (values < 0), -1, found * size + values)
        return found

    def _values(self, part: str, queries: Queries) -> tuple[np.ndarray, int]:
        if part == "item":
            return queries.item[:, None], self.num_items
        if part == "user":
            return queries.user[:, None], 1
        column = self.columns[part]
        if part in queries.ids:
            ids = queries.ids[part]
        else:
            ids = column.ids[{"item": queries.item, "user": queries.user, "event": queries.events}[column.of]]
        return np.where(ids == UNKNOWN, -1, ids), column.size


class Tallies:
    """The tallies of B queries; each is made when it is first read."""

    def __init__(self, index: PastIndex, queries: Queries) -> None:
        self.index, self.queries, self.seconds = index, queries, queries.seconds
        if queries.events is None:
            self.moment = np.searchsorted(index.times, queries.seconds)
        else:
            self.moment = index.moment(queries.events)
        #: What is older than this moment has a label that is known; of a label of the row itself the same one.
        self.known = index.known_moment(queries.seconds) if index.events.label_delay else self.moment
        self._keys: dict[Key, np.ndarray] = {}
        self._older: dict[str, list[Older]] = {}

    def older(self, rows: RowSet, key: Key) -> list[Older]:
        """The ranges of older rows, for each value of a target with several ones."""
        name = self.index.name(rows, key)
        if name not in self._older:
            past, moment = self.index.past(rows, key), self.known if rows == "labeled" else self.moment
            self._older[name] = [past.older(one, moment) for one in self.keys(key).T]
        return self._older[name]

    def keys(self, key: Key) -> np.ndarray:
        """`[B, K]` int64, the keys of the queries, -1 for none."""
        if key not in self._keys:
            self._keys[key] = self.index.keys(key, self.queries)
        return self._keys[key]

    def num_rows(self, rows: RowSet, key: Key = ()) -> np.ndarray:
        """`[B]` int64, the number of older rows."""
        return sum(one.count for one in self.older(rows, key))

    def sums(self, rows: RowSet, key: Key, values: str, newest: int | None = None) -> np.ndarray:
        """`[B]` float64, sums of values over older rows; see `PastIndex.prefix`.

        Args:
            newest: over so many of the newest rows of each key alone.
        """
        ranges = self.older(rows, key)
        ranges = ranges if newest is None else [one.newest(newest) for one in ranges]
        if self.index.is_implicit and values == "label":  # every row is a positive
            return sum(one.count for one in ranges).astype(np.float64)
        prefix = self.index.prefix(rows, key, values)
        return sum(one.sum(prefix) for one in ranges)

    def tally(self, key: Key, newest: int | None = None) -> Tally:
        """Counts labels among older rows."""
        positives, ranges = self.sums("labeled", key, "label", newest), self.older("labeled", key)
        counts = [(one if newest is None else one.newest(newest)).count for one in ranges]
        return Tally(positives, sum(counts).astype(np.float64))

    @cached_property
    def overall(self) -> np.ndarray:
        """`[B]`, the share of positives among all labeled rows."""
        return self.tally(()).rate(0.5, 1.0)

    @cached_property
    def item(self) -> Tally:
        """Labeled rows of the target."""
        return self.tally(("item",))

    @cached_property
    def user(self) -> Tally:
        """Labeled rows of the user, events of histories or not."""
        return self.tally(("user",))

    @cached_property
    def item_rate(self) -> np.ndarray:
        """`[B]`, the rate of the target, smoothed."""
        return self.item.rate(self.overall, _SMOOTHING)

    @cached_property
    def expected(self) -> np.ndarray:
        """`[B]`, the rate that the pasts of target and user let expect."""
        return np.clip(self.item_rate + self.user.rate(self.overall, _SMOOTHING) - self.overall, 0.0, 1.0)

    def user_share(self, part: str) -> tuple[Tally, np.ndarray]:
        """The user's events that share a value with the target, among all of the user's; and the share of all users.

        Of a target with several values the mean over these.

        Args:
            part: of a key, an item's column or "item".
        """
        known = np.maximum((self.keys((part,)) >= 0).sum(axis=1), 1)
        own = self.num_rows("history", ("user", part)) / known
        everybody = self.num_rows("history", (part,)) / known / np.maximum(self.num_rows("history"), 1)
        return Tally(own, self.num_rows("history", ("user",)).astype(np.float64)), everybody

    def decayed(self, key: Key, half_life: float) -> Tally:
        """Labeled rows, which count half for every half-life, in seconds, of their age; of keys with one value."""
        past, (older,) = self.index.past("labeled", key), self.older("labeled", key)
        some = np.flatnonzero(older.count)
        last = older.end[some] - 1
        decay = np.exp2((self.index.times[past.codes[last] % past.moments] - self.seconds[some]) / half_life)
        found = []
        for label in (True, False):
            if label and self.index.is_implicit:
                continue
            sums = np.zeros(len(self.seconds))
            sums[some] = self.index.decayed(key, half_life, label)[last] * decay
            found.append(sums)
        return Tally(found[0], found[-1])

    def age(self, rows: RowSet, key: Key, oldest: bool = False) -> np.ndarray:
        """`[B]` seconds since the newest older row of the key, or since the oldest one; NaN without one."""
        past, (older,) = self.index.past(rows, key), self.older(rows, key)
        some = np.flatnonzero(older.count)
        chosen = older.first[some] if oldest else older.end[some] - 1
        found = np.full(len(self.seconds), np.nan)
        found[some] = self.seconds[some] - self.index.times[past.codes[chosen] % past.moments]
        return found

    @cached_property
    def session(self) -> tuple[Older, np.ndarray]:
        """The user's events in a session that still lasts, and `[B]` int64, its first moment."""
        past, (older,) = self.index.past("history", ("user",)), self.older("history", ("user",))
        first, moment = older.end.copy(), self.moment.copy()
        some = np.flatnonzero(np.nan_to_num(self.age("history", ("user",)), nan=np.inf) <= PAUSE)
        first[some] = start = self.index.session_starts[older.end[some] - 1]
        moment[some] = past.codes[start] % past.moments
        return Older(first, older.end, older.position), moment

    def in_session(self, key: Key) -> np.ndarray:
        """`[B]` int64, the user's events of a key in a session that still lasts, once for each value of the target."""
        past, moment = self.index.past("history", ("user", *key)), self.session[1]
        found = np.zeros(len(moment), np.int64)
        for own, older in zip(self.keys(("user", *key)).T, self.older("history", ("user", *key)), strict=True):
            found += Older(past.older(own, moment).end, older.end, older.position).count
        return found
