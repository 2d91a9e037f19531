"""The newest events of users, read for requests and written as events arrive."""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from jfi.serving.requests import Request, RequestReader
from jfi.serving.user_state.events import Events
from jfi.serving.user_state.layout import (
    EVENT_ID,
    FORMAT,
    TIME,
    Column,
    EventLayout,
    StateInfo,
    known_ids,
    user_key,
)
from jfi.serving.user_state.stores import Changes, Get, StateError, Store
from jfi.serving.validation import BadRequestError
from jfi.utils.encoding import UNKNOWN, age_buckets

_INFO, _VOCABULARIES = b"m", b"v"
#: Before the keys of the values that the vocabularies lack: by text, by number, and how many there are.
_NUMBER, _TEXT, _COUNT = b"n", b"t", b"c"
#: Most values of a dictionary that get a number of their own; a further one is unknown for good.
MOST_UNKNOWN = 10_000_000
#: Bytes of the longest key of LMDB; a longer value is unknown for good, too.
LONGEST_KEY = 511
_INTEGER = struct.Struct("<q")


@dataclass(frozen=True)
class Added:
    """What became of a body of events: how many are new, and how many were there already."""

    added: int
    repeated: int


class UserState:
    """The newest events of users in a store.

    Args:
        store: holds them.
        layout: of the records.
        max_late: seconds that an event may be older than its user's newest one.

    Raises:
        StateError: the store has no state, or one that another run's events were encoded for.
    """

    def __init__(self, store: Store, layout: EventLayout, max_late: float = 86400.0) -> None:
        self.store, self.layout, self.max_late = store, layout, max_late
        info = read_info(store)
        if info.fingerprint != layout.fingerprint:
            why = _difference(info, store, layout)
            raise StateError(
                f"the state of users is of another encoding, {why}; `jfi state migrate` makes one for this artifact"
            )
        #: Numbers and texts of values that the vocabularies lack, by dictionary; they never change.
        self._numbers: dict[bytes, int] = {}
        self._texts: dict[bytes, str] = {}

    def histories(self, users: Sequence[str]) -> list[np.ndarray]:
        """Returns the records of users, none for one without state, by one read of the store.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        return [self.layout.records(value) for value in self.store.get(list(map(user_key, users)))]

    def add(self, bodies: Sequence[Events]) -> list[Added | BadRequestError]:
        """Writes events, all at once; a body with a fault is left out whole.

        Raises:
            StoreUnavailableError: the store does not answer, and it is unknown whether the events were written; sent
                again with the same ids they count once.
        """
        results: list[Added | BadRequestError] = []
        new: dict[bytes, int] = {}

        def change(get: Get) -> Changes:
            results.clear()
            new.clear()
            users = list(dict.fromkeys(user for events in bodies for user in events.users))
            values = get(list(map(user_key, users)))
            now = dict(zip(users, map(self.layout.records, values), strict=True))
            before = dict(now)
            names = Dictionaries(get, self._numbers, self._texts)
            for events in bodies:
                try:
                    merged, added = self._merged(events, now, names)
                except BadRequestError as fault:
                    results.append(fault)
                    continue
                now |= merged
                results.append(added)
            new.update(names.new)
            changed = {user_key(user): now[user].tobytes() for user in users if now[user] is not before[user]}
            return changed | names.changes()

        self.store.update(change)
        self._numbers |= new
        return results

    def delete(self, user: str) -> bool:
        """Removes a user's events; returns whether there were any."""
        found: list[bool] = []

        def change(get: Get) -> Changes:
            found[:] = [get([user_key(user)])[0] is not None]
            return {user_key(user): None} if found[0] else {}

        self.store.update(change)
        return found[0]

    def fill(self, requests: Sequence[Request], reader: RequestReader) -> list[Request]:
        """Returns requests with the events of their users in place of none, all read at once.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        users = [one.stored.user for one in requests if one.stored is not None]
        histories = iter(self.histories(users) if users else [])
        return [one if one.stored is None else self._filled(one, next(histories), reader) for one in requests]

    def _filled(self, request: Request, events: np.ndarray, reader: RequestReader) -> Request:
        stored = request.stored
        end = int(events[TIME].searchsorted(stored.now))
        events = events[max(0, end - reader.limits.max_history) : end]
        stored.events, stored.time = len(events), float(events[TIME][-1]) if len(events) else None
        ages, weights = stored.now - events[TIME], None
        if reader.schema.policy is not None and len(events):
            rows, weights = reader.choose(ages, self._engagement(events))
            events, ages = events[rows], ages[rows]
        ids = {
            column.name: known_ids(events[column.name]) if column.values else events[column.name].astype(np.int64)
            for column in self.layout.columns
            if column.role is None
        }
        buckets = next((age_buckets(ages, one.num_buckets) for one in reader.schema.event if one.kind == "age"), None)
        return replace(request, ids=request.ids | ids, ages=buckets, num_events=len(events), weights=weights)

    def _engagement(self, events: np.ndarray) -> tuple[Sequence | np.ndarray | None, ...]:
        """The dwell, surface and session of events, as a request's policy takes them."""
        found: dict[str, Sequence | np.ndarray | None] = dict.fromkeys(("dwell", "surface", "session"))
        for column in self.layout.columns:
            values = events[column.name]
            if column.role == "surface":
                names = {number: self.text(column, number) for number in np.unique(values).tolist()}
                found["surface"] = [names[number] for number in values.tolist()]
            elif column.role == "session":
                found["session"] = [number or None for number in values.tolist()]
            elif column.role == "dwell":
                found["dwell"] = values
        return tuple(found.values())

    def text(self, column: Column, number: int) -> str | None:
        """Returns the value of an id, of the vocabulary or of those that it lacks; None for a missing one."""
        return self._text(column, number, Dictionaries(self.store.get, self._numbers, self._texts))

    def _text(self, column: Column, number: int, names: "Dictionaries") -> str | None:
        if number >= 0 or column.values is None:
            known = self.layout.schema.vocabularies.get(column.values or "", [])
            return known[number - 1] if number > 0 else None
        return names.text(column.values, number)

    def _merged(self, events: Events, now: dict[str, np.ndarray], names: "Dictionaries") -> tuple[dict, Added]:
        """The records of the users of a body with its events, and how many are new."""
        rows_of: dict[str, list[int]] = {}
        for row, user in enumerate(events.users):
            rows_of.setdefault(user, []).append(row)
        new_of = {user: self._new_rows(events, np.array(rows), now[user]) for user, rows in rows_of.items()}
        records, merged = self._numbered(events, names), {}

        def texts(ids: np.ndarray) -> list[str]:
            return [self._text(self.layout.item, int(one), names) or "" for one in ids]

        for user, rows in new_of.items():
            if len(rows):
                merged[user] = self.layout.merge(now[user], records[rows], texts)
        added = sum(map(len, new_of.values()))
        return merged, Added(added, len(events) - added)

    def _new_rows(self, events: Events, rows: np.ndarray, old: np.ndarray) -> np.ndarray:
        """Those of a user's rows `[N]` that are not repeated.

        Raises:
            BadRequestError: one is too late.
        """
        rows = rows[~_is_repeated(old[EVENT_ID], events.records[EVENT_ID][rows])]
        late = rows[events.records[TIME][rows] < old[TIME][-1] - self.max_late] if len(old) else []
        if len(late):
            at, newest = events.place(int(late[0]), TIME), f"the newest event of the user, {old[TIME][-1]:.15g}"
            time = events.records[TIME][late[0]]
            raise BadRequestError(f"{at} is {time:.15g}, more than {self.max_late:g} s older than {newest}")
        return rows

    def _numbered(self, events: Events, names: "Dictionaries") -> np.ndarray:
        """The records of events, with numbers for the values that the vocabularies lack."""
        if not events.unknown:
            return events.records
        records = events.records.copy()
        for column in self.layout.columns:
            if lacking := events.unknown.get(column.name):
                names.read(column.values, (text for _, text in lacking))
                for row, text in lacking:
                    records[column.name][row] = names.number(column.values, text)
        return records


