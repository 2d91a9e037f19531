"""Fills a store with a log's events and with the columns of items and users, by the way of tables to train on."""

import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np

from jfi.data import DataConfig, DataError, DataSchema
from jfi.data.feature_config import FeatureConfig
from jfi.data.io.blocks import find_interactions, read_table
from jfi.data.labels import LabelWindow
from jfi.data.prepared.event_logs import read_log
from jfi.data.prepared.prepare import Stages, read_and_sort, sorted_events
from jfi.data.prepared.stages.columns import Columns
from jfi.data.prepared.stages.encode_columns import has_lists
from jfi.data.prepared.stages.read import SourceTables
from jfi.data.prepared.stages.sort import read_ids
from jfi.events.events import user_blocks
from jfi.serving.schema import Schema
from jfi.serving.validation import LONGEST_ID
from jfi.state.columns import Entity
from jfi.state.counters import StateCounters
from jfi.state.dictionaries import Dictionaries
from jfi.state.layout import (
    ID,
    LABELED,
    OTHERS,
    TIME,
    Column,
    EventLayout,
    Kind,
    Log,
    hashes,
    layout_of,
    mixed,
    other_key,
    user_key,
)
from jfi.state.state import write_layout
from jfi.state.stores import StateError, Store
from jfi.state.table_rows import read_times
from jfi.state.tables import read_semantic_ids, write_columns_of_log, write_tables
from jfi.state.user_rows import is_ahead
from jfi.utils.files import temporary_folder
from jfi.utils.jagged import first_values

#: Events that are encoded together, up to the user with the most.
_AT_ONCE = 1 << 18


def fill(
    store: Store,
    requests: Schema,
    config: DataConfig,
    schema: DataSchema,
    interactions: str | None,
    reads_labels: bool = False,
) -> tuple[int, int]:
    """Makes an empty store the state of a run's log and tables, in bounded memory but for the tables.

    Args:
        interactions: the log; None for the run's own interactions, of all splits, and "none" for no event.

    Returns:
        The number of users and that of events.

    Raises:
        DataError: a table is missing or malformed, a row is of the future, or a user's id is too long.
        StateError: see `layout_of_run`.
    """
    users, events, layout = 0, 0, layout_of_run(requests, config, schema, reads_labels)
    if interactions != "none":
        if interactions is not None:
            config = replace(config, interactions=interactions, split="time", validation=None, test=None)
        elif config.interactions is None:
            raise DataError("the run has no file of interactions")
        of_log = [of for of in ("item", "user") if of not in layout.log.tables]
        settings = _log_settings(config, requests, layout, of_log)
        users, events = _load(store, layout, settings, schema, of_log)
        if requests.statistics is not None:
            store.put(counter_records(StateCounters(requests.statistics, requests, layout), config, schema))
    write_tables(store, layout.info, config, schema)
    write_layout(store, layout)
    return users, events


def layout_of_run(requests: Schema, config: DataConfig, schema: DataSchema, reads_labels: bool = False) -> EventLayout:
    """Returns the records that a run's model needs.

    Args:
        reads_labels: whether rows with a label are told from others, which statistics do in any case.

    Raises:
        StateError: it needs labels of rows that a state does not make.
    """
    if config.is_raw_log and (requests.statistics is not None or reads_labels):
        what = "data.samples and labels with a window (within) are of tables; a state has no statistics of them"
        raise StateError(f"{what}; score tables by `jfi predict`, or train with data.statistics: [] for a server")
    log = log_of(config, schema)
    if requests.statistics is None and not reads_labels:
        log = msgspec.structs.replace(log, label=None)
    return layout_of(requests, schema.max_history, log)


def log_of(config: DataConfig, schema: DataSchema) -> Log:
    """Returns what the columns of a run's log mean."""
    settings, label, others = config.resolved(), config.targets()[0], []
    numbers = {name for of in ("user", "item", "event", "context") for name in settings.names(of, "number")}
    for name in sorted(settings.columns(of_interactions=True) - {*settings.statistics_columns()}):
        kind: Kind = "any"
        if name in numbers or name == settings.dwell:
            kind = "number"
        elif any(one.name == name for one in settings.features):
            kind = "texts" if has_lists(schema, name) else "text"
        others.append(Column(name, kind, settings.max_slots if kind == "texts" else 1))
    own = settings.user, settings.item, settings.timestamp, settings.timestamp_unit
    texts = settings.missing_values, settings.separators(), settings.null_ids
    rule = None if isinstance(label.label, LabelWindow) else label.label  # no state reads a window
    tables = [of for of, table in (("item", settings.items), ("user", settings.users)) if table is not None]
    return Log(*own, rule, label.task, settings.history, settings.event_id, others, *texts, tables)


