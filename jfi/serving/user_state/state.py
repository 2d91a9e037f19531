"""The newest events of users, read for requests and written as events arrive."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import msgspec
import numpy as np

from jfi.serving.requests import Request, RequestReader
from jfi.serving.schema import PastFields
from jfi.serving.user_state.counters import StateCounters, comparable
from jfi.serving.user_state.dictionaries import Dictionaries
from jfi.serving.user_state.events import SentEvents
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
from jfi.serving.user_state.stores import Changes, Get, StateError, Store, finding_damage
from jfi.serving.validation import BadRequestError
from jfi.utils.encoding import age_buckets

_INFO, _VOCABULARIES = b"m", b"v"
#: Before the keys of the counters of statistics of the past.
COUNTERS = (b"k", b"i")
#: The newest ids of a user's events that are not of histories, by which repeated ones are known.
_MAX_IDS = 256
#: Numbers of values, and texts of numbers, that are kept in memory.
_MAX_CACHED = 1_000_000
_NO_IDS = np.zeros(0, np.uint64)


@dataclass(frozen=True)
class Added:
    """Counts the events of a body that are new, and those that were there already."""

    added: int
    repeated: int


class _Changed:
    """Reads keys as an update has changed them so far.

    Args:
        get: reads keys as they were.
    """

    def __init__(self, get: Get) -> None:
        self._get = get
        self.changes: Changes = {}

    def __call__(self, keys: Sequence[bytes]) -> list[bytes | None]:
        absent = [key for key in dict.fromkeys(keys) if key not in self.changes]
        found = dict(zip(absent, self._get(absent), strict=True)) if absent else {}
        return [self.changes[key] if key in self.changes else found[key] for key in keys]

    def ids(self, users: Iterable[str]) -> dict[str, np.ndarray]:
        """Returns by user the newest ids of events that are not of histories."""
        users = list(dict.fromkeys(users))
        return dict(zip(users, map(_as_ids, self(list(map(_ids_key, users))), users), strict=True))

    def keep_ids(self, events: SentEvents, rows: np.ndarray) -> None:
        """Keeps the ids of those of a body's new events that are not of histories."""
        rows = rows[~events.in_history[rows]]
        own = self.ids(events.users[row] for row in rows)
        for row in rows[events.records[EVENT_ID][rows] != 0]:
            own[events.users[row]] = np.append(own[events.users[row]], events.records[EVENT_ID][row])
        self.changes |= {_ids_key(user): ids[-_MAX_IDS:].tobytes() for user, ids in own.items() if len(ids)}


def _ids_key(user: str) -> bytes:
    return b"i" + user.encode()


