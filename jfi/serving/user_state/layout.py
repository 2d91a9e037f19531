"""Records of events: which columns they have, and how they are encoded, both by the schema of a run's requests.

A user's value in the store is an array of records of one size, oldest first:

    time      float64, seconds since 1970
    event_id  uint64, a hash of the id that the sender gave the event, or 0
    <key>     an id for each key of the model's history: int32, int16 for a quantile, int64 for a semantic ID and for a
              raw id of a table that grows

A value that the run's vocabulary lacks has a negative number, which the store gives to each such value, so that it is
known where a later run knows it. A model reads it as unknown.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import numpy as np

from jfi.serving.schema import Field, PastFields, Schema
from jfi.serving.user_state.stores import finding_damage
from jfi.utils.encoding import UNKNOWN

TIME, EVENT_ID, USER = "time", "event_id", "user"
#: The fields of an event that are not the model's.
OWN_FIELDS = (USER, TIME, EVENT_ID)
#: Those that statistics of the past need.
LABEL, IN_HISTORY = "label", "in_history"
#: Before the name of a policy's field, where it is that of a column of a record.
_POLICY = "policy "
#: Events older than the newest `max_history` that stay, for requests of a time before the newest ones.
MARGIN = 64


@dataclass(frozen=True)
class Column:
    """A column of a record.

    Args:
        name: the key of the model's input, or the name of the policy's field.
        field: of the event.
        slot: the number of the value in a list of them, or None.
        kind: its type.
        values: the name of the dictionary of its values, or None for a column without one.
        role: of the policy, "dwell", "surface" or "session"; None for a column that the model reads.
    """

    name: str
    field: Field
    slot: int | None
    kind: str
    values: str | None
    role: Literal["dwell", "surface", "session"] | None = None


class StateInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describes the records of a store, as JSON.

    Args:
        format: of the store.
        max_history: the newest events of a history that a model reads.
        fingerprint: of the encoding; a run with another one cannot read the records.
        schema: of the requests that they are made for; user and candidate are left out.
        past: the statistics of the past that the state has, or None.
    """

    format: int
    max_history: int
    fingerprint: str
    schema: Schema
    past: PastFields | None = None


#: The format of stores that this version reads.
FORMAT = 1


class EventLayout:
    """The columns of the records of a run's events.

    Args:
        schema: of the run's requests.
        max_history: the newest events of a history that the run's model reads.

    Raises:
        ValueError: the model reads no events, or an event has a field with the name of one of `OWN_FIELDS`.

    Example:
        >>> item = Field("item_id", "category", ["history_item_id"])
        >>> layout = EventLayout(Schema([], [], [item], {"item_id": ["a", "b"]}, item_id="item_id"), max_history=200)
        >>> layout.dtype.names, layout.dtype.itemsize
        (('time', 'event_id', 'history_item_id'), 20)
    """

    def __init__(self, schema: Schema, max_history: int) -> None:
        if not schema.event:
            raise ValueError("the model reads no events, so there is no state of users")
        for name in (*OWN_FIELDS, *((LABEL, IN_HISTORY) if schema.past is not None else ())):
            if any(one.name == name for one in schema.event):
                why = "which is one of the server's own; rename the column"
                raise ValueError(f"an event has a field '{name}', {why}")
        self.max_history, self.keep, self.past = max_history, max_history + MARGIN, schema.past
        self.fields = [one for one in schema.event if one.kind != "age"]
        self.columns = [column for one in self.fields for column in _columns(one)]
        names = {column.field.name for column in self.columns}
        self.schema = replace(
            schema,
            user=[],
            candidate=[],
            event=self.fields,
            vocabularies={name: values for name, values in schema.vocabularies.items() if name in names},
            past=None,
            labels=[],
            tasks=[],
        )
        if schema.policy is not None:
            kinds = {"dwell": "<f8", "surface": "<i4", "session": "<u8"}
            for role, field in schema.policy.fields().items():
                values = _POLICY + field.name if role == "surface" else None
                self.columns.append(Column(_POLICY + field.name, field, None, kinds[role], values, role))
        self.dtype = np.dtype(
            [(TIME, "<f8"), (EVENT_ID, "<u8"), *((column.name, column.kind) for column in self.columns)]
        )
        #: The column of the item's id, by which events of one time are sorted; None without one.
        self.item = next((one for one in self.columns if one.field.name == schema.item_id and one.values), None)
        #: Whether all known items are integers: they are sorted by number then.
        self._by_number = self.item is not None and all(map(_is_integer, schema.vocabularies[self.item.values]))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the encoding."""
        schema = msgspec.to_builtins(replace(self.schema, vocabularies={}))
        for one in schema["event"]:
            del one["bounds"]  # of statistics alone
            if not one["capacity"]:  # states of earlier versions have none
                del one["capacity"]
            else:  # whatever the capacity, the raw ids are the same
                one["capacity"] = 1
        digest = hashlib.sha256(msgspec.json.encode(schema))
        for name in sorted(self.schema.vocabularies):
            digest.update(msgspec.json.encode([name, self.schema.vocabularies[name]]))
        return digest.hexdigest()

    def info(self, past: PastFields | None = None) -> StateInfo:
        """Returns what a store of these records says of them; the vocabularies are apart."""
        schema = replace(self.schema, vocabularies={})
        return StateInfo(FORMAT, self.max_history, self.fingerprint, schema, past)

    def records(self, value: bytes | None, user: str) -> np.ndarray:
        """Returns the records `[S]` of a user's value; none if it is None.

        Raises:
            StateError: it is damaged.
        """
        with finding_damage(f"the events of user '{user}'"):
            return np.frombuffer(value or b"", self.dtype)

    def merge(self, old: np.ndarray, new: np.ndarray, texts: Callable[[np.ndarray], list[str]]) -> np.ndarray:
        """Returns the newest records of both, by (time, item); of equal ones the old come first.

        Args:
            old: `[S]` sorted records.
            new: `[N]` records, in the order in which they came.
            texts: gives the texts of ids of items.
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
                    keys = self._order(texts(joined[self.item.name][begin : begin + count]))
                    order = sorted(range(count), key=keys.__getitem__)
                    joined[begin : begin + count] = joined[begin : begin + count][order]
        return joined[-self.keep :]

    def _order(self, texts: list[str]) -> list:
        """Returns the sort keys of items, as `jfi.data` sorts them."""
        return list(map(int, texts)) if all(map(self.is_numbered, texts)) else texts

    def is_numbered(self, item: str) -> bool:
        """Returns whether an item is sorted by its number."""
        return (self._by_number or self.item is None) and _is_integer(item)


def _columns(one: Field) -> list[Column]:
    """The columns of a field of events."""
    if one.kind == "sid":
        return [Column(one.keys[0], one, None, "<i8", None)]
    if one.kind == "quantile":
        return [Column(one.keys[0], one, None, "<i2" if len(one.edges) < 2**15 - 2 else "<i4", None)]
    is_large, is_hashed = one.capacity or one.num_buckets >= 2**31 - 1, one.encoding() is not None
    kind, values = "<i8" if is_large else "<i4", None if is_hashed else one.name
    slots = range(len(one.keys)) if one.kind == "slots" else [None]
    return [Column(key, one, slot, kind, values) for slot, key in zip(slots, one.keys, strict=True)]


def known_ids(ids: np.ndarray) -> np.ndarray:
    """`[S]` int64, the ids as a model reads them: 0 for a value that the run's vocabulary lacks."""
    return np.maximum(ids, UNKNOWN, dtype=np.int64)


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


def _is_integer(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and len(text) < 20
