"""Facts about rows to score: about how many there are, and which are repeated or first."""

import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from jfi.data.io.paths import find_files
from jfi.data.prepared.arrange import Rows
from jfi.data.schema.columns import sort_ids

#: A text file's row is rarely shorter.
_BYTES_PER_ROW = 30


def estimate_rows(source: str | list[str] | pa.Table, setting: str) -> int:
    """About the number of rows of files or of a table; a file that cannot be read counts as none."""
    if isinstance(source, pa.Table):
        return len(source)
    rows = 0
    for file in find_files(source, setting):
        path = Path(file.path)
        if file.layout.format != "parquet":
            rows += path.stat().st_size // _BYTES_PER_ROW if path.is_file() else 0
            continue
        try:
            with pa.parquet.ParquetFile(path) as parquet:
                rows += parquet.metadata.num_rows
        except (pa.ArrowException, OSError):
            continue  # the reader says what is wrong
    return rows


def find_repeated(rows: Rows, history: np.ndarray) -> np.ndarray:
    """`[E]` bool: the rows to score that the history has too, with the same user, item and time; one for each of its.

    The row of the history stays an event, since it may tell what happened where the row to score does not.

    Args:
        rows: sorted rows.
        history: `[E]` bool, whether the row is of the history.
    """
    order = np.lexsort((history, rows.item, rows.time, rows.user))
    keys = [column[order] for column in (rows.user, rows.time, rows.item)]
    first = np.append(True, np.any([key[1:] != key[:-1] for key in keys], axis=0))
    group = np.cumsum(first) - 1
    place = np.arange(len(order)) - np.flatnonzero(first)[group]
    again = ~history[order] & (place < np.bincount(group, history[order])[group])
    repeated = np.zeros(len(order), bool)
    repeated[order[again]] = True
    return repeated


def hash_ids(ids: pa.Array) -> np.ndarray:
    """`[N]` int64, a hash of each string that is the same in every process."""
    encoded = ids.dictionary_encode()
    hashes = [zlib.crc32(value.encode()) for value in encoded.dictionary.to_pylist()]
    return np.array(hashes, np.int64)[encoded.indices.to_numpy()]


def take_first_rows(tables: list[pa.Table | None], item: str, user: str, time: str) -> pa.Table:
    """Each item's first row in time of all tables, as in training; among rows of one time that of the first user.

    Args:
        tables: with equal columns; None counts as empty.
        item, user, time: names of columns.
    """
    data = pa.concat_tables([table for table in tables if table is not None]).combine_chunks()
    index = data.column(item).combine_chunks().dictionary_encode().indices.to_numpy()
    by_time = np.lexsort((sort_ids(data.column(user).combine_chunks())[1], data.column(time).to_numpy()))
    return data.take(pa.array(by_time[np.unique(index[by_time], return_index=True)[1]]))
