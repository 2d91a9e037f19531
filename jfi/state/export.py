"""Writes the events of a state to a Parquet file."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jfi.state.columns import Stored
from jfi.state.dictionaries import Dictionaries
from jfi.state.layout import TIME, Column, EventLayout
from jfi.state.model_ids import Texts
from jfi.state.state import read_layout
from jfi.state.stores import Store
from jfi.state.user_rows import scan_records
from jfi.utils.encoding import PER_SECOND
from jfi.utils.files import writing_file

TYPES = {
    "text": pa.large_string(),
    "texts": pa.large_list(pa.large_string()),
    "number": pa.float64(),
    "sid": pa.int64(),
    "session": pa.uint64(),
}


def as_arrow(column: Column, values: Stored, texts: Texts) -> pa.Array:
    """Returns the values `[N]` of a column of events, items or users.

    Args:
        values: `[N]`, of lists `[N, size]` or the numbers of all lists and how many `[N]` each has.
    """
    if column.kind not in ("text", "texts"):
        is_missing = values == 0 if column.kind == "session" else np.isnan(values)
        return pa.array(values, TYPES[column.kind], mask=is_missing)
    numbers, counts = values if isinstance(values, tuple) else (values, None)
    if counts is None and column.kind == "texts":
        counts, numbers = (numbers > 0).sum(axis=1), numbers[numbers > 0]
    distinct, index = np.unique(numbers, return_inverse=True)
    flat = pa.array(texts(column.name, distinct.tolist()), pa.large_string()).take(pa.array(index.ravel()))
    if counts is None:
        return flat
    return pa.LargeListArray.from_arrays(np.append(0, np.cumsum(counts)), flat)


#: Events of a row group.
_AT_ONCE = 1 << 18


def export_events(store: Store, out: Path) -> tuple[int, int]:
    """Writes all events of a state to a Parquet file, whole or not at all.

    The columns are the user, the time in the log's unit and what records keep of the log's columns: texts, lists of
    them, numbers, semantic IDs, and hashes of a policy's sessions.

    Returns:
        The number of users and that of events.
    """
    layout = read_layout(store)
    log, texts = layout.log, Dictionaries(store.get).texts
    schema = pa.schema(
        [
            (log.user, pa.string()),
            (log.time, pa.float64()),
            *((one.name, TYPES[one.kind]) for one in layout.columns.values()),
        ]
    )
    users = events = 0
    with writing_file(out) as path, pq.ParquetWriter(path, schema) as writer:
        for names, records in _blocks(store, layout):
            lengths, joined = list(map(len, records)), np.concatenate(records)
            columns = [
                pa.array(np.repeat(np.array(names, object), lengths), pa.string()),
                pa.array(joined[TIME] * PER_SECOND[log.unit]),
            ]
            columns += [as_arrow(one, joined[name], texts) for name, one in layout.columns.items()]
            writer.write_table(pa.table(columns, schema))
            users, events = users + len(names), events + len(joined)
    return users, events


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
