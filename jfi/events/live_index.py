"""RowSet of a log that grows, and the records of their keys as the arrays of a PastIndex.

So training's functions compute queries, and say how surprising the labels of events are. The rows that are given are
read together; those that are events count in all queries that are later than they.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jfi.events.events import SortedEvents
from jfi.events.groups import StatisticsSettings
from jfi.events.live_records import (
    DIGEST_BYTES,
    PAIRS,
    USER_ROWS,
    AddedRows,
    KeyedRows,
    add_rows,
    empty_record,
    keys_of_entries,
    rows_that_stay,
    sessions_of,
)
from jfi.events.past import Past
from jfi.events.point_in_time import Key, KeyColumn, PastIndex, Queries, RowSet, Tallies
from jfi.utils.errors import InputError
from jfi.utils.jagged import blocks, ranges

Get = Callable[[Sequence[bytes]], list[bytes | None]]


def changed(get: Get, changes: Mapping[bytes, bytes | None]) -> Get:
    """Returns what reads keys as they are after changes, of which there may be more with each call."""

    def read(keys: Sequence[bytes]) -> list[bytes | None]:
        found = get(keys)
        return [changes.get(key, value) for key, value in zip(keys, found, strict=True)] if changes else found

    return read


#: The sorted rows that labels are compared with, to tell how surprising they are.
SURPRISES = ("labeled by nothing", "labeled by item", "labeled by user")
#: Keys whose bytes are made together.
_KEYS_AT_ONCE = 1 << 20
#: No two sets of rows share an array.
SETS: dict[RowSet, RowSet] = {name: name for name in ("labeled", "history")}


@dataclass(frozen=True)
class LiveRows:
    """N users, items and times: queries, or events, which have labels. Ids are digests of texts, uint64, not 0.

    Args:
        user, item: `[N]` ids.
        time: `[N]` seconds.
        values: by categorical column of the item the ids `[N, K]` of its values, 0 for none.
        label: `[N]` 0 or 1, NaN for none; None for queries.
        in_history: `[N]` bool, whether they are events of histories.
        order: `[N]` uint64, by which a user's events of one time are sorted.
        session: `[N]` ids, 0 for none; None without a column of sessions.
        sums: by name what is summed over events, `[N]` whole numbers; see `point_in_time.event_values`.
        is_counted: `[N]` bool, events that were added before, without the label that they have now; None for none.
    """

    user: np.ndarray
    item: np.ndarray
    time: np.ndarray
    values: dict[str, np.ndarray] = field(default_factory=dict)
    label: np.ndarray | None = None
    in_history: np.ndarray | None = None
    order: np.ndarray | None = None
    session: np.ndarray | None = None
    sums: dict[str, np.ndarray] = field(default_factory=dict)
    is_counted: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.user)

    def take(self, rows: np.ndarray | slice) -> "LiveRows":
        """Returns some of the rows."""

        def part(one: np.ndarray | dict | None) -> np.ndarray | dict | None:
            if isinstance(one, dict):
                return {name: ids[rows] for name, ids in one.items()}
            return None if one is None else one[rows]

        return LiveRows(**{name: part(one) for name, one in vars(self).items()})

    def by_time(self) -> np.ndarray:
        """Returns the order `[N]` in which events are counted, whatever order they came in: by time, user and item."""
        return np.lexsort((self.order, self.user, self.time))


class LiveIndex:
    """The records of the keys of some rows, with the rows themselves if these are events.

    Args:
        names: the sorted rows that they read, by their names.
        get: reads records by key; it is called twice.
    """

    def __init__(self, settings: StatisticsSettings, names: dict[str, KeyedRows], get: Get, rows: LiveRows) -> None:
        self._settings, self._names, self._get, self._rows = settings, names, get, rows
        #: By part of a key the digests of its values, by number.
        self._digests: dict[str, np.ndarray] = {}
        #: By name of sorted rows the numbers of keys, ascending, the keys, and the entries of their records.
        self._numbers: dict[str, np.ndarray] = {}
        self._keys: dict[str, list[bytes]] = {}
        self._old: dict[str, np.ndarray] = {}
        #: By key the numbers of those of the rows.
        self._of_rows: dict[Key, np.ndarray] = {}
        self._columns = {} if rows.label is None else _columns_of(rows, settings.is_implicit)
        self._digests["user"], user = np.unique(rows.user, return_inverse=True)
        others = np.zeros(0, np.uint64)
        if USER_ROWS in names:
            self._read({USER_ROWS: np.arange(len(self._digests["user"]))})
            others = self._old[USER_ROWS]["item"]
        self._digests["item"] = _distinct(rows.item, others)
        item, ids = np.searchsorted(self._digests["item"], rows.item), {}
        for name, column in settings.columns.items():
            given = rows.values.get(name, np.zeros((len(rows), column.slots), np.uint64))
            self._digests[f"column {name}"] = _distinct(given.ravel(), np.zeros(1, np.uint64))
            ids[f"column {name}"] = np.searchsorted(self._digests[f"column {name}"], given)
        #: The rows as queries.
        self.queries = Queries(user, rows.time, item, ids=ids)
        self._pairs, window = None, np.zeros(0, np.int64)
        if USER_ROWS in names:
            window = self._read_windows()
        self._read_others(window)
        self._times = _distinct(rows.time, [np.inf], *(own["time"] for own in self._old.values()))
        #: By name of sorted rows the entries, and the indices of the added rows that they are, or -1.
        self._entries: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        if self._columns and not settings.is_implicit and set(SURPRISES) <= names.keys():
            self._find_surprises()
        for text, name in names.items():
            if name is not self._pairs and text not in self._entries:
                self._entries[text] = self._added_to(text)
        if self._pairs is not None:
            self._entries[self._pairs.text] = self._added_pairs()

    def index(self) -> PastIndex:
        """Returns the index of the records and the events."""
        return self._index_of({text: entries for text, (entries, _) in self._entries.items()})

    def changes(self) -> dict[bytes, bytes]:
        """Returns the records that events have changed, by key."""
        found: dict[bytes, bytes] = {}
        for text, (entries, source) in self._entries.items():
            key = keys_of_entries(entries)
            changed, name = np.unique(key[source >= 0]), self._names[text]
            stays, is_row = np.isin(key, changed), np.isfinite(entries["time"])
            session = entries["session"][is_row] if name.has_sessions else None
            stays[is_row] &= rows_that_stay(name, key[is_row], session)
            whole, size, begin = entries[stays].tobytes(), entries.itemsize, 0
            ends = size * np.cumsum(np.bincount(key[stays], minlength=len(self._keys[text])))[changed]
            for number, end in zip(changed.tolist(), ends.tolist(), strict=True):
                found[self._keys[text][number]] = whole[begin:end]
                begin = end
        return found

    def _read(self, numbers: dict[str, np.ndarray]) -> None:
        """Reads the records of keys, whose numbers `[K]` are given by name of sorted rows."""
        keys = {text: keys_of(self._names[text], own, self._digests) for text, own in numbers.items()}
        values = self._get([key for own in keys.values() for key in own])
        begin = 0
        for text, own in keys.items():
            found, begin, dtype = values[begin : begin + len(own)], begin + len(own), self._names[text].dtype
            if not self._columns and text != USER_ROWS:  # no query reads what is not there
                there = [number for number, value in enumerate(found) if value is not None]
                found, numbers[text] = [found[number] for number in there], numbers[text][there]
            if any(value is not None and len(value) % dtype.itemsize for value in found):
                raise InputError(f"the counters '{text}' are damaged: a record is of a wrong length")
            none = empty_record(dtype).tobytes()
            self._old[text] = np.frombuffer(b"".join(none if value is None else value for value in found), dtype)
        self._numbers |= numbers
        self._keys |= keys

    def _read_windows(self) -> np.ndarray:
        """Finds the sessions of events, and the pairs of a row's item and those of the newest events before it.

        Returns:
            The numbers of the items of these events, where pairs are counted.
        """
        name = self._names[USER_ROWS]
        self._times = _distinct(self._rows.time, self._old[USER_ROWS]["time"], [np.inf])
        entries, source = self._added_to(USER_ROWS)
        if self._columns:
            at, is_new = self._added_rows(name)[0], source >= 0
            sessions = sessions_of(entries, is_new, self._rows.session is not None)
            self._columns["session"][at[source[is_new]]] = sessions[is_new]
        self._pairs = next((one for text, one in self._names.items() if text.startswith(PAIRS)), None)
        if self._pairs is None:
            return np.zeros(0, np.int64)
        codes, rows = _codes(entries, self._times)
        moment = np.searchsorted(self._times, self._rows.time)
        past = Past(codes, len(self._times), np.zeros(0, np.int64))
        newest = past.older(self.queries.user, moment).newest(self._settings.window)
        #: Of each pair the row, and the index of the other event among all of the users.
        self._pair_row = np.repeat(np.arange(len(moment)), newest.count)
        self._pair_event = ranges(newest.first, newest.count)
        items = np.searchsorted(self._digests["item"], rows["item"])
        one, other = self.queries.item[self._pair_row], items[self._pair_event]
        self._pair_number = np.minimum(one, other) * len(self._digests["item"]) + np.maximum(one, other)
        return _distinct(other)

    def _read_others(self, window: np.ndarray) -> None:
        """Reads all records but those of users' events.

        Args:
            window: the items of the events that rows are compared with.
        """
        numbers = {}
        for text, name in self._names.items():
            if name is self._pairs:
                numbers[text] = _distinct(self._pair_number)
            elif text != USER_ROWS:
                own = _distinct(self._row_keys(name).ravel(), window[: len(window) if text == "history by item" else 0])
                numbers[text] = own[own >= 0]
        self._read(numbers)

    def _find_surprises(self) -> None:
        """Finds how far labels are above what the rows before them let expect."""
        self._entries = {text: self._added_to(text) for text in SURPRISES}
        tallies = Tallies(self._index_of({text: one for text, (one, _) in self._entries.items()}), self.queries)
        self._columns["item surprise"] = np.nan_to_num(self._rows.label - tallies.item_rate)
        self._columns["surprise"] = np.nan_to_num(np.rint((self._rows.label - tallies.expected) * 1024) / 1024)
        for text in SURPRISES:
            if "item surprise" in self._names[text].sums:  # it is made again, with them
                del self._entries[text]

    def _row_keys(self, name: KeyedRows) -> np.ndarray:
        """`[N, K]` int64, the numbers of the keys of the rows, -1 for none."""
        if name.key not in self._of_rows:
            self._of_rows[name.key] = self._index_of({}).keys(name.key, self.queries)
        return self._of_rows[name.key]

    def _added_rows(self, name: KeyedRows) -> tuple[np.ndarray, np.ndarray]:
        """Returns the events `[n]` that are rows of a set, and the index of the key of each; twice for two values."""
        is_row = self._new_events() if name.rows == "history" else self._columns["has label"]
        keys = self._row_keys(name)
        at, slot = np.nonzero((keys >= 0) & is_row[:, None])
        return at, np.searchsorted(self._numbers[name.text], keys[at, slot])

    def _new_events(self) -> np.ndarray:
        rows = self._rows
        return rows.in_history if rows.is_counted is None else rows.in_history & ~rows.is_counted

    def _added_to(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the entries of sorted rows with those that are added, and the indices of these; see `add_rows`."""
        name, at, key = self._names[text], np.zeros(0, np.int64), np.zeros(0, np.int64)
        if self._columns:
            at, key = self._added_rows(name)
        added = AddedRows(key, self._rows.time[at], lambda one: self._columns[one][at])
        return add_rows(name, self._old[text], added, self._times)

    def _added_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns what `_added_to` does, of pairs of items."""
        at, key, event = (np.zeros(0, np.int64) for _ in range(3))
        if self._columns:
            is_event = self._new_events()[self._pair_row]
            at, event = self._pair_row[is_event], self._pair_event[is_event]
            key = np.searchsorted(self._numbers[self._pairs.text], self._pair_number[is_event])
        entries = self._entries[USER_ROWS][0]
        surprise = entries["surprise"][np.isfinite(entries["time"])]
        products = AddedRows(key, self._rows.time[at], lambda _: self._columns["surprise"][at] * surprise[event])
        return add_rows(self._pairs, self._old[self._pairs.text], products, self._times)

    def _index_of(self, entries: Mapping[str, np.ndarray]) -> PastIndex:
        """Returns the index of the entries of records, by name of sorted rows."""
        arrays = {"times": self._times if entries else np.zeros(0)}
        events = {name: np.zeros(0, kind) for name, kind in _EVENTS.items()}
        for text, own in entries.items():
            codes, rows = _codes(own, self._times)
            numbers, ends = self._numbers[text], np.flatnonzero(np.isinf(own["time"]))
            are_all = not len(numbers) or numbers[-1] == len(numbers) - 1  # the index of a key is its number then
            arrays |= {f"{text}: codes": codes, f"{text}: keys": numbers[:0] if are_all else numbers}
            for one in ("position", *self._names[text].sums):
                before = np.append(0, np.cumsum(own[one][ends]))  # all rows of the keys before
                key = codes // len(self._times)
                arrays[f"{text}: {one}"] = np.append(rows[one] + before[key], before[-1])
            arrays |= {f"{text}: {one}": np.array(rows[one]) for one in self._names[text].decays}
            if text == USER_ROWS:
                key, since = codes // len(self._times), np.searchsorted(self._times, rows["session"])
                arrays["session starts"] = np.searchsorted(codes, key * len(self._times) + since)
                events = {"user": key, "item": np.searchsorted(self._digests["item"], rows["item"])}
                events |= {"time": np.array(rows["time"]), "label": np.array(rows["own label"])}
                arrays["rounded surprise"] = np.array(rows["surprise"])
        none = np.zeros((0, 1), np.int64)
        columns = {
            part: KeyColumn("item", none, len(own), part.removeprefix("column "))
            for part, own in self._digests.items()
            if part.startswith("column ")
        }
        known = max(len(self._digests["item"]), 1), self._settings.num_known, self._settings.is_implicit
        of_histories = SortedEvents(**events, split=np.zeros(len(events["user"]), np.int8))
        return PastIndex(of_histories, columns, *known, arrays=arrays, new=_refuse, sets=SETS)


def _refuse(*_: object) -> np.ndarray:
    raise KeyError("an array that queries need")  # it cannot be made of some rows


_EVENTS = {"user": np.int64, "item": np.int64, "time": np.float64, "label": np.float32}


def _columns_of(events: LiveRows, is_implicit: bool) -> dict[str, np.ndarray]:
    """Returns what events add to records, `[N]` each; surprises and sessions are found later."""
    none, has_label = np.zeros(len(events)), is_implicit | ~np.isnan(events.label)
    return {
        "label": np.nan_to_num(events.label),
        "has label": has_label,
        "item surprise": none,
        "surprise": none,
        "own label": events.label,
        "session": np.array(events.time, np.float64),
        "session_id": np.zeros(len(events), np.uint64) if events.session is None else events.session,
        "order": events.order,
        "item": events.item,
        **events.sums,
    }


def _distinct(*values: np.ndarray) -> np.ndarray:
    """Returns the distinct values of arrays, ascending; a sort is faster than the hash table of np.unique."""
    ordered = np.sort(np.concatenate(values))
    return ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]


def _codes(entries: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns of entries the rows `[n]`, without the ends, and their codes by the indices of their keys."""
    is_row = np.isfinite(entries["time"])
    rows = entries[is_row]
    return keys_of_entries(entries)[is_row] * len(times) + np.searchsorted(times, rows["time"]), rows


