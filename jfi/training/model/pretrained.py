"""Embeddings from a file as the initial values of a table."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from jfi.data import DataSchema
from jfi.data.io.arrays import is_list
from jfi.data.io.table import SourceRows
from jfi.data.schema.schema import as_array
from jfi.semantic_ids.content import read_lists
from jfi.training.config import ConfigError
from jfi.training.distributed.processes import World, shared_folder
from jfi.training.model.build_model import shards_of
from jfi.training.model_config import PretrainedConfig
from jfi.utils.errors import InputError
from jfi.utils.files import naming, reading_file


def read_pretrained(column: str, config: PretrainedConfig, schema: DataSchema, width: int) -> tuple[Tensor, Tensor]:
    """The rows of a column's table that a file has.

    Args:
        column: a categorical column with a vocabulary.
        config: the file.
        schema: of the data.
        width: of the table. Wider vectors are projected to their `width` first principal components, by the vectors of
            the column's values; narrower ones are filled up with zeros.

    Returns:
        rows: `[M]` int64, the ids that the file has.
        vectors: `[M, width]` float32.

    Raises:
        ConfigError: the file is missing or malformed, or has none of the column's values, by the setting's name.
    """
    key = f"model.pretrained.{column}"
    if column not in schema.encodings.vocabularies:
        known = ", ".join(schema.encodings.vocabularies)
        raise ConfigError(f"{key}: no such column with a vocabulary; known: {known}")
    ids, vectors = _read(key, config.path)
    index = pc.index_in(as_array(schema.encodings.vocabularies[column].values), value_set=ids)
    found = index.is_valid().to_numpy(zero_copy_only=False)
    if not found.any():
        raise ConfigError(f"{key}: {config.path} has none of the values of '{column}'")
    vectors = vectors[index.drop_null().to_numpy()]
    return torch.from_numpy(np.flatnonzero(found) + 1), torch.from_numpy(_project(vectors, width))


def _project(vectors: np.ndarray, width: int) -> np.ndarray:
    count, given = vectors.shape
    if given > width:
        centered = (vectors - vectors.mean(0)).astype(np.float64)
        # The components are those of the covariance; eigh gives them in ascending order.
        components = np.linalg.eigh(centered.T @ centered / count)[1][:, ::-1][:, :width]
        vectors = (centered @ components).astype(np.float32)
    return np.pad(vectors, ((0, 0), (0, max(0, width - given))))


def _read(key: str, path: str) -> tuple[pa.Array, np.ndarray]:
    """The ids of a file, and their vectors `[N, D]` float32."""
    try:
        with reading_file(path, ConfigError), open(path, "rb") as opened:  # Arrow would take a path for a URL
            data = pyarrow.parquet.ParquetFile(opened).read()
        lists, names = [is_list(one) for one in data.schema.types], data.column_names
        if sorted(lists) != [False, True]:
            what = f"the values of '{key.rpartition('.')[2]}' and lists of numbers"
            raise ConfigError(f"{path} has the columns {', '.join(names)}; it must have two, {what}")
        table = SourceRows(path, data, names, lambda row: row + 1)
        ids, vectors = table.unique_ids(names[lists.index(False)]), read_lists(table, names[lists.index(True)])
        if (without := np.isnan(vectors[:, 0])).any():
            raise table.fault(int(without.argmax()), "has no vector")
        return ids, vectors
    except (InputError, pa.ArrowException) as error:
        raise ConfigError(f"{key}: {error}") from None


def load_pretrained(
    column: str, config: PretrainedConfig, schema: DataSchema, width: int, world: World
) -> tuple[Tensor, Tensor]:
    """`read_pretrained`, which one process of each host calls for all: the others map what it has written."""
    if not world.launched:
        return read_pretrained(column, config, schema, width)

    def write(folder: Path) -> None:
        rows, vectors = read_pretrained(column, config, schema, width)
        with naming(folder):
            np.save(folder / "rows.npy", rows.numpy())
            np.save(folder / "vectors.npy", vectors.numpy())

    with shared_folder(world, "jfi-pretrained-", write) as folder:
        # "c": torch would warn of an array that is not writable.
        rows, vectors = (np.load(folder / f"{name}.npy", mmap_mode="c") for name in ("rows", "vectors"))
    return torch.from_numpy(rows), torch.from_numpy(vectors)


def fill_rows(weight: Tensor | ShardedTensor, rows: Tensor, vectors: Tensor) -> None:
    """Writes `vectors [M, width]` to the rows `[M]` of a table, those of them that this process has."""
    for shard, row, column in shards_of(weight):
        here = (rows >= row) & (rows < row + len(shard))
        values = vectors[here, column : column + shard.shape[1]]
        shard[(rows[here] - row).to(shard.device)] = values.to(shard.device, shard.dtype)
