"""Writes the events of a state to a Parquet file."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jfi.state.arrow import TYPES, as_arrow
from jfi.state.dictionaries import Dictionaries
from jfi.state.layout import TIME, EventLayout
from jfi.state.state import read_layout, scan_records
from jfi.state.stores import Store
from jfi.utils.encoding import PER_SECOND
from jfi.utils.files import writing_file

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