class Dictionaries:
    """Numbers of the values that the vocabularies of a state lack: -1, -2 and so on in each of its dictionaries.

    Args:
        get: reads keys of the store; by default there are none.
        numbers, texts: numbers by key and texts by key that were read before; both never change.
    """

    def __init__(
        self, get: Get | None = None, numbers: dict[bytes, int] | None = None, texts: dict[bytes, str] | None = None
    ) -> None:
        self._get = get or (lambda keys: [None] * len(keys))
        self._numbers, self._texts = {} if numbers is None else numbers, {} if texts is None else texts
        #: Those that the store does not have yet.
        self.new: dict[bytes, int] = {}
        self._new_texts: dict[bytes, str] = {}
        self._counts: dict[str, int] = {}

    def read(self, values: str, texts: Iterable[str]) -> None:
        """Reads the numbers of texts of a dictionary, all at once."""
        keys = list(dict.fromkeys(_number_key(values, text) for text in texts))
        absent = [key for key in keys if key not in self._numbers and key not in self.new]
        for key, found in zip(absent, self._get(absent) if absent else [], strict=True):
            if found is not None:
                self._numbers[key] = _INTEGER.unpack(found)[0]

    def number(self, values: str, text: str) -> int:
        """Returns the number of a text that `read` has read, or a new one; 0 if it is too long or there are too many.

        Args:
            values: the dictionary.
            text: a value.
        """
        key = _number_key(values, text)
        found = self._numbers.get(key) or self.new.get(key)
        if found is not None:
            return found
        if values not in self._counts:
            (count,) = self._get([_COUNT + values.encode()])
            self._counts[values] = _INTEGER.unpack(count)[0] if count else 0
        if self._counts[values] >= MOST_UNKNOWN or len(key) > LONGEST_KEY:
            return UNKNOWN
        self._counts[values] += 1
        number = self.new[key] = -self._counts[values]
        self._new_texts[text_key(values, number)] = text
        return number

    def text(self, values: str, number: int) -> str | None:
        """Returns the text of a number of a dictionary."""
        key = text_key(values, number)
        if key in self._new_texts:
            return self._new_texts[key]
        if key not in self._texts:
            (found,) = self._get([key])
            if found is None:
                return None
            self._texts[key] = found.decode()
        return self._texts[key]

    def changes(self) -> Changes:
        """Returns what the store gets."""
        found: Changes = {key: _INTEGER.pack(number) for key, number in self.new.items()}
        found |= {key: text.encode() for key, text in self._new_texts.items()}
        return found | {_COUNT + values.encode(): _INTEGER.pack(count) for values, count in self._counts.items()}


