"""The raw columns of a dataset, in the form in which a schema is learnt from them and encodes them."""

from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data.batches.choose_events import ONLY_SURFACE, Engagement
from jfi.data.errors import DataError
from jfi.data.io.blocks import DROP
from jfi.data.io.table import SourceRows
from jfi.data.prepared.stages.column_files import SCRATCH, new_map, read_columns
from jfi.data.prepared.stages.read import RawColumn, SourceTables, read_values
from jfi.data.prepared.stages.sort import read_ids
from jfi.data.prepared.stages.splits import SPLITS, count_training
from jfi.data.schema.columns import CodedColumn, Dictionary
from jfi.data.schema.schema import Entity
from jfi.events.events import SortedEvents
from jfi.utils.encoding import CROSSED, LARGEST_NUMBER, PER_SECOND
from jfi.utils.jagged import blocks


class Columns:
    """The sorted interactions of some tables, and the raw columns, a row for each user, item or event.

    Columns of events are maps of files. Those of users and items, which are few, are in memory.

    Args:
        given: the tables.
        work: folder of the stages "read" and "rows", and of files for temporary arrays.
        events: the sorted interactions.
        item_ids: the ids of the items, of which some may have no row; None means those of the interactions.

        since: `[E]` the times by which the first event of a user or an item is found; None means those of the events.

    Raises:
        DataError: a table has an id twice, or none of the rows' ids.
    """

    def __init__(
        self,
        given: SourceTables,
        work: Path,
        events: SortedEvents,
        item_ids: pa.Array | None = None,
        since: np.ndarray | None = None,
    ) -> None:
        self.config, self.events, self.sids = given.config, events, given.sids
        self._given, self._tables = given, {"user": given.users, "item": given.items}
        self._read, self._scratch, self._columns = work / "read", work / SCRATCH, read_columns(work / "rows")
        #: Columns of the file of events that is being written, by name.
        self.written: dict[str, np.ndarray] = {}
        #: Further columns of numbers `[E]`, by name.
        self.computed: dict[str, np.ndarray] = {}
        #: Lines for the summary.
        self.notes: list[str] = []
        self._crossed: dict[str, CodedColumn] = {}
        item_ids = read_ids(work, "item") if item_ids is None else item_ids
        self._keys = {"user": (self.config.user, read_ids(work, "user")), "item": (self.config.item, item_ids)}
        self._index = {"user": events.user, "item": events.item}
        #: By entity the row of each user or item in its table, else its first event in time; -1 where there is none.
        self._positions = {
            of: _positions(self._tables[of], key, ids, given)
            if self._tables[of] is not None
            else _first_rows(self._index[of], events.time if since is None else since, len(ids))
            for of, (key, ids) in self._keys.items()
        }

    def new(self, name: str, kind: type, count: int | tuple[int, ...], column: str | None = None) -> np.ndarray:
        """An array `[count]`, or of that shape, to write to: the column of `written`, or the map of a scratch file."""
        if column in self.written:
            return self.written[column]
        return new_map(self._scratch / f"{name}.npy", kind, count)

    def temporary(self, count: int, kind: np.dtype | type) -> np.ndarray:
        """An array `[count]` to write to, the map of a file that takes space as long as the array is there."""
        if not count:
            return np.empty(0, kind)
        found = self.new("temporary", kind, count)
        (self._scratch / "temporary.npy").unlink()
        return found

    @property
    def train(self) -> np.ndarray:
        """`[E]` bool: the rows that vocabularies, quantiles and means come from."""
        return self.events.split == SPLITS.index("train")

    def count_training(self, of: Literal["user", "item"]) -> np.ndarray:
        """`[U]` or `[N]` int64, the number of each user's or item's rows in training."""
        return count_training(self._index[of], self.events.split, self.count(of))

    def count(self, of: Entity) -> int:
        """The number of rows."""
        return len(self.events) if of == "event" else len(self._keys[of][1])

    def categories(self, name: str, of: Entity) -> CodedColumn:
        """A categorical column."""
        if name in self.config.crosses():
            if name not in self._crossed:
                self._crossed[name] = self._cross(name)
            return self._crossed[name]
        if of == "event":
            return self._coded(name)
        key, ids = self._keys[of]
        if name == key:
            return CodedColumn(ids.cast(pa.large_string()), np.arange(len(ids), dtype=np.int32))
        table = self._tables[of]
        if table is None:
            return self._coded(name).take(self._positions[of])
        return CodedColumn.of(table.categories(name, self.config.separators())).take(self._positions[of])

    def numbers(self, name: str, of: Entity) -> np.ndarray:
        """A column as float64, NaN where it is missing."""
        if name in self.computed:
            return self.computed[name]
        if of == "event":
            return self._columns[RawColumn(name, "number").file]
        table, positions = self._tables[of], self._positions[of]
        column = self._columns[RawColumn(name, "number").file] if table is None else table.numbers(name)
        return np.where(positions < 0, np.nan, column[positions]) if len(column) else np.full(len(positions), np.nan)

    def item_sids(self) -> np.ndarray:
        """The semantic ID of each item, int64."""
        return self.sids.of(self._keys["item"][1], allow_no_match=not self._given.are_complete)

    def count_changing(self, name: str, of: Entity, numeric: bool) -> int:
        """The number of users (items) whose rows have different values in a column, categorical or numeric.

        A missing value differs from none. It is 0 where the column comes from a table of users (items). Training uses
        the value of a user's first row.
        """
        if self._tables[of] is not None or name == self._keys[of][0]:
            return 0
        column = self._columns[RawColumn(name, "number").file] if numeric else self._coded(name)
        index = self._index[of]
        # Of each user (item) whether a row with a value is known, the value there, and whether another row differs.
        known, changing = np.zeros((2, self.count(of)), bool)
        one: np.ndarray | None = None
        for begin, end in blocks(len(index)):
            rows = np.arange(begin, end)
            rows = rows[~np.isnan(column[rows]) if numeric else column.counts(rows) > 0]
            who, values = index[rows], column[rows] if numeric else column.numbers(rows)
            one = np.zeros(len(known), values.dtype) if one is None else one
            new = ~known[who]
            one[who[new]], known[who] = values[new], True
            changing[who[values != one[who]]] = True
        return int(changing.sum())

    def _coded(self, name: str) -> CodedColumn:
        column = RawColumn(name, "category")
        values, codes = read_values(self._read, column.file), self._columns[column.file]
        return CodedColumn(values, codes, self._columns.get(column.offsets))

    def _cross(self, name: str) -> CodedColumn:
        """The texts of several columns of events as one; missing where one of them is."""
        parts = []
        for part in self.config.crosses()[name]:
            of_item = part in (self.config.item, *self.config.names("item", "category"))
            column = self.categories(part, "item" if of_item else "event")
            if column.offsets is not None:
                raise DataError(f"data.features: a cross has '{part}', whose rows are lists; it needs single values")
            parts.append((column, self.events.item if of_item else None))
        crossed, written = self.new(f"cross-{len(self._crossed)}", np.int32, self.count("event")), 0

        def write(codes: np.ndarray) -> None:
            nonlocal written
            crossed[written : written + len(codes)] = codes
            written += len(codes)

        dictionary = Dictionary(write)
        for begin, end in blocks(self.count("event")):
            texts = []
            for column, index in parts:
                codes = column.codes[begin:end] if index is None else column.codes[index[begin:end]]
                texts.append(column.values.take(pa.array(codes, mask=codes < 0)))
            dictionary.add(pc.binary_join_element_wise(*texts, pa.scalar(CROSSED, pa.large_string())))
        return CodedColumn(dictionary.flush(), crossed)


