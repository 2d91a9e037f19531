"""The users and the statistics of a log that is followed, in a store of the run that is never ahead of its checkpoint.

What the parts since the last checkpoint have changed is in memory. The checkpoint is written first, and the changes
then, in one transaction with their place in the log; a run that was killed between the two adds these parts again,
without training on them.
"""

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from jfi.data import DataConfig, DataError, DataSchema
from jfi.data.prepared.stages.read import open_tables
from jfi.follow.records import ANY, Records, number_users
from jfi.serving.dataset_schema import schema_of, statistics_settings
from jfi.state.counters import StateCounters
from jfi.state.layout import layout_of
from jfi.state.load import counter_records
from jfi.state.stores import Changes, LmdbStore, Store
from jfi.training import ConfigError
from jfi.utils.files import writing_folder

_PLACE = b"p"


class StatePlace(msgspec.Struct, forbid_unknown_fields=True):
    """The place in the log of a store.

    Args:
        part: name of the last part whose rows are in it; "" for the run's own interactions alone.
        newest: time of the newest row, in seconds.
        types: by column what the run's own interactions hold, see `jfi.follow.records.Records.contents`.
    """

    part: str
    newest: float
    types: dict[str, str]


class Overlay:
    """A store, and over it the changes since its last commit, those of the current part apart.

    Args:
        store: is written by `commit` alone.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._changes: Changes = {}
        self._part: Changes = {}

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Returns the values of keys, None for a key that is not there."""
        found: Changes = {}
        for key in keys:
            if key in self._part:
                found[key] = self._part[key]
            elif key in self._changes:
                found[key] = self._changes[key]
        absent = [key for key in dict.fromkeys(keys) if key not in found]
        if absent:
            found |= zip(absent, self._store.get(absent), strict=True)
        return [found[key] for key in keys]

    def put(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        """Changes keys, for the current part."""
        self._part |= items

    def end_part(self) -> None:
        """Makes the changes of the current part ones that are committed."""
        self._changes |= self._part
        self._part = {}

    def drop_part(self) -> None:
        """Forgets the changes of the current part."""
        self._part = {}

    def commit(self, place: StatePlace) -> None:
        """Writes the changes of all parts that have ended, and the place, in one transaction."""
        changes = self._changes | {_PLACE: _encoded(place)}
        self._store.update(lambda get: changes)
        self._changes = {}


class LogState:
    """The records of users and the counters of a run that follows a log.

    Args:
        store: of `open_state`.
        records: of the run.
        counters: of the run, or None without `data.statistics`.
    """

    def __init__(self, store: Store, records: Records, counters: StateCounters | None) -> None:
        self._store, self.records, self.counters = store, records, counters
        self.overlay = Overlay(store)
        (found,) = store.get([_PLACE])
        try:
            self.place = msgspec.json.decode(found or b"", type=StatePlace)
        except msgspec.DecodeError as error:
            raise ConfigError(f"the state of the log is damaged: {error}; remove its folder to make it anew") from None

    def end_part(self, name: str, newest: float) -> None:
        """Ends a part, whose changes the next commit writes."""
        self.overlay.end_part()
        self.place = StatePlace(name, max(newest, self.place.newest), self.place.types)

    def commit(self) -> None:
        """Writes what the parts since the last commit have changed, which the checkpoint of the run has already."""
        self.overlay.commit(self.place)

    def close(self) -> None:
        """Releases the store."""
        self._store.close()


def open_state(folder: Path, config: DataConfig, schema: DataSchema) -> LogState:
    """Opens the state in `folder`; makes it of the run's own interactions, of all splits, if it is not there.

    Args:
        folder: of the store.
        config: the section `data` of the run.
        schema: of the run.

    Raises:
        DataError: the run's interactions are missing or malformed.
    """
    settings = config.resolved()
    records, counters = Records(settings, schema), _counters(settings, schema)
    if not folder.exists():
        with writing_folder(folder) as unfinished, closing(LmdbStore(unfinished, create=True)) as store:
            _fill(store, records, config)
            if counters is not None:
                store.put(counter_records(counters, config, schema))
    return LogState(LmdbStore(folder), records, counters)


def _counters(config: DataConfig, schema: DataSchema) -> StateCounters | None:
    if not config.statistics_groups():
        return None
    past = statistics_settings(config, schema)
    try:
        # Whatever the model reads, statistics are counted by the columns of items that events have.
        requests = replace(schema_of(config, schema, True, False), statistics=past)
        return StateCounters(past, requests, layout_of(requests, schema.max_history))
    except ValueError as error:
        raise ConfigError(f"--follow: {error}") from None


def _fill(store: Store, records: Records, config: DataConfig) -> None:
    """Writes the newest rows of each user of the run's own log, in bounded memory, and the place."""
    if config.interactions is None:
        raise DataError("the run has no file of interactions, which the state of a log begins with")
    newest, types = -np.inf, {}
    for table in open_tables(config).blocks():
        user, users, rows = *number_users((found := records.read(table))[0]), found[1]
        if not len(rows):
            continue
        for name, what in records.contents(table).items():
            types[name] = what if types.get(name, what) == what else ANY
        newest = max(newest, float(np.max(rows[config.resolved().timestamp].to_numpy())))
        store.put(records.merged(users, records.of(store.get, users), (user, rows)))
    store.put([(_PLACE, _encoded(StatePlace("", newest, types)))])


def _encoded(place: StatePlace) -> bytes:
    return msgspec.json.encode(place)
