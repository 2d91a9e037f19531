"""Copies a state of users: to a Parquet file, or to the encoding of another artifact."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jfi.serving.user_state.counters import is_same
from jfi.serving.user_state.dictionaries import Dictionaries, read_dictionary
from jfi.serving.user_state.layout import TIME, USER, Column, EventLayout
from jfi.serving.user_state.state import COUNTERS, put_records, read_layout, scan_records, write_layout
from jfi.serving.user_state.stores import StateError, Store
from jfi.utils.encoding import UNKNOWN, Vocabulary
from jfi.utils.files import writing_file

#: Events of a row group.
_AT_ONCE = 1 << 18


def export_events(store: Store, out: Path) -> tuple[int, int]:
    """Writes all events of a state to a Parquet file, whole or not at all.

    The columns are `user`, `time` (seconds) and those of the run's events: texts of categories, lists of them, numbers
    of the interval of a quantile, semantic IDs, hashes of buckets, raw ids of tables that grow.

    Returns:
        The number of users and that of events.
    """
    layout = read_layout(store)
    texts = {column.name: _Texts(store, layout, column) for column in layout.columns if column.values is not None}
    schema = pa.schema([(USER, pa.string()), (TIME, pa.float64()), *map(_type, _fields(layout).items())])
    users = events = 0
    with writing_file(out) as path, pq.ParquetWriter(path, schema) as writer:
        for names, records in _blocks(store, layout):
            lengths = list(map(len, records))
            joined = np.concatenate(records)
            columns = [pa.array(np.repeat(np.array(names, object), lengths), pa.string()), pa.array(joined[TIME])]
            for name, own in _fields(layout).items():
                values = [texts[one.name](joined[one.name]) if one.name in texts else joined[one.name] for one in own]
                if own[0].slot is not None:
                    rows = zip(*values, strict=True)
                    values = [[[value for value in row if value is not None] for row in rows]]
                columns.append(pa.array(values[0], schema.field(name).type))
            writer.write_table(pa.table(columns, schema))
            users, events = users + len(names), events + len(joined)
    return users, events


def migrate(store: Store, target: Store, layout: EventLayout) -> tuple[int, int]:
    """Writes the events of a state to an empty store, in the encoding of another artifact.

    A value keeps its meaning: one that both vocabularies have gets its id there, and one that the first lacked is known
    where the other has it.

    Args:
        store: of the state.
        target: to fill.
        layout: of the other artifact.

    Returns:
        The number of users and that of events.

    Raises:
        StateError: the events cannot be encoded otherwise, since the state does not have what that needs.
    """
    old = read_layout(store)
    if layout.max_history > old.max_history:
        what = f"keeps {old.max_history} events of a user, and the artifact reads {layout.max_history}"
        raise StateError(f"the state {what}; load it from the log by `jfi state load`")
    if old.past is not None and (layout.past is None or not is_same(old.past, layout.past)):
        what = "has statistics of the past that the artifact does not have, or computes otherwise"
        raise StateError(f"the state {what}; load it from the log by `jfi state load`")
    if old.past is None and layout.past is not None:
        why = "has no statistics of the past, which the artifact has; load it from the log by `jfi state load`"
        raise StateError(f"the state {why}")
    names, own = Dictionaries(), {column.name: column for column in old.columns}
    moves = [(column.name, _Move(store, old, own.get(column.name), layout, column, names)) for column in layout.columns]
    counts = [0, 0]

    def moved() -> Iterator[tuple[str, np.ndarray]]:
        for user, records in scan_records(store, old):
            found = np.zeros(len(records), layout.dtype)
            for name in ("time", "event_id"):
                found[name] = records[name]
            for name, move in moves:
                found[name] = move(records[name])
            found = found[-layout.keep :]
            counts[0] += 1
            counts[1] += len(found)
            yield user, found

    put_records(target, moved())
    target.put(names.changes().items())
    if old.past is not None:
        for prefix in COUNTERS:
            target.put(store.scan(prefix))
    write_layout(target, layout)
    return counts[0], counts[1]


def _fields(layout: EventLayout) -> dict[str, list[Column]]:
    """Returns the columns by name of the field of events; a policy's field that the model reads too has one name."""
    found: dict[str, list[Column]] = {}
    for column in layout.columns:
        if column.role is None or all(one.field.name != column.field.name for one in layout.columns if one != column):
            found.setdefault(column.field.name, []).append(column)
    return found


