"""Checks rows of a log that are sent to the server, and makes records of them but for the numbers of their texts."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np

from jfi.serving.schema import KINDS, LATEST, LONGEST_TEXT, Field, id_schema
from jfi.serving.validation import (
    BadRequestError,
    Place,
    Rows,
    Values,
    check_count,
    flat_values,
    numbers,
    read_id,
    shown,
    sids,
    texts,
)
from jfi.state.dictionaries import Dictionaries
from jfi.state.layout import ID, LABELED, TIME, Column, EventLayout, hashes, ids_of
from jfi.utils.encoding import SECONDS

_ID = Field("id", "category")
#: By kind of a column that of its field in a request.
FIELDS: dict[str, Literal["category", "slots", "quantile", "sid"]] = {
    "text": "category",
    "texts": "slots",
    "number": "quantile",
    "sid": "sid",
    "session": "category",
    "any": "category",
}
_DATE = "^[0-9]{4}-[0-9]{2}-[0-9]{2}"
_TIME = {"description": "a date and time by ISO 8601, or a number", "type": ["number", "string"], "pattern": _DATE}


@dataclass(frozen=True)
class LogRows:
    """N valid rows of a log, in the order in which they came.

    Args:
        users: `[N]` texts of the users' ids.
        records: `[N]`, of EventLayout; the numbers of texts are 0.
        texts: by column of texts the value of each row, `[N]`; of lists `[N * size]`.
        lacking: columns that the rows do not have; the state's items and users have them, see
            `jfi.state.columns.complete`.
        labels: `[N]` float32, NaN for none.
        in_history: `[N]` bool, whether a row is an event of histories.
        sessions: `[N]` uint64, equal for those of a session, 0 for none.
        place: gives the place of a row in the body, for messages.
    """

    users: list[str]
    records: np.ndarray
    texts: dict[str, list[str | None]]
    lacking: list[str]
    labels: np.ndarray
    in_history: np.ndarray
    sessions: np.ndarray
    place: Place

    def __len__(self) -> int:
        return len(self.users)

    def numbered(self, names: Dictionaries, rows: np.ndarray) -> np.ndarray:
        """Returns the records of rows `[K]` int64, with the numbers of their texts."""
        records = self.records[rows]
        for name, own in self.texts.items():
            shape = records[name].shape
            if len(rows) < len(self):
                wide = np.array(own, object).reshape(len(self), -1)[rows]
                own = wide.ravel().tolist()
            records[name] = names.numbers(name, own).reshape(shape)
        return records


class EventReader:
    """Checks rows of a log, which have the columns of a state.

    Args:
        layout: of the records.
        max_events: most rows of a body.
        max_future: seconds that a row may be ahead of the clock.
        clock: gives the seconds since 1970.
    """

    def __init__(
        self,
        layout: EventLayout,
        max_events: int = 10_000,
        max_future: float = 60.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.layout, self.max_events, self._log = layout, max_events, layout.log
        self._max_future, self._clock, log, settings = max_future, clock, layout.log, layout.info.statistics
        #: By column of a row the kind of its field.
        self._kinds = {one.name: FIELDS[one.kind] for one in (*layout.columns.values(), *log.others)}
        own, self._meaning = [log.user, log.time, *layout.columns], None
        self._session = None if settings is None else settings.session
        if self._session is not None:
            own.append(self._session)
        if log.label is not None or log.history is not None:
            from jfi.state.meaning import Meaning  # only rules need pyarrow

            self._meaning = Meaning(log)
            own += self._meaning.of_history
        for name in (*own, *([log.event_id] if log.event_id else [])):
            self._kinds.setdefault(name, "category")
        known = {one.name for one in (*layout.info.items, *layout.info.users)}
        #: Names of the columns that each row has; what the state has of items and users is not needed.
        self.required = [name for name in dict.fromkeys(own) if name not in known]
        #: Names of those that all rows of a body have or none.
        self.optional = [name for name in self._kinds if name not in self.required]

    def json_schema(self) -> dict:
        """Returns the JSON Schema of a body of rows."""
        values = {name: KINDS[kind] for name, kind in self._kinds.items()}
        values |= {
            self._log.user: id_schema("the id of the user"),
            self._log.item: id_schema("the id of the item", LONGEST_TEXT),
            self._log.time: _TIME | {"exclusiveMinimum": -LATEST / SECONDS[self._log.unit]},
        }
        row = {"type": "object", "properties": values, "required": self.required, "additionalProperties": False}
        has = [{"required": [name]} for name in self.optional]
        same = [{"anyOf": [{"items": one}, {"items": {"not": one}}]} for one in has]
        bounds = {"minItems": 1, "maxItems": self.max_events}
        columns = {name: {"type": "array", "items": one, **bounds} for name, one in values.items()}
        rows = {"type": "array", "items": row, **bounds} | ({"allOf": same} if same else {})
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "A body of POST /events",
            "anyOf": [rows, row | {"properties": columns}],
        }

    def read(self, body: bytes) -> LogRows:
        """Parses and encodes events.

        Raises:
            BadRequestError: not JSON, or a fault, with its place.
        """
        from jfi.serving.server.body import read_body  # by orjson, which `jfi state load` does not need

        return read_body(body, self)

    def __call__(self, given: object) -> LogRows:
        """Encodes events.

        Args:
            given: a list of objects, one for each event, or an object of lists.

        Raises:
            BadRequestError: a fault, with its place.
        """
        check_count("events", given, self.max_events)
        rows = Rows("events", given, self._kinds)
        rows.require(self.required)
        if not (count := len(rows)):
            raise BadRequestError("events must not be empty")
        log, columns, place = self._log, rows.columns, rows.place
        users = names_of(columns[log.user], lambda row, _: place(row, log.user))
        records = np.zeros(count, self.layout.dtype)
        records[TIME] = self._times(columns[log.time], place)
        found: dict[str, list[str | None]] = {}
        lacking = [name for name in self.layout.columns if name not in columns]
        for name, column in self.layout.columns.items():
            if name in lacking:
                continue
            values = values_of(column, columns[name], place)
            if isinstance(values, tuple):
                found[name] = _first_texts(*values, column.size)
            elif isinstance(values, list):
                found[name] = values
            else:
                records[name] = values
        for column in log.others:
            if column.name in columns:
                values_of(column, columns[column.name], place)
        for row, item in enumerate(found[log.item]):
            if item is None:
                got = shown(columns[log.item][row])
                raise BadRequestError(f"{place(row, log.item)} must be the id of an item, got {got}")
        event_ids = None
        if log.event_id in columns:
            event_ids = texts(Field(log.event_id, "category"), columns[log.event_id], place)
        records[ID] = ids_of(found[log.item], records[TIME], event_ids)
        labels, in_history = np.ones(count, np.float32), np.ones(count, bool)
        if self._meaning is not None:
            labels, in_history = self._meaning(columns, count)
        records[LABELED] = ~np.isnan(labels)
        sessions = np.zeros(count, np.uint64)
        if self._session is not None:
            sessions = hashes(texts(Field(self._session, "category"), columns[self._session], place))
        return LogRows(users, records, found, lacking, labels, in_history, sessions, place)

    def _times(self, values: Values, place: Place) -> np.ndarray:
        """`[N]` float64 seconds."""
        one, kinds = Field(self._log.time, "category"), set(map(type, values))
        if kinds <= {int, float}:
            with np.errstate(over="ignore"):
                found = np.array(values, np.float64) * SECONDS[self._log.unit]
        elif kinds == {str} and all(re.match(_DATE, value) for value in values):
            from jfi.state.meaning import times

            found = times(one.name, values, self._log.unit)
        else:
            is_date = [type(value) is str and re.match(_DATE, value) is not None for value in values]
            is_number = [type(value) in (int, float) for value in values]
            row = (is_date if is_date[0] else is_number).index(False)
            what = f"{_TIME['description']}, all of a body of one kind"
            raise BadRequestError(f"{place(row, one.name)} must be {what}, got {shown(values[row])}")
        is_old = found <= -LATEST
        ahead = found > self._clock() + self._max_future
        if (ahead | is_old).any():
            row = int((ahead | is_old).argmax())
            if is_old[row]:
                raise BadRequestError(f"{place(row, one.name)} must be a time, got {shown(values[row])}")
            limit = f"more than {self._max_future:g} s ahead of the server's clock"
            raise BadRequestError(f"{place(row, one.name)} is {shown(values[row])}, {limit}")
        return found


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
    found = texts(_ID, values, place)
    return [read_id(values[row], text, place(row, _ID.name), of) for row, text in enumerate(found)]
