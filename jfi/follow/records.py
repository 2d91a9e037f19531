"""The rows of users that a run keeps: the newest ones of each, with the columns that histories read.

A record holds them as they come, and not as ids of the run's encoding: a hash or an interval of quantiles cannot be
turned back into the value, and a value that is new today may have a row of a growing table tomorrow.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data import DataConfig, DataError, DataSchema
from jfi.data.io.arrays import TEXT, TEXTS, has_values, is_list, is_text
from jfi.data.io.blocks import DROP
from jfi.data.io.paths import find_layout
from jfi.data.io.table import SourceRows
from jfi.data.prepared.stages.encode_columns import has_lists
from jfi.data.prepared.stages.read import raw_columns
from jfi.data.prepared.summary import date_of
from jfi.data.schema.rules import only_column, parse_rule, read_labels

#: The column that tells whether a row is an event of histories.
IN_HISTORY = "jfi: in history"
#: The column that tells whether a row has a label.
LABELED = "jfi: labeled"
#: Events older than the newest `max_history` that stay, for late rows; and rows that are no events of histories, by
#: which repeated ones are known.
MARGIN, OTHERS = 64, 256
#: Seconds that a row may be ahead of the clock of this machine.
_MAX_AHEAD = 3600.0
#: What a column holds that has no type of its own, see `Records.contents`.
ANY = ""
#: Records that are joined at a time: each one alone takes some 10 kB beside its rows.
_JOINED = 1000
_RECORD = b"h"
Get = Callable[[Sequence[bytes]], list[bytes | None]]


class Records:
    """Makes records of the rows of a log, and tables of records.

    Args:
        config: the section `data` of a run, with the meaning of its columns.
        schema: of the run.
    """

    def __init__(self, config: DataConfig, schema: DataSchema) -> None:
        self._config, self._keep = config, schema.max_history + MARGIN
        made = {*config.statistics_columns(), config.title, config.request_id, config.split_column}
        #: The columns that a part must have.
        self.wanted = config.columns(of_interactions=True) - made
        labels = {only_column(one.label) for one in config.targets() if one.label is not None}
        #: Columns that are read as labels alone, of which true is 1.
        self._labels = labels - {feature.name for feature in config.features}
        apart = {*config.names("context")} - {*config.names("event")} | {config.title}
        #: The columns that histories read, each with whether it holds numbers and whether it holds lists.
        self.columns = [
            (one.name, one.kind == "number", has_lists(schema, one.name))
            for one in raw_columns(config)
            if one.name not in apart
        ]
        kinds = [pa.float64() if numeric else TEXTS if lists else TEXT for _, numeric, lists in self.columns]
        fields = [(config.item, TEXT), (config.timestamp, pa.float64()), (IN_HISTORY, pa.int8()), (LABELED, pa.int8())]
        self.schema = pa.schema([*fields, *zip([name for name, _, _ in self.columns], kinds, strict=True)])

    def read(self, table: SourceRows) -> tuple[pa.Array, pa.Table]:
        """Returns the users of rows and what records keep of these, with times in seconds.

        Raises:
            DataError: a column is missing or malformed, or a row is of the future, which would make all later rows old.
        """
        config = self._config
        users, items = (table.ids(name, DROP) for name in (config.user, config.item))
        times = table.times(config.timestamp, config.timestamp_unit)
        ahead = times > time.time() + _MAX_AHEAD
        if ahead.any():
            row = int(ahead.argmax())
            what = f"is {date_of(times[row]) or f'{times[row]} s after 1970'}, which is in the future"
            raise table.fault(row, f"'{config.timestamp}' {what}")
        in_history = np.ones(len(table), np.int8)
        if config.history is not None:
            in_history[:] = parse_rule(config.history).holds(table) == 1
        label = config.targets()[0]
        labeled = (~np.isnan(read_labels(table, label.label, label.task))).astype(np.int8)
        columns = [items, pa.array(times), pa.array(in_history), pa.array(labeled)]
        for name, numeric, lists in self.columns:
            if numeric:
                columns.append(pa.array(table.numbers(name)))
                continue
            values = table.categories(name, config.separators())
            if is_list(values.type) != lists:
                if values.null_count < len(values):
                    kinds = ("one value a row", "lists of values")
                    raise DataError(
                        f"{table.name}: column '{name}' has {kinds[not lists]}, but in training it had {kinds[lists]}"
                    )
                values = pa.nulls(len(table), TEXTS if lists else TEXT)
            columns.append(values)
        return users, pa.Table.from_arrays(columns, schema=self.schema)

    def contents(self, table: SourceRows) -> dict[str, str]:
        """Returns by column what it holds, such as "numbers": equal for types that are read to the same values.

        A column without values is left out; `ANY` is one of a text file, whose types are not known.

        Args:
            table: whose times have been read.
        """
        found, layout = {}, find_layout(table.name, self._config.delimiter)
        for name in sorted(self.wanted.intersection(table.known)):
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

    def of(self, get: Get, users: Sequence[str]) -> tuple[np.ndarray, pa.Table]:
        """Returns the rows of distinct users in the store, by time, and for each the number of its user `[N]` int64."""
        tables, counts = [self.schema.empty_table()], np.zeros(len(users), np.int64)
        for begin in range(0, len(users), _JOINED):
            found = []
            for number, value in enumerate(get([_key(user) for user in users[begin : begin + _JOINED]]), begin):
                if value is not None:
                    found.append(pa.ipc.read_record_batch(pa.py_buffer(value), self.schema))
                    counts[number] = len(found[-1])
            tables.append(pa.Table.from_batches(found, self.schema).combine_chunks())
        return np.repeat(np.arange(len(users)), counts), pa.concat_tables(tables)

    def merged(
        self, users: Sequence[str], old: tuple[np.ndarray, pa.Table], new: tuple[np.ndarray, pa.Table]
    ) -> Iterable[tuple[bytes, bytes]]:
        """Yields the records of distinct users, with their keys, of the rows before and of new ones.

        Args:
            users: distinct users.
            old, new: the number of each row's user `[N]`, and the rows.
        """
        user = np.concatenate([old[0], new[0]])
        rows = pa.concat_tables([old[1], new[1]])
        time, other = rows[self._config.timestamp].to_numpy(), rows[IN_HISTORY].to_numpy() == 0
        order = np.lexsort((_ranks(rows[self._config.item]), time, user))
        user, other = user[order], other[order]
        stays = np.zeros(len(order), bool)
        for mask, most in ((~other, self._keep), (other, OTHERS)):
            own = np.flatnonzero(mask)
            counts = np.bincount(user[own], minlength=len(users))
            from_end = np.cumsum(counts)[user[own]] - np.arange(len(own))
            stays[own[from_end <= most]] = True
        counts = np.bincount(user[stays], minlength=len(users))
        kept = rows.take(pa.array(order[stays])).combine_chunks()
        (batch,) = kept.to_batches() or [pa.RecordBatch.from_pylist([], self.schema)]
        ends = np.cumsum(counts)
        for number in np.flatnonzero(counts):
            own = batch.slice(int(ends[number] - counts[number]), int(counts[number]))
            yield _key(users[number]), own.serialize().to_pybytes()

    def match(
        self, old: tuple[np.ndarray, pa.Table], new: tuple[np.ndarray, pa.Table]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Finds the new rows whose user, item and time another row has, an old one or a new one before it.

        Of such rows the first one with a label counts, or without labels the first one. Of a user with as many events
        as are kept, an event that is as old as the oldest of these, or older, counts as repeated, too: it is not known
        whether it was there. So do rows that are no events.

        Returns:
            `[N]` bool, the new rows that do not count; and `[N]` int64, the index of the old row without a label that a
            new row with one takes the place of, or -1.
        """
        user, time = np.concatenate([old[0], new[0]]), _join(old[1], new[1], self._config.timestamp).to_numpy()
        item = _ranks(_join(old[1], new[1], self._config.item))
        labeled = _join(old[1], new[1], LABELED).to_numpy()
        order = np.lexsort((-labeled, item, time, user))  # stable: an old row comes before an equal new one
        again = np.zeros(len(order), bool)
        same = [values[order[1:]] == values[order[:-1]] for values in (user, time, item)]
        again[order[1:]] = np.all(same, axis=0)
        group = np.cumsum(~again[order]) - 1
        is_old = order < len(old[0])
        replaced = np.full(len(order), -1)
        replaced[group[is_old]] = order[is_old]  # by group
        replaced = np.where(again, -1, replaced[group[np.argsort(order)]])[len(old[0]) :]
        is_event = _join(old[1], new[1], IN_HISTORY).to_numpy() == 1
        kind = 2 * user + is_event  # a user's other rows, and their events
        known = slice(len(old[0]))
        size = 2 * int(user.max(initial=-1) + 1)
        oldest = np.full(size, np.inf)
        np.minimum.at(oldest, kind[known], time[known])
        is_full = np.bincount(kind[known], minlength=size) >= np.tile([OTHERS, self._keep], size // 2)
        oldest[~is_full] = -np.inf
        return (again | (time <= oldest[kind]))[len(old[0]) :] & (replaced < 0), replaced


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


def number_users(users: pa.Array) -> tuple[np.ndarray, list[str]]:
    """Returns for each row the number of its user `[N]` int64, and the distinct users."""
    encoded = users.cast(TEXT).dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()


def _join(old: pa.Table, new: pa.Table, name: str) -> pa.ChunkedArray:
    return pa.chunked_array([*old[name].chunks, *new[name].chunks], new.schema.field(name).type)


def _ranks(texts: pa.ChunkedArray) -> np.ndarray:
    """`[N]` int64, the place of each text among the sorted distinct ones."""
    encoded = texts.combine_chunks().dictionary_encode()
    encoded = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
    rank = np.empty(len(encoded.dictionary), np.int64)
    rank[pc.array_sort_indices(encoded.dictionary).to_numpy()] = np.arange(len(rank))
    return rank[encoded.indices.to_numpy()]


def _key(user: str) -> bytes:
    """The key of a user's record; a digest, since a text may be longer than a key."""
    return _RECORD + hashlib.blake2b(user.encode(), digest_size=16).digest()