def _type(field: tuple[str, list[Column]]) -> tuple[str, pa.DataType]:
    name, columns = field
    if columns[0].values is not None:
        return name, pa.list_(pa.string()) if columns[0].slot is not None else pa.string()
    kind = pa.from_numpy_dtype(np.dtype(columns[0].kind))
    return name, pa.list_(kind) if columns[0].slot is not None else kind


def _blocks(store: Store, layout: EventLayout) -> Iterator[tuple[list[str], list[np.ndarray]]]:
    names, records, count = [], [], 0
    for user, own in scan_records(store, layout):
        names.append(user)
        records.append(own)
        count += len(own)
        if count >= _AT_ONCE:
            yield names, records
            names, records, count = [], [], 0
    if names:
        yield names, records


class _Texts:
    """The texts of a column's ids.

    Args:
        store: of the state.
        layout: of its records.
        column: to decode.
    """

    def __init__(self, store: Store, layout: EventLayout, column: Column) -> None:
        self._store, self._column = store, column
        self._known = layout.schema.vocabularies.get(column.values, [])
        self._read()

    def _read(self) -> None:
        lacking = read_dictionary(self._store, self._column.values)
        #: From the last of those that the vocabulary lacks to the last that it has, and where None is between them.
        self.values, self.zero = np.array([*reversed(lacking), None, *self._known], object), len(lacking)

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """Returns the texts `[N]`, None for a missing value."""
        if ids.min(initial=0) < -self.zero:  # of events that came meanwhile
            self._read()
        return _at(self.values, ids, self.zero, self._column)


def _at(values: np.ndarray, ids: np.ndarray, zero: int, column: Column) -> np.ndarray:
    """Returns what ids [N] of a column have in `values`, where that of id 0 is at `zero`."""
    index = ids.astype(np.int64) + zero
    if index.min(initial=0) < 0 or index.max(initial=0) >= len(values):
        raise StateError(f"the state of users is damaged: an event has no known value of '{column.field.name}'")
    return values[index]


class _Move:
    """Ids of one encoding as those of another.

    Args:
        store: of the state.
        old: the layout of its records.
        one: the column there, or None.
        new: the other layout.
        other: the column there.
        names: gets the values that the other vocabulary lacks.

    Raises:
        StateError: the state lacks what the other encoding needs.
    """

    def __init__(
        self, store: Store, old: EventLayout, one: Column | None, new: EventLayout, other: Column, names: Dictionaries
    ) -> None:
        name, field = other.field.name, other.field
        if one is None or one.role != other.role:
            raise StateError(f"the events of the state have no field '{name}'; load them by `jfi state load`")
        if one.values is None or other.values is None or one.field.columns != field.columns:
            hashes = one.values is not None and field.encoding() is not None and one.field.columns == field.columns
            same = replace(field, capacity=one.field.capacity) if field.capacity and one.field.capacity else field
            if not hashes and (one.field != same or old.schema.codec != new.schema.codec):
                what = f"the field '{name}' is encoded otherwise, and the state does not have its values"
                raise StateError(f"{what}; load it from the log by `jfi state load`")
        self._ids, self._column = None, one
        if one.values is None:
            return
        texts = _Texts(store, old, one)
        known = field.encoding() or Vocabulary(
            new.schema.vocabularies.get(field.name, []) if other.role is None else []
        )
        values = [field.default if text is None else text for text in texts.values]
        self._ids, self._zero = known.ids(values), texts.zero
        if other.values is not None:
            for i in np.flatnonzero(self._ids == UNKNOWN).tolist():
                if values[i] is not None:
                    self._ids[i] = names.number(other.values, values[i])

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """Returns the ids `[N]` in the other encoding."""
        if self._ids is None:
            return ids
        if ids.min(initial=0) < -self._zero:
            raise StateError("the state is written to; stop the servers that use it, or migrate a copy")
        return _at(self._ids, ids, self._zero, self._column)
