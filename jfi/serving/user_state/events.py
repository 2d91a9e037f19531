"""Checks and encodes events that are sent to the server, as a request's history is."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jfi.serving.requests import RequestReader
from jfi.serving.schema import KINDS, Field, PastFields, id_schema, schemas_of, time_schema
from jfi.serving.user_state.layout import (
    EVENT_ID,
    IN_HISTORY,
    LABEL,
    TIME,
    USER,
    Column,
    EventLayout,
    hashes,
)
from jfi.serving.validation import (
    BadRequestError,
    Place,
    Rows,
    Values,
    check_count,
    lists,
    numbers,
    read_id,
    read_time,
    shown,
    sids,
    texts,
)
from jfi.utils.encoding import UNKNOWN, cross, quantile_ids, text_of

_USER, _EVENT_ID = Field(USER, "category"), Field(EVENT_ID, "category")


@dataclass(frozen=True)
class SentEvents:
    """N valid events, in the order in which they were sent.

    Args:
        users: `[N]` texts of the users' ids.
        records: `[N]`, of EventLayout; values that the vocabulary lacks are 0.
        unknown: by column of the records the rows and the texts of values that the vocabulary lacks.
        place: gives the place of an event in the body, for messages.
        items: `[N]` texts of the items' ids, where statistics are counted, like what follows.
        labels: `[N]` float32, NaN for none.
        in_history: `[N]` bool, whether an event is one of histories.
        sessions: `[N]` uint64, equal for those of a session, 0 for none.
    """

    users: list[str]
    records: np.ndarray
    unknown: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    place: Place = lambda row, name: f"events[{row}].{name}"
    items: list[str] = field(default_factory=list)
    labels: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    in_history: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    sessions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))

    def __len__(self) -> int:
        return len(self.users)


class EventReader:
    """Checks and encodes events.

    Args:
        layout: of the records.
        reader: of requests, with the same schema.
        max_events: most events of a body.
        max_future: seconds that an event may be ahead of the clock.
        clock: gives the seconds since 1970.
        past: the statistics that events are counted in, or None.
    """

    def __init__(
        self,
        layout: EventLayout,
        reader: RequestReader,
        max_events: int = 10_000,
        max_future: float = 60.0,
        clock: Callable[[], float] = time.time,
        past: PastFields | None = None,
    ) -> None:
        self.layout, self.max_events = layout, max_events
        self._known, self._max_future, self._clock = reader.known, max_future, clock
        #: By name of a field of an event its kind.
        self.fields = {one.name: one.kind for one in layout.fields if one.kind != "cross"}
        self.fields |= {column.field.name: column.field.kind for column in layout.columns if column.role is not None}
        self._past = past
        #: Names of fields that all events of a body have or none.
        self.optional = [EVENT_ID]
        if past is not None:
            self.fields[past.item] = "category"
            self.optional += [IN_HISTORY] if past.is_implicit else [IN_HISTORY, LABEL]
            if past.session is not None:
                self.fields.setdefault(past.session, "category")

    def json_schema(self) -> dict:
        """Returns the JSON Schema of a body of events."""
        values = schemas_of(self.fields, self.layout.fields)
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
        given_too = [name for name in self.optional if _any_has(given, name)]
        rows = Rows("events", given, [*names, *given_too])
        if not (count := len(rows)):
            raise BadRequestError("events must not be empty")
        columns, place = rows.columns(), rows.place
        users = users_of(columns[USER], place)
        records = np.zeros(count, self.layout.dtype)
        records[TIME] = self._times(columns[TIME], place)
        if EVENT_ID in given_too:
            records[EVENT_ID] = hashes(texts(_EVENT_ID, columns[EVENT_ID], place))
        unknown: dict[str, list[tuple[int, str]]] = {}
        by_field: dict[str, list] = {}
        for column in self.layout.columns:
            values = self._values(column, columns, place, by_field)
            if isinstance(values, np.ndarray):
                records[column.name] = values
                continue
            ids, lacking = self.ids(column, values)
            records[column.name] = ids
            if lacking:
                unknown[column.name] = lacking
        return SentEvents(users, records, unknown, place, *self._counted(columns, place, count))

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

    def ids(self, column: Column, values: Sequence[str | None]) -> tuple[np.ndarray, list[tuple[int, str]]]:
        """Returns the ids `[N]` of texts, and the rows and the texts of those that the vocabulary lacks."""
        one = column.field
        if column.role is None:
            if one.default is not None:
                values = [one.default if text is None else text for text in values]
            ids = self._known[one.name].ids(values)
        else:
            ids = np.zeros(len(values), np.int64)
        if column.values is None:  # hashed
            return ids, []
        rows = np.flatnonzero(ids == UNKNOWN).tolist()
        return ids, [(row, text) for row in rows if (text := values[row]) is not None]

    def _values(
        self, column: Column, columns: dict[str, Sequence], place: Place, by_field: dict[str, list]
    ) -> Sequence[str | None] | np.ndarray:
        """The texts of a column with ids, or the ids or numbers of another."""
        one = column.field
        if column.role == "dwell":
            return numbers(one, columns[one.name], place)
        if column.role == "session":
            return hashes(texts(one, columns[one.name], place))
        if one.kind == "cross":
            return cross(*(texts(replace(one, name=name), columns[name], place) for name in one.columns))
        if one.kind == "quantile":
            return quantile_ids(numbers(one, columns[one.name], place), np.array(one.edges), one.default)
        if one.kind == "sid":
            return sids(one, columns[one.name], place)
        if column.slot is None:
            return texts(one, columns[one.name], place)
        if one.name not in by_field:
            lists(one, self._known[one.name], columns[one.name], place)  # checks them
            by_field[one.name] = [_texts(values) for values in columns[one.name]]
        return [values[column.slot] if column.slot < len(values) else None for values in by_field[one.name]]

    def _times(self, values: Values, place: Place) -> np.ndarray:
        """`[N]` float64 seconds."""
        latest = self._clock() + self._max_future
        for row, value in enumerate(values):
            seconds = read_time(value, place(row, TIME))
            if seconds > latest:
                limit = f"more than {self._max_future:g} s ahead of the server's clock"
                raise BadRequestError(f"{place(row, TIME)} is {shown(value)}, {limit}")
        return np.array(values, np.float64)


def users_of(values: Sequence[object], place: Place) -> list[str]:
    """The texts of users' ids.

    Raises:
        BadRequestError: one is missing, of another type, or too long.
    """
    found = texts(_USER, values, place)
    return [read_id(values[row], user, place(row, USER)) for row, user in enumerate(found)]


def _texts(values: list | None) -> list[str]:
    return [text for text in map(text_of, values or []) if text is not None]


def _any_has(rows: object, name: str) -> bool:
    if isinstance(rows, dict):
        return name in rows
    return isinstance(rows, list) and any(isinstance(row, dict) and name in row for row in rows)
