"""Records of a state: the columns of a log and of its tables, whatever model reads them.

A user's value in the store is an array of records of one size, oldest first:

    time      float64, seconds since 1970
    event_id  uint64, a hash of the id that the sender gave the event, or 0
    <column>  of a text int32, its number in the store's dictionary of the column, 0 where it is missing; of a list of
              texts `[size]` of these; float64 of a number, NaN where it is missing; int64 of a semantic ID; of the
              session of a policy uint64, a hash

The value of an item or a user in the store has the columns of their table, see `jfi.state.columns`.

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
from jfi.state.stores import StateError, finding_damage

TIME, EVENT_ID, USER = "time", "event_id", "user"
#: The fields of an event that are not columns of the log.
OWN_FIELDS = (USER, TIME, EVENT_ID)
#: Those that statistics of the past need.
LABEL, IN_HISTORY = "label", "in_history"
#: Events older than the newest `max_history` that stay, for requests of a time before the newest ones.
MARGIN = 64
#: The format of stores that this version reads.
FORMAT = 2
DTYPES = {"text": "<i4", "texts": "<i4", "number": "<f8", "sid": "<i8", "session": "<u8"}
Kind = Literal["text", "texts", "number", "sid", "session"]
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


class StateInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describes the records of a store, as JSON.

    Args:
        format: of the store.
        max_history: the newest events of a history that a model may read.
        columns: of the records.
        item: the name of the column of the item's id, by which events of one time are sorted; None without one.
        is_numbered: whether items that are integers are sorted by their numbers.
        codec: fingerprint of the codec of semantic IDs, or None.
        statistics: of the past, which the state has, or None.
        id: of the store, whose numbers are no other's.
        items, users: the columns of items and of users, beside their ids.
    """

    format: int
    max_history: int
    columns: list[Column]
    item: str | None = None
    is_numbered: bool = False
    codec: str | None = None
    statistics: StatisticsSettings | None = None
    id: str = ""
    items: list[Column] = []
    users: list[Column] = []


class EventLayout:
    """The records of a state.

    Args:
        info: describes them.

    Example:
        >>> from jfi.serving.schema import Field
        >>> item = Field("item_id", "category", ["history_item_id"])
        >>> layout = layout_of(Schema([], [], [item], {"item_id": ["a", "b"]}, item_id="item_id"), max_history=200)
        >>> layout.dtype.names, layout.dtype.itemsize
        (('time', 'event_id', 'item_id'), 20)
    """

    def __init__(self, info: StateInfo) -> None:
        self.info, self.columns, self.item = info, {one.name: one for one in info.columns}, info.item
        self.max_history, self.keep = info.max_history, info.max_history + MARGIN
        own = [
            (one.name, DTYPES[one.kind], (one.size,)) if one.kind == "texts" else (one.name, DTYPES[one.kind])
            for one in info.columns
        ]
        self.dtype = np.dtype([(TIME, "<f8"), (EVENT_ID, "<u8"), *own])

    def records(self, value: bytes | None, user: str) -> np.ndarray:
        """Returns the records `[S]` of a user's value; none if it is None.

        Raises:
            StateError: it is damaged.
        """
        with finding_damage(f"the events of user '{user}'"):
            return np.frombuffer(value or b"", self.dtype)

    def merge(self, old: np.ndarray, new: np.ndarray, texts: Callable[[list[int]], list[str | None]]) -> np.ndarray:
        """Returns the newest records of both, by (time, item); of equal ones the old come first.

        Args:
            old: `[S]` sorted records.
            new: `[N]` records, in the order in which they came.
            texts: gives the texts of numbers of items.
        """
        joined = np.concatenate([old, new])
        joined = joined[np.argsort(joined[TIME], kind="stable")]
        if self.item is not None:
            time = joined[TIME]
            first = np.flatnonzero(np.diff(time, prepend=np.nan) != 0)
            lengths = np.diff(first, append=len(time))
            since = new[TIME].min(initial=np.inf)
            for begin, count in zip(first.tolist(), lengths.tolist(), strict=True):
                if count > 1 and time[begin] >= since:
                    keys = self._order(texts(joined[self.item][begin : begin + count].tolist()))
                    order = sorted(range(count), key=keys.__getitem__)
                    joined[begin : begin + count] = joined[begin : begin + count][order]
        return joined[-self.keep :]

    def _order(self, texts: list[str | None]) -> list:
        """Returns the sort keys of items, as `jfi.data` sorts them."""
        items = [text or "" for text in texts]
        return list(map(int, items)) if all(map(self.is_numbered, items)) else items

    def is_numbered(self, item: str) -> bool:
        """Returns whether an item is sorted by its number."""
        return self.info.is_numbered and is_integer(item)


def layout_of(schema: Schema, max_history: int) -> EventLayout:
    """Returns the records that a model needs.

    Args:
        schema: of the requests to the model.
        max_history: the newest events of a history that it reads.

    Raises:
        StateError: an event has a field with the name of one of `OWN_FIELDS`.
    """
    fields = schema.event_fields
    for name in (*OWN_FIELDS, *((LABEL, IN_HISTORY) if schema.statistics is not None else ())):
        if any(one.name == name for one in fields):
            raise StateError(f"an event has a field '{name}', which is one of the server's own; rename the column")
    columns, users = _columns(fields), _columns(one for one in schema.user if one.name != schema.user_id)
    items = _columns(one for one in schema.candidate if one.name in schema.item_columns)
    if schema.policy is not None:
        known = {one.name for one in columns}
        read = schema.policy.fields().items()
        columns += [Column(one.name, POLICY_KINDS[of]) for of, one in read if one.name not in known]
    item = schema.item_id if any(one.name == schema.item_id and one.kind == "text" for one in columns) else None
    is_numbered = item is None or all(map(is_integer, schema.vocabularies.get(item, [])))
    settings = None if schema.statistics is None else comparable(schema.statistics, schema)
    own = {"codec": schema.codec, "statistics": settings, "items": items, "users": users}
    return EventLayout(StateInfo(FORMAT, max_history, columns, item, is_numbered, **own))


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


def user_key(user: str) -> bytes:
    """The key of a user's records."""
    return b"u" + user.encode()


def hashes(texts: Sequence[str | None]) -> np.ndarray:
    """`[N]` uint64, 64 bits of the BLAKE2b of each text, such as an event's id or a session's; 0 for None."""
    hashed = (0 if one is None else int.from_bytes(digest(one)) or 1 for one in texts)
    return np.fromiter(hashed, np.uint64, len(texts))


def digest(text: str) -> bytes:
    """Returns 8 bytes that are the same for equal texts, and as good as never for others."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def is_integer(text: str) -> bool:
    """Returns whether a text is an integer that may be a key to sort by."""
    return text.removeprefix("-").isdecimal() and len(text) < 20
