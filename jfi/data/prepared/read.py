"""First stage of preparing a dataset: the tables' rows as numbers in column files, and the distinct values beside them.

The folder of the stage has the columns in the table's order, and a file of distinct values for each column of text.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data.config import DataConfig
from jfi.data.errors import DataError
from jfi.data.io.blocks import fault_of_no_rows, iterate_tables, name_of
from jfi.data.io.table import Table
from jfi.data.prepared.arrange import given_splits
from jfi.data.prepared.column_files import ColumnWriter, map_arrow, write_arrow
from jfi.data.schema.codes import Codes
from jfi.data.schema.columns import is_multi_valued
from jfi.data.schema.labels import (
    AbsentValue,
    absent_values,
    check_counts,
    check_history,
    count_labels,
    read_history,
    read_labels,
)
from jfi.data.schema.targets import labels_of, read_targets, target_names

_VALUES, _WARNINGS = "values.json", "warnings.json"


@dataclass(frozen=True)
class RawColumn:
    """A column of the interactions beyond user, item, time and label.

    Args:
        name: of the column in the table.
        kind: "category" for ids, "number" for floats, "text" for titles.
    """

    name: str
    kind: str

    @property
    def file(self) -> str:
        """The name of its codes or numbers among the column files."""
        return f"{self.kind} {self.name}"

    @property
    def counts(self) -> str:
        """The name of a multi-valued column's counts; its codes are then as many as these add up to."""
        return f"counts {self.name}"


def raw_columns(config: DataConfig) -> list[RawColumn]:
    """The columns that are read from the interactions, whether of events or, without tables, of users and items."""
    places = [name for name in (config.surface, config.session) if name is not None]
    of_events = dict.fromkeys([*config.names("event", "category"), *config.names("context", "category"), *places])
    columns = [RawColumn(name, "category") for name in of_events]
    dwell = [] if config.dwell is None else [config.dwell]
    numbers = dict.fromkeys([*config.names("event", "number"), *config.names("context", "number"), *dwell])
    columns += [RawColumn(name, "number") for name in numbers]
    if config.users is None:
        columns += [RawColumn(name, "category") for name in config.names("user", "category") if name != config.user]
        columns += [RawColumn(name, "number") for name in config.names("user", "number")]
    if config.items is None:
        columns += [RawColumn(name, "category") for name in config.names("item", "category") if name != config.item]
        columns += [RawColumn(name, "number") for name in config.names("item", "number")]
        columns += [] if config.title is None else [RawColumn(config.title, "text")]
    return columns


def read_rows(config: DataConfig, folder: Path, advance: Callable[[int], None]) -> None:
    """Reads all interactions into `folder`, which must be empty.

    Args:
        config: the tables and the meaning of their columns.
        folder: of the stage.
        advance: called with the number of rows after each block.

    Raises:
        DataError: a fault in the files.
    """
    stage = None
    for setting, table in iterate_tables(config):
        if stage is None:
            stage = _Stage(config, table, folder)
        stage.append(table, setting)
        advance(len(table))
    if stage is None or not stage.rows:
        raise fault_of_no_rows(config)
    name = name_of(config)

    def tables() -> Iterator[Table]:
        return (table for _, table in iterate_tables(config))

    for one, counts in zip(config.trained_labels(), stage.labels, strict=True):
        check_counts(name, one.label, *counts, tables)
    if config.history is not None:
        check_history(name, config.history, stage.rows, stage.events, tables)
    (folder / _WARNINGS).write_text(json.dumps([one.describe(tables) for one in stage.absent or []]))
    stage.close()


def read_warnings(folder: Path) -> list[str]:
    """Warnings of the rows that `read_rows` has read, a line each."""
    return json.loads((folder / _WARNINGS).read_text())


def read_values(folder: Path, column: str) -> pa.Array:
    """The distinct values of a column file of codes."""
    number = json.loads((folder / _VALUES).read_text()).index(column)
    return map_arrow(folder / f"values-{number}.arrow")["value"]