def _number_key(values: str, text: str) -> bytes:
    return b"\0".join([_NUMBER + values.encode(), text.encode()])


def text_key(values: str, number: int) -> bytes:
    """The key of the text of a number of a dictionary."""
    return b"\0".join([_TEXT + values.encode(), _INTEGER.pack(number)])


def read_info(store: Store) -> StateInfo:
    """Reads what a store says of its records.

    Raises:
        StateError: it has no state, or one of another version.
    """
    (found,) = store.get([_INFO])
    if found is None:
        raise StateError("the store has no state of users; `jfi state load` makes one")
    try:
        info = msgspec.json.decode(found, type=StateInfo)
    except msgspec.DecodeError as error:
        raise StateError(f"the state of users is damaged: {error}") from None
    if info.format != FORMAT:
        raise StateError(f"the state of users has format {info.format}, but this version reads format {FORMAT}")
    return info


def read_layout(store: Store) -> EventLayout:
    """Reads the layout of a store's records, with the vocabularies that they were encoded by."""
    info = read_info(store)
    (found,) = store.get([_VOCABULARIES])
    vocabularies = msgspec.json.decode(found or b"{}", type=dict[str, list[str]])
    info.schema.vocabularies.update(vocabularies)
    return EventLayout(info.schema, info.max_history)


def write_layout(store: Store, layout: EventLayout) -> None:
    """Makes an empty or filled store one of these records; it is written last."""
    vocabularies = msgspec.json.encode(layout.schema.vocabularies)
    store.put([(_VOCABULARIES, vocabularies)])
    store.put([(_INFO, msgspec.json.encode(layout.info()))])


def is_empty(store: Store) -> bool:
    """Returns whether a store has no state."""
    return store.get([_INFO])[0] is None


def _is_repeated(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """`[N]` bool, whether an event's id, other than 0, is among the old ones or before it among the new."""
    first = np.zeros(len(new), bool)
    first[np.unique(new, return_index=True)[1]] = True
    return (new != 0) & (~first | np.isin(new, old))


def _difference(info: StateInfo, store: Store, layout: EventLayout) -> str:
    """Says what differs between a state's encoding and another."""
    if info.max_history != layout.max_history:
        return f"with max_history {info.max_history} and not {layout.max_history}"
    own, wanted = ({one.name: one for one in schema.event} for schema in (info.schema, layout.schema))
    for name in own.keys() ^ wanted.keys():
        return f"whose events {'lack' if name in wanted else 'have'} the field '{name}'"
    for name, one in own.items():
        if one != wanted[name]:
            return f"in which the field '{name}' is encoded otherwise"
    known = read_layout(store).schema.vocabularies
    for name, values in layout.schema.vocabularies.items():
        if known.get(name) != values:
            return f"whose vocabulary of '{name}' has {len(known.get(name, [])):,} values and not {len(values):,}"
    return "of other columns of a policy or of another codec"


def put_records(store: Store, records: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes the records of users, in several steps."""
    store.put((user_key(user), own.tobytes()) for user, own in records)


def scan_records(store: Store, layout: EventLayout) -> Iterator[tuple[str, np.ndarray]]:
    """Yields all users and their records."""
    for key, value in store.scan(user_key("")):
        yield key[1:].decode(), layout.records(value)


def read_dictionary(store: Store, values: str) -> list[str]:
    """Reads the texts of a dictionary by number: the first is that of -1."""
    prefix = text_key(values, 0)[: -_INTEGER.size]
    found = {_INTEGER.unpack(key[-_INTEGER.size :])[0]: text.decode() for key, text in store.scan(prefix)}
    return [found[number] for number in sorted(found, reverse=True)]