def counter_records(counters: StateCounters, config: DataConfig, schema: DataSchema) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and the records of the statistics of a log.

    Args:
        config: the section `data` of a run with `data.statistics`, whose interactions are the log.

    Raises:
        DataError: the log is missing or malformed.
    """
    settings = counters.settings
    with read_log(config, schema) as (made, log):
        session = None if settings.session is None else Column(settings.session, "session")
        sessions = None if session is None else _Values(session, log, Dictionaries()).at
        of = {"user": settings.user, "item": settings.item}
        ids = {part: log.categories(name, part).values.to_pylist() for part, name in of.items()}
        digests = {part: hashes(own) for part, own in ids.items()}
        for name, column in settings.columns.items():
            digests[f"column {name}"] = counters.digests(name, np.arange(column.size))
        yield from counters.live.records_of(made.index, digests, counters.orders(ids["item"]), sessions)


def _log_settings(config: DataConfig, requests: Schema, layout: EventLayout, of_log: Collection[Entity]) -> DataConfig:
    """The section `data` of a run, with what a log needs: neither splits nor columns of tables."""
    config = config.resolved()
    own = {one.name for one in requests.event_fields if one.kind != "cross"}
    has_policy = requests.policy is not None
    read = {"event": own, "item": own, "user": set()}
    for of, columns in (("item", layout.info.items), ("user", layout.info.users)):
        read[of] = read[of] | ({one.name for one in columns} if of in of_log else set())
    features = [one for one in config.features if one.name in read.get(one.of, ())]
    if config.event_id is not None:
        features.append(FeatureConfig(config.event_id, "event"))
    return replace(
        config,
        features=features,
        users=None,
        samples=None,
        label=layout.log.label,
        labels=[],
        weight=None,
        request_id=None,
        title=None,
        statistics=[],
        policy=None,
        dwell=config.dwell if has_policy else None,
        surface=config.surface if has_policy else None,
        session=config.session if has_policy else None,
    )


def _load(
    store: Store, layout: EventLayout, config: DataConfig, schema: DataSchema, of_log: Collection[Entity]
) -> tuple[int, int]:
    """Writes the newest rows of each user of a log, and the columns of items and users that have no table."""
    has_columns = any(one.of == "item" and one.name != config.item for one in config.features)
    items = None
    if config.items is not None and has_columns:
        items = read_table(config.items, config.columns(), config, "data.items")
    config = config if items is not None else replace(config, items=None)
    sids = read_semantic_ids(config, schema)
    given = SourceTables(config, find_interactions(config), None, items, sids, are_complete=False)
    counts = [0, 0]
    with temporary_folder("jfi-state-") as folder:
        read_and_sort(given, Stages(folder, durable=False), check=False)
        columns = Columns(given, folder, sorted_events(config, folder))
        events, users = columns.events, read_ids(folder, "user").to_pylist()
        if is_ahead(np.max(events.time, initial=-np.inf), time.time()):
            for table in given.blocks():
                read_times(table, layout.log)  # names the row
        if (longest := next((one for one in users if len(one.encode()) > LONGEST_ID), None)) is not None:
            raise DataError(f"user {longest[:40]}... has an id of more than {LONGEST_ID} bytes")
        names, items = Dictionaries(), hashes(read_ids(folder, "item").to_pylist())
        given_ids = None if config.event_id is None else columns.categories(config.event_id, "event")
        hashed = None if given_ids is None else hashes([*given_ids.values.to_pylist(), None])
        values = [_Values(column, columns, names) for column in layout.columns.values()]

        def records(rows: np.ndarray, kind: np.dtype) -> np.ndarray:
            found = np.zeros(len(rows), kind)
            found[TIME], found[LABELED] = events.time[rows], ~np.isnan(events.label[rows])
            found[ID] = mixed(items[events.item[rows]], found[TIME])
            if given_ids is not None:
                own = hashed[given_ids.codes[rows]]  # the code of a missing one is -1
                found[ID] = np.where(own != 0, own, found[ID])
            for column in values if kind == layout.dtype else ():
                found[column.name] = column.at(rows)
            return found

        def written() -> Iterator[tuple[bytes, bytes]]:
            for begin, end in user_blocks(events.first, _AT_ONCE):
                is_event = np.ones(end - begin, bool)
                if events.rows is not None:
                    own = slice(*np.searchsorted(events.rows, [begin, end]))
                    is_event[:] = False
                    is_event[events.rows[own] - begin] = True
                for kind, key, most in ((True, user_key, layout.keep), (False, other_key, OTHERS)):
                    rows = _newest(events.user, begin + np.flatnonzero(is_event == kind), most)
                    found = records(rows, layout.dtype if kind else layout.others)
                    ends = np.append(np.flatnonzero(np.diff(events.user[rows], prepend=-1)), len(rows))
                    counts[0] += (len(ends) - 1) * kind
                    counts[1] += len(rows) * kind
                    for one, other in pairwise(ends.tolist()):
                        yield key(users[events.user[rows[one]]]), found[one:other].tobytes()

        store.put(written())
        store.put(names.changes().items())
        write_columns_of_log(store, layout.info, columns, sids, of_log)
    return counts[0], counts[1]


def _newest(user: np.ndarray, rows: np.ndarray, most: int) -> np.ndarray:
    """Returns of each user the last `most` of `rows`, which are sorted by user."""
    own = user[rows]
    last = np.searchsorted(own, own, "right")
    return rows[last - np.arange(len(rows)) <= most]


class _Values:
    """The values of a column of records, for any events of a log."""

    def __init__(self, column: Column, columns: Columns, names: Dictionaries) -> None:
        self.name, self._column, config = column.name, column, columns.config
        of: Entity = "event"
        if column.kind == "sid" or column.name in (config.item, *config.names("item")):
            of = "item"
        elif column.name in config.names("user"):
            of = "user"
        self._index = {"event": None, "item": columns.events.item, "user": columns.events.user}[of]
        if column.kind == "sid":
            self._values = columns.item_sids()
            return
        if column.kind == "number":
            self._values = columns.numbers(column.name, of)
            return
        self._coded = columns.categories(column.name, of)
        texts = [*self._coded.values.to_pylist(), None]  # the code of a missing value is -1
        self._numbers = hashes(texts) if column.kind == "session" else names.numbers(column.name, texts)

    def at(self, rows: np.ndarray) -> np.ndarray:
        """Returns the values of events `[N]`, of lists `[N, size]`."""
        column, index = self._column, rows if self._index is None else self._index[rows].astype(np.int64)
        if column.kind in ("sid", "number"):
            return self._values[index]
        part = self._coded.take(index)
        codes = first_values(part.codes, part.offsets, column.size, missing=-1)
        return self._numbers[codes if column.kind == "texts" else codes[:, 0]]
