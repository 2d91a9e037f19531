"""Checks rows of a log that are sent to the server, and makes records of them but for the numbers of their texts."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import NoneType
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
    TableColumns,
    Values,
    flat_values,
    id_type,
    read_id,
    shown,
    sids,
    table_type,
    texts,
)
from jfi.state.layout import ID, LABELED, TIME, Column, EventLayout, hashes, ids_of
from jfi.state.user_rows import TOO_FAR_AHEAD, Given, LogRows, is_ahead
from jfi.utils.encoding import PER_SECOND, finite_numbers, text_of
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


class EventReader:
    """Checks rows of a log, which have the columns of a state.

    Args:
        max_events: most rows of a body.
        clock: gives the seconds since 1970.
    """

    def __init__(
        self,
        layout: EventLayout,
        max_events: int = 10_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.layout, self.max_events, self._log = layout, max_events, layout.log
        self.clock, log, settings = clock, layout.log, layout.info.statistics
        #: By name the columns of a row, but for the user and the time.
        self.columns = {one.name: one for one in (*layout.columns.values(), *log.others)}
        own, self._meaning = [log.user, log.time, *layout.columns], None
        #: Names of columns of ids, which records need not keep.
        self.texts = texts = [log.event_id] if log.event_id else []
        self._session = None if settings is None else settings.session
        if self._session is not None:
            own.append(self._session)
            texts.append(self._session)
        if log.label is not None or log.history is not None:
            from jfi.state.meaning import Meaning  # only rules need pyarrow

            self._meaning = Meaning(log)
            own += self._meaning.of_history
        #: Names of columns that rules and labels read.
        self.raw: list[str] = [] if self._meaning is None else self._meaning.columns
        for name in (*texts, *own):
            if name not in (log.user, log.time):
                self.columns.setdefault(name, Column(name, "text" if name in texts else "any"))
        self._missing = {text for one in log.missing_values if (text := text_of(one)) is not None}
        self._missing_numbers = finite_numbers(log.missing_values)
        types = {name: self._type(one) for name, one in self.columns.items()}
        number = Annotated[float, Meta(gt=-LATEST * PER_SECOND[log.unit])]
        date = Annotated[str, Meta(pattern=_DATE, description="a date and time by ISO 8601")]
        types |= {log.user: id_type(LONGEST_ID), log.item: id_type(LONGEST_TEXT), log.time: date | number}
        known = {one.name for one in (*layout.info.items, *layout.info.users)}
        #: Names of the columns that each row has; what the state has of items and users is not needed.
        self.required = [name for name in dict.fromkeys(own) if name not in known]
        #: Names of those that all rows of a body have or none.
        self.optional = [name for name in types if name not in self.required]
        rows = table_type("Row", types, self.optional, bounds=Meta(min_length=1, max_length=max_events))
        self._body = BodyType(rows, {"": types}, "events", "events")

    def _type(self, column: Column) -> Any:
        """The type of a column's values in a body, of lists with a separator of one text too."""
        if column.kind == "number" and self._log.missing_values:
            return COLUMN_TYPES["number"] | str
        kind = COLUMN_TYPES[column.kind]
        return kind | VALUE if column.name in self._log.separators else kind

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
        rows = TableColumns("events", given)
        if not len(rows):
            raise BadRequestError("events must not be empty")
        log, given, place = self._log, rows.columns, rows.place
        columns: dict[str, Given] = {
            log.user: names_of(given[log.user], lambda row, _: place(row, log.user), missing=self._missing)
        }
        times, seconds = self._times(given[log.time], place)
        for name, column in self.columns.items():
            if name in given:
                columns[name] = self.values(column, given[name], place)
        if None in columns[log.item] or self.layout.info.items:  # an item with columns is a key of the state
            names_of(given[log.item], lambda row, _: place(row, log.item), "an item", self._missing)
        if self._meaning is None:
            return self.encode(columns | {log.time: times}, seconds, None, place)
        rows = self.encode(columns | {log.time: times}, seconds, self._meaning(given, len(seconds), place), place)
        return replace(rows, raw={name: given[name] for name in self.raw if name in given})

    def values(self, column: Column, values: Values, place: Place) -> Given:
        """Returns the values of a column as training reads them; what a rule or a label reads stays as it is."""
        log = self._log
        if column.kind == "any":
            return values
        if column.kind == "number" and log.missing_values:
            values = [None if value in log.missing_values else value for value in values]
            if str in set(map(type, values)):
                row = [type(value) is str for value in values].index(True)
                raise BadRequestError(f"{place(row, column.name)} must be a number or null, got {shown(values[row])}")
        elif (separator := log.separators.get(column.name)) is not None:
            values = [one if type(one) in (list, NoneType) else (text_of(one) or "").split(separator) for one in values]
        found = values_of(column, values, place)
        if not log.missing_values or column.kind == "sid":
            return found
        if column.kind == "number":
            return np.where(np.isin(found, self._missing_numbers), np.nan, found)
        if column.kind != "texts":
            return [None if text in self._missing else text for text in found]
        flat, lengths = found
        there = np.array([text not in self._missing for text in flat], bool)
        owner = np.repeat(np.arange(len(lengths)), lengths)[there]
        return [text for text in flat if text not in self._missing], np.bincount(owner, minlength=len(lengths))

    def encode(
        self,
        columns: Mapping[str, Given],
        seconds: np.ndarray,
        meaning: tuple[np.ndarray, np.ndarray] | None,
        place: Place,
    ) -> LogRows:
        """Makes rows of checked values.

        Args:
            seconds: `[N]` float64, the times.
            meaning: the labels and which rows are events of histories, see `jfi.state.meaning`; None if all have one
                and are.
        """
        log, count = self._log, len(seconds)
        records, found = np.zeros(count, self.layout.dtype), {}
        records[TIME] = seconds
        for name, column in self.layout.columns.items():
            if name not in columns:  # one of an item or a user, see `jfi.state.columns.with_columns`
                continue
            values = columns[name]
            if isinstance(values, tuple):
                own, ends = np.array(values[0], object), np.append(0, values[1].cumsum())
                found[name] = first_values(own, ends, column.size, missing=None).ravel().tolist()
            elif column.kind == "session":
                records[name] = hashes(values)
            elif isinstance(values, list):
                found[name] = values
            else:
                records[name] = values
        records[ID] = ids_of(found[log.item], seconds, columns.get(log.event_id))
        labels, in_history = meaning or (np.ones(count, np.float32), np.ones(count, bool))
        records[LABELED] = ~np.isnan(labels)
        sessions = np.zeros(count, np.uint64)
        if self._session is not None:
            sessions = hashes(columns[self._session])
        return LogRows(columns[log.user], records, found, labels, in_history, sessions, place, columns)

    def _times(self, values: Values, place: Place) -> tuple[np.ndarray, np.ndarray]:
        """`[N]` numbers of the log's unit, or `[N]` datetime64; and these as `[N]` float64 seconds."""
        name, kinds = self._log.time, set(map(type, values))
        if len(kinds) > 1:
            row = [type(value) is type(values[0]) for value in values].index(False)
            kind = "date" if type(values[0]) is str else "number"
            raise BadRequestError(f"{place(row, name)} must be a {kind} as that of row 0, got {shown(values[row])}")
        if kinds == {float}:
            times = np.array(values, np.float64)
            seconds = times / PER_SECOND[self._log.unit]
            if self._missing_numbers:
                seconds[np.isin(times, self._missing_numbers)] = np.nan
        else:
            from jfi.state.meaning import times as times_of

            seconds = times_of(values, self._log, place)
            times = np.rint(seconds * 1e6).astype("datetime64[us]")  # exact until 2041
        is_none, ahead = ~(seconds > -LATEST), is_ahead(seconds, self.clock())
        if (ahead | is_none).any():
            row = int((ahead | is_none).argmax())
            if is_none[row]:
                raise BadRequestError(f"{place(row, name)} must be a time, got {shown(values[row])}")
            raise BadRequestError(f"{place(row, name)} is {shown(values[row])}, {TOO_FAR_AHEAD}")
        return times, seconds


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
    return list(texts(given))


def names_of(values: Sequence[object], place: Place, of: str = "a user", missing: Collection[str] = ()) -> list[str]:
    """The texts of users' ids, or of items'; one that is in `missing` is none.

    Raises:
        BadRequestError: one is missing, of another type, or too long.
    """
    found = [None if text in missing else text for text in texts(values)]
    return [read_id(values[row], text, place(row, ""), of) for row, text in enumerate(found)]
