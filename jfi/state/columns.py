"""Records of items and users: the columns of their tables, by id.

An id's value in the store is one record, and after it the values of its lists:

    <column>  as of an event, see `jfi.state.layout`; of a list of texts int32, how many there are
    known     uint8, only beside a semantic ID: 0 for an item of which nothing else is known
    numbers   int32, those of the texts of all lists, one column after another
"""

import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal, TypeVar

import numpy as np

from jfi.serving.schema import Field
from jfi.serving.validation import LONGEST_ID, BadRequestError, BodyType, fields_of, object_type
from jfi.state.dictionaries import Cache, Dictionaries
from jfi.state.events import COLUMN_TYPES, EventReader
from jfi.state.layout import DTYPES, TIME, Column, EventLayout, StateInfo, integer
from jfi.state.lookups import Encoded
from jfi.state.model_ids import Encoding, Ids, Texts, check_column
from jfi.state.stores import Changes, Get, Store, finding_damage
from jfi.state.user_rows import Given, LogRows, taken
from jfi.utils.encoding import standardize
from jfi.utils.jagged import first_values

T = TypeVar("T")
Entity = Literal["item", "user"]
#: Field of a record with a semantic ID, which is no column.
KNOWN = "jfi known"
#: Values `[N]` of a column: its numbers, its texts, or all texts of its lists and how many `[N]` each list has.
Values = np.ndarray | list[str | None] | tuple[list[str], np.ndarray]
#: The same of a column of the store: numbers of its texts in place of texts.
Stored = np.ndarray | tuple[np.ndarray, np.ndarray]
#: The key of a random value, which each write that changes or removes the value of an item renews.
VERSION = b"v"
#: Values of items in memory: at most so many of so many bytes together, and of lists of at most so many bytes each.
_MAX_KEPT, _MAX_BYTES, _LARGEST = 2**21, 2**28, 128
#: Slots in which the value of an item may be.
_WAYS = 4


