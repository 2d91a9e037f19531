"""First stage of preparing a dataset: the tables' rows as numbers in column files, and their distinct values.

The folder of the stage has the columns in the table's order, and a file of distinct values for each column of text.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data.config import WEIGHT, DataConfig
from jfi.data.errors import DataError
from jfi.data.io.arrays import is_list
from jfi.data.io.blocks import DROP, describe_left_out, find_interactions, name_files, read_files, read_table
from jfi.data.io.paths import File
from jfi.data.io.table import SourceRows, of_other_kind
from jfi.data.labels import LabelConfig, LabelWindow
from jfi.data.prepared.stages.column_files import ColumnWriter, map_arrow, write_arrow
from jfi.data.prepared.stages.splits import named_splits
from jfi.data.schema.columns import Dictionary, flat_lists
from jfi.data.schema.rules import check_held, describe_values, only_column, parse_rule, read_labels, read_window
from jfi.data.schema.semantic_ids import SemanticIDs
from jfi.utils.jagged import blocks


@dataclass(frozen=True)
class SourceTables:
    """The tables of a config.

    Args:
        config: the resolved config.
        files: of the interactions, of all splits.
        users, items: None where their columns are in the interactions.
        sids: the semantic IDs of the items, or None.
        are_complete: whether users, items and semantic IDs must have some of the ids of the interactions.
    """

    config: DataConfig
    files: list[File]
    users: SourceRows | None = None
    items: SourceRows | None = None
    sids: SemanticIDs | None = None
    are_complete: bool = True

    @property
    def name(self) -> str:
        """Returns how messages name the interactions."""
        return name_files(self.files)

    def interactions(self) -> Iterator[tuple[int, SourceRows]]:
        """The interactions in blocks of rows, each after the number of its split with `split: files`, else 0."""
        splits = list(dict.fromkeys(file.setting for file in self.files))
        for file, table in read_files(self.files, self.config.columns(of_interactions=True), self.config):
            yield splits.index(file.setting), table

    def blocks(self) -> Iterable[SourceRows]:
        """The interactions in blocks of rows."""
        return (table for _, table in self.interactions())


def open_tables(config: DataConfig, setting: str = "data.semantic_ids") -> SourceTables:
    """Finds the files of the interactions of a config, and reads its tables of users and items.

    Args:
        config: names the tables.
        setting: what gave the path of the semantic IDs, for messages.

    Raises:
        DataError: a file cannot be read.
    """
    config = config.resolved()
    sids = None if config.semantic_ids is None else SemanticIDs.read(config.semantic_ids, config.item, setting)
    wanted = config.columns()
    users, items = (
        None if paths is None else read_table(paths, wanted, config, f"data.{of}")
        for of, paths in (("users", config.users), ("items", config.items))
    )
    return SourceTables(config, find_interactions(config), users, items, sids)


_VALUES, _WARNINGS = "values.json", "warnings.json"
#: What precedes the name of a label among the columns of what rows add to the labels of rows before them.
ADDED = "added to "


@dataclass(frozen=True)
class RawColumn:
    """A column of the interactions beyond user, item, time and label.

    Args:
        name: of the column in the table.
        kind: "category" for ids, "number" for floats.
    """

    name: str
    kind: str

    @property
    def file(self) -> str:
        """The name of its codes or numbers among the column files."""
        return f"{self.kind} {self.name}"

    @property
    def offsets(self) -> str:
        """The name of a multi-valued column's offsets, the range of each row's codes; others have none."""
        return f"offsets {self.name}"


def raw_columns(config: DataConfig) -> list[RawColumn]:
    """The columns that are read from the interactions, whether of events or, without tables, of users and items."""
    categories = [*config.names("event", "category"), *config.names("context", "category")]
    categories += [name for name in (config.surface, config.session, *config.window_columns()) if name is not None]
    numbers = [*config.names("event", "number"), *config.names("context", "number")]
    numbers += [] if config.dwell is None else [config.dwell]
    if config.users is None:
        categories += [name for name in config.names("user", "category") if name != config.user]
        numbers += config.names("user", "number")
    if config.items is None:
        categories += [name for name in config.names("item", "category") if name != config.item]
        numbers += config.names("item", "number")
        categories += [] if config.title is None else [config.title]
    made = config.statistics_columns()
    columns = [RawColumn(name, "category") for name in dict.fromkeys(categories)]
    return columns + [RawColumn(name, "number") for name in dict.fromkeys(numbers) if name not in made]


def read_warnings(folder: Path) -> list[str]:
    """Warnings of the rows that `RowReader.check` has checked, a line each."""
    return json.loads((folder / _WARNINGS).read_text())


def read_values(folder: Path, column: str) -> pa.Array:
    """The distinct values of a column file of codes."""
    number = json.loads((folder / _VALUES).read_text()).index(column)
    return map_arrow(folder / f"values-{number}.arrow")["value"]


class RowReader:
    """Writes blocks of rows as numbers into column files.

    Args:
        config: the meaning of the columns.
        folder: of the stage, empty.
        lists: the multi-valued columns; None means those whose first value is a list.
    """

    def __init__(self, config: DataConfig, folder: Path, lists: set[str] | None = None) -> None:
        self.config, self.folder, self.rows = config, folder, 0
        #: Rows without an id that are not among `rows`.
        self.left_out = 0
        self.labels, self.samples = np.zeros((len(config.trained_labels()), 2), np.int64), 0
        self.events = [0] * len(config.history_rules())
        #: The values that no row has so far, after the setting, the rule and the column that they are compared with.
        self.absent: list[tuple[str, str, str, str]] | None = None
        self._columns = raw_columns(config)
        categories = [column for column in self._columns if column.kind == "category"]
        #: By column whether it is multi-valued, as far as rows have shown it.
        self._lists = {} if lists is None else {column.name: column.name in lists for column in categories}
        types: dict[str, type] = {"user": np.int32, "item": np.int32, "time": np.float64, "label": np.float32}
        types |= dict.fromkeys(config.target_names(), np.float32)
        types |= {ADDED + name: np.float64 for name in config.label_windows()}
        types |= {"split": np.int8} if config.split in ("column", "files") else {}
        types |= {"event": np.int8} if config.history_rules() else {}
        types |= {} if config.request_id is None else {"group": np.int64}
        for column in self._columns:
            types[column.file] = np.float64 if column.kind == "number" else np.int32
            if column.kind == "category":
                types[column.offsets] = np.int64
        self._writer = ColumnWriter(folder, types)
        coded = ["user", "item", *(column.file for column in categories)]
        self._dictionaries = {name: Dictionary(lambda codes, name=name: self._put(name, codes)) for name in coded}

    def read(self, tables: Iterable[tuple[int, SourceRows]], advance: Callable[[int], None]) -> None:
        """Reads all rows.

        Args:
            tables: the interactions in blocks of rows, each after the number of its split.
            advance: called with the number of rows after each block.

        Raises:
            DataError: a fault in the files.
        """
        for split, table in tables:
            self.left_out += table.left_out
            if len(table):
                self.append(table, split)
            advance(len(table) + table.left_out)
        self._close()

    def check(self, name: str, tables: Callable[[], Iterable[SourceRows]]) -> None:
        """Checks that each label and the rule of histories hold in some rows; writes the warnings of the rows.

        Args:
            name: of the table, for messages.
            tables: gives the rows again, to show their values.
        """
        config = self.config
        for one, counts in zip(config.trained_labels(), self.labels, strict=True):
            is_window = isinstance(one.label, LabelWindow)
            setting, rule = ("label.event", one.label.event) if is_window else ("label", one.label)
            check_held(name, setting, rule, counts, tables)
        check_held(name, "samples", config.samples, (self.rows - self.samples, self.samples), tables)
        for (setting, rule), count in zip(config.history_rules(), self.events, strict=True):
            check_held(name, setting, rule, (self.rows - count, count), tables)
        warnings = describe_left_out(name, self.rows, self.left_out)
        warnings += [
            f"{setting} '{rule}': no row has the value '{value}'; {describe_values(tables(), column)}"
            for setting, rule, column, value in self.absent or []
        ]
        (self.folder / _WARNINGS).write_text(json.dumps(warnings))

    def append(self, table: SourceRows, split: int) -> None:
        """Appends rows of the split of that number, if the config gives the rows of each split."""
        config, put = self.config, self._put
        for setting in ("user", "item", "timestamp"):
            table.require(getattr(config, setting), f" (data.{setting})")
        if config.items is None:
            for column in self._columns:
                if column.name in config.names("item"):
                    table.require(column.name, " (data.items is not set)")
        if made := next((name for name in config.statistics_columns() if name in table.known), None):
            raise DataError(
                f"{table.name}: has a column '{made}', which data.statistics makes; rename it, or leave its "
                "group out, or all of them by data.statistics: []"
            )
        self._dictionaries["user"].add(table.ids(config.user, DROP))
        self._dictionaries["item"].add(table.ids(config.item, DROP))
        put("time", table.times(config.timestamp, config.timestamp_unit))
        first = config.targets()[0]
        labels = _labels_of(table, first)
        if config.samples is not None:
            is_sample = parse_rule(config.samples).holds(table) == 1
            self.samples += int(is_sample.sum())
            labels[~is_sample] = np.nan
        put("label", labels)
        targets = read_targets(table, config, labels)
        for name, column in targets.items():
            put(name, column)
        held = dict(zip(["label", *config.further_labels()], config.labels_of(labels, targets), strict=True))
        for name, window in config.label_windows().items():
            put(ADDED + name, added := read_window(table, window))
            held[name] = np.abs(np.sign(added))  # NaN stays
        self.labels += [[(column == value).sum() for value in (0, 1)] for column in held.values()]
        if config.split == "column":
            put("split", _given_splits(table, config.split_column))
        elif config.split == "files":
            put("split", np.full(len(table), split, np.int8))
        if rules := config.history_rules():
            event = np.zeros(len(table), np.int8)
            for i, (_, rule) in enumerate(rules):
                holds = np.ones(len(table), bool) if rule is None else parse_rule(rule).holds(table) == 1
                self.events[i] += int(holds.sum())
                event |= holds.astype(np.int8) << i
            put("event", event)
        if self.absent != []:
            rules = [(setting, rule, parse_rule(rule).absent_values(table)) for setting, rule in _rules(config)]
            absent = [(setting, rule, *pair) for setting, rule, pairs in rules for pair in pairs]
            self.absent = absent if self.absent is None else [one for one in self.absent if one in absent]
        if config.request_id is not None:
            put("group", self._groups(table))
        for column in self._columns:
            if column.kind == "number":
                put(column.file, table.numbers(column.name))
            else:
                self._append_categories(column, table)
        self.rows += len(table)

    def _append_categories(self, column: RawColumn, table: SourceRows) -> None:
        values, name = table.categories(column.name, self.config.separators()), column.name
        is_missing = values.null_count == len(values)
        if name not in self._lists and (is_list(values.type) or not is_missing):
            self._set_lists(column, is_list(values.type))
        has_lists = self._lists.get(name)
        if is_missing:
            self._append_missing(column, len(values), has_lists)
            return
        if is_list(values.type) != has_lists:
            raise DataError(f"{table.name}: column '{name}' {of_other_kind(not has_lists)}")
        if has_lists:
            values, offsets = flat_lists(values)
            self._writer.append_offsets(column.offsets, np.diff(offsets))
        self._dictionaries[column.file].add(values)

    def _set_lists(self, column: RawColumn, has_lists: bool) -> None:
        """Appends the rows so far, in which no value showed whether the column is multi-valued."""
        self._lists[column.name] = has_lists
        for begin, end in blocks(self.rows):
            self._append_missing(column, end - begin, has_lists)

    def _append_missing(self, column: RawColumn, count: int, has_lists: bool | None) -> None:
        if has_lists:
            self._writer.append_offsets(column.offsets, np.zeros(count, np.int64))
        elif has_lists is not None:
            self._dictionaries[column.file].add(pa.nulls(count, pa.large_string()))

    def _put(self, name: str, values: np.ndarray) -> None:
        self._writer.append(name, values)

    def _groups(self, table: SourceRows) -> np.ndarray:
        """`[N]` int64, a hash of each row's group, at least 0; a row without one has a negative number of its own."""
        encoded = table.strings(self.config.request_id).dictionary_encode()
        # 63 bits: two groups of one user share a hash about once in 10^13 users with a thousand groups each.
        hashes = [
            int.from_bytes(hashlib.blake2b(value.encode(), digest_size=8).digest(), "big") >> 1
            for value in encoded.dictionary.to_pylist()
        ]
        codes = pc.fill_null(encoded.indices, -1).to_numpy()
        alone = -1 - (self.rows + np.arange(len(table)))
        return np.where(codes < 0, alone, np.array([*hashes, 0], np.int64)[codes])

    def _close(self) -> None:
        """Writes what is left, and the distinct values."""
        for column in self._columns:
            if column.kind == "category" and column.name not in self._lists:
                self._set_lists(column, False)
        # Names of columns may hold any character, so files have numbers.
        (self.folder / _VALUES).write_text(json.dumps(list(self._dictionaries)))
        for number, dictionary in enumerate(self._dictionaries.values()):
            write_arrow(self.folder / f"values-{number}.arrow", {"value": dictionary.flush()})
        self._writer.close()