class _Stage:
    def __init__(self, config: DataConfig, first: Table, folder: Path) -> None:
        self._config, self._folder, self.rows = config, folder, 0
        self.labels, self.events = np.zeros((len(config.trained_labels()), 2), np.int64), 0
        self.absent: list[AbsentValue] | None = None
        self._columns = raw_columns(config)
        self._lists = {
            column.name
            for column in self._columns
            if column.kind == "category" and is_multi_valued(first.categories(column.name, config.separators()))
        }
        types: dict[str, type] = {"user": np.int32, "item": np.int32, "time": np.float64, "label": np.float32}
        types |= dict.fromkeys(target_names(config), np.float32)
        if config.split in ("column", "files"):
            types["split"] = np.int8
        if config.history is not None:
            types["event"] = np.int8
        if config.group is not None:
            types["group"] = np.int64
        for column in self._columns:
            types[column.file] = np.float64 if column.kind == "number" else np.int32
            if column.name in self._lists and column.kind == "category":
                types[column.counts] = np.int32
        self._writer = ColumnWriter(folder, types)
        coded = ["user", "item", *(column.file for column in self._columns if column.kind != "number")]
        self._codes = {name: Codes() for name in coded}

    def append(self, table: Table, setting: int) -> None:
        """Appends rows of the setting of that number, which is also the number of their split with `split: files`."""
        config, put = self._config, self._writer.append
        put("user", self._codes["user"].encode(table.ids(config.user)))
        put("item", self._codes["item"].encode(table.ids(config.item)))
        put("time", table.times(config.timestamp, config.timestamp_unit))
        labels = read_labels(table, config.label, config.task)
        put("label", labels)
        targets = read_targets(table, config, labels)
        for name, column in targets.items():
            put(name, column)
        self.labels += [count_labels(column) for column in labels_of(config, labels, targets)]
        if config.split == "column":
            put("split", given_splits(table, config.split_column))
        elif config.split == "files":
            put("split", np.full(len(table), setting, np.int8))
        if config.history is not None:
            event = read_history(table, config.history)
            self.events += int(event.sum())
            put("event", event)
        if self.absent != []:
            absent = absent_values(table, config.rules())
            self.absent = absent if self.absent is None else [one for one in self.absent if one in absent]
        if config.group is not None:
            put("group", self._groups(table))
        for column in self._columns:
            if column.kind == "number":
                put(column.file, table.numbers(column.name))
            elif column.kind == "text":
                put(column.file, self._codes[column.file].encode(table.strings(column.name)))
            elif column.name in self._lists:
                codes, counts = self._codes[column.file].encode_lists(
                    table.categories(column.name, config.separators())
                )
                put(column.file, codes)
                put(column.counts, counts)
            else:
                values = table.categories(column.name, config.separators())
                if is_multi_valued(values):
                    raise DataError(f"{table.name}: column '{column.name}' has lists here, but single values before")
                put(column.file, self._codes[column.file].encode(values))
        self.rows += len(table)

    def _groups(self, table: Table) -> np.ndarray:
        """`[N]` int64, a hash of each row's group, at least 0; a row without one has a negative number of its own."""
        encoded = table.strings(self._config.group).dictionary_encode()
        # 63 bits: two groups of one user share a hash about once in 10^13 users with a thousand groups each.
        hashes = [
            int.from_bytes(hashlib.blake2b(value.encode(), digest_size=8).digest(), "big") >> 1
            for value in encoded.dictionary.to_pylist()
        ]
        codes = pc.fill_null(encoded.indices, -1).to_numpy()
        alone = -1 - (self.rows + np.arange(len(table)))
        return np.where(codes < 0, alone, np.array([*hashes, 0], np.int64)[codes])

    def close(self) -> None:
        # Names of columns may hold any character, so files have numbers.
        (self._folder / _VALUES).write_text(json.dumps(list(self._codes)))
        for number, codes in enumerate(self._codes.values()):
            write_arrow(self._folder / f"values-{number}.arrow", {"value": codes.values})
        self._writer.close()