class ColumnLayout:
    """The records of items or of users.

    Example:
        >>> layout = ColumnLayout("item", [Column("brand", "text"), Column("price", "number")])
        >>> layout.dtype.itemsize, layout.key("i7")
        (12, b'Ii7')
    """

    def __init__(self, of: Entity, columns: Sequence[Column]) -> None:
        self.of, self.columns = of, {one.name: one for one in columns}
        #: Names of the columns of semantic IDs.
        self.sids = [one.name for one in columns if one.kind == "sid"]
        self.dtype = np.dtype([(one.name, DTYPES[one.kind]) for one in columns] + [(KNOWN, "u1")] * bool(self.sids))
        self._lists = [one.name for one in columns if one.kind == "texts"]
        #: Of an array of values: records have one size, and with lists they have not.
        self.packed = np.dtype(object) if self._lists else np.dtype((np.void, max(1, self.dtype.itemsize)))
        missing = np.zeros(1, self.dtype)
        for one in columns:
            missing[one.name] = {"number": np.nan, "sid": -1}.get(one.kind, 0)
        #: The value of an id without one: all of its columns are missing.
        self._missing = missing.tobytes()

    @cached_property
    def body_type(self) -> BodyType:
        """Returns the type of a body with the columns of one id."""
        types = {name: COLUMN_TYPES[one.kind] for name, one in self.columns.items()}
        return BodyType(object_type(f"Columns of the {self.of}", types, types), {"": types}, whole=f"the {self.of}")

    def key(self, text: str) -> bytes:
        """The key of an id's record."""
        return (b"I" if self.of == "item" else b"U") + text.encode()

    def is_known(self, value: bytes | None) -> bool:
        """Returns whether the value of an id says more than its semantic ID."""
        return value is not None and (not self.sids or value[self.dtype.itemsize - 1] == 1)

    def new_records(
        self, values: Sequence[bytes | None], given: Mapping[str, Given], rows: np.ndarray, names: Dictionaries
    ) -> list[bytes]:
        """Returns the values `[K]` of ids that are not known, by what the rows `[K]` int64 of a log say of them."""
        columns = {name: taken(given[name], rows) for name in self.columns if name in given}
        found = self.decode(values) if self.sids else {}
        for name in self.sids:  # an item may have a semantic ID before it has columns
            columns[name] = np.where(found[name] < 0, columns.get(name, -1), found[name])
        return self.encode(columns, len(rows), names)

    def encode(self, columns: Mapping[str, Values], count: int, names: Dictionaries) -> list[bytes]:
        """Returns the values `[count]` of ids, of which a column that is not given is missing."""
        records, lists = np.frombuffer(self._missing * count, self.dtype).copy(), []
        if self.sids:
            records[KNOWN] = 1
        for name, values in columns.items():
            if isinstance(values, tuple):
                records[name] = values[1]
            else:
                records[name] = values if isinstance(values, np.ndarray) else names.numbers(name, values)
        size, joined = self.dtype.itemsize, records.tobytes()
        found = [joined[begin : begin + size] for begin in range(0, count * size, size)]
        for name in self._lists:
            if name in columns:
                texts, counts = columns[name]
                numbers, ends = names.numbers(name, texts).tobytes(), 4 * np.cumsum(counts)
                lists = zip(found, (ends - 4 * counts).tolist(), ends.tolist(), strict=True)
                found = [own + numbers[begin:end] for own, begin, end in lists]
        return found

    def pack(self, values: Sequence[bytes | None]) -> np.ndarray:
        """Returns N values as an array `[N]` of `packed`."""
        own = [self._missing if one is None else one for one in values]
        if self._lists:
            found = np.empty(len(own), object)
            found[:] = own
            return found
        with finding_damage(f"the columns of {self.of}s"):
            return _checked(found := np.frombuffer(b"".join(own), self.packed), len(found) == len(own))

    def decode(self, values: Sequence[bytes | None] | np.ndarray) -> dict[str, Stored]:
        """Returns by name the columns `[N]` of N values, or of an array of them."""
        packed, size = values if isinstance(values, np.ndarray) else self.pack(values), self.dtype.itemsize
        if not self._lists:
            return {name: packed.view(self.dtype)[name] for name in self.columns}
        with finding_damage(f"the columns of {self.of}s"):
            own = packed.tolist()
            records = np.frombuffer(b"".join([one[:size] for one in own]), self.dtype)
            found: dict[str, Stored] = {name: records[name] for name in self.columns}
            numbers = np.frombuffer(b"".join([one[size:] for one in own]), "<i4")
            counts = np.stack([records[name] for name in self._lists], axis=1)
            owner = np.repeat(np.tile(np.arange(len(self._lists)), len(own)), counts.ravel())
            _checked(found, len(records) == len(own) and len(owner) == len(numbers))
            for number, name in enumerate(self._lists):
                found[name] = numbers[owner == number], counts[:, number].astype(np.int64)
        return found


def layouts_of(info: StateInfo) -> dict[Entity, ColumnLayout]:
    """The records of a state's items and users."""
    return {"item": ColumnLayout("item", info.items), "user": ColumnLayout("user", info.users)}


def with_columns(
    rows: LogRows,
    kept: np.ndarray,
    layout: EventLayout,
    tables: Mapping[Entity, ColumnLayout],
    get: Get,
    names: Dictionaries,
) -> tuple[LogRows, Changes]:
    """Returns rows with the columns that training gives them, and the records of items and users that are new.

    An item or a user has the columns that the state has, whatever its rows say. A new one without a table gets those of
    its first row, where they may be missing.

    Args:
        kept: `[K]` int64, those that count; in the order of (time, user, item) the first ones are found.
    """
    texts, records, changes = dict(rows.texts), rows.records.copy(), Changes()
    ids: dict[Entity, list] = {"item": rows.texts[layout.log.item], "user": rows.users}
    for of, table in tables.items():
        if not table.columns:
            continue
        known = list(dict.fromkeys(ids[of]))
        values = dict(zip(known, get(list(map(table.key, known))), strict=True))
        if of not in layout.log.tables:
            new = [row for row in kept.tolist() if not table.is_known(values[ids[of][row]])]
            keys = [layout.sort_keys(part, [own[row] for row in new]) for part, own in ids.items()]
            order = sorted(zip(rows.records[TIME][new].tolist(), keys[1], keys[0], new, strict=True), reverse=True)
            first = {ids[of][row]: row for *_, row in order}  # the last one that is written stays
            before, chosen = [values[one] for one in first], np.array([*first.values()], np.int64)
            own = table.new_records(before, rows.given, chosen, names)
            values |= zip(first, own, strict=True)
            changes |= zip(map(table.key, first), own, strict=True)
            changes |= renewal(table, before, own)
        found, position = table.decode([*values.values()]), {one: number for number, one in enumerate(values)}
        index = np.fromiter(map(position.__getitem__, ids[of]), np.int64, len(rows))
        for name in [name for name in layout.columns if name in table.columns]:
            column, values = layout.columns[name], found[name]
            if column.kind == "texts":
                numbers, counts = values
                values = first_values(numbers, np.append(0, np.cumsum(counts)), column.size, missing=0)
            if column.kind in ("text", "texts"):
                texts[name] = names.texts(name, values[index].ravel().tolist())
            else:
                records[name] = values[index]
    return replace(rows, texts=texts, records=records), changes


