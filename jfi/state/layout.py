"""Records of a state: the columns of a log and of its tables, whatever model reads them.

A user's value in the store is an array of records of one size, the events of their history, oldest first:

    time      float64, seconds since 1970
    id        uint64, by which a row that comes again is known: a hash of its `event_id`, or of its item and time
    labeled   uint8, 1 where the row had a label
    <column>  of a text int32, its number in the store's dictionary of the column, 0 where it is missing; of a list of
              texts `[size]` of these; float64 of a number, NaN where it is missing; int64 of a semantic ID; of the
              session of a policy uint64, a hash

Of their other rows, which are no events of histories, another value has the first three fields. The value of an item or
a user has the columns of their table, see `jfi.state.columns`.

An artifact brings what turns these into the ids of its model, see `jfi.state.model_ids`. So another artifact of the
same columns reads the same state, with other vocabularies, intervals of quantiles, hash buckets or crosses.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal

import msgspec
import numpy as np

from jfi.events.groups import StatisticsSettings
from jfi.serving.schema import Field, Schema
from jfi.state.stores import finding_damage

#: Fields of a record that are no columns of the log, which have no such names.
TIME, ID, LABELED = "jfi time", "jfi id", "jfi labeled"
_OWN = [(TIME, "<f8"), (ID, "<u8"), (LABELED, "u1")]
#: Events older than the newest `max_history` that stay, for requests of a time before the newest ones and for late
#: rows; and rows that are no events of histories, by which repeated ones are known.
MARGIN, OTHERS = 64, 256
#: The key of the number of rows of the log that the state has.
POSITION = b"p"
#: The key of the part that the state was fed last, see `jfi.state.outbox.Cursor`.
CURSOR = b"f"
#: The format of stores that this version reads.
FORMAT = 4
DTYPES = {"text": "<i4", "texts": "<i4", "number": "<f8", "sid": "<i8", "session": "<u8"}
#: "any" is a column that a rule reads, whatever it holds.
Kind = Literal["text", "texts", "number", "sid", "session", "any"]
#: By kind of a field that a model reads, and by what a policy reads it for, the kind of its column.
KINDS: dict[str, Kind] = {"category": "text", "slots": "texts", "quantile": "number", "sid": "sid"}
KINDS |= {"categories": "texts", "number": "number"}
POLICY_KINDS: dict[str, Kind] = {"dwell": "number", "surface": "text", "session": "session"}


class Column(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A column of the records.

    Args:
        name: of the log's column, and of the field of an event that is sent.
        kind: of its values; "session" is the hash of a text of which only the equality counts.
        size: of a list of texts the values that are kept, the first ones; 0 for all of an item's or a user's.
        layout: of a semantic ID, the arguments of `jfi.semantic_ids.packing.Layout`.
    """

    name: str
    kind: Kind
    size: int = 1
    layout: dict[str, int] = {}