def read_targets(table: SourceRows, config: DataConfig, label: np.ndarray) -> dict[str, np.ndarray]:
    """The columns `config.target_names()`, each `[N]` float32.

    Args:
        table: the interactions.
        config: the section `data`.
        label: `[N]`, the first label. A row without one is no sample, needs no weight, and gets 1.

    Raises:
        DataError: a column is absent, a weight is not positive and finite, or a label is malformed.
    """
    found = {}
    if config.weight is not None:
        values = table.numbers(config.weight).astype(np.float32)
        is_wrong = ~(np.isfinite(values) & (values > 0))
        if (wrong := is_wrong & ~np.isnan(label)).any():
            row = int(wrong.argmax())
            shown = "empty" if np.isnan(values[row]) else f"{table.numbers(config.weight)[row]:g}"
            raise table.fault(row, f"weight '{config.weight}' is {shown}, must be positive and finite")
        found[WEIGHT] = np.where(is_wrong, np.float32(1), values)
    for name, one in config.further_labels().items():
        found[name] = _labels_of(table, one)
    return found


def _labels_of(table: SourceRows, one: LabelConfig) -> np.ndarray:
    """`[N]` float32, a label; of a window, which sorted rows are needed for, 0 for now, and NaN for no label."""
    if isinstance(one.label, LabelWindow):
        return (read_window(table, one.label) * 0).astype(np.float32)
    return read_labels(table, one.label, one.task).copy()


def _rules(config: DataConfig) -> list[tuple[str, str]]:
    """The settings that are rules, each with its rule."""
    labels = [] if config.is_implicit else [one.label for one in config.trained_labels()]
    rules = [("label.event", one.event) for one in labels if isinstance(one, LabelWindow)]
    rules += [("label", one) for one in labels if isinstance(one, str) and only_column(one) is None]
    others = [("samples", config.samples), *config.history_rules()]
    return rules + [(setting, rule) for setting, rule in others if rule is not None]


def _given_splits(table: SourceRows, name: str) -> np.ndarray:
    """`[N]` int8, the index in `splits.SPLITS` that the column `name` says."""
    column = table.ids(name)
    split = named_splits(column)
    if (split < 0).any():
        row = int((split < 0).argmax())
        raise table.fault(row, f"'{name}' is '{column[row].as_py()}', must be train, validation or test")
    return split