def _checked(found: T, is_whole: bool) -> T:
    if not is_whole:
        raise ValueError("a record has another size than its columns")
    return found


def write_columns(
    store: Store,
    layout: ColumnLayout,
    ids: Sequence[str],
    columns: Mapping[str, Values],
    cache: Cache,
    check: Callable[[Get], None] = lambda get: None,
) -> None:
    """Writes the records of ids, in place of those that they had, all or none of them.

    Args:
        ids: `[N]`.
        columns: `[N]` by name; one that is not given is missing.
        check: raises an error if the store may not be written.
    """
    new: dict[str, dict[str | None, int]] = {}

    def change(get: Get) -> Changes:
        check(get)
        names = Dictionaries(get, cache)
        records = layout.encode(columns, len(ids), names)
        new.clear()
        new.update(names.new)
        keys = list(map(layout.key, ids))
        return dict(zip(keys, records, strict=True)) | names.changes() | renewal(layout, get(keys), records)

    store.update(change)
    cache.keep(new)


def renewal(layout: ColumnLayout, before: Iterable[bytes | None], after: Iterable[bytes | None]) -> Changes:
    """Returns what is written with values of ids, so that no server takes an item's old value from its memory."""
    is_changed = any(old not in (None, new) for old, new in zip(before, after, strict=True))
    return {VERSION: secrets.token_bytes(8)} if is_changed and layout.of == "item" else {}


