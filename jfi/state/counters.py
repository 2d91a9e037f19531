"""The statistics of the past in a state of users: what events add to them, and what requests read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import numpy as np

from jfi.events.events import event_values
from jfi.events.groups import StatisticsSettings
from jfi.events.live_counters import LiveCounters
from jfi.events.live_index import Get, LiveRows
from jfi.events.statistics import StatisticColumns
from jfi.serving.schema import Schema
from jfi.state.layout import TIME, EventLayout, StateInfo, comparable, hashes, is_integer
from jfi.state.lookups import Lookup
from jfi.state.stores import StateError
from jfi.state.user_rows import Chosen, LogRows

#: Numbers of items are sorted above texts.
_NUMBERS = 1 << 63


class StateCounters:
    """The statistics of a log that grows, by the ids of users, items and values.

    Args:
        schema: of requests, whose events have the columns that are counted by.

    Raises:
        StateError: events lack such a column.
    """

    def __init__(self, settings: StatisticsSettings, schema: Schema, layout: EventLayout) -> None:
        self.settings, self._layout, self._vocabularies = settings, layout, schema.vocabularies
        keys = {one.name: one.keys for one in schema.event_fields if one.kind in ("category", "slots", "quantile")}
        read = {**settings.columns, **settings.numbers, **settings.values}
        if lacking := next((name for name in read if name not in keys), None):
            raise StateError(f"events have no field '{lacking}', which statistics of the past count by")
        #: By column of the item, number and categorical column of events the model's keys of its ids.
        self._columns, self._numbers, self._values = (
            {name: keys[name] for name in names} for names in (settings.columns, settings.numbers, settings.values)
        )
        #: The counters, by digests.
        self.live = LiveCounters(settings)
        self._digests: dict[tuple[str, int], int] = {}

    def changes(
        self,
        get: Get,
        bodies: Sequence[tuple[LogRows, Chosen]],
        ids_of: Callable[[np.ndarray, Mapping[str, Sequence[str | None]]], Mapping[str, np.ndarray]],
    ) -> dict[bytes, bytes]:
        """Returns what rows change."""
        counted = [(one, chosen.kept) for one, chosen in bodies]
        users = [one.users[row] for one, rows in counted for row in rows]
        items = [one.texts[self._layout.log.item][row] for one, rows in counted for row in rows]
        times = np.concatenate([one.records[TIME][rows] for one, rows in counted])
        labels, in_history, sessions = (
            np.concatenate([getattr(one, of)[rows] for one, rows in counted])
            for of in ("labels", "in_history", "sessions")
        )
        was_event = np.concatenate([chosen.was_event for _, chosen in bodies])
        found = [(ids_of(one.records, one.texts), rows) for one, rows in counted]
        ids = {key: np.concatenate([own[key][rows] for own, rows in found]) for key in found[0][0]}
        values = {
            name: self.digests(name, np.stack([ids[key] for key in keys], axis=1))
            for name, keys in self._columns.items()
        }
        sessions = None if self.settings.session is None else sessions
        of_events = event_values(
            {name: ids[key] for name, (key,) in self._numbers.items()},
            {name: [ids[key] for key in keys] for name, keys in self._values.items()},
        )
        sums = {name: of(np.arange(len(times))) for name, of in of_events.items()}
        own = values, labels, in_history, self.orders(items), sessions, sums, was_event
        rows = LiveRows(hashes(users), hashes(items), times, *own)
        by_item = sorted(range(len(items)), key=self._layout.sort_keys("item", items).__getitem__)
        rows = rows.take(np.array(by_item, np.int64))  # `order` has the beginnings of texts alone
        return self.live.add(get, rows.take(rows.by_time()))

    def read(self, get: Get, requests: Sequence[Lookup]) -> list[StatisticColumns]:
        """Returns by column the statistics `[R]` of the candidates of requests."""
        lengths = [len(one.items) for one in requests]
        users, times = hashes([one.user for one in requests]), np.array([one.now for one in requests])
        values = {
            name: self.digests(name, np.concatenate([one.column_ids[column.key] for one in requests]))
            for name, column in self.settings.columns.items()
        }
        items = hashes([item for one in requests for item in one.items])
        rows = LiveRows(np.repeat(users, lengths), items, np.repeat(times, lengths), values)
        found, ends = self.live.compute(get, rows), np.cumsum(lengths)
        return [
            {name: one[end - own : end] for name, one in found.items()} for own, end in zip(lengths, ends, strict=True)
        ]

    def digests(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Returns digests of a column's ids, by their texts or of a bucket by its number; 0 for unknown or no ones."""
        distinct, index = np.unique(ids, return_inverse=True)
        known = self._vocabularies.get(name)
        for number in distinct[distinct > 0].tolist():
            if (name, number) not in self._digests:
                text = known[number - 1] if known and number <= len(known) else f"\0{number}"
                self._digests[name, number] = int(hashes([text])[0])
        found = [self._digests[name, number] if number > 0 else 0 for number in distinct.tolist()]
        return np.array(found, np.uint64)[index].reshape(ids.shape)

    def orders(self, items: Sequence[str]) -> np.ndarray:
        """Returns the sort keys of events of one time `[N]` uint64: numbers of items, or first bytes of their texts."""
        return np.fromiter(map(self._order, items), np.uint64, len(items))

    def _order(self, item: str) -> int:
        if "item" in self._layout.info.numbered and is_integer(item):
            return min(max(int(item) + _NUMBERS, 0), 2 * _NUMBERS - 1)
        return int.from_bytes(item.encode()[:8].ljust(8, b"\0"), "big")


def check_counts(info: StateInfo, schema: Schema) -> None:
    """Raises StateError if a state does not have the histories and the statistics of the past that a model reads."""
    load = "load it from the log by `jfi state load`"
    rules = [("history", info.log.history, schema.history)] if schema.event or schema.statistics else []
    rules += [("label", info.log.label, schema.label)] if schema.statistics and info.statistics else []
    for name, of_state, of_model in rules:
        if of_state != of_model:
            made, read = (f"`data.{name} {rule}`" if rule else f"no `data.{name}`" for rule in (of_state, of_model))
            raise StateError(f"the state of users was made by {made}, and the model by {read}; {load}")
    if schema.statistics is None:
        return
    own, wanted = info.statistics, comparable(schema.statistics, schema)
    if own is None:
        raise StateError(f"the state of users has no statistics of the past, which the model reads; {load}")
    one, other = asdict(own), asdict(wanted)
    if name := next((name for name in one if one[name] != other[name]), None):
        why = f"{name} {one[name]} and not {other[name]}; {load}"
        raise StateError(f"the state of users has other statistics of the past, {why}")