def _as_ids(value: bytes | None, user: str) -> np.ndarray:
    with finding_damage(f"the ids of events of user '{user}'"):
        return np.frombuffer(value or b"", np.uint64)


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
        store.check()
        (self._info,) = store.get([_INFO])
        info = _decoded(self._info)
        if (info.fingerprint, info.max_history) != (layout.fingerprint, layout.max_history):
            why = _difference(info, store, layout)
            raise StateError(
                f"the state of users is of another encoding, {why}; `jfi state migrate` makes one for this artifact"
            )
        past = layout.past
        if info.past is not None and past is not None and comparable(past) != comparable(info.past):
            raise StateError(f"the state of users has other statistics of the past, {_other(info.past, past)}")
        #: The statistics of the past that events are counted in, or None.
        self.past = info.past
        self.counters = None if info.past is None else StateCounters(info.past, layout)
        #: Numbers and texts of values that the vocabularies lack, by dictionary; they never change.
        self._numbers: dict[bytes, int] = {}
        self._texts: dict[bytes, str] = {}

    def histories(self, users: Sequence[str]) -> list[np.ndarray]:
        """Returns the records of users, none for one without state, by one read of the store.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        return list(map(self.layout.records, self.store.get(list(map(user_key, users))), users))

    def add(self, bodies: Sequence[SentEvents]) -> list[Added | BadRequestError]:
        """Writes events, all at once; a body with a fault is left out whole.

        Raises:
            StoreUnavailableError: the store does not answer, and it is unknown whether the events were written; sent
                again with the same ids they count once.
            StateError: the state is damaged, and nothing was written.
        """
        results: list[Added | BadRequestError] = []
        new: dict[bytes, int] = {}

        def change(get: Get) -> Changes:
            results.clear()
            new.clear()
            users = list(dict.fromkeys(user for events in bodies for user in events.users))
            info, *values = get([_INFO, *map(user_key, users)])
            self._check_info(info)
            now = dict(zip(users, map(self.layout.records, values, users), strict=True))
            before = dict(now)
            names, counted = Dictionaries(get, self._numbers, self._texts), _Changed(get)
            added: list[tuple[SentEvents, np.ndarray, np.ndarray]] = []
            for events in bodies:
                try:
                    rows_of = self._new_rows_of(events, now, counted)
                except BadRequestError as fault:
                    results.append(fault)
                    continue
                records, rows = self._numbered(events, names), np.concatenate(list(rows_of.values()))
                now |= self._merged(events, records, rows_of, now, names)
                if self.counters is not None:
                    counted.keep_ids(events, rows)
                    added.append((events, records, rows))
                results.append(Added(len(rows), len(events) - len(rows)))
            if added:
                counted.changes |= self.counters.changes(get, added)
            new.update(names.new)
            changed = {user_key(user): now[user].tobytes() for user in users if now[user] is not before[user]}
            return changed | names.changes() | counted.changes

        self.store.update(change)
        for cached in (self._numbers, self._texts):
            if len(cached) > _MAX_CACHED:
                cached.clear()
        self._numbers |= new
        return results

    def delete(self, user: str) -> bool:
        """Removes a user's events and their ids; returns whether there were any. Statistics of the past stay."""
        found: list[bool] = []

        def change(get: Get) -> Changes:
            keys = user_key(user), _ids_key(user)
            info, *values = get([_INFO, *keys])
            self._check_info(info)
            found[:] = [value is not None for value in values]
            return {key: None for key, is_there in zip(keys, found, strict=True) if is_there}

        self.store.update(change)
        return any(found)

    def _check_info(self, info: bytes | None) -> None:
        if info != self._info:
            raise StateError("the state of users was removed or replaced; restart the server on a whole one")

    def fill(self, requests: Sequence[Request], reader: RequestReader) -> list[Request]:
        """Returns requests with the events of their users in place of none, all read at once.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        users = [one.stored.user for one in requests if one.stored is not None]
        histories = iter(self.histories(users) if users else [])
        found = [one if one.stored is None else self._filled(one, next(histories), reader) for one in requests]
        asked = [one.stored for one in requests if one.stored is not None and one.stored.items is not None]
        if not asked:
            return found
        answers = iter(self.counters.answers(self.store.get, asked))
        return [
            one if one.stored is None or one.stored.items is None else reader.with_statistics(one, next(answers))
            for one in found
        ]

    def _filled(self, request: Request, events: np.ndarray, reader: RequestReader) -> Request:
        stored = request.stored
        end = int(events[TIME].searchsorted(stored.now))
        events = events[max(0, end - reader.limits.max_history) : end]
        stored.events, stored.time = len(events), float(events[TIME][-1]) if len(events) else None
        stored.is_available = True
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

    def _text(self, column: Column, number: int, names: Dictionaries) -> str | None:
        if number >= 0 or column.values is None:
            known = self.layout.schema.vocabularies.get(column.values or "", [])
            return known[number - 1] if number > 0 else None
        return names.text(column.values, number)

    def _new_rows_of(self, events: SentEvents, now: dict[str, np.ndarray], get: "_Changed") -> dict[str, np.ndarray]:
        """Returns by user the rows of a body that are not repeated.

        Raises:
            BadRequestError: one is too late.
        """
        rows_of: dict[str, list[int]] = {}
        for row, user in enumerate(events.users):
            rows_of.setdefault(user, []).append(row)
        known = {} if self.counters is None else get.ids(events.users)
        return {
            user: self._new_rows(events, np.array(rows), now[user], known.get(user, _NO_IDS))
            for user, rows in rows_of.items()
        }

    def _new_rows(self, events: SentEvents, rows: np.ndarray, old: np.ndarray, others: np.ndarray) -> np.ndarray:
        ids = events.records[EVENT_ID]
        rows = rows[~_is_repeated(np.append(old[EVENT_ID], others), ids[rows])]
        if len(old) >= self.layout.keep:  # the ids of older events are forgotten, so a repeated one is not recognized
            rows = rows[(ids[rows] == 0) | (events.records[TIME][rows] > old[TIME][0])]
        late = rows[events.records[TIME][rows] < old[TIME][-1] - self.max_late] if len(old) else []
        if len(late):
            at, newest = events.place(int(late[0]), TIME), f"the newest event of the user, {old[TIME][-1]:.15g}"
            time = events.records[TIME][late[0]]
            raise BadRequestError(f"{at} is {time:.15g}, more than {self.max_late:g} s older than {newest}")
        return rows

    def _merged(
        self,
        events: SentEvents,
        records: np.ndarray,
        rows_of: dict[str, np.ndarray],
        now: dict[str, np.ndarray],
        names: Dictionaries,
    ) -> dict[str, np.ndarray]:
        """Returns by user the records with the new events of a body."""
        merged = {}

        def texts(ids: np.ndarray) -> list[str]:
            return [self._text(self.layout.item, int(one), names) or "" for one in ids]

        for user, rows in rows_of.items():
            if self.counters is not None:
                rows = rows[events.in_history[rows]]
            if len(rows):
                merged[user] = self.layout.merge(now[user], records[rows], texts)
        return merged

    def _numbered(self, events: SentEvents, names: Dictionaries) -> np.ndarray:
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


def _decoded(found: bytes | None) -> StateInfo:
    """Decodes the description of a state; a StateError says that there is none, or one of another version."""
    if found is None:
        raise StateError("the store has no state of users; `jfi state load` makes one")
    with finding_damage("its description"):
        info = msgspec.json.decode(found, type=StateInfo)
    if info.format != FORMAT:
        raise StateError(f"the state of users has format {info.format}, but this version reads format {FORMAT}")
    return info


def read_layout(store: Store) -> EventLayout:
    """Reads the layout of a store's records, with its vocabularies and its statistics of the past.

    Raises:
        StateError: the store has no state, or a damaged one.
    """
    info, found = store.get([_INFO, _VOCABULARIES])
    info = _decoded(info)
    with finding_damage("its vocabularies"):
        vocabularies = msgspec.json.decode(found or b"", type=dict[str, list[str]])
        layout = EventLayout(replace(info.schema, vocabularies=vocabularies, past=info.past), info.max_history)
        if layout.fingerprint != info.fingerprint:
            raise ValueError("they are not those that it was made with")
    return layout


def write_layout(store: Store, layout: EventLayout) -> None:
    """Makes an empty or filled store one of these records, and of statistics of the past; it is written last."""
    vocabularies = msgspec.json.encode(layout.schema.vocabularies)
    store.put([(_VOCABULARIES, vocabularies)])
    store.put([(_INFO, msgspec.json.encode(layout.info(None if layout.past is None else comparable(layout.past))))])


def is_empty(store: Store) -> bool:
    """Returns whether a store has no key, of a state or of one that was not filled to the end."""
    return next(iter(store.scan(b"")), None) is None


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
        if (old := known.get(name, [])) != values:
            many = "others in place of some" if len(old) == len(values) else f"{len(old):,} and not {len(values):,}"
            return f"whose values of '{name}' are {many}"
    return "of other columns of a policy or of another codec"


def put_records(store: Store, records: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes the records of users, in several steps."""
    store.put((user_key(user), own.tobytes()) for user, own in records)


def scan_records(store: Store, layout: EventLayout) -> Iterator[tuple[str, np.ndarray]]:
    """Yields all users and their records."""
    for key, value in store.scan(user_key("")):
        with finding_damage("the id of a user"):
            user = key[1:].decode()
        yield user, layout.records(value, user)


def _other(past: PastFields, other: PastFields) -> str:
    """Says what differs between the statistics of a state and those of an artifact."""
    own, wanted = asdict(comparable(past)), asdict(comparable(other))
    name = next(name for name in own if own[name] != wanted[name])
    return f"{name} {own[name]} and not {wanted[name]}; load it from the log by `jfi state load`"
