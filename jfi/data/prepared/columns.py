"""The sorted columns of a prepared dataset, in the form in which a schema is learnt from them and encodes them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from jfi.data.config import DataConfig
from jfi.data.features.semantic_ids import SemanticIDs
from jfi.data.io.blocks import name_of, read_table
from jfi.data.prepared.arrange import Rows
from jfi.data.prepared.column_files import read_columns
from jfi.data.prepared.crosses import cross_columns
from jfi.data.prepared.read import RawColumn, read_values
from jfi.data.prepared.sort import offsets_name
from jfi.data.prepared.source import EntityTable, check_crossed
from jfi.data.schema.coded import BLOCK, CodedColumn, blocks
from jfi.data.schema.columns import Categorical, cut, encode
from jfi.data.schema.encode import check_kind
from jfi.data.schema.schema import DataSchema, Entity, FeatureSpec
from jfi.utils.encoding import HashBuckets, Vocabulary


class SortedColumns:
    """The raw columns, a row for each user, item or event; `Columns` does the same for tables in memory.

    Columns of events are maps of files, and categorical ones are `CodedColumn`s. Those of users and items, which are
    few, are in memory.

    Args:
        values: folder of the first stage, with the distinct values.
        folder: folder of the second stage, with the sorted columns.
        rows: the sorted rows.
        config: the meaning of the columns.
        scratch: folder for the codes of crosses.
    """

    def __init__(self, values: Path, folder: Path, rows: Rows, config: DataConfig, scratch: Path) -> None:
        self._values, self._columns, self._rows, self._scratch = values, read_columns(folder), rows, scratch
        self._crosses, self._items = config.crosses(), [config.item, *config.names("item", "category")]
        self._crossed: dict[str, CodedColumn] = {}
        self._ids = {"user": (config.user, rows.user_ids), "item": (config.item, rows.item_ids)}
        self._separators = config.separators()
        self.sids = None if config.semantic_ids is None else SemanticIDs.read(config.semantic_ids, config.item)
        self._tables, self._first = {}, {}
        for of, path, index in (("user", config.users, rows.user), ("item", config.items, rows.item)):
            key, ids = self._ids[of]
            if path is None:
                self._first[of] = _first_rows(index, rows.time, len(ids))
            else:
                table = read_table(path, config.columns(), config.file_settings(), f"data.{of}s")
                self._tables[of] = EntityTable(table, key, ids, name_of(config))

    def count(self, of: Entity) -> int:
        """The number of rows."""
        return len(self._rows.user) if of == "event" else len(self._ids[of][1])

    def categories(self, name: str, of: Entity) -> pa.Array | CodedColumn:
        """The column as strings, or as lists of strings; null where it is missing."""
        if name in self._crosses:
            if name not in self._crossed:
                self._crossed[name] = self._cross(name)
            return self._crossed[name]
        if of == "event":
            return self._coded(RawColumn(name, "category"))
        if name == self._ids[of][0]:
            return self._ids[of][1]
        if of in self._tables:
            return self._tables[of].categories(name, self._separators)
        return self._coded(RawColumn(name, "category")).take(self._first[of])

    def numbers(self, name: str, of: Entity) -> np.ndarray:
        """The column as float64, NaN where it is missing."""
        if of in self._tables:
            return self._tables[of].numbers(name)
        column = self._columns[RawColumn(name, "number").file]
        return column if of == "event" else column[self._first[of]]

    def strings(self, name: str, of: Entity) -> pa.Array:
        """The column of users or items as strings; null where it is missing."""
        if of in self._tables:
            return self._tables[of].strings(name)
        return self._coded(RawColumn(name, "text")).take(self._first[of])

    def item_sids(self) -> np.ndarray:
        """See `Columns.item_sids`."""
        return self.sids.of(self._rows.item_ids)

    def count_changing(self, name: str, of: Entity, numeric: bool) -> int:
        """See `Columns.count_changing`."""
        if of in self._tables or name == self._ids[of][0]:
            return 0
        column = self._columns[RawColumn(name, "number").file] if numeric else self._coded(RawColumn(name, "category"))
        index = {"user": self._rows.user, "item": self._rows.item}[of]
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

    def _cross(self, name: str) -> CodedColumn:
        parts = []
        for part in self._crosses[name]:
            of_item = part in self._items
            column = self.categories(part, "item" if of_item else "event")
            check_crossed(part, column)
            parts.append((column, self._rows.item if of_item else None))
        return cross_columns(parts, self._scratch / f"cross-{len(self._crossed)}")

    def _coded(self, column: RawColumn) -> CodedColumn:
        values, codes = read_values(self._values, column.file), self._columns[column.file]
        return CodedColumn(
            values, codes, self._columns.get(offsets_name(column)) if column.kind == "category" else None
        )


def encode_events(
    columns: SortedColumns, spec: FeatureSpec, schema: DataSchema, new_map: Callable[[int], np.ndarray]
) -> Categorical:
    """The ids of a key of events, written a block at a time.

    Args:
        columns: the raw columns.
        spec: the key.
        schema: the encodings.
        new_map: gives integers to write to, as many as it is told: E, or all values of a multi-valued key.
    """
    name = spec.column
    default = schema.encodings.defaults.get(name)
    if name in schema.encodings.edges:
        numbers = columns.numbers(name, "event")
        out = new_map(len(numbers))
        for begin, end in blocks(len(out)):
            out[begin:end] = cut(np.array(numbers[begin:end]), schema.encodings.edges[name], default).ids
        return Categorical(out)
    column = columns.categories(name, "event")
    check_kind(schema, name, column)
    out = new_map(len(column.codes) if spec.multi_valued else len(column))
    ids = _ids_of_values(column.values, schema.encodings.ids_of(name), default).astype(out.dtype)
    for begin, end in blocks(len(out)):
        codes = column.codes[begin:end] if spec.slot is None else column.slot(spec.slot, begin, end)
        out[begin:end] = ids[codes]
    return Categorical(out, column.offsets if spec.multi_valued else None)


def _ids_of_values(values: pa.Array, known: Vocabulary | HashBuckets, default: str | None = None) -> np.ndarray:
    """`[V + 1]`, the id of each value, and last that of code -1, a missing one."""
    return np.append(encode(values, known).ids, encode(pa.nulls(1, pa.string()), known, default).ids)


def _first_rows(index: np.ndarray, time: np.ndarray, count: int) -> np.ndarray:
    """`[count]` the first row in time of each index; of equal times the first in the order of the rows."""
    first, since = np.full(count, -1, np.int64), np.full(count, np.inf)
    for begin, end in blocks(len(index), BLOCK):
        by_time = np.argsort(time[begin:end], kind="stable")
        found, place = np.unique(index[begin:end][by_time], return_index=True)
        row = begin + by_time[place]
        earlier = time[row] < since[found]
        first[found[earlier]], since[found[earlier]] = row[earlier], time[row[earlier]]
    return first
