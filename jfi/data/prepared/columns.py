"""The raw columns of a dataset, in the form in which a schema is learnt from them and encodes them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data.config import DataConfig
from jfi.data.errors import DataError
from jfi.data.features.semantic_ids import SemanticIDs
from jfi.data.io.table import Table
from jfi.data.prepared.column_files import new_map, read_columns
from jfi.data.prepared.read import RawColumn, read_values
from jfi.data.prepared.rows import Rows
from jfi.data.prepared.sort import offsets_name
from jfi.data.schema.coded import CodedColumn, blocks
from jfi.data.schema.schema import Entity
from jfi.utils.encoding import CROSSED


class Columns:
    """The raw columns, a row for each user, item or event.

    Columns of events are maps of files. Those of users and items, which are few, are in memory.

    Args:
        read: folder of the first stage, with the distinct values.
        folder: folder of the second stage, with the sorted columns.
        rows: the sorted rows; there may be items without a row.
        config: the meaning of the columns.
        scratch: folder for the codes of crosses.
        tables: the tables of users and of items, None where their columns are in the interactions.
        sids: the semantic IDs of the items, or None.
        name: of the interactions; None lets the tables and the IDs have none of the rows' ids.
        computed: further columns of numbers `[E]`, by name.

    Raises:
        DataError: a table has an id twice, or none of the rows' ids.
    """

    def __init__(
        self,
        read: Path,
        folder: Path,
        rows: Rows,
        config: DataConfig,
        scratch: Path,
        tables: dict[Entity, Table | None],
        sids: SemanticIDs | None = None,
        name: str | None = None,
        computed: dict[str, np.ndarray] | None = None,
    ) -> None:
        self._read, self._columns, self._rows, self._scratch = read, read_columns(folder), rows, scratch
        self._config, self._tables, self.sids, self._name = config, tables, sids, name
        self._computed = computed or {}
        self._crossed: dict[str, CodedColumn] = {}
        events = rows.events
        self._keys = {"user": (config.user, rows.user_ids), "item": (config.item, rows.item_ids)}
        #: By entity the row of each user or item in its table, else its first event in time; -1 where there is none.
        self._places = {
            of: _first_rows(index, events.time, len(ids)) if tables[of] is None else _places(tables[of], key, ids, name)
            for (of, (key, ids)), index in zip(self._keys.items(), (events.user, events.item), strict=True)
        }

    def count(self, of: Entity) -> int:
        """The number of rows."""
        return len(self._rows.events) if of == "event" else len(self._keys[of][1])

    def categories(self, name: str, of: Entity) -> CodedColumn:
        """A categorical column."""
        if name in self._config.crosses():
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
            return self._coded(name).take(self._places[of])
        return CodedColumn.of(table.categories(name, self._config.separators())).take(self._places[of])

    def numbers(self, name: str, of: Entity) -> np.ndarray:
        """A column as float64, NaN where it is missing."""
        if name in self._computed:
            return self._computed[name]
        if of == "event":
            return self._columns[RawColumn(name, "number").file]
        table, places = self._tables[of], self._places[of]
        column = self._columns[RawColumn(name, "number").file] if table is None else table.numbers(name)
        return np.where(places < 0, np.nan, column[places]) if len(column) else np.full(len(places), np.nan)

    def titles(self) -> pa.Array:
        """The titles of the items, strings; null where one is missing."""
        column = self.categories(self._config.title, "item")
        if column.offsets is not None:
            raise DataError(f"data.title is '{self._config.title}', whose rows are lists; it must have one value a row")
        return column.values.take(pa.array(column.codes, mask=column.codes < 0))

    def item_sids(self) -> np.ndarray:
        """The semantic ID of each item, int64."""
        return self.sids.of(self._rows.item_ids, few=self._name is None)

    def count_changing(self, name: str, of: Entity, numeric: bool) -> int:
        """The number of users (items) whose rows have different values in a column, categorical or numeric.

        A missing value differs from none. It is 0 where the column comes from a table of users (items). Training uses
        the value of a user's first row.
        """
        if self._tables[of] is not None or name == self._keys[of][0]:
            return 0
        column = self._columns[RawColumn(name, "number").file] if numeric else self._coded(name)
        index = {"user": self._rows.events.user, "item": self._rows.events.item}[of]
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
        return CodedColumn(values, codes, self._columns.get(offsets_name(column)))

    def _cross(self, name: str) -> CodedColumn:
        """The values of several columns of events as one; missing where one of them is.

        Memory grows with the combinations that occur, and not with the events.
        """
        parts = []
        for part in self._config.crosses()[name]:
            of_item = part in (self._config.item, *self._config.names("item", "category"))
            column = self.categories(part, "item" if of_item else "event")
            if column.offsets is not None:
                raise DataError(f"data.features: a cross has '{part}', whose rows are lists; it needs single values")
            parts.append((column, self._rows.events.item if of_item else None))

        def codes_of(number: int, begin: int, end: int) -> np.ndarray:
            column, index = parts[number]
            return (column.codes[begin:end] if index is None else column.codes[index[begin:end]]).astype(np.int64)

        crossed = new_map(self._scratch / f"cross-{len(self._crossed)}.npy", np.int32, self.count("event"))
        values = parts[0][0].values
        for begin, end in blocks(len(crossed)):
            crossed[begin:end] = codes_of(0, begin, end)
        for number in range(1, len(parts)):
            other = parts[number][0].values

            def pairs(begin: int, end: int, number: int = number, count: int = len(other)) -> np.ndarray:
                left, right = crossed[begin:end], codes_of(number, begin, end)
                return np.where((left < 0) | (right < 0), -1, left * count + right)

            distinct = _distinct(pairs(*block) for block in blocks(len(crossed)))
            for begin, end in blocks(len(crossed)):
                pair = pairs(begin, end)
                crossed[begin:end] = np.where(pair < 0, -1, np.searchsorted(distinct, pair))
            values = pc.binary_join_element_wise(
                values.take(pa.array(distinct // max(1, len(other)))),
                other.take(pa.array(distinct % max(1, len(other)))),
                pa.scalar(CROSSED, pa.large_string()),
            )
        # Values that hold the separator themselves can give one text in two ways.
        merged = values.dictionary_encode()
        same = np.append(merged.indices.to_numpy(), np.int32(-1))
        for begin, end in blocks(len(crossed)):
            crossed[begin:end] = same[crossed[begin:end]]
        return CodedColumn(merged.dictionary, crossed)


def _distinct(parts: Iterator[np.ndarray]) -> np.ndarray:
    """The distinct numbers from 0 of all parts, ascending."""
    known, pending = np.empty(0, np.int64), []
    for part in parts:
        found = np.unique(part)
        pending.append(found[found >= 0])
        if sum(map(len, pending)) > len(known):
            known, pending = np.unique(np.concatenate([known, *pending])), []
    return np.unique(np.concatenate([known, *pending]))


def _places(table: Table, key: str, ids: pa.Array, interactions: str | None) -> np.ndarray:
    """`[N]` int64, the row of each id in a table of users or items, -1 for one that it lacks."""
    known = table.ids(key).cast(pa.large_string())
    first = pc.index_in(known, value_set=known).to_numpy()
    again = first != np.arange(len(first))
    if again.any():
        row = int(again.argmax())
        raise table.fault(row, f"'{key}' {known[row]} is already in {table.place(int(first[row]))}")
    places = pc.index_in(ids.cast(pa.large_string()), value_set=known)
    if interactions is not None and places.null_count == len(ids):
        raise DataError(f"{table.name}: column '{key}' has none of the ids of {interactions}")
    return pc.fill_null(places, -1).to_numpy().astype(np.int64)


def _first_rows(index: np.ndarray, time: np.ndarray, count: int) -> np.ndarray:
    """`[count]` int64, the first row in time of each index; of equal times the first in the order of the rows."""
    first, since = np.full(count, -1, np.int64), np.full(count, np.inf)
    for begin, end in blocks(len(index)):
        np.minimum.at(since, index[begin:end], time[begin:end])
    for begin, end in reversed(list(blocks(len(index)))):
        rows = begin + np.flatnonzero(time[begin:end] == since[index[begin:end]])
        first[index[rows][::-1]] = rows[::-1]  # of several rows of an index the last one that is written stays
    return first