def _positions(table: SourceRows, key: str, ids: pa.Array, given: SourceTables) -> np.ndarray:
    """`[N]` int64, the row of each id in a table of users or items, -1 for one that it lacks."""
    positions = pc.index_in(ids.cast(pa.large_string()), value_set=table.unique_ids(key, DROP).cast(pa.large_string()))
    if given.are_complete and positions.null_count == len(ids):
        raise DataError(f"{table.name}: column '{key}' has none of the ids of {given.name}")
    return pc.fill_null(positions, -1).to_numpy().astype(np.int64)


def _first_rows(index: np.ndarray, time: np.ndarray, count: int) -> np.ndarray:
    """`[count]` int64, the first row in time of each index; of equal times the first in the order of the rows."""
    first, since = np.full(count, -1, np.int64), np.full(count, np.inf)
    for begin, end in blocks(len(index)):
        np.minimum.at(since, index[begin:end], time[begin:end])
    for begin, end in reversed(list(blocks(len(index)))):
        rows = begin + np.flatnonzero(time[begin:end] == since[index[begin:end]])
        first[index[rows][::-1]] = rows[::-1]  # of several rows of an index the last one that is written stays
    return first


def read_engagement(columns: Columns) -> Engagement | None:
    """The fields of all events, in the order of the rows; None where the config names none of them.

    Raises:
        DataError: a column is missing or holds something else than numbers (dwell) or single values (the others).
    """
    config, count = columns.config, columns.count("event")
    if not config.engagement_columns():
        return None
    dwell, surface = (
        columns.new(name, kind, count, name) for name, kind in (("dwell", np.float32), ("surface", np.int32))
    )
    numbers = None if config.dwell is None else columns.numbers(config.dwell, "event")
    for begin, end in blocks(count):
        part = np.nan if numbers is None else np.asarray(numbers[begin:end]) / PER_SECOND[config.dwell_unit]
        dwell[begin:end] = np.clip(part, -LARGEST_NUMBER, LARGEST_NUMBER)
    surface[:], names = 0, [ONLY_SURFACE]
    if config.surface is not None:
        names = _fill_codes(columns, config.surface, "surface", surface)
    return Engagement(dwell, surface, names, read_sessions(columns))


def read_sessions(columns: Columns) -> np.ndarray | None:
    """`[E]` int64, equal for the events of a session; None where the config names no column of it."""
    config, count = columns.config, columns.count("event")
    if config.session is None:
        return None
    session = columns.new("session", np.int64, count, "session")
    _fill_codes(columns, config.session, "session", session)
    for begin, end in blocks(count):
        alone = begin + np.flatnonzero(session[begin:end] < 0)
        session[alone] = -1 - alone  # an event without a session is one of its own
    return session


def _fill_codes(columns: Columns, name: str, setting: str, out: np.ndarray) -> list[str]:
    """Writes the indices of a column's values, sorted, to `out [E]`, -1 where one is missing; returns the values."""
    column = columns.categories(name, "event")
    if column.offsets is not None:
        raise DataError(f"data.{setting} is '{name}', whose rows are lists; it must have one value a row")
    order = pc.array_sort_indices(column.values).to_numpy()
    rank = np.full(len(order) + 1, -1, out.dtype)  # the last is that of code -1
    rank[order] = np.arange(len(order))
    for begin, end in blocks(len(column)):
        out[begin:end] = rank[column.codes[begin:end]]
    return column.values.take(pa.array(order)).to_pylist() if setting == "surface" else []
