"""The newest events of users, read for requests and written as events arrive."""

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice

import msgspec
import numpy as np

from jfi.events.live_index import changed
from jfi.serving.requests import Request, RequestReader
from jfi.serving.validation import BadRequestError
from jfi.state.columns import Entity, KeptItems, ModelColumns, Values, layouts_of, renewal, with_columns, write_columns
from jfi.state.counters import StateCounters, check_counts
from jfi.state.deletions import DELETIONS, deletion_of, write_deletions
from jfi.state.dictionaries import Cache, Dictionaries
from jfi.state.layout import CURSOR, FORMAT, POSITION, TIME, EventLayout, StateInfo, digest, integer, user_key
from jfi.state.lookups import Encoded, Lookup
from jfi.state.model_ids import ModelIds
from jfi.state.outbox import entry
from jfi.state.retention import KEEP_ALL, USER_KEYS, Quota, Retention, expire, newer
from jfi.state.stores import Changes, Get, StateError, Store, finding_damage
from jfi.state.user_rows import MAX_LATE, Chosen, LogRows, UserRows
from jfi.utils.encoding import LARGEST_NUMBER, age_buckets

_INFO = b"m"
#: Times that requests are read if events come between two reads; the last time stands whatever comes.
_TRIES = 10


@dataclass(frozen=True)
class Added:
    """Counts the rows of a body.

    Args:
        late: those that came too late and were left out.
        over_quota: those that are left out, since their users have had all rows of the day.
    """

    added: int
    repeated: int
    late: int = 0
    over_quota: int = 0


