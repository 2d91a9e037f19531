"""The statistics of the past in a state of users: what events add to them, and what requests ask."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from jfi.events.events import event_values
from jfi.events.live_counters import LiveCounters
from jfi.events.live_index import Get, LiveRows
from jfi.events.statistics import StatisticColumns
from jfi.serving.counters import LogCounters
from jfi.serving.schema import PastFields
from jfi.serving.user_state.events import SentEvents
from jfi.serving.user_state.layout import TIME, EventLayout, hashes
from jfi.serving.user_state.stored_history import StoredHistory
from jfi.serving.user_state.stores import StateError

#: Numbers of items are sorted above texts.
_NUMBERS = 1 << 63


def comparable(past: PastFields) -> PastFields:
    """Returns the statistics without what differs between logs."""
    return replace(past, until=0.0, sets={})


def is_same(one: PastFields, other: PastFields) -> bool:
    """Returns whether the counters of statistics can be those of others, whose vocabularies may differ."""

    def counted(past: PastFields) -> tuple:
        columns = {name: column.slots for name, column in past.columns.items()}
        known = past.window, past.half_lives, past.is_implicit, past.session, past.numbers, past.values
        return past.groups, past.categories, columns, *known

    return counted(one) == counted(other)


class StateCounters:
    """The statistics of a log that grows, by the ids of users, items and values.

    Args:
        past: the statistics.
        layout: of the records of events, which have the columns that are counted by.

    Raises:
        StateError: events lack such a column.
    """

    def __init__(self, past: PastFields, layout: EventLayout) -> None:
        self.past, self._layout = past, layout
        slots = {name: column.slots for name, column in past.columns.items()}
        #: By column of the item, number and categorical column of events the columns of the records with its values.
        self._columns, self._numbers, self._values = (
            {
                name: [column.name for column in layout.columns if column.field.name == name and column.role is None]
                for name in names
            }
            for names in (past.columns, past.numbers, past.values)
        )
        read = self._columns | self._numbers | self._values
        if lacking := next((name for name, own in read.items() if not own), None):
            raise StateError(f"events have no field '{lacking}', which statistics of the past count by")
        known = past.window, past.half_lives, past.is_implicit, past.num_known
        #: The counters, by digests.
        self.live = LiveCounters(past.groups, past.categories, slots, *known, past.numbers, past.values)
        self._digests: dict[tuple[str, int], int] = {}

    def changes(self, get: Get, bodies: Sequence[tuple[SentEvents, np.ndarray, np.ndarray]]) -> dict[bytes, bytes]:
        """Returns what events change: of each body these, their records, and the rows `[N]` of those that count."""
        users, items = ([getattr(one, of)[row] for one, _, rows in bodies for row in rows] for of in ("users", "items"))
        records = np.concatenate([records[rows] for _, records, rows in bodies])
        labels, in_history, sessions = (
            np.concatenate([getattr(one, of)[rows] for one, _, rows in bodies])
            for of in ("labels", "in_history", "sessions")
        )
        values = {
            name: self.digests(name, np.stack([records[one] for one in own], axis=1))
            for name, own in self._columns.items()
        }
        sessions = None if self.past.session is None else sessions
        of_events = event_values(
            {name: records[one] for name, (one,) in self._numbers.items()},
            {name: [records[one] for one in own] for name, own in self._values.items()},
        )
        sums = {name: of(np.arange(len(records))) for name, of in of_events.items()}
        own = values, labels, in_history, self.orders(items), sessions, sums
        return self.live.add(get, LiveRows(hashes(users), hashes(items), records[TIME], *own))

    def answers(self, get: Get, asked: Sequence[StoredHistory]) -> list[StatisticColumns]:
        """Returns by column the statistics `[R]` of the candidates of requests."""
        lengths = [len(one.items) for one in asked]
        users, times = hashes([one.user for one in asked]), np.array([one.now for one in asked])
        values = {
            name: self.digests(name, np.concatenate([one.column_ids[column.key] for one in asked]))
            for name, column in self.past.columns.items()
        }
        items = hashes([item for one in asked for item in one.items])
        rows = LiveRows(np.repeat(users, lengths), items, np.repeat(times, lengths), values)
        found, ends = self.live.compute(get, rows), np.cumsum(lengths)
        return [
            {name: one[end - own : end] for name, one in found.items()} for own, end in zip(lengths, ends, strict=True)
        ]

    def records_of(self, counters: LogCounters) -> Iterator[tuple[bytes, bytes]]:
        """Yields the keys and the records of a log."""
        digests = {"user": hashes(counters.ids.users), "item": hashes(counters.ids.items)}
        for name, column in counters.fields.columns.items():
            digests[f"column {name}"] = self.digests(name, np.arange(column.size))
        yield from self.live.records_of(counters.arrays, counters.fields.sets, digests)

    def digests(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Returns digests of values, by their texts or of a bucket by its number; 0 for none and for unknown ones.

        Args:
            name: of a categorical column of the item.
            ids: of the values, of any shape.
        """
        distinct, index = np.unique(ids, return_inverse=True)
        known = self._layout.schema.vocabularies.get(name)
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
        if self._layout.is_numbered(item):
            return min(max(int(item) + _NUMBERS, 0), 2 * _NUMBERS - 1)
        return int.from_bytes(item.encode()[:8].ljust(8, b"\0"), "big")
