"""Reads tables with rows of a log, such as its parts, into rows of a state: for training and for servers alike."""

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data import DataError
from jfi.data.io.arrays import is_list
from jfi.data.io.blocks import DROP
from jfi.data.io.table import SourceRows
from jfi.data.prepared.summary import date_of
from jfi.serving.validation import LONGEST_ID
from jfi.state.events import EventReader
from jfi.state.layout import Column, Log
from jfi.state.meaning import Meaning
from jfi.state.user_rows import TOO_FAR_AHEAD, Given, LogRows, is_ahead


class TableReader:
    """Reads rows of a log.

    Args:
        wanted: the columns that a table must have, and that alone are read; None for those that sent rows must have,
            and others as far as a table has them.
    """

    def __init__(self, events: EventReader, wanted: Collection[str] | None = None) -> None:
        self._events, self._meaning, layout = events, Meaning(events.layout.log), events.layout
        #: The columns of items and users.
        self._tables = [one.name for one in (*layout.info.items, *layout.info.users)]
        encoded = {*layout.columns, *events.texts, *self._tables}
        #: The columns to read, and those that a table must have.
        self.wanted = wanted or {layout.log.user, layout.log.time, *events.raw, *encoded}
        self._required = sorted(wanted or events.required)
        self._columns = [one for one in events.columns.values() if one.name in self.wanted]
        self._encoded = [one for one in self._columns if one.name in encoded]

    def __call__(self, table: SourceRows) -> LogRows:
        """Returns the rows of a table, in its order.

        Raises:
            DataError: a column is missing or malformed, or a row is of the future, which would make later rows late.
        """
        log = self._events.layout.log
        for name in self._required:
            table.require(name)
        ids = {log.user: self._ids(table, log.user, is_key=True)}
        ids[log.item] = self._ids(table, log.item, is_key=bool(self._events.layout.info.items))
        seconds = read_times(table, log, self._events.clock)
        check_lists(table, self._columns, log.separators)
        columns = {one.name: self._values(table, one) for one in self._encoded if one.name in table.known} | ids
        place = lambda row, name: f"{table.location(row)}: '{name}'"  # noqa: E731
        rows = self._events.encode(columns, seconds, self._meaning.of_table(table), place)
        return replace(rows, given={name: columns[name] for name in self._tables if name in columns})

    def _ids(self, table: SourceRows, name: str, is_key: bool) -> list[str]:
        ids = table.ids(name, DROP)
        sizes = pc.binary_length(ids)
        if is_key and (longest := pc.max(sizes).as_py() or 0) > LONGEST_ID:
            what = f"'{name}' has {longest} bytes, and an id of a state has at most {LONGEST_ID}"
            raise table.fault(pc.index(sizes, longest).as_py(), what)
        return ids.to_pylist()

    def _values(self, table: SourceRows, column: Column) -> Given:
        """The values of a column as rows that are sent have them."""
        if column.kind == "number":
            return table.numbers(column.name)
        if column.kind == "sid":
            return table.column(column.name).cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
        values = table.categories(column.name, self._events.layout.log.separators)
        if column.kind != "texts":
            return values.to_pylist()
        if not is_list(values.type):  # a column without a value
            return [], np.zeros(len(values), np.int64)
        flat, owner = pc.list_flatten(values), pc.list_parent_indices(values).to_numpy()
        owner = owner[flat.is_valid().to_numpy(zero_copy_only=False)]
        return flat.drop_null().to_pylist(), np.bincount(owner, minlength=len(values))


def check_lists(table: SourceRows, columns: Iterable[Column], separators: Collection[str]) -> None:
    """Checks that the columns of a table hold lists where training has read lists, and else not.

    Raises:
        DataError: one does not.
    """
    for one in columns:
        if one.kind not in ("text", "texts") or one.name not in table.known:
            continue
        values = table.column(one.name)
        holds = is_list(values.type) or one.name in separators
        if holds != (one.kind == "texts") and values.null_count < len(values):
            kinds = ("one value a row", "lists of values")
            what = f"has {kinds[holds]}, but in training it had {kinds[not holds]}"
            raise DataError(f"{table.name}: column '{one.name}' {what}")


def read_times(table: SourceRows, log: Log, clock: Callable[[], float] = time.time) -> np.ndarray:
    """Returns the times `[N]` float64 of rows, in seconds.

    Raises:
        DataError: one is malformed or of the future, see `jfi.state.user_rows.MAX_AHEAD`.
    """
    seconds = table.times(log.time, log.unit)
    if (ahead := is_ahead(seconds, clock())).any():
        row = int(ahead.argmax())
        date = date_of(seconds[row]) or f"{seconds[row]} s after 1970"
        raise table.fault(row, f"'{log.time}' is {date}, {TOO_FAR_AHEAD}")
    return seconds
