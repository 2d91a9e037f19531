"""The embedding tables of an artifact: float32, or int8 in TorchRec's quantized EmbeddingCollection.

Both are called with ids [n] by key and return embeddings [n, D] by key, D of the key's table.
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from jfi.serving.artifact import ArtifactError
from jfi.serving.schema import Table
from jfi.utils.files import naming

FLOAT, INT8 = "float32", "int8"


class FloatTables:
    """Float32 tables.

    Args:
        weights: by table its rows [N, D].
        table_of: by key the name of its table.
    """

    def __init__(self, weights: dict[str, Tensor], table_of: dict[str, str]) -> None:
        self.weights = {key: weights[table] for key, table in table_of.items()}
        self._tables = weights

    def write_rows(self, table: str, rows: Tensor, values: Tensor) -> None:
        """Replaces rows [n] of a table by values [n, D], in place."""
        self._tables[table].index_copy_(0, rows, values)

    def __call__(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for key, values in ids.items():
            weight = self.weights[key]
            found[key] = F.embedding(values.to(weight.device), weight).to(values.device)
        return found


class Int8Tables:
    """Quantized EmbeddingCollections, one for each width: one byte per element, a scale and an offset per row.

    Args:
        state: what the collections' state_dicts have, whose names are by table.
        tables: by name.
        device: device of the tables.

    Raises:
        ValueError: the state is of other tables.
    """

    def __init__(self, state: dict[str, Tensor], tables: Mapping[str, Table], device: torch.device) -> None:
        # Imported here, since float tables are served without TorchRec.
        from torchrec.modules.embedding_configs import DataType
        from torchrec.quant.embedding_modules import EmbeddingCollection

        #: And the keys of each.
        self.collections: list[tuple[EmbeddingCollection, list[str]]] = []
        for configs in _configs(tables):
            for config in configs:
                config.data_type = DataType.INT8
            collection = EmbeddingCollection(configs, device)
            own = collection.state_dict()
            _check_tensors(state, {name: (one.dtype, tuple(one.shape)) for name, one in own.items()})
            collection.load_state_dict({name: state[name] for name in own})
            self.collections.append((collection, [key for config in configs for key in config.feature_names]))
        self.device = device

    def __call__(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        found = {}
        for collection, keys in self.collections:
            # A batch of one sample, which has all the ids of a key.
            lengths = [ids[key].numel() for key in keys]
            values = torch.cat([ids[key] for key in keys]).to(self.device)
            features = KeyedJaggedTensor(
                keys,
                values,
                lengths=torch.tensor(lengths, dtype=values.dtype, device=self.device),
                stride=1,
                length_per_key=lengths,
            )
            found |= {key: rows.values().to(ids[key].device) for key, rows in collection(features).items()}
        return found


Tables = FloatTables | Int8Tables


def save_tables(path: Path, kind: str, weights: dict[str, Tensor], tables: Mapping[str, Table]) -> None:
    """Writes float32 tables from any device, as they are or quantized."""
    state = {name: weight.detach().cpu().float() for name, weight in weights.items()}
    state = state if kind == FLOAT else _quantize(state, tables)
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    write_tensors(path, lambda: save_file(state, path))


def write_tensors(path: Path, save: Callable[[], None]) -> None:
    """Has safetensors write a file, with the mode of any new file and the errors of the storage."""
    with naming(path):
        path.touch()
        mode = path.stat().st_mode
        try:
            save()  # replaces the file by one that only its owner can read
        except SafetensorError as error:
            if number := re.search(r"\(os error (\d+)\)", str(error)):
                raise OSError(int(number[1]), os.strerror(int(number[1]))) from None
            raise
        path.chmod(mode)


def load_tables(path: Path, kind: str, tables: Mapping[str, Table], device: torch.device) -> Tables:
    """Reads the tables that `save_tables` wrote.

    Raises:
        ArtifactError: the file holds other tables, or int8 tables, but TorchRec is not installed.
    """
    try:
        with safe_open(path, "pt") as file:  # maps the file, which may change later: hence copies
            state = {name: file.get_tensor(name).to(device, copy=True) for name in file.keys()}  # noqa: SIM118
        if kind == INT8:
            return Int8Tables(state, tables, device)
        _check_tensors(state, {name: (torch.float32, (one.rows, one.width)) for name, one in tables.items()})
        return FloatTables(state, {key: name for name, one in tables.items() for key in one.keys})
    except (ValueError, SafetensorError) as error:
        raise ArtifactError(f"{path.parent} is damaged: {path.name}: {' '.join(str(error).split())}") from None
    except ModuleNotFoundError as error:
        raise ArtifactError(
            f"{path.parent} has int8 tables, which need TorchRec, but {error.name} is missing; "
            "export with --tables float32"
        ) from error


def _check_tensors(state: dict[str, Tensor], wanted: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    """Raises ValueError unless there is a tensor of each name, dtype and shape."""
    for name, one in wanted.items():
        found = (state[name].dtype, tuple(state[name].shape)) if name in state else None
        if found != one:
            raise ValueError(f"'{name}' is {found}, must be {one}")


def _configs(tables: Mapping[str, Table]) -> list[list]:
    """The tables of each width: an EmbeddingCollection has one for all of its tables."""
    from torchrec import EmbeddingConfig

    by_width: dict[int, list] = {}
    for name, one in tables.items():
        config = EmbeddingConfig(
            name=name, embedding_dim=one.width, num_embeddings=one.rows, feature_names=list(one.keys)
        )
        by_width.setdefault(one.width, []).append(config)
    return list(by_width.values())


def _quantize(weights: dict[str, Tensor], tables: Mapping[str, Table]) -> dict[str, Tensor]:
    """Returns what the state_dicts of quantized EmbeddingCollections of these tables have."""
    from torch import nn
    from torchrec import EmbeddingCollection
    from torchrec.inference.modules import quantize_embeddings
    from torchrec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection

    state = {}
    for configs in _configs(tables):
        collection = EmbeddingCollection(tables=configs, device=torch.device("meta"))
        for config in configs:
            collection.embeddings[config.name].weight = nn.Parameter(weights[config.name])
        quantized = quantize_embeddings(
            nn.ModuleDict({"tables": collection}),
            torch.qint8,
            inplace=True,
            additional_qconfig_spec_keys=[EmbeddingCollection],
            additional_mapping={EmbeddingCollection: QuantEmbeddingCollection},
        )
        state |= quantized["tables"].state_dict()
    return state
