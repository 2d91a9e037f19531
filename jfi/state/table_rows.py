"""Reads tables with rows of a log, as training reads them, into rows of a state."""

import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data import DataConfig, DataError, DataSchema
from jfi.data.io.arrays import has_values, is_list, is_text
from jfi.data.io.blocks import DROP
from jfi.data.io.paths import find_layout
from jfi.data.io.table import SourceRows
from jfi.data.prepared.stages.encode_columns import has_lists
from jfi.data.prepared.summary import date_of
from jfi.data.schema.columns import CodedColumn
from jfi.data.schema.rules import only_column, parse_rule, read_labels
from jfi.state.layout import ID, LABELED, TIME, Column, EventLayout, Log, hashes, ids_of
from jfi.state.user_rows import TOO_FAR_AHEAD, LogRows, is_ahead
from jfi.utils.jagged import first_values

#: What a column holds that has no type of its own, see `TableReader.contents`.
ANY = ""


class TableReader:
    """Reads rows of a run's log.

    Args:
        config: the section `data` of the run.
        schema: of the run.
        layout: of the records.
    """

    def __init__(self, config: DataConfig, schema: DataSchema, layout: EventLayout) -> None:
        self._config = config = config.resolved()
        self._layout = layout
        made = {*config.statistics_columns(), config.title, config.request_id, config.split_column}
        #: The columns that a table must have.
        self.wanted = (config.columns(of_interactions=True) | {layout.log.event_id}) - made - {None}
        labels = {only_column(one.label) for one in config.targets() if one.label is not None}
        #: Columns that are read as labels alone, of which true is 1.
        self._labels = labels - {feature.name for feature in config.features}
        self._lists = {name: has_lists(schema, name) for of in ("user", "item", "event") for name in config.names(of)}

    def __call__(self, table: SourceRows) -> LogRows:
        """Returns the rows of a table.

        Raises:
            DataError: a column is missing or malformed, or a row is of the future, which would make all later rows old.
        """
        config, log, count = self._config, self._layout.log, len(table)
        for name in sorted(self.wanted):
            table.require(name)
        users, items = (table.ids(name, DROP) for name in (config.user, config.item))
        records = np.zeros(count, self._layout.dtype)
        records[TIME] = read_times(table, log)
        in_history, labels = np.ones(count, bool), np.ones(count, np.float32)
        if config.history is not None:
            in_history = parse_rule(config.history).holds(table) == 1
        if log.label is not None:
            labels = read_labels(table, log.label, log.task)
        records[LABELED] = ~np.isnan(labels)
        event_ids = None if log.event_id is None else table.strings(log.event_id).to_pylist()
        records[ID] = ids_of(items.to_pylist(), records[TIME], event_ids)
        self._check_lists(table)
        texts: dict[str, list[str | None]] = {}
        lacking = [name for name in self._layout.columns if name not in self.wanted]
        for name, column in self._layout.columns.items():
            if name in lacking:
                continue
            if column.kind == "number":
                records[name] = table.numbers(name)
            else:
                own = self._texts(table, column)
                if column.kind == "session":
                    records[name] = hashes(own)
                else:
                    texts[name] = own
        settings, sessions = self._layout.info.statistics, np.zeros(count, np.uint64)
        if settings is not None and settings.session is not None:
            sessions = hashes(table.strings(settings.session).to_pylist())
        place = lambda row, name: f"{table.location(row)}: '{name}'"  # noqa: E731
        return LogRows(users.to_pylist(), records, texts, lacking, labels, in_history, sessions, place)

    def _texts(self, table: SourceRows, column: Column) -> list[str | None]:
        """The texts `[N]` of a column, of lists the first ones `[N * size]`."""
        coded = CodedColumn.of(table.categories(column.name, self._config.separators()))
        values = np.array([*coded.values.to_pylist(), None], object)  # the code of a missing value is -1
        codes = first_values(coded.codes, coded.offsets, column.size, missing=-1)
        return values[codes.ravel()].tolist()

    def _check_lists(self, table: SourceRows) -> None:
        """Checks that columns hold lists where they did in training, and else not."""
        for name in sorted({*self._lists} & {*table.known} & self.wanted):
            values = table.column(name)
            holds = is_list(values.type) or name in self._config.separators()
            if holds != self._lists[name] and values.null_count < len(values):
                kinds = ("one value a row", "lists of values")
                what = f"has {kinds[holds]}, but in training it had {kinds[not holds]}"
                raise DataError(f"{table.name}: column '{name}' {what}")

    def contents(self, table: SourceRows) -> dict[str, str]:
        """Returns by column what it holds, such as "numbers": equal for types that are read to the same values.

        A column without values is left out; `ANY` is one of a text file, whose types are not known.

        Args:
            table: whose times have been read.
        """
        found, layout = {}, find_layout(table.name, self._config.delimiter)
        for name in sorted(self.wanted.intersection(table.data.column_names)):
            column = table.column(name)
            if name == self._config.timestamp:
                kind = table.reading.time_kinds.get(name)
                if kind is not None:
                    found[name] = _content(kind)
            elif has_values(pc.list_flatten(column) if is_list(column.type) else column):
                is_untyped = layout is not None and layout.format == "text" and is_text(column.type)
                is_number = name in self._labels and pa.types.is_boolean(column.type)
                found[name] = ANY if is_untyped else _content(pa.int8() if is_number else column.type)
        return found


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


def _content(kind: pa.DataType) -> str:
    if is_list(kind):
        return f"lists of {_content(kind.value_type)}"
    if pa.types.is_dictionary(kind):
        return _content(kind.value_type)
    if is_text(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):  # binary is read as UTF-8
        return "texts"
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "numbers"
    if pa.types.is_timestamp(kind):
        return "times without a time zone" if kind.tz is None else f"times in {kind.tz}"
    return str(kind)