class KeptItems:
    """Reads the values of items, and keeps them in memory for later requests, until one of them changes.

    The tag of a value is the 64-bit hash of its id XOR the version, so a new version drops all values. Two ids of one
    hash are taken for the same item, as in `KnownValues`: one chance in 2^64 for each pair. Items without a value are
    read each time, so that a new item needs no new version.

    Args:
        layout: of the values.
    """

    def __init__(self, layout: ColumnLayout) -> None:
        self._layout, self._lock = layout, threading.Lock()
        most = min(_MAX_KEPT, _MAX_BYTES // layout.packed.itemsize)
        size = 1 << max(3, most.bit_length() - 1)  # of the slots, whose pages take memory as they are used
        self._tags, self._values = np.zeros(size, np.uint64), np.empty(size, layout.packed)
        self._first, self._version, self._turn = np.uint64(size - _WAYS), np.uint64(0), 0

    def read(
        self, get: Get | None, keys: Sequence[bytes], items: Sequence[str]
    ) -> tuple[list[bytes | None], np.ndarray, np.ndarray]:
        """Returns the values of keys, those of items `[N]` as `ColumnLayout.pack`, and `[N]` bool, which have none.

        Args:
            get: reads the store; None if nothing has a value.
            keys: that are not kept.
            items: ids.
        """
        if get is None or not items:
            found = [None] * len(keys) if get is None else get(keys)
            return found, self._layout.pack([None] * len(items)), np.ones(len(items), bool)
        hashes = np.fromiter(map(hash, items), np.int64, len(items)).view(np.uint64)
        first = (hashes & self._first).view(np.int64)
        while True:
            version, slots = self._version, first.copy()
            tags = hashes ^ version
            with self._lock:
                for _ in range(_WAYS - 1):
                    slots += self._tags.take(slots) != tags
                lacking = (self._tags.take(slots) != tags).nonzero()[0]
                values = self._values.take(slots)
            own = [self._layout.key(items[row]) for row in lacking.tolist()]
            now, *found = get([VERSION, *keys, *own])  # in one call: of one moment
            self._version = now = np.uint64(integer(now))
            if now == version or len(own) == len(items):
                break
        own = found[len(keys) :]
        values[lacking] = self._layout.pack(own)
        is_absent = np.zeros(len(items), bool)
        is_absent[lacking] = [one is None for one in own]
        largest = max(_LARGEST, self._layout.dtype.itemsize)
        new = lacking[[one is not None and len(one) <= largest for one in own]]
        with self._lock:
            slots = first[new] + (self._turn + np.arange(len(new))) % _WAYS
            self._tags[slots], self._values[slots] = hashes[new] ^ now, values[new]
            self._turn += len(new)
        return found[: len(keys)], values, is_absent


def read_columns(layout: ColumnLayout, events: EventReader, body: bytes) -> dict[str, Values]:
    """Parses the columns of one item or user, an object; returns their values `[1]` as `events` reads those of rows.

    Raises:
        BadRequestError: not JSON, or a fault, with its place.
    """
    if not layout.columns:
        raise BadRequestError(f"this state has no columns of {layout.of}s")
    given = fields_of(layout.body_type.read(body))
    return {name: events.values(layout.columns[name], [value], lambda _, name: name) for name, value in given.items()}


def log_columns(
    tables: Mapping[Entity, ColumnLayout],
    ids: Mapping[Entity, Sequence[str]],
    names: Sequence[str],
    get: Get,
    texts: Texts,
) -> dict[str, Given]:
    """Returns columns of items and users as rows of a log have them, as far as the state has these columns.

    Args:
        ids: of the items and the users of the rows, `[N]` each.
    """
    found: dict[str, Given] = {}
    for of, layout in tables.items():
        if own := [name for name in names if name in layout.columns]:
            keys = {one: layout.key(one) for one in ids[of] if len(one.encode()) <= LONGEST_ID}
            values = dict(zip(keys, get([*keys.values()]), strict=True))
            stored = layout.decode([values.get(one) for one in ids[of]])
            for name in own:
                column = stored[name]
                if isinstance(column, tuple):
                    found[name] = texts(name, column[0].tolist()), column[1]
                else:
                    is_text = layout.columns[name].kind == "text"
                    found[name] = texts(name, column.tolist()) if is_text else column
    return found


class ModelColumns:
    """Turns records of items or users into what a model reads.

    Args:
        fields: of a candidate or of the user; those that the records have are read.
        known: by column with ids what gives them, as of RequestReader.

    Raises:
        StateError: the records have a column of another kind than the model reads.
    """

    def __init__(
        self, layout: ColumnLayout, fields: Sequence[Field], known: Mapping[str, Encoding], texts: Texts
    ) -> None:
        self._fields = [one for one in fields if one.name in layout.columns]
        for one in self._fields:
            check_column(f"{layout.of}s", one.name, layout.columns[one.name], one)
        self._ids = {one.name: Ids(one.name, known[one.name], one, texts) for one in self._fields if one.name in known}

    def __call__(self, columns: Mapping[str, Stored], names: Sequence[str]) -> Encoded:
        """Returns what a model reads of some columns."""
        found = Encoded()
        for one in self._fields:
            if one.name not in names:
                continue
            values = columns[one.name]
            if isinstance(values, tuple):
                found.ids[one.keys[0]], found.counts[one.keys[0]] = self._ids[one.name](values[0]), values[1]
            elif one.kind == "number":
                found.numbers[one.name] = standardize(values, one.mean, one.deviation, one.default, one.bounds)
            else:
                ids = values.astype(np.int64) if one.kind == "sid" else self._ids[one.name](values)
                found.ids[one.keys[0]] = ids
        return found
