"""Columns that grow on disk: a raw file each, appended to in blocks and read as a map of the file."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from jfi.data.errors import DataError
from jfi.events.events import index_type
from jfi.utils.jagged import blocks

_INDEX = "columns.json"
#: The folder of temporary files, next to those of the stages.
SCRATCH = "scratch"


class ColumnWriter:
    """Writes columns into a folder, which must exist. The folder is complete once `close` has returned.

    Args:
        folder: the folder.
        types: by column its NumPy type.
    """

    def __init__(self, folder: Path, types: Mapping[str, np.dtype | type]) -> None:
        self._folder = folder
        self._types = {name: np.dtype(kind) for name, kind in types.items()}
        self._paths = {name: folder / file_name(i) for i, name in enumerate(types)}
        self._lengths, self._ends = dict.fromkeys(types, 0), dict.fromkeys(types, 0)

    def append(self, name: str, values: np.ndarray) -> None:
        """Appends values, which are cast to the column's type."""
        # Opened for each block: what an error interrupts leaves no file open.
        with open(self._paths[name], "ab" if self._lengths[name] else "wb") as file:
            file.write(np.ascontiguousarray(values, self._types[name]).data)
        self._lengths[name] += len(values)

    def append_offsets(self, name: str, lengths: np.ndarray) -> None:
        """Appends the ends of further lists of these lengths, at first after 0."""
        if not self._lengths[name]:
            self.append(name, np.zeros(1))
        ends = self._ends[name] + np.cumsum(lengths, dtype=np.int64)
        self.append(name, ends)
        self._ends[name] = int(ends[-1])

    def close(self) -> None:
        """Writes the list of columns."""
        index = {name: (kind.str, self._lengths[name]) for name, kind in self._types.items()}
        (self._folder / _INDEX).write_text(json.dumps(index))


def read_columns(folder: Path, mode: Literal["r", "r+"] = "r") -> dict[str, np.ndarray]:
    """The columns of a complete folder, as maps of their files; with the mode "r+" as maps that write to them.

    Raises:
        DataError: a column is not one of numbers.
    """
    index = json.loads((folder / _INDEX).read_text())
    if strange := [kind for kind, _ in index.values() if np.dtype(kind).kind not in "iufb"]:  # objects are pointers
        raise DataError(f"{folder / _INDEX}: damaged: a column has the type {strange[0]!r}")
    return {
        name: np.memmap(folder / file_name(i), kind, mode, shape=(length,)) if length else np.empty(0, kind)
        for i, (name, (kind, length)) in enumerate(index.items())
    }


def write_true_rows(folder: Path, column: np.ndarray, bits: int = -1) -> np.ndarray:
    """The rows where `column [N]` has any of some bits, as the map of a file in `folder`, which must not exist."""
    folder.mkdir()
    writer = ColumnWriter(folder, {"row": index_type(len(column))})
    for begin, end in blocks(len(column)):
        writer.append("row", begin + np.flatnonzero(column[begin:end] & bits))
    writer.close()
    return read_columns(folder)["row"]


def remove_columns(folder: Path) -> None:
    """Removes the columns of a folder, and leaves its other files."""
    (folder / _INDEX).unlink(missing_ok=True)
    for path in folder.glob(file_name("*")):
        path.unlink()


def file_name(number: int | str) -> str:
    """The name of a column's file; names of columns may hold any character."""
    return f"{number}.bin"


def new_map(path: Path, kind: np.dtype | type, count: int | tuple[int, ...]) -> np.ndarray:
    """`[count]` values to be written, or an array of that shape, as the map of a new `.npy` file.

    Raises:
        OSError: the storage has not enough space. Without this check a write to the map would end the process.
    """
    values = np.lib.format.open_memmap(path, "w+", kind, count if isinstance(count, tuple) else (count,))
    with open(path, "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return values


def write_arrow(path: Path, columns: Mapping[str, np.ndarray | pa.Array]) -> None:
    """Writes columns of equal length as an uncompressed Arrow IPC file of one record batch; makes no copy in memory."""
    arrays = [column if isinstance(column, pa.Array) else pa.array(column) for column in columns.values()]
    batch = pa.RecordBatch.from_arrays(arrays, names=list(columns))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def map_to_write(path: Path) -> dict[str, np.ndarray]:
    """The columns of a file of `write_arrow`, as maps that write to it; of a column of lists its values."""
    with pa.memory_map(str(path)) as file:
        content = file.read_buffer()
    batch, found = pa.ipc.open_file(content).get_batch(0), {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        values = column.values if pa.types.is_large_list(column.type) else column
        kind, offset = values.type.to_pandas_dtype(), values.buffers()[1].address - content.address
        found[name] = np.memmap(path, kind, "r+", offset, (len(values),)) if len(values) else np.empty(0, kind)
    return found


def map_arrow(path: Path) -> dict[str, pa.Array]:
    """The columns of a file of one record batch, as maps of it.

    Raises:
        OSError, pyarrow.ArrowInvalid: it cannot be read, is no Arrow file, or says that it has more than it has.
        ValueError: it has several record batches.
    """
    with pa.memory_map(str(path)) as file:
        reader = pa.ipc.open_file(file)
        if reader.num_record_batches != 1:
            raise ValueError(f"{reader.num_record_batches} record batches")
        batch = reader.get_batch(0)
        batch.validate()
    return dict(zip(batch.schema.names, batch.columns, strict=True))
