"""The users and the statistics of a log that is followed, in a store of the run that is never ahead of its checkpoint.

What the parts since the last checkpoint have changed is in memory. The checkpoint is written first, and the changes
then, in one transaction with their place in the log; a run that was killed between the two adds these parts again,
without training on them.
"""

from collections import ChainMap
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jfi.data import DataConfig, DataSchema
from jfi.data.io.arrays import has_values, is_list, is_text
from jfi.data.io.paths import find_layout
from jfi.data.io.table import SourceRows
from jfi.data.prepared.stages.read import open_tables
from jfi.data.schema.rules import only_column
from jfi.events.live_index import changed
from jfi.serving.dataset_schema import schema_of, statistics_settings
from jfi.serving.schema import Schema
from jfi.state.columns import layouts_of
from jfi.state.counters import StateCounters
from jfi.state.deletions import Deletion, keys_of_users
from jfi.state.dictionaries import Cache
from jfi.state.events import EventReader
from jfi.state.load import fill, layout_of_run
from jfi.state.state import read_layout
from jfi.state.stores import Changes, LmdbStore, StateError, Store
from jfi.state.table_rows import TableReader, read_times
from jfi.training import ConfigError
from jfi.utils.files import writing_folder

_PLACE = b"f"
#: What a column holds that has no type of its own, see `contents`.
ANY = ""


class StatePlace(msgspec.Struct, forbid_unknown_fields=True):
    """The place in the log of a store.

    Args:
        part: name of the last part whose rows are in it; "" for the run's own interactions alone.
        newest: time of the newest row, in seconds.
        types: by column what the run's own interactions hold, see `contents`.
        deletions: how many lines of the list of deleted users have been applied, see `jfi.state.deletions`.
    """

    part: str
    newest: float
    types: dict[str, str]
    deletions: int = 0


class LogState:
    """The state of a run that follows a log: a store, which `commit` alone writes, and what has changed since."""

    def __init__(self, store: Store, config: DataConfig, schema: DataSchema) -> None:
        self._store = store
        #: The changes of the current part, and those of the parts before it.
        self._changes = ChainMap[bytes, bytes | None]({}, {})
        #: Reads keys as they are after the changes.
        self.get = changed(store.get, self._changes)
        (found,) = store.get([_PLACE])
        try:
            self.place = msgspec.json.decode(found or b"", type=StatePlace)
            self.layout = read_layout(store)
        except (msgspec.DecodeError, StateError) as error:
            raise ConfigError(f"the state of the log is damaged: {error}; remove its folder to make it anew") from None
        self._deletions = self.place.deletions
        #: By entity the records of its columns.
        self.tables = layouts_of(self.layout.info)
        #: Numbers and texts that were read.
        self.cache = Cache()
        made = {*config.statistics_columns(), config.title, config.request_id, config.split_column}
        wanted = (config.columns(of_interactions=True) | {config.event_id}) - made - {None}
        self.reader, requests = TableReader(EventReader(self.layout), wanted), requests_of(config, schema)
        #: The statistics of the log, or None without `data.statistics`.
        self.counters = None
        if requests.statistics is not None:
            self.counters = StateCounters(requests.statistics, requests, self.layout)

    def pages(self, prefixes: Sequence[bytes]) -> Iterator[list[tuple[bytes, bytes]]]:
        """See Store; of keys that have been changed both values, and of removed ones the one in the store."""
        yield from self._store.pages(prefixes)
        changes = self._changes.items()
        yield [(key, value) for key, value in changes if value is not None and key.startswith(tuple(prefixes))]

    def update(self, changes: Changes) -> None:
        """Changes keys, for the current part."""
        self._changes.update(changes)

    def forget(self, deletions: Sequence[Deletion]) -> None:
        """Removes, for the current part, what the state has of users who were deleted since the part before."""
        if users := {bytes.fromhex(one.user) for one in deletions[self.place.deletions :]}:
            self.update(dict.fromkeys(keys_of_users(self.pages, users, self.counters)))
        self._deletions = max(len(deletions), self.place.deletions)

    def end_part(self, name: str, newest: float) -> None:
        """Ends a part, whose changes the next commit writes."""
        part, others = self._changes.maps
        others.update(part)
        self._changes.maps[0] = {}
        self.cache.trim()
        self.place = StatePlace(name, max(newest, self.place.newest), self.place.types, self._deletions)

    def drop_part(self) -> None:
        """Forgets what the current part has changed."""
        self._changes.maps[0], self.cache = {}, Cache()

    def commit(self) -> None:
        """Writes what the parts since the last commit have changed, which the checkpoint of the run has already."""
        changes = self._changes.maps[1] | {_PLACE: msgspec.json.encode(self.place)}
        self._store.update(lambda get: changes)
        self._changes.maps[1] = {}

    def close(self) -> None:
        """Releases the store."""
        self._store.close()


def open_state(folder: Path, config: DataConfig, schema: DataSchema) -> LogState:
    """Opens the state in `folder`; makes it of the run's own interactions, of all splits, if it is not there.

    Raises:
        DataError: the run's interactions are missing or malformed.
    """
    settings = config.resolved()
    if not folder.exists():
        requests = requests_of(settings, schema)
        try:
            layout = layout_of_run(requests, config, schema, reads_labels=True)
            with writing_folder(folder) as unfinished, closing(LmdbStore(unfinished, create=True)) as store:
                newest, types = -np.inf, {}
                for table in open_tables(config).blocks():
                    newest = max(newest, float(np.max(read_times(table, layout.log), initial=-np.inf)))
                    for name, what in contents(table, settings).items():
                        types[name] = what if types.get(name, what) == what else ANY
                fill(store, requests, config, schema, None, reads_labels=True)
                store.put([(_PLACE, msgspec.json.encode(StatePlace("", newest, types)))])
        except StateError as error:
            raise ConfigError(f"--follow: {error}") from None
    return LogState(LmdbStore(folder), settings, schema)


def contents(table: SourceRows, config: DataConfig) -> dict[str, str]:
    """Returns by column what it holds, such as "numbers": equal for types that are read to the same values.

    A column without values is left out; `ANY` is one of a text file, whose types are not known.

    Args:
        table: whose times have been read.
    """
    found, layout = {}, find_layout(table.name, config.delimiter)
    labels = {only_column(one.label) for one in config.targets() if one.label is not None}
    labels -= {feature.name for feature in config.features}  # true is 1 in a column that is read as a label alone
    for name in sorted({*table.known}.intersection(table.data.column_names)):
        column = table.column(name)
        if name == config.timestamp:
            kind = table.reading.time_kinds.get(name)
            if kind is not None:
                found[name] = _content(kind)
        elif has_values(pc.list_flatten(column) if is_list(column.type) else column):
            is_untyped = layout is not None and layout.format == "text" and is_text(column.type)
            is_number = name in labels and pa.types.is_boolean(column.type)
            found[name] = ANY if is_untyped else _content(pa.int8() if is_number else column.type)
    return found


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


def requests_of(config: DataConfig, schema: DataSchema) -> Schema:
    """Returns what a model of a run may read: all columns of events, by which statistics are counted."""
    past = statistics_settings(config, schema) if config.statistics_groups() else None
    return replace(schema_of(config, schema, True, False), statistics=past)