class Log(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Says what the columns of a log mean, as the section `data` of a run does.

    Args:
        user, item, time: names of the columns.
        unit: of times that are numbers.
        label: column or rule of the first label; None if every row is a positive, or if nothing reads labels.
        task: of that label.
        history: rule of which rows are events of histories; None for all.
        event_id: column of an id by which a row that comes again is known; None for the user, the item and the time.
        others: columns of the log that the records do not keep, such as those of labels.
        missing_values: texts that mean a missing value.
        separators: by column of lists what is between their values where they are one text.
        null_ids: as `data.null_ids`.
        tables: which of "item" and "user" have a table; what rows say of their columns does not count.
    """

    user: str = "user_id"
    item: str = "item_id"
    time: str = "timestamp"
    unit: str = "s"
    label: str | None = None
    task: str = "binary"
    history: str | None = None
    event_id: str | None = None
    others: list[Column] = []
    missing_values: list[str] = []
    separators: dict[str, str] = {}
    null_ids: str = "refuse"
    tables: list[str] = []


class StateInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describes the records of a store, as JSON.

    Args:
        max_history: the newest events of a history that a model may read.
        numbered: which of "item" and "user" have ids that are sorted by their numbers, as far as these are integers.
        codec: fingerprint of the codec of semantic IDs, or None.
        id: of the store, whose numbers are no other's.
        items, users: the columns of items and of users, beside their ids.
    """

    format: int
    max_history: int
    columns: list[Column]
    log: Log = Log()
    numbered: list[str] = []
    codec: str | None = None
    statistics: StatisticsSettings | None = None
    id: str = ""
    items: list[Column] = []
    users: list[Column] = []


class EventLayout:
    """The records of a state.

    Example:
        >>> from jfi.serving.schema import Field
        >>> item = Field("item_id", "category", ["history_item_id"])
        >>> layout = layout_of(Schema([], [], [item], {"item_id": ["a", "b"]}, item_id="item_id"), max_history=200)
        >>> layout.dtype.names[3:], layout.dtype.itemsize
        (('item_id',), 21)
    """

    def __init__(self, info: StateInfo) -> None:
        self.info, self.log, self.columns = info, info.log, {one.name: one for one in info.columns}
        self.max_history, self.keep = info.max_history, info.max_history + MARGIN
        own = [
            (one.name, DTYPES[one.kind], (one.size,)) if one.kind == "texts" else (one.name, DTYPES[one.kind])
            for one in info.columns
        ]
        self.dtype, self.others = np.dtype([*_OWN, *own]), np.dtype(_OWN)

    def records(self, value: bytes | None, user: str) -> np.ndarray:
        """Returns the records `[S]` of a user's value; none if it is None."""
        with finding_damage(f"the events of user '{user}'"):
            return np.frombuffer(value or b"", self.dtype)

    def other_rows(self, value: bytes | None, user: str) -> np.ndarray:
        """Returns what is kept `[O]` of a user's rows that are no events; a StateError says that it is damaged."""
        with finding_damage(f"the other rows of user '{user}'"):
            return np.frombuffer(value or b"", self.others)

    def merge(
        self,
        user: np.ndarray,
        records: np.ndarray,
        is_new: np.ndarray,
        num_users: int,
        texts: Callable[[list[int]], list[str | None]],
    ) -> list[np.ndarray]:
        """Returns of each user the newest records, by (time, item); equal ones stay in their order.

        Args:
            user: `[N]` int64 numbers of users, below `num_users`.
            records: `[N]`, of each user the old ones, sorted, before the new ones.
        """

        def arrange(order: np.ndarray) -> None:
            time, own = records[TIME][order], user[order]
            same = (time[1:] == time[:-1]) & (own[1:] == own[:-1])
            if not same.any():
                return
            first = np.flatnonzero(np.append(True, ~same))
            lengths = np.diff(first, append=len(order))
            tied = (lengths > 1) & np.logical_or.reduceat(is_new[order], first)
            for begin, count in zip(first[tied].tolist(), lengths[tied].tolist(), strict=True):
                part = order[begin : begin + count]
                keys = self.sort_keys("item", texts(records[self.log.item][part].tolist()))
                order[begin : begin + count] = part[sorted(range(count), key=keys.__getitem__)]

        found = newest(user, records[TIME], num_users, self.keep, arrange)
        return [take(records, rows) for rows in found]

    def sort_keys(self, of: str, ids: Sequence[str | None]) -> list:
        """Returns the keys that ids of "item" or "user" are sorted by: integers by number, as in training."""
        texts = [text or "" for text in ids]
        is_numbered = of in self.info.numbered and all(map(is_integer, texts))
        return [(int(text), text) for text in texts] if is_numbered else texts


def layout_of(schema: Schema, max_history: int, log: Log | None = None) -> EventLayout:
    """Returns the records that a model needs.

    Args:
        log: what the columns mean; by default what the schema says of it.
    """
    log = Log(schema.user_id or "user_id", schema.item_id or "item_id") if log is None else log
    columns, users = _columns(schema.event_fields), _columns(one for one in schema.user if one.name != schema.user_id)
    items = _columns(one for one in schema.candidate if one.name in schema.item_columns)
    known = {one.name for one in columns}
    if log.item not in known:
        columns.append(Column(log.item, "text"))
    if schema.policy is not None:
        read = schema.policy.fields().items()
        columns += [Column(one.name, POLICY_KINDS[of]) for of, one in read if one.name not in known]
    ids = {"item": log.item, "user": log.user}
    numbered = [of for of, name in ids.items() if all(map(is_integer, schema.vocabularies.get(name, [])))]
    settings = None if schema.statistics is None else comparable(schema.statistics, schema)
    kept = {log.user, log.time, log.event_id, *(one.name for one in columns)}
    log = msgspec.structs.replace(log, others=[one for one in log.others if one.name not in kept])
    own = {"codec": schema.codec, "statistics": settings, "items": items, "users": users}
    return EventLayout(StateInfo(FORMAT, max_history, columns, log, numbered, **own))


def _columns(fields: Iterable[Field]) -> list[Column]:
    return [
        Column(one.name, KINDS[one.kind], {"slots": len(one.keys), "categories": 0}.get(one.kind, 1), one.layout)
        for one in fields
        if one.kind in KINDS
    ]


def comparable(settings: StatisticsSettings, schema: Schema) -> StatisticsSettings:
    """Returns the statistics without what differs between vocabularies."""
    hashed = {one.name for one in schema.event_fields if one.num_buckets}
    columns = settings.columns.items()
    sized = {name: replace(one, key="", size=one.size if name in hashed else 0) for name, one in columns}
    return replace(settings, num_known=1, columns=sized)


def newest(
    user: np.ndarray,
    time: np.ndarray,
    num_users: int,
    most: int,
    arrange: Callable[[np.ndarray], None] = lambda order: None,
) -> list[np.ndarray]:
    """Returns for each user the indices of their newest rows, at most `most`, by time; of one time as they come.

    Args:
        user: `[N]` int64 numbers of users.
        time: `[N]` float64.
        arrange: sorts in place the indices by user and time, such as those of one time by item.
    """
    order = np.lexsort((time, user))
    if len(order):
        arrange(order)
    ends = np.cumsum(np.bincount(user, minlength=num_users))
    begins = np.maximum(np.append(0, ends[:-1]), ends - most)
    return [order[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]


def take(records: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns records by their indices or a mask, copied as bytes: field by field it takes many times as long."""
    return records.view(np.dtype((np.void, records.itemsize)))[rows].view(records.dtype)


def user_key(user: str) -> bytes:
    """The key of a user's records."""
    return b"u" + user.encode()


def other_key(user: str) -> bytes:
    """The key of what is kept of a user's rows that are no events of histories."""
    return b"i" + user.encode()


def hashes(texts: Sequence[str | None]) -> np.ndarray:
    """`[N]` uint64, 64 bits of the BLAKE2b of each text, such as an event's id or a session's; 0 for None."""
    hashed = (0 if one is None else int.from_bytes(digest(one)) or 1 for one in texts)
    return np.fromiter(hashed, np.uint64, len(texts))


def ids_of(items: Sequence[str], times: np.ndarray, event_ids: Sequence[str | None] | None = None) -> np.ndarray:
    """Returns the ids of rows `[N]` uint64: a hash of the event's id, or without one of the item and the time.

    Args:
        items: `[N]` texts.
        times: `[N]` float64 seconds.
        event_ids: `[N]` texts, None for a row without one.
    """
    found = mixed(hashes(items), times)
    if event_ids is None:
        return found
    given = hashes(event_ids)
    return np.where(given != 0, given, found)


def mixed(items: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Returns hashes `[N]` uint64, none of them 0, of the hashes of items `[N]` uint64 and of times `[N]` float64."""
    bits = (times + 0.0).view(np.uint64)  # without -0.0
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # the finalizer of SplitMix64
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    bits = (bits ^ items) * np.uint64(0x9E3779B97F4A7C15)
    return np.maximum(bits ^ (bits >> np.uint64(32)), np.uint64(1))


def integer(value: bytes | None) -> int:
    """Returns the number of a key such as `POSITION`, 0 where it is not there."""
    return int.from_bytes(value or b"", "little")


def digest(text: str) -> bytes:
    """Returns 8 bytes that are the same for equal texts, and as good as never for others."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def is_integer(text: str) -> bool:
    """Returns whether a text is an integer that may be a key to sort by."""
    return text.removeprefix("-").isdecimal() and len(text) < 20
