"""Writes the events of a state to a Parquet file."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jfi.state.dictionaries import read_dictionary
from jfi.state.layout import TIME, Column, EventLayout, user_key
from jfi.state.state import read_layout
from jfi.state.stores import StateError, Store, finding_damage
from jfi.utils.encoding import PER_SECOND
from jfi.utils.files import writing_file

#: Events of a row group.
_AT_ONCE = 1 << 18
_TYPES = {
    "text": pa.string(),
    "texts": pa.list_(pa.string()),
    "number": pa.float64(),
    "sid": pa.int64(),
    "session": pa.uint64(),
}


def export_events(store: Store, out: Path) -> tuple[int, int]:
    """Writes all events of a state to a Parquet file, whole or not at all.

    The columns are the user, the time in the log's unit and what records keep of the log's columns: texts, lists of
    them, numbers, semantic IDs, and hashes of a policy's sessions.

    Returns:
        The number of users and that of events.
    """
    layout, texts = read_layout(store), {}
    log = layout.log
    schema = pa.schema(
        [
            (log.user, pa.string()),
            (log.time, pa.float64()),
            *((one.name, _TYPES[one.kind]) for one in layout.columns.values()),
        ]
    )
    for one in layout.columns.values():
        if one.kind in ("text", "texts"):
            texts[one.name] = _Texts(store, one)
    users = events = 0
    with writing_file(out) as path, pq.ParquetWriter(path, schema) as writer:
        for names, records in _blocks(store, layout):
            lengths, joined = list(map(len, records)), np.concatenate(records)
            columns = [
                pa.array(np.repeat(np.array(names, object), lengths), pa.string()),
                pa.array(joined[TIME] * PER_SECOND[log.unit]),
            ]
            for name, one in layout.columns.items():
                values = texts[name](joined[name]) if name in texts else joined[name]
                if one.kind == "texts":
                    values = [[value for value in row if value is not None] for row in values.tolist()]
                columns.append(pa.array(values, _TYPES[one.kind], from_pandas=one.kind == "number"))
            writer.write_table(pa.table(columns, schema))
            users, events = users + len(names), events + len(joined)
    return users, events


def _blocks(store: Store, layout: EventLayout) -> Iterator[tuple[list[str], list[np.ndarray]]]:
    names, records, count = [], [], 0
    for user, own in _scan(store, layout):
        names.append(user)
        records.append(own)
        count += len(own)
        if count >= _AT_ONCE:
            yield names, records
            names, records, count = [], [], 0
    if names:
        yield names, records


def _scan(store: Store, layout: EventLayout) -> Iterator[tuple[str, np.ndarray]]:
    """Yields all users and their records."""
    for key, value in store.scan(user_key("")):
        with finding_damage("the id of a user"):
            user = key[1:].decode()
        yield user, layout.records(value, user)


class _Texts:
    """The texts of a column's numbers.

    Args:
        store: of the state.
        column: of texts or lists of them.
    """

    def __init__(self, store: Store, column: Column) -> None:
        self._store, self._column = store, column
        self._read()

    def _read(self) -> None:
        self._values = np.array([None, *read_dictionary(self._store, self._column.name)], object)

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the texts of numbers of any shape, None for a missing value."""
        if numbers.max(initial=0) >= len(self._values):  # of events that came meanwhile
            self._read()
        if numbers.min(initial=0) < 0 or numbers.max(initial=0) >= len(self._values):
            raise StateError(f"the state of users is damaged: an event has no known value of '{self._column.name}'")
        return self._values[numbers]
