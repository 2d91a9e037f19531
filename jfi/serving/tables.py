"""The embedding tables of an artifact: float32, or int8 in TorchRec's quantized EmbeddingCollection.

Both are called with ids [n] by key and return embeddings [n, D] by key, D of the key's table.
"""

import pickle
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from jfi.serving.artifact import ArtifactError
from jfi.utils.files import reporting_file

FLOAT, INT8 = "float32", "int8"


class FloatTables:
    """Float32 tables.

    Args:
        weights: by table its rows [N, D].
        table_of: by key the name of its table.
    """

    def __init__(self, weights: dict[str, Tensor], table_of: dict[str, str]) -> None:
        self.weights = {key: weights[table] for key, table in table_of.items()}

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
        sizes: by table its number of rows.
        table_of: by key the name of its table.
        widths: by table the D of its rows.
        device: device of the tables.

    Raises:
        ValueError: the state is of other tables.
    """

    def __init__(
        self,
        state: dict[str, Tensor],
        sizes: dict[str, int],
        table_of: dict[str, str],
        widths: dict[str, int],
        device: torch.device,
    ) -> None:
        # Imported here, since float tables are served without TorchRec.
        from torchrec.modules.embedding_configs import DataType
        from torchrec.quant.embedding_modules import EmbeddingCollection

        #: And the keys of each.
        self.collections: list[tuple[EmbeddingCollection, list[str]]] = []
        for configs in _configs(sizes, table_of, widths):
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


def save_tables(path: Path, kind: str, weights: dict[str, Tensor], table_of: dict[str, str]) -> None:
    """Writes float32 tables from any device, as they are or quantized."""
    weights = {table: weight.detach().cpu().float() for table, weight in weights.items()}
    weights = weights if kind == FLOAT else _quantize(weights, table_of)
    with reporting_file(path) as file:
        torch.save(weights, file)


def load_tables(
    path: Path, kind: str, sizes: dict[str, int], table_of: dict[str, str], widths: dict[str, int], device: torch.device
) -> Tables:
    """Reads the tables that `save_tables` wrote; the arguments are those of `Int8Tables`.

    Raises:
        ArtifactError: the file holds other tables, or int8 tables, but TorchRec is not installed.
    """
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        if kind == FLOAT:
            _check_tensors(state, {name: (torch.float32, (rows, widths[name])) for name, rows in sizes.items()})
            return FloatTables(state, table_of)
        return Int8Tables(state, sizes, table_of, widths, device)
    except (ValueError, pickle.UnpicklingError, EOFError) as error:
        raise ArtifactError(f"{path.parent} is damaged: {path.name}: {' '.join(str(error).split())}") from None
    except ModuleNotFoundError as error:
        raise ArtifactError(
            f"{path.parent} has int8 tables, which need TorchRec, but {error.name} is missing; "
            "export with --tables float32"
        ) from error


def _check_tensors(state: dict[str, Tensor], wanted: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    """Raises ValueError unless there is a tensor of each name, dtype and shape."""
    for name, one in wanted.items():
        found = state.get(name) if isinstance(state, dict) else None
        found = (found.dtype, tuple(found.shape)) if isinstance(found, Tensor) else None
        if found != one:
            raise ValueError(f"'{name}' is {found}, must be {one}")


def _configs(sizes: dict[str, int], table_of: dict[str, str], widths: dict[str, int]) -> list[list]:
    """The tables of each width: an EmbeddingCollection has one for all of its tables."""
    from torchrec import EmbeddingConfig

    by_width = {}
    for table, rows in sizes.items():
        keys = [key for key, of in table_of.items() if of == table]
        config = EmbeddingConfig(name=table, embedding_dim=widths[table], num_embeddings=rows, feature_names=keys)
        by_width.setdefault(widths[table], []).append(config)
    return list(by_width.values())


def _quantize(weights: dict[str, Tensor], table_of: dict[str, str]) -> dict[str, Tensor]:
    """Returns what the state_dicts of quantized EmbeddingCollections of these tables have."""
    from torch import nn
    from torchrec import EmbeddingCollection
    from torchrec.inference.modules import quantize_embeddings
    from torchrec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection

    sizes, widths = ({table: weight.size(axis) for table, weight in weights.items()} for axis in (0, 1))
    state = {}
    for configs in _configs(sizes, table_of, widths):
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
