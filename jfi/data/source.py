"""The columns of a config's tables, by user, by item and by event."""

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data import synthetic
from jfi.data.arrange import Rows
from jfi.data.config import DataConfig
from jfi.data.errors import DataError
from jfi.data.readers import read_table
from jfi.data.schema import Entity
from jfi.data.table import Table


@dataclass(frozen=True)
class Tables:
    """The tables that a config names; `users` and `items` are None where their columns are in `interactions`."""

    interactions: Table
    users: Table | None
    items: Table | None


def read_tables(config: DataConfig) -> Tables:
    """Reads the columns in use of the tables that a config names, or generates them.

    Raises:
        DataError: a file cannot be read.
    """
    if config.source == "synthetic":
        interactions, items = synthetic.make_tables(config.synthetic)
        return Tables(interactions, None, items)
    wanted = config.columns()
    return Tables(
        read_table(config.interactions, wanted),
        None if config.users is None else read_table(config.users, wanted),
        None if config.items is None else read_table(config.items, wanted),
    )


def column_settings(config: DataConfig) -> DataConfig:
    """The config with the meaning of the columns that the tables have: those of the synthetic ones are fixed."""
    return replace(config, **synthetic.COLUMNS) if config.source == "synthetic" else config


class Columns:
    """The raw columns of the tables in the order of `Rows`: a row for each user, each item or each event.

    Args:
        tables: the tables.
        rows: their interactions, sorted.
        config: the meaning of the columns.
    """

    def __init__(self, tables: Tables, rows: Rows, config: DataConfig) -> None:
        self._interactions, self._rows, self._separators = tables.interactions, rows, config.separators
        self._entities = {
            of: _FirstRows(tables.interactions, key, ids, index, rows)
            if table is None
            else EntityTable(table, key, ids, tables.interactions.name)
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
        if of == "event":
            return self._interactions.categories(name, self._separators).take(pa.array(self._rows.order))
        return self._entities[of].categories(name, self._separators)

    def numbers(self, name: str, of: Entity) -> np.ndarray:
        """The column as float64, NaN where it is missing."""
        if of == "event":
            return self._interactions.numbers(name)[self._rows.order]
        return self._entities[of].numbers(name)

    def strings(self, name: str, of: Entity) -> pa.Array:
        """The column of users or items as strings; null where it is missing."""
        return self._entities[of].strings(name)


class EntityTable:
    """The columns of users or of items, with one row for each, from their own table.

    Args:
        table: the table of users or of items.
        key: name of the id column.
        ids: the distinct ids, in the order of the rows to make. The table may lack some of them.
        interactions: name of the table that the ids come from, for messages.

    Raises:
        DataError: an id is in the table twice, or none is.
    """

    def __init__(self, table: Table, key: str, ids: pa.Array, interactions: str) -> None:
        self._table, self._key, self._ids = table, key, ids
        known = table.ids(key)
        first = pc.index_in(known, value_set=known).to_numpy()
        again = first != np.arange(len(first))
        if again.any():
            row = int(again.argmax())
            raise table.fault(row, f"'{key}' {known[row]} is already on line {table.line(int(first[row]))}")
        self._places = pc.index_in(ids.cast(known.type), value_set=known)
        if self._places.null_count == len(ids):
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


class _FirstRows(EntityTable):
    """The columns of users or of items, with one row for each, from the first event of each."""

    def __init__(self, interactions: Table, key: str, ids: pa.Array, index: np.ndarray, rows: Rows) -> None:
        self._table, self._key, self._ids = interactions, key, ids
        by_time = np.argsort(rows.time, kind="stable")
        first = np.unique(index[by_time], return_index=True)[1]
        self._places = pa.array(rows.order[by_time[first]])
