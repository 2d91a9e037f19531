"""The columns of a config's tables, by user, by item and by event."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data.config import DataConfig, FeatureConfig
from jfi.data.errors import DataError
from jfi.data.features import synthetic, synthetic_dwell
from jfi.data.features.semantic_ids import SemanticIDs
from jfi.data.io.blocks import read_table
from jfi.data.io.table import Table, join_tables
from jfi.data.prepared.arrange import Rows
from jfi.data.schema.coded import CodedColumn
from jfi.data.schema.columns import is_multi_valued, present
from jfi.data.schema.schema import Entity
from jfi.utils.encoding import CROSSED

#: By `data.synthetic.kind` what makes the tables.
_SYNTHETIC = {"taste": synthetic, "dwell": synthetic_dwell}


@dataclass(frozen=True)
class Tables:
    """The tables that a config names.

    Args:
        interactions: with the rows for validation and test, if they have files of their own.
        users, items: None where their columns are in `interactions`.
        given_split: `[E]` int8, the index in `splits.SPLITS` of each interaction, or None without files for the splits.
        sids: the semantic IDs of the items, or None.
    """

    interactions: Table
    users: Table | None
    items: Table | None
    given_split: np.ndarray | None = None
    sids: SemanticIDs | None = None


def read_tables(config: DataConfig, more: Iterable[str] = ()) -> Tables:
    """Reads the columns in use of the tables that a config names, or generates them.

    Args:
        config: the section `data`.
        more: further columns of the interactions to read.

    Raises:
        DataError: a file cannot be read.
    """
    sids = None if config.semantic_ids is None else SemanticIDs.read(config.semantic_ids, column_settings(config).item)
    if config.source == "synthetic":
        interactions, items = _SYNTHETIC[config.synthetic.kind].make_tables(config.synthetic)
        return Tables(interactions, None, items, sids=sids)
    wanted, settings = config.columns() | {*more}, config.file_settings()
    interactions, given = read_table(config.interactions, wanted, settings), None
    if config.split == "files":
        named = {"data.validation": config.validation, "data.test": config.test}
        parts = [interactions, *(read_table(paths, wanted, settings, name) for name, paths in named.items())]
        given = np.repeat(np.arange(len(parts), dtype=np.int8), [len(part) for part in parts])
        interactions = join_tables(parts)
    return Tables(
        interactions,
        None if config.users is None else read_table(config.users, wanted, settings, "data.users"),
        None if config.items is None else read_table(config.items, wanted, settings, "data.items"),
        given,
        sids,
    )


def column_settings(config: DataConfig) -> DataConfig:
    """The config with the meaning of the columns that the tables have.

    Those of the synthetic tables are fixed. The statistics are features of the context once they are made.
    """
    if config.source == "synthetic":
        config = replace(config, **_SYNTHETIC[config.synthetic.kind].COLUMNS)
    made = [name for name in config.statistics_columns() if name not in config.names("context", "number")]
    made = [FeatureConfig(name, "context", "number") for name in made]
    return replace(config, features=[*config.features, *made]) if made else config


class RawColumns(Protocol):
    """The raw columns of users, items and events, in memory or, where there are many events, in files."""

    #: The catalogue's semantic IDs, or None.
    sids: SemanticIDs | None

    def count(self, of: Entity) -> int: ...
    def categories(self, name: str, of: Entity) -> pa.Array | CodedColumn: ...
    def numbers(self, name: str, of: Entity) -> np.ndarray: ...
    def strings(self, name: str, of: Entity) -> pa.Array: ...
    def item_sids(self) -> np.ndarray: ...
    def count_changing(self, name: str, of: Entity, numeric: bool) -> int: ...


class Columns:
    """The raw columns of the tables in the order of `Rows`: a row for each user, each item or each event.

    Args:
        tables: the tables.
        rows: their interactions, sorted.
        config: the meaning of the columns.
        few: whether the table of users or of items, or the semantic IDs, may have none of the rows' ids; each may
            always lack some.
    """

    def __init__(self, tables: Tables, rows: Rows, config: DataConfig, few: bool = False) -> None:
        self._crosses, self._items = config.crosses(), [config.item, *config.names("item", "category")]
        self._interactions, self._rows, self._separators = tables.interactions, rows, config.separators()
        self.sids, self._few = tables.sids, few
        self._entities = {
            of: _FirstRows(tables.interactions, key, ids, index, rows)
            if table is None
            else EntityTable(table, key, ids, tables.interactions.name, few)
            for of, table, key, ids, index in (
                ("user", tables.users, config.user, rows.user_ids, rows.user),
                ("item", tables.items, config.item, rows.item_ids, rows.item),
            )
        }

    def count(self, of: Entity) -> int:
        """The number of rows."""
        return {"user": len(self._rows.user_ids), "item": len(self._rows.item_ids), "event": len(self._rows.user)}[of]

    def categories(self, name: str, of: Entity) -> pa.Array:
        """The column as strings, or as lists of strings; null where it is missing."""
        if name in self._crosses:
            return self._cross(name)
        if of == "event":
            return self._interactions.categories(name, self._separators).take(pa.array(self._rows.order))
        return self._entities[of].categories(name, self._separators)

    def _cross(self, name: str) -> pa.Array:
        """The values of a cross's columns as one, for each event; null where one is missing."""
        parts = []
        for part in self._crosses[name]:
            of_item = part in self._items
            column = self.categories(part, "item" if of_item else "event")
            check_crossed(part, column)
            column = column.take(pa.array(self._rows.item)) if of_item else column
            parts.append(column.cast(pa.large_string()))
        return pc.binary_join_element_wise(*parts, pa.scalar(CROSSED, pa.large_string()))

    def numbers(self, name: str, of: Entity) -> np.ndarray:
        """The column as float64, NaN where it is missing."""
        if of == "event":
            return self._interactions.numbers(name)[self._rows.order]
        return self._entities[of].numbers(name)

    def strings(self, name: str, of: Entity) -> pa.Array:
        """The column of users or items as strings; null where it is missing."""
        return self._entities[of].strings(name)

    def item_sids(self) -> np.ndarray:
        """The semantic ID of each item, int64."""
        return self.sids.of(self._rows.item_ids, self._few)

    def count_changing(self, name: str, of: Entity, numeric: bool) -> int:
        """The number of users (items) whose rows have different values in a column, categorical or numeric.

        A missing value differs from none. It is 0 where the column comes from a table of users (items). Training uses
        the value of a user's first row.
        """
        return self._entities[of].count_changing(name, self._separators, numeric)