class UserState:
    """The events of users in a store, as a model reads them.

    Args:
        reader: of requests to the model, of whose schema, vocabularies and newest events the ids are.
        max_late: seconds that an event may be older than its user's newest one.
        is_logged: whether rows that are accepted go into the outbox too, see `jfi.state.outbox`.

    Raises:
        StoreUnavailableError: the store does not answer.
        StateError: it has no state, a damaged one, or not what the model reads.
    """

    def __init__(
        self,
        store: Store,
        reader: RequestReader,
        max_late: float = MAX_LATE,
        retention: Retention = KEEP_ALL,
        is_logged: bool = False,
    ) -> None:
        self.store, self.reader, self.max_late, self.retention = store, reader, max_late, retention
        self._is_logged = is_logged
        store.check()
        (self._info,) = store.get([_INFO])
        self.layout = EventLayout(_decoded(self._info))
        info, schema = self.layout.info, reader.schema
        if reader.limits.max_history > info.max_history:
            what = f"keeps {info.max_history} events of a user, and the model reads {reader.limits.max_history}"
            raise StateError(f"the state {what}; load it by `jfi state load` of a run with that `data.max_history`")
        check_counts(info, schema)
        #: Rows of the log that the state has, as of the last read or write.
        self.position = 0
        #: Numbers and texts that were read.
        self._cache = Cache()
        self._ids = ModelIds(self.layout, schema, reader.known, self.texts)
        #: By entity the records of its columns, and what a model reads of them.
        self.tables = layouts_of(info)
        items = [one for one in schema.candidate if one.name in schema.item_columns]
        self._columns = {
            of: ModelColumns(self.tables[of], fields, reader.known, self.texts)
            for of, fields in (("item", items), ("user", schema.user))
        }
        self._items = KeptItems(self.tables["item"])
        #: The statistics of the past that events are counted in, or None.
        self.counters = None
        if info.statistics is not None:
            self.counters = StateCounters(schema.statistics or info.statistics, schema, self.layout)

    def texts(self, values: str, numbers: Iterable[int]) -> list[str | None]:
        """Returns the texts of numbers of a column, None for 0."""
        found = Dictionaries(self.store.get, self._cache).texts(values, numbers)
        self._cache.trim()
        return found

    def add(self, bodies: Sequence[LogRows]) -> list[Added | BadRequestError]:
        """Writes rows, all at once; a body with a fault is left out whole.

        Raises:
            StoreUnavailableError: the store does not answer, and it is unknown whether the rows were written; sent
                again they count once.
            StateError: the state is damaged, and nothing was written.
        """
        results: list[Added | BadRequestError] = []

        def change(get: Get, names: Dictionaries) -> tuple[int, Changes]:
            results.clear()
            counted, told, changes = self._count(get, names, bodies, refuses_late=True)
            results.extend(told)
            rows = [(events, chosen.kept) for events, chosen in counted]
            count = sum(len(kept) for _, kept in rows)
            if self._is_logged and count:
                begin = integer(get([POSITION])[0])
                changes |= entry(begin, self.layout, self.tables, rows, get, names.texts)
            return count, changes

        self._update(change)
        return results

    def feed(self, steps: Sequence[Sequence[LogRows]], cursors: tuple[bytes | None, bytes]) -> Added | None:
        """Adds rows of a log that others write, all at once; late ones are left out.

        Args:
            steps: bodies that are counted together, one after another as they were accepted, or in the order of time.
            cursors: what the state was fed last before, and with these rows.

        Returns:
            None, and nothing is added, if the state was fed something else meanwhile.
        """
        found: list[Added] = []

        def change(get: Get, names: Dictionaries) -> tuple[int, Changes]:
            found.clear()
            changes: Changes = {}
            if get([CURSOR]) != [cursors[0]]:
                return 0, changes

            for bodies in steps:
                _, told, own = self._count(changed(get, changes), names, bodies, refuses_late=False)
                changes |= own
                found.extend(told)
            return sum(map(len, chain.from_iterable(steps))), changes | {CURSOR: cursors[1]}

        self._update(change)
        if not found:
            return None
        return Added(
            *(sum(getattr(one, name) for one in found) for name in ("added", "repeated", "late", "over_quota"))
        )

    def _update(self, change: Callable[[Get, Dictionaries], tuple[int, Changes]]) -> None:
        """Writes what `change` returns, with the numbers of new texts and the rows by which the position grows."""
        new: dict[str, dict[str | None, int]] = {}
        end = 0

        def whole(get: Get) -> Changes:
            nonlocal end
            self._check_info(*get([_INFO]))
            count, changes = change(get, names := Dictionaries(get, self._cache))
            end = integer(get([POSITION])[0]) + count  # last, since all who write on Redis conflict from its read on
            new.clear()
            new.update(names.new)
            return changes | names.changes() | ({POSITION: end.to_bytes(8, "little")} if count else {})

        self.store.update(whole)
        self._cache.keep(new)
        self.position = end

    def _count(
        self, get: Get, names: Dictionaries, bodies: Sequence[LogRows], refuses_late: bool
    ) -> tuple[list[tuple[LogRows, Chosen]], list[Added | BadRequestError], Changes]:
        """Adds bodies of rows to those of their users, and counts them together.

        Returns:
            The bodies that were added with their rows that count, what became of each body, and what changes.
        """
        users, kept = list(dict.fromkeys(user for events in bodies for user in events.users)), self.retention
        quota = None if kept.quota is None or not refuses_late else Quota(kept.quota, get, users, kept.clock())
        now = UserRows(self.layout, get, users, kept.oldest(), quota)
        counted: list[tuple[LogRows, Chosen]] = []
        results: list[Added | BadRequestError] = []
        changes: Changes = {}
        for events in bodies:
            chosen = now.choose(events, self.max_late)
            if refuses_late and len(chosen.late):
                results.append(self._late(events, int(chosen.late[0]), now))
                continue
            own = self.layout, self.tables, changed(get, changes), names
            events, new = with_columns(events, chosen.kept, *own)
            changes |= new
            now.add(events, chosen, events.numbered(names, chosen.kept), partial(names.texts, self.layout.log.item))
            counted.append((events, chosen))
            results.append(Added(len(chosen.kept), chosen.repeated, len(chosen.late), chosen.over_quota))
        if self.counters is not None and counted:
            changes |= self.counters.changes(get, counted, self._ids)
        return counted, results, changes | now.changes()

    def _late(self, events: LogRows, row: int, now: UserRows) -> BadRequestError:
        at, newest = events.place(row, self.layout.log.time), now.newest(events.users[row])
        what = f"{newest - events.records[TIME][row]:.15g} s older than the newest row of the user"
        return BadRequestError(f"{at} is {what}, and at most {self.max_late:g} s are allowed")

    def put(self, of: Entity, name: str, columns: Mapping[str, Values]) -> None:
        """Writes the columns of an item or a user, in place of those that were there; one that is not given is missing.

        Raises:
            StoreUnavailableError: the store does not answer, and it is unknown whether they were written.
            StateError: the state is damaged, and nothing was written.
        """
        check = lambda get: self._check_info(*get([_INFO]))  # noqa: E731
        write_columns(self.store, self.tables[of], [name], columns, self._cache, check)

    def delete(self, of: Entity, name: str) -> bool:
        """Removes the columns of an item or a user, and a user's rows and own statistics; returns if there were any.

        Statistics of items and values stay, in which the user's events have been counted.
        """
        keys, found = [self.tables[of].key(name)], list[bool]()
        if of == "user":
            keys += [key(name) for key in USER_KEYS]
            if self.counters is not None:
                pages = self.store.pages(self.counters.live.prefixes_of(digest(name)))
                keys += [key for page in pages for key, _ in page]

        parts = self.retention.parts if of == "user" else None

        def change(get: Get) -> Changes:
            info, position, lines, *values = get([_INFO, POSITION, DELETIONS, *keys])
            self._check_info(info)
            found[:] = [value is not None for value in values]
            changes: Changes = {key: None for key, is_there in zip(keys, found, strict=True) if is_there}
            changes |= renewal(self.tables[of], values[:1], [None])
            if parts is not None:
                line = deletion_of(parts, name, integer(position) if self._is_logged else None)
                changes[DELETIONS] = (lines or b"") + line
            return changes

        self.store.update(change)
        if parts is not None:
            write_deletions(self.store, parts)
        return any(found)

    def expire(self) -> Iterator[int]:
        """Removes the rows that are kept no longer, see `jfi.state.retention.expire`."""
        return expire(self.store, self.layout, self.retention, lambda get: self._check_info(*get([_INFO])))

    def _check_info(self, info: bytes | None) -> None:
        if info != self._info:
            raise StateError("the state of users was removed or replaced; restart the server on a whole one")

    def fill(self, requests: Sequence[Request], is_available: bool = True) -> list[Request]:
        """Returns requests with what they lack, all of one moment of the log.

        On Redis, where events have come between the reads of statistics ten times, it may be of two moments.

        Args:
            is_available: if false, nothing is read: the user and the items are new ones.
        """
        keys = [[] if one.stored is None else self._keys(one.stored) for one in requests]
        items = [one.stored.items if one.stored is not None and one.stored.item_columns else [] for one in requests]
        is_read, ids = is_available and any(one.stored is not None for one in requests), [*chain(*items)]
        for _ in range(_TRIES):
            with self.store.snapshot() if is_read else nullcontext() as get:
                (info, position, *values), *columns = self._items.read(get, [_INFO, POSITION, *chain(*keys)], ids)
                if is_read:
                    self._check_info(info)
                    self.position = integer(position)
                rest, found, begin = iter(values), [*requests], 0
                for row, (one, own, own_items) in enumerate(zip(requests, keys, items, strict=True)):
                    if (stored := one.stored) is not None:
                        stored.is_available, stored.position = is_available, integer(position)
                        part = slice(begin, begin := begin + len(own_items))
                        found[row] = self._filled(one, [*islice(rest, len(own))], *(each[part] for each in columns))
                if self.reader.schema.statistics is None or not is_read:
                    break
                past = iter(self.counters.read(get, [one.stored for one in found if one.stored is not None]))
                found = [one if one.stored is None else self.reader.with_statistics(one, next(past)) for one in found]
                if get([POSITION]) == [position]:  # on Redis others may have written between the reads
                    break
        return found

    def _keys(self, stored: Lookup) -> list[bytes]:
        """The keys of the user that a request reads."""
        keys = [user_key(stored.user)] if stored.reads_events else []
        return keys + ([self.tables["user"].key(stored.user)] if stored.user_columns else [])

    def _filled(self, request: Request, values: list[bytes | None], items: np.ndarray, absent: np.ndarray) -> Request:
        """Returns a request with what the values of its keys and of its items say."""
        stored, user, candidate = request.stored, Encoded(), Encoded()
        if stored.reads_events:
            request = self._with_events(request, self.layout.records(values.pop(0), stored.user))
        if stored.user_columns:
            user = self._columns["user"](self.tables["user"].decode([values.pop(0)]), stored.user_columns)
        if stored.item_columns:
            candidate = self._columns["item"](self.tables["item"].decode(items), stored.item_columns)
            stored.unknown_items = int(absent.sum())
        if stored.user_columns or stored.item_columns:
            request = self.reader.complete(request, user, candidate)
        if stored.reads_statistics:
            stored.column_ids = self.reader.column_ids(request)
        return request

    def _with_events(self, request: Request, events: np.ndarray) -> Request:
        stored, reader, oldest = request.stored, self.reader, self.retention.oldest()
        events, stored.oldest = newer(events, oldest), None if oldest == -np.inf else oldest
        end = int(events[TIME].searchsorted(stored.now))
        events = events[max(0, end - reader.limits.max_history) : end]
        stored.events, stored.time = len(events), float(events[TIME][-1]) if len(events) else None
        ages, weights = stored.now - events[TIME], None
        if reader.policy is not None and len(events):
            rows, weights = reader.policy(ages, *self._engagement(events))
            events, ages = events[rows], ages[rows]
        buckets = next((age_buckets(ages, one.num_buckets) for one in reader.schema.event if one.kind == "age"), None)
        return replace(
            request, ids=request.ids | self._ids(events), ages=buckets, num_events=len(events), weights=weights
        )

    def _engagement(self, events: np.ndarray) -> tuple[Sequence | np.ndarray | None, ...]:
        """The dwell, surface and session of events, as a request's policy takes them."""
        found: dict[str, Sequence | np.ndarray | None] = dict.fromkeys(("dwell", "surface", "session"))
        for role, one in self.reader.schema.policy.fields().items():
            values = events[one.name]
            if role == "surface":
                found[role] = self.texts(one.name, values.tolist())
            elif role == "session":
                found[role] = [number or None for number in values.tolist()]
            else:
                found[role] = np.where(np.abs(values) <= LARGEST_NUMBER, values, np.nan)
        return tuple(found.values())


def _decoded(found: bytes | None) -> StateInfo:
    """Decodes the description of a state; a StateError says that there is none, or one of another version."""
    if found is None:
        raise StateError("the store has no state of users; `jfi state load` makes one")
    with finding_damage("its description"):
        made = msgspec.json.decode(found, type=dict)["format"]
        if made != FORMAT:
            what = f"has format {made}, but this version reads format {FORMAT}"
            raise StateError(f"the state of users {what}; load it from the log by `jfi state load`")
        return msgspec.json.decode(found, type=StateInfo)


def read_layout(store: Store) -> EventLayout:
    """Reads the layout of a store's records.

    Raises:
        StateError: the store has no state, or a damaged one.
    """
    return EventLayout(_decoded(store.get([_INFO])[0]))


def write_layout(store: Store, layout: EventLayout) -> None:
    """Makes an empty or filled store one of these records, and of statistics of the past; it is written last."""
    info = msgspec.structs.replace(layout.info, id=secrets.token_hex(16))
    store.put([(_INFO, msgspec.json.encode(info))])


def is_empty(store: Store) -> bool:
    """Returns whether a store has no key, of a state or of one that was not filled to the end."""
    return next(iter(store.scan(b"")), None) is None