def keys_of(name: KeyedRows, numbers: np.ndarray, digests: Mapping[str, np.ndarray]) -> list[bytes]:
    """Returns the keys of the records of sorted rows.

    Args:
        numbers: `[K]` int64, keys as `PastIndex.keys` makes them.
        digests: by part of a key those of its values `[N]` uint64, by number.
    """
    whole = _key_matrix(name, numbers, digests)
    joined, size = whole.tobytes(), whole.shape[1]
    return [joined[begin : begin + size] for begin in range(0, len(joined), size)]


def sort_keys(name: KeyedRows, numbers: np.ndarray, digests: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the order `[K]` of keys by the first 8 bytes behind their prefix, in which a store is filled fastest."""
    begin = np.zeros((len(numbers), DIGEST_BYTES), np.uint8)
    for first, end in blocks(len(numbers), _KEYS_AT_ONCE):
        whole = _key_matrix(name, numbers[first:end], digests)[:, len(name.prefix) :][:, :DIGEST_BYTES]
        begin[first:end, : whole.shape[1]] = whole
    return np.argsort(begin.view(">u8")[:, 0].astype(np.uint64), kind="stable")


def _key_matrix(name: KeyedRows, numbers: np.ndarray, digests: Mapping[str, np.ndarray]) -> np.ndarray:
    """The keys as `[K, bytes]` uint8."""
    if name.text.startswith(PAIRS):
        items = digests["item"]
        low, high = (items[own] for own in np.divmod(numbers, max(len(items), 1)))
        parts = [_as_bytes(np.minimum(low, high)), _as_bytes(np.maximum(low, high))]
    else:
        parts, left = [], numbers
        for part in reversed(name.key):
            known = _as_bytes(digests[part])
            parts.insert(0, known[left if part == "user" else left % max(len(known), 1)])
            left = left // max(len(known), 1)
    prefix = np.broadcast_to(np.frombuffer(name.prefix, np.uint8), (len(numbers), len(name.prefix)))
    return np.concatenate([prefix, *parts], axis=1)


def _as_bytes(digests: np.ndarray) -> np.ndarray:
    """Returns digests `[N]` as `[N, 8]` uint8."""
    return digests.astype(">u8").view(np.uint8).reshape(-1, DIGEST_BYTES)
