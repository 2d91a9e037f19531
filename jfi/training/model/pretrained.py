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
from jfi.data.io.arrays import as_text, flatten
from jfi.data.schema.schema import as_array
from jfi.training.config import ConfigError, PretrainedConfig
from jfi.training.distributed.processes import World, shared_folder
from jfi.training.model.build_model import shards_of
from jfi.utils.files import is_storage_fault, naming


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
    ids, vectors = (_read_npy if config.path.endswith(".npy") else _read_parquet)(key, config)
    if len(ids) != len(vectors):
        raise ConfigError(f"{key}: {config.path} has {len(vectors)} vectors, but there are {len(ids)} ids")
    if len(pc.unique(ids)) != len(ids):
        raise ConfigError(f"{key}: {config.path} has an id twice")
    place = pc.index_in(as_array(schema.encodings.vocabularies[column].values), value_set=ids)
    found = place.is_valid().to_numpy(zero_copy_only=False)
    if not found.any():
        raise ConfigError(f"{key}: {config.path} has none of the values of '{column}'")
    vectors = vectors[place.drop_null().to_numpy()].astype(np.float32)
    if not np.isfinite(vectors).all():
        raise ConfigError(f"{key}: {config.path} has a vector with NaN or infinity")
    return torch.from_numpy(np.flatnonzero(found) + 1), torch.from_numpy(_project(vectors, width))


def _project(vectors: np.ndarray, width: int) -> np.ndarray:
    count, given = vectors.shape
    if given > width:
        centered = (vectors - vectors.mean(0)).astype(np.float64)
        # The components are those of the covariance; eigh gives them in ascending order.
        components = np.linalg.eigh(centered.T @ centered / count)[1][:, ::-1][:, :width]
        vectors = (centered @ components).astype(np.float32)
    return np.pad(vectors, ((0, 0), (0, max(0, width - given))))


def _read_npy(key: str, config: PretrainedConfig) -> tuple[pa.Array, np.ndarray]:
    try:
        vectors = np.load(config.path, allow_pickle=False)
        # Text mode ends lines at LF, CR LF and CR; str.splitlines would at U+2028 too.
        with open(Path(config.path).with_suffix(".txt"), encoding="utf-8-sig") as file:
            lines = [line.removesuffix("\n") for line in file]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {_fault(error, config.path)}") from None
    if vectors.ndim != 2 or vectors.dtype.kind != "f":
        raise ConfigError(
            f"{key}: {config.path} has shape {vectors.shape} of {vectors.dtype}, must be [rows, width] of floats"
        )
    return as_text(pa.array(lines, pa.large_string())), vectors


def _read_parquet(key: str, config: PretrainedConfig) -> tuple[pa.Array, np.ndarray]:
    try:
        with open(config.path, "rb") as opened:  # Arrow would open the path as a URL if it is no file
            table = pyarrow.parquet.ParquetFile(opened).read()
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{key}: {_fault(error, config.path)}") from None
    of_lists = [
        pa.types.is_list(one) or pa.types.is_large_list(one) or pa.types.is_fixed_size_list(one)
        for one in table.schema.types
    ]
    if sorted(of_lists) != [False, True]:
        raise ConfigError(
            f"{key}: {config.path} has the columns {', '.join(table.column_names)}; it must have two, the values of "
            f"'{key.rpartition('.')[2]}' and lists of numbers"
        )
    lists = table.column(of_lists.index(True)).combine_chunks()
    if pa.types.is_fixed_size_list(lists.type):
        lists = lists.cast(pa.list_(lists.type.value_type))
    widths = pc.unique(pc.list_value_length(lists))
    if len(widths) != 1 or not widths[0].as_py() or lists.flatten().null_count:
        raise ConfigError(f"{key}: the vectors of {config.path} must all have the same width, without gaps")
    values = lists.flatten().cast(pa.float32()).to_numpy(zero_copy_only=False)
    ids = as_text(flatten(table.column(of_lists.index(False))))
    if ids.null_count:
        raise ConfigError(f"{key}: {config.path} has an empty id")
    return ids, values.reshape(len(lists), widths[0].as_py())


def _fault(error: Exception, path: str) -> str:
    if is_storage_fault(error):
        with naming(Path(path)):
            raise error
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or path}: {error.strerror.lower()}"
    return f"{path}: {str(error).splitlines()[0]}"


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
