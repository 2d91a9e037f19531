"""The statistics of the past in a state of users: what events add to them, and what requests ask."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from jfi.events.live_counters import Get, LiveCounters
from jfi.events.live_index import LiveQuestion, as_matrix
from jfi.events.live_records import LiveEvent
from jfi.events.statistics import Columns
from jfi.serving.counters import LogCounters
from jfi.serving.schema import PastFields
from jfi.serving.user_state.events import Events
from jfi.serving.user_state.layout import TIME, EventLayout, digest
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
        known = past.window, past.half_lives, past.is_implicit, past.session
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
        #: By categorical column of the item the columns of the records that have its values.
        self._columns = {
            name: [column.name for column in layout.columns if column.field.name == name and column.role is None]
            for name in past.columns
        }
        if lacking := next((name for name, own in self._columns.items() if not own), None):
            raise StateError(f"events have no field '{lacking}', which statistics of the past count by")
        known = past.window, past.half_lives, past.is_implicit, past.num_known
        self._live = LiveCounters(past.groups, past.categories, slots, *known)
        self._digests: dict[tuple[str, int], bytes] = {}

    def changes(self, get: Get, events: Events, records: np.ndarray, rows: Sequence[int]) -> dict[bytes, bytes]:
        """Returns what the events at `rows` of a body change, whose values are in `records`."""
        found = []
        for row in rows:
            record, item = records[row], events.items[row]
            values = {
                name: [self._value(name, int(record[one])) for one in own if record[one] > 0]
                for name, own in self._columns.items()
            }
            found.append(
                LiveEvent(
                    digest(events.users[row]),
                    digest(item),
                    float(record[TIME]),
                    float(events.labels[row]),
                    bool(events.in_history[row]),
                    self._order(item),
                    int(events.sessions[row]),
                    values,
                )
            )
        return self._live.add(get, found)

    def answers(self, get: Get, asked: Sequence[StoredHistory]) -> list[Columns]:
        """Returns by column the statistics `[R]` of the candidates of requests; the store is read twice for all."""
        return self._live.answers(get, [self._question(one) for one in asked])

    def records_of(self, counters: LogCounters) -> Iterator[tuple[bytes, bytes]]:
        """Yields the keys and the records of a log."""
        digests = {
            "user": as_matrix(map(digest, counters.ids.users)),
            "item": as_matrix(map(digest, counters.ids.items)),
        }
        for name, column in counters.fields.columns.items():
            digests[f"column {name}"] = as_matrix(self._value(name, number) for number in range(column.size))
        yield from self._live.records_of(counters.arrays, counters.fields.sets, digests)

    def _question(self, one: StoredHistory) -> LiveQuestion:
        items = [digest(item or "") for item in one.items]
        values = {}
        for name, column in self.past.columns.items():
            ids = one.column_ids[column.key].tolist()
            values[name] = [[self._value(name, own) for own in row if own] for row in ids]
        return LiveQuestion(digest(one.user), items, one.now, values)

    def _value(self, name: str, number: int) -> bytes:
        """The digest of a value, by its text, or of a bucket by its number."""
        if (name, number) not in self._digests:
            known = self._layout.schema.vocabularies.get(name)
            text = known[number - 1] if known and 0 < number <= len(known) else f"\0{number}"
            self._digests[name, number] = digest(text)
        return self._digests[name, number]

    def _order(self, item: str) -> int:
        """Returns the sort key of events of one time: the number of an item, or the first bytes of its text."""
        if self._layout.is_numbered(item):
            return min(max(int(item) + _NUMBERS, 0), 2 * _NUMBERS - 1)
        return int.from_bytes(item.encode()[:8].ljust(8, b"\0"), "big")