def check_crossed(name: str, column: pa.Array | CodedColumn) -> None:
    """Raises DataError if a column of a cross has lists."""
    if is_multi_valued(column):
        raise DataError(f"data.features: a cross has '{name}', whose rows are lists; it needs single values")


class EntityTable:
    """The columns of users or of items, with one row for each, from their own table.

    Args:
        table: the table of users or of items.
        key: name of the id column.
        ids: the distinct ids, in the order of the rows to make. The table may lack some of them.
        interactions: name of the table that the ids come from, for messages.
        few: whether the table may have none of the ids.

    Raises:
        DataError: an id is in the table twice, or none is and `few` is false.
    """

    def __init__(self, table: Table, key: str, ids: pa.Array, interactions: str, few: bool = False) -> None:
        self._table, self._key, self._ids = table, key, ids
        known = table.ids(key)
        first = pc.index_in(known, value_set=known).to_numpy()
        again = first != np.arange(len(first))
        if again.any():
            row = int(again.argmax())
            raise table.fault(row, f"'{key}' {known[row]} is already on {table.place(int(first[row]), row)}")
        if known.type != ids.type:
            # One of them is too long for 32-bit offsets.
            ids, known = ids.cast(pa.large_string()), known.cast(pa.large_string())
        self._places = pc.index_in(ids, value_set=known)
        if not few and self._places.null_count == len(ids):
            raise DataError(f"{table.name}: column '{key}' has none of the ids of {interactions}")

    def categories(self, name: str, separators: dict[str, str]) -> pa.Array:
        """The column as strings, or as lists of strings; null where it is missing."""
        return self._ids if name == self._key else self._table.categories(name, separators).take(self._places)

    def numbers(self, name: str) -> np.ndarray:
        """The column as float64, NaN where it is missing."""
        # An id that the table lacks reads the NaN that is appended to the column.
        return np.append(self._table.numbers(name), np.nan)[pc.fill_null(self._places, -1).to_numpy()]

    def strings(self, name: str) -> pa.Array:
        """The column as strings; null where it is missing."""
        return self._table.strings(name).take(self._places)

    def count_changing(self, name: str, separators: dict[str, str], numeric: bool) -> int:
        """The number of users (items) whose rows differ in a column: 0 in a table with one row for each."""
        return 0


class _FirstRows(EntityTable):
    """The columns of users or of items, with one row for each, from the first event of each."""

    def __init__(self, interactions: Table, key: str, ids: pa.Array, index: np.ndarray, rows: Rows) -> None:
        self._table, self._key, self._ids = interactions, key, ids
        self._index, self._order = index, rows.order
        by_time = np.argsort(rows.time, kind="stable")
        first = np.unique(index[by_time], return_index=True)[1]
        self._places = pa.array(rows.order[by_time[first]])

    def count_changing(self, name: str, separators: dict[str, str], numeric: bool) -> int:
        if name == self._key:
            return 0
        column = (
            pa.array(self._table.numbers(name), from_pandas=True)
            if numeric
            else self._table.categories(name, separators)
        )
        if is_multi_valued(column):
            values, offsets = present(column)
            lists = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values.cast(pa.large_string()))
            column = pc.binary_join(lists, pa.scalar(CROSSED, pa.large_string()))
            column = pc.if_else(pa.array(np.diff(offsets) > 0), column, None)
        codes = pc.fill_null(column.dictionary_encode().indices, -1).to_numpy()[self._order]
        index, codes = self._index[codes >= 0], codes[codes >= 0]
        one = np.empty(len(self._ids), codes.dtype)  # any of the values of each user (item)
        one[index] = codes
        return len(np.unique(index[codes != one[index]]))
