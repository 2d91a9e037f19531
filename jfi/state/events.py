"""Checks events that are sent to the server, and makes records of them but for the numbers of their texts."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import numpy as np

from jfi.serving.schema import KINDS, Field, id_schema, time_schema
from jfi.serving.validation import (
    BadRequestError,
    Place,
    Rows,
    Values,
    check_count,
    flat_values,
    numbers,
    read_id,
    read_time,
    shown,
    sids,
    texts,
)
from jfi.state.layout import EVENT_ID, IN_HISTORY, LABEL, TIME, USER, Column, EventLayout, hashes

_USER, _EVENT_ID = Field(USER, "category"), Field(EVENT_ID, "category")
#: By kind of a column that of its field in a request.
FIELDS: dict[str, Literal["category", "slots", "quantile", "sid"]] = {
    "text": "category",
    "texts": "slots",
    "number": "quantile",
    "sid": "sid",
    "session": "category",
}


@dataclass(frozen=True)
class SentEvents:
    """N valid events, in the order in which they were sent.

    Args:
        users: `[N]` texts of the users' ids.
        records: `[N]`, of EventLayout; the numbers of texts are 0.
        texts: by column of texts the value of each event, `[N]`; of lists `[N * size]`.
        place: gives the place of an event in the body, for messages.
        items: `[N]` texts of the items' ids, where statistics are counted, like what follows.
        labels: `[N]` float32, NaN for none.
        in_history: `[N]` bool, whether an event is one of histories.
        sessions: `[N]` uint64, equal for those of a session, 0 for none.
    """

    users: list[str]
    records: np.ndarray
    texts: dict[str, list[str | None]] = field(default_factory=dict)
    place: Place = lambda row, name: f"events[{row}].{name}"
    items: list[str] = field(default_factory=list)
    labels: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    in_history: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    sessions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))

    def __len__(self) -> int:
        return len(self.users)


class EventReader:
    """Checks events, which have the columns of a state.

    Args:
        layout: of the records.
        max_events: most events of a body.
        max_future: seconds that an event may be ahead of the clock.
        clock: gives the seconds since 1970.
    """

    def __init__(
        self,
        layout: EventLayout,
        max_events: int = 10_000,
        max_future: float = 60.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.layout, self.max_events = layout, max_events
        self._max_future, self._clock, self._past = max_future, clock, layout.info.statistics
        #: By name of a field of an event its kind.
        self.fields = {name: FIELDS[one.kind] for name, one in layout.columns.items()}
        #: Names of fields that all events of a body have or none.
        self.optional = [EVENT_ID]
        if self._past is not None:
            self.fields.setdefault(self._past.item, "category")
            self.optional += [IN_HISTORY] if self._past.is_implicit else [IN_HISTORY, LABEL]
            if self._past.session is not None:
                self.fields.setdefault(self._past.session, "category")

    def json_schema(self) -> dict:
        """Returns the JSON Schema of a body of events."""
        values = {name: KINDS[kind] for name, kind in self.fields.items()}
        own = {
            USER: id_schema("the id of the user"),
            TIME: time_schema("seconds since 1970"),
            EVENT_ID: KINDS["category"] | {"description": "equal for events that are sent again, which count once"},
            LABEL: {"description": "1 for a positive, 0 for a negative, null for neither", "enum": [0, 1, None]},
            IN_HISTORY: {"description": "whether it is an event of histories", "type": "boolean"},
        }
        own = {name: one for name, one in own.items() if name in (USER, TIME, *self.optional)}
        required = [USER, TIME, *values]
        row = {"type": "object", "properties": own | values, "required": required, "additionalProperties": False}
        has = [{"required": [name]} for name in self.optional]
        same = [{"anyOf": [{"items": one}, {"items": {"not": one}}]} for one in has]
        bounds = {"minItems": 1, "maxItems": self.max_events}
        columns = {name: {"type": "array", "items": one, **bounds} for name, one in (own | values).items()}
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "A body of POST /events",
            "anyOf": [{"type": "array", "items": row, **bounds, "allOf": same}, row | {"properties": columns}],
        }

    def read(self, body: bytes) -> SentEvents:
        """Parses and encodes events.

        Raises:
            BadRequestError: not JSON, or a fault, with its place.
        """
        from jfi.serving.server.body import read_body  # by orjson, which `jfi state load` does not need

        return read_body(body, self)

    def __call__(self, given: object) -> SentEvents:
        """Encodes events.

        Args:
            given: a list of objects, one for each event, or an object of lists.

        Raises:
            BadRequestError: a fault, with its place.
        """
        check_count("events", given, self.max_events)
        names = [USER, TIME, *self.fields]
        rows = Rows("events", given, {*names, *self.optional})
        rows.require(names)
        if not (count := len(rows)):
            raise BadRequestError("events must not be empty")
        columns, place = rows.columns, rows.place
        users = names_of(columns[USER], place)
        records = np.zeros(count, self.layout.dtype)
        records[TIME] = self._times(columns[TIME], place)
        if EVENT_ID in columns:
            records[EVENT_ID] = hashes(texts(_EVENT_ID, columns[EVENT_ID], place))
        found: dict[str, list[str | None]] = {}
        for name, column in self.layout.columns.items():
            values = values_of(column, columns[name], place)
            if isinstance(values, tuple):
                found[name] = _first_texts(*values, column.size)
            elif isinstance(values, list):
                found[name] = values
            else:
                records[name] = values
        return SentEvents(users, records, found, place, *self._counted(columns, place, count))

    def _counted(self, columns: dict[str, Values], place: Place, count: int) -> list:
        """The items, labels, whether they are events of histories, and sessions, of events that are counted."""
        if self._past is None:
            return []
        items = texts(Field(self._past.item, "category"), columns[self._past.item], place)
        if None in items:
            row = items.index(None)
            got = shown(columns[self._past.item][row])
            raise BadRequestError(f"{place(row, self._past.item)} must be the id of an item, got {got}")
        labels = np.full(count, 1.0 if self._past.is_implicit else np.nan, np.float32)
        for row, value in enumerate(columns.get(LABEL, ())):
            if value is not None:
                if isinstance(value, bool) or value not in (0, 1):
                    raise BadRequestError(f"{place(row, LABEL)} must be 0, 1 or null, got {shown(value)}")
                labels[row] = value
        in_history = np.ones(count, bool)
        for row, value in enumerate(columns.get(IN_HISTORY, ())):
            if type(value) is not bool:
                raise BadRequestError(f"{place(row, IN_HISTORY)} must be true or false, got {shown(value)}")
            in_history[row] = value
        sessions = np.zeros(count, np.uint64)
        if (name := self._past.session) is not None:
            sessions = hashes(texts(Field(name, "category"), columns[name], place))
        return [items, labels, in_history, sessions]

    def _times(self, values: Values, place: Place) -> np.ndarray:
        """`[N]` float64 seconds."""
        latest = self._clock() + self._max_future
        for row, value in enumerate(values):
            seconds = read_time(value, place(row, TIME))
            if seconds > latest:
                limit = f"more than {self._max_future:g} s ahead of the server's clock"
                raise BadRequestError(f"{place(row, TIME)} is {shown(value)}, {limit}")
        return np.array(values, np.float64)


def values_of(column: Column, given: Values, place: Place) -> Values | tuple[list[str], np.ndarray]:
    """The values of a column of the state: texts, numbers, or the texts of all lists and their lengths.

    Raises:
        BadRequestError: a fault, with its place.
    """
    one = Field(column.name, FIELDS[column.kind], layout=column.layout)
    if column.kind == "number":
        return numbers(one, given, place)
    if column.kind == "sid":
        return sids(one, given, place)
    if column.kind == "texts":
        flat, lengths, place = flat_values(one, given, place)
        return list(texts(one, flat, place)), lengths
    found = list(texts(one, given, place))
    return hashes(found) if column.kind == "session" else found


def _first_texts(values: list[str], lengths: np.ndarray, size: int) -> list[str | None]:
    """The first texts of each list, `[N * size]`, None where there are fewer."""
    found, rest = [], iter(values)
    for length in lengths.tolist():
        row = list(islice(rest, length))[:size]
        found += row + [None] * (size - len(row))
    return found


def names_of(values: Sequence[object], place: Place, of: str = "a user") -> list[str]:
    """The texts of users' ids, or of items'.

    Raises:
        BadRequestError: one is missing, of another type, or too long.
    """
    found = texts(_USER, values, place)
    return [read_id(values[row], text, place(row, USER), of) for row, text in enumerate(found)]
