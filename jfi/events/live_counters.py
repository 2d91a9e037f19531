"""Statistics of a log that grows: events are counted as they come, and queries of now get what training would.

Records of the keys of all users, items, pairs of items and values lie in a store, see `live_records`. A query reads
those of its own keys. An event that comes late is counted from its own time on, in all sums. The surprise in the labels
of events that came before it, and the pairs of items that these made, stay as they were. A record keeps the newest rows
of its key, so a query of a time before more than `NEWER_ROWS` of them reads those that are left.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from jfi.events.events import SortedEvents, event_values
from jfi.events.groups import StatisticsSettings
from jfi.events.live_index import SETS, SURPRISES, Get, LiveIndex, LiveRows, changed, keys_of, sort_keys
from jfi.events.live_records import PAIRS, USER_ROWS, KeyedRows, entries_of_log, rows_that_stay
from jfi.events.past import Past
from jfi.events.point_in_time import KeyColumn, PastIndex, Queries
from jfi.events.statistics import StatisticColumns, Statistics
from jfi.utils.jagged import blocks, ranges

#: Rows that are computed or counted together, which bounds memory; so are rows of one time.
_AT_ONCE = 1 << 13
#: Keys of a log whose records are made together.
_KEYS_AT_ONCE = 1 << 16


class LiveCounters:
    """The statistics of a log that grows.

    Example:
        >>> counters, store = LiveCounters(StatisticsSettings("user", "item", ["item"], 8, [], False, 2, [], {})), {}
        >>> get = lambda keys: [store.get(key) for key in keys]
        >>> id, is_event = np.full(3, 7, np.uint64), np.ones(3, bool)
        >>> label, time = np.array([1.0, 0.0, 1.0]), np.array([1.0, 5.0, 9.0])
        >>> store |= counters.add(get, LiveRows(id, id, time, label=label, in_history=is_event, order=id))
        >>> queries = LiveRows(np.full(2, 3, np.uint64), np.array([7, 8], np.uint64), np.full(2, 9.0))
        >>> np.exp(counters.compute(get, queries)["past_item_count"]) - 1
        array([2., 0.])
    """

    def __init__(self, settings: StatisticsSettings) -> None:
        self._settings = settings
        #: The sorted rows that queries read, by their names.
        self.names = {one.text: one for one in self._find_names()}

    def _find_names(self) -> list[KeyedRows]:
        """Finds the sorted rows that a query reads, by computing one of a log of two rows."""
        zero, one = np.zeros(2, np.int64), np.ones(2, np.float32)
        events = SortedEvents(zero, zero, np.array([0.0, 1.0]), one, zero.astype(np.int8))
        columns, ids = {}, {}
        for name, column in self._settings.columns.items():
            ids[f"column {name}"] = np.ones((1, column.slots), np.int64)
            columns[f"column {name}"] = KeyColumn("item", ids[f"column {name}"], 2, name)
        settings = self._settings
        sums = event_values(dict.fromkeys(settings.numbers, zero), {name: [zero] for name in settings.values})
        known = settings.num_known, settings.is_implicit
        index = PastIndex(events, columns, 1, *known, sets=SETS, values=sums)
        self._statistics(index).compute(Queries(zero[:1], np.array([2.0]), zero[:1], ids=ids))
        if "session starts" in index.arrays or any(name.startswith(PAIRS) for name in index.pasts):
            index.past("history", ("user",))
        if any(name.endswith((": item surprise", ": products")) for name in index.arrays):
            for key in ((), ("item",), ("user",)):
                index.past("labeled", key)
        found = []
        for text in sorted(index.pasts):
            parts = [name.removeprefix(f"{text}: ") for name in sorted(index.arrays) if name.startswith(f"{text}: ")]
            sums = [one for one in parts if one in ("label", "item surprise", "products", *index.values)]
            if text in SURPRISES and "label" not in sums and not settings.is_implicit:
                sums.append("label")
            decays = [one for one in parts if one.startswith(("labels by ", "rows by ")) and one not in sums]
            key = index.sorted_by.get(text, ())
            found.append(KeyedRows(text, text.partition(" by ")[0], key, tuple(sums), tuple(decays)))
        return found

    def _statistics(self, index: PastIndex) -> Statistics:
        one = self._settings
        return Statistics(index, one.groups, one.categories, one.window, one.half_lives, one.numbers, one.values)

    def prefixes_of(self, user: bytes) -> list[bytes]:
        """Returns the beginnings of the keys of a user's own records, by the digest of the user's id."""
        return [name.prefix + user for name in self.names.values() if name.key[:1] == ("user",)]

    def compute(self, get: Get, queries: LiveRows) -> StatisticColumns:
        """Returns by column the statistics `[N]` of queries."""
        return _joined([self._compute(index) for index in self._indices(get, queries, {})])

    def add(self, get: Get, events: LiveRows) -> dict[bytes, bytes]:
        """Counts events, and returns the records that have changed, by key."""
        changes: dict[bytes, bytes] = {}
        for index in self._indices(get, events, changes):
            changes |= index.changes()
        return changes

    def compute_and_add(self, get: Get, events: LiveRows) -> tuple[StatisticColumns, dict[bytes, bytes]]:
        """Counts events; returns the statistics of each as of its own time, and the records that have changed.

        Args:
            events: in the order of `LiveRows.by_time`.
        """
        parts, changes = [], {}
        for index in self._indices(get, events, changes):
            parts.append(self._compute(index))
            changes |= index.changes()
        return _joined(parts), changes

    def _compute(self, index: LiveIndex) -> StatisticColumns:
        return self._statistics(index.index()).compute(index.queries)

    def _indices(self, get: Get, rows: LiveRows, changes: dict[bytes, bytes]) -> Iterator[LiveIndex]:
        """Yields the index of a block of rows after the other; `changes` has what the blocks before have changed."""
        begin, count = 0, len(rows)
        while begin < max(count, 1):
            end = min(begin + _AT_ONCE, count)
            if rows.label is not None and end < count:  # rows of one time do not see each other
                end = max(end, int(np.searchsorted(rows.time, rows.time[end - 1], "right")))
            yield LiveIndex(self._settings, self.names, changed(get, changes), rows.take(slice(begin, end)))
            begin = max(end, 1)

    def records_of(
        self,
        index: PastIndex,
        digests: Mapping[str, np.ndarray],
        orders: np.ndarray,
        sessions: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yields the keys and the records of a log, a block at a time.

        Args:
            index: of the log, which has made what queries need.
            digests: by part of a key, such as "user" and "column genres", those of its values `[N]` uint64, by number;
                the first of a column is not used.
            orders: `[I]` uint64, by item what sorts a user's events of one time.
            sessions: gives ids of the sessions of events `[n]`; None without a column of them.
        """
        index.past("history", ("user",))
        for name in self.names.values():
            source = name.text.replace(name.rows, index.sets.get(name.rows, name.rows), 1)
            past, since = index.sorted_rows(source), None
            if name.has_sessions and "session starts" in index.arrays:
                since = _session_times(index, past)
            kept = np.flatnonzero(rows_that_stay(name, past.codes // past.moments, since))
            number = past.codes[kept] // past.moments
            first = np.flatnonzero(np.diff(number, prepend=-1) != 0)
            lengths = np.diff(first, append=len(kept))
            keys = number[first] if not len(past.keys) else past.keys[number[first]]
            bounds = np.append(kept[first], len(past.codes))  # of each key's rows; the oldest one stays
            order = sort_keys(name, keys, digests)
            for begin, end in blocks(len(order), _KEYS_AT_ONCE):
                part = order[begin:end]
                rows, of = kept[ranges(first[part], lengths[part])], (bounds[part], bounds[part + 1], lengths[part])
                found, is_row = entries_of_log(name, source, index, rows, of)
                if name.has_sessions:
                    found["session"][is_row] = found["time"][is_row] if since is None else since[rows]
                if "order" in name.dtype.names:
                    found["order"][is_row] = orders[index.events.item[index.sorted_rows(source).order[rows]]]
                if name.text == USER_ROWS:
                    events = index.events.rows_at(rows)
                    found["own label"][is_row] = index.events.label[events]
                    found["item"][is_row] = digests["item"][index.events.item[events]]
                    if "rounded surprise" in index.arrays:
                        found["surprise"][is_row] = index.arrays["rounded surprise"][events]
                    if sessions is not None:
                        found["session_id"][is_row] = sessions(events)
                ends = np.cumsum(lengths[part] + 1)
                whole = zip(keys_of(name, keys[part], digests), [0, *ends[:-1].tolist()], ends.tolist(), strict=True)
                yield from ((key, found[one:two].tobytes()) for key, one, two in whole)


def _session_times(index: PastIndex, past: Past) -> np.ndarray:
    """`[N]` seconds, the time of the first event of the session of each row, an event of histories."""
    events, rows = index.events, past.order
    if events.rows is not None:
        rows = np.searchsorted(events.rows, rows.astype(events.rows.dtype, copy=False))
    return events.time[events.rows_at(index.arrays["session starts"][rows])]


def _joined(parts: list[StatisticColumns]) -> StatisticColumns:
    return parts[0] if len(parts) == 1 else {name: np.concatenate([one[name] for one in parts]) for name in parts[0]}
