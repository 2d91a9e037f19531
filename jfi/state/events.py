"""Checks rows of a log that are sent to the server, and makes records of them but for the numbers of their texts."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from jfi.serving.validation import (
    LATEST,
    LONGEST_ID,
    LONGEST_TEXT,
    TYPES,
    VALUE,
    BadRequestError,
    BodyType,
    Place,
    Rows,
    Values,
    flat_values,
    id_type,
    read_id,
    shown,
    sids,
    table_type,
    texts,
)
from jfi.state.dictionaries import Dictionaries
from jfi.state.layout import ID, LABELED, TIME, Column, EventLayout, hashes, ids_of
from jfi.utils.encoding import SECONDS
from jfi.utils.jagged import first_values

#: By kind of a column the type of its values in a body.
COLUMN_TYPES: dict[str, Any] = {
    "text": VALUE,
    "texts": TYPES["slots"],
    "number": TYPES["quantile"],
    "sid": TYPES["sid"],
    "session": VALUE,
    "any": VALUE,
}
_DATE = "^[0-9]{4}-[0-9]{2}-[0-9]{2}"


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
        #: By column of a row the type of its values.
        types = {one.name: COLUMN_TYPES[one.kind] for one in (*layout.columns.values(), *log.others)}
        own, self._meaning = [log.user, log.time, *layout.columns], None
        self._session = None if settings is None else settings.session
        if self._session is not None:
            own.append(self._session)
        if log.label is not None or log.history is not None:
            from jfi.state.meaning import Meaning  # only rules need pyarrow

            self._meaning = Meaning(log)
            own += self._meaning.of_history
        for name in (*own, *([log.event_id] if log.event_id else [])):
            types.setdefault(name, VALUE)
        number = Annotated[float, Meta(gt=-LATEST / SECONDS[log.unit])]
        date = Annotated[str, Meta(pattern=_DATE, description="a date and time by ISO 8601")]
        types |= {log.user: id_type(LONGEST_ID), log.item: id_type(LONGEST_TEXT), log.time: date | number}
        known = {one.name for one in (*layout.info.items, *layout.info.users)}
        #: Names of the columns that each row has; what the state has of items and users is not needed.
        self.required = [name for name in dict.fromkeys(own) if name not in known]
        #: Names of those that all rows of a body have or none.
        self.optional = [name for name in types if name not in self.required]
        rows = table_type("Row", types, self.optional, bounds=Meta(min_length=1, max_length=max_events))
        self._body = BodyType(rows, {"": types}, "events", "events")

    def json_schema(self) -> dict:
        """Returns the JSON Schema of a body of rows."""
        about = f"Rows of the log; {', '.join(self.optional) or 'no column'} may be left out, by all rows of a body."
        return self._body.json_schema("A body of POST /events", about)

    def read(self, body: bytes) -> LogRows:
        """Parses and encodes events.

        Raises:
            BadRequestError: not JSON, or a fault, with its place.
        """
        return self._read(self._body.read(body))

    def __call__(self, given: object) -> LogRows:
        """Encodes events.

        Args:
            given: a list of objects, one for each event, or an object of lists.

        Raises:
            BadRequestError: a fault, with its place.
        """
        return self._read(self._body.convert(given))

    def _read(self, given: Any) -> LogRows:
        rows = Rows("events", given)
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
                own, ends = np.array(values[0], object), np.append(0, values[1].cumsum())
                found[name] = first_values(own, ends, column.size, missing=None).ravel().tolist()
            elif isinstance(values, list):
                found[name] = values
            else:
                records[name] = values
        for column in log.others:
            if column.kind == "sid" and column.name in columns:
                values_of(column, columns[column.name], place)
        event_ids = texts(columns[log.event_id]) if log.event_id in columns else None
        records[ID] = ids_of(found[log.item], records[TIME], event_ids)
        labels, in_history = np.ones(count, np.float32), np.ones(count, bool)
        if self._meaning is not None:
            labels, in_history = self._meaning(columns, count)
        records[LABELED] = ~np.isnan(labels)
        sessions = np.zeros(count, np.uint64)
        if self._session is not None:
            sessions = hashes(texts(columns[self._session]))
        return LogRows(users, records, found, lacking, labels, in_history, sessions, place)

    def _times(self, values: Values, place: Place) -> np.ndarray:
        """`[N]` float64 seconds."""
        name, kinds = self._log.time, set(map(type, values))
        if len(kinds) > 1:
            row = [type(value) is type(values[0]) for value in values].index(False)
            kind = "date" if type(values[0]) is str else "number"
            raise BadRequestError(f"{place(row, name)} must be a {kind} as that of row 0, got {shown(values[row])}")
        if kinds == {float}:
            with np.errstate(over="ignore"):
                found = np.array(values, np.float64) * SECONDS[self._log.unit]
        else:
            from jfi.state.meaning import times

            found = times(name, values, self._log.unit)
        is_old = found <= -LATEST
        ahead = found > self._clock() + self._max_future
        if (ahead | is_old).any():
            row = int((ahead | is_old).argmax())
            if is_old[row]:
                raise BadRequestError(f"{place(row, name)} must be a time, got {shown(values[row])}")
            limit = f"more than {self._max_future:g} s ahead of the server's clock"
            raise BadRequestError(f"{place(row, name)} is {shown(values[row])}, {limit}")
        return found


def values_of(column: Column, given: Values, place: Place) -> Values | tuple[list[str], np.ndarray]:
    """The values of a column of the state: texts, numbers, or the texts of all lists and their lengths.

    Raises:
        BadRequestError: a fault, with its place.
    """
    if column.kind == "number":
        return np.asarray(given, np.float64)
    if column.kind == "sid":
        return sids(column.name, column.layout, given, place)
    if column.kind == "texts":
        flat, lengths = flat_values(given)
        return list(texts(flat)), lengths
    found = list(texts(given))
    return hashes(found) if column.kind == "session" else found


def names_of(values: Sequence[object], place: Place, of: str = "a user") -> list[str]:
    """The texts of users' ids, or of items'.

    Raises:
        BadRequestError: one is missing, of another type, or too long.
    """
    return [read_id(values[row], text, place(row, ""), of) for row, text in enumerate(texts(values))]
