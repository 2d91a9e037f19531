"""The embedding tables of an artifact: float32, or int8 in TorchRec's quantized EmbeddingCollection.

Both are called with ids [n] by key and return embeddings [n, D] by key.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from jfi.files import reporting_file
from jfi.serving.artifact import ArtifactError

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
    """A quantized EmbeddingCollection: one byte per element, a scale and an offset per row.

    Args:
        state: the collection's state_dict.
        sizes: by table its number of rows.
        table_of: by key the name of its table.
        embedding_dim: D.
        device: device of the tables.
    """

    def __init__(
        self,
        state: dict[str, Tensor],
        sizes: dict[str, int],
        table_of: dict[str, str],
        embedding_dim: int,
        device: torch.device,
    ) -> None:
        # Imported here, since float tables are served without TorchRec.
        from torchrec.modules.embedding_configs import DataType
        from torchrec.quant.embedding_modules import EmbeddingCollection

        configs = _configs(sizes, table_of, embedding_dim)
        for config in configs:
            config.data_type = DataType.INT8
        self.keys = [key for config in configs for key in config.feature_names]
        self.collection = EmbeddingCollection(configs, device)
        self.collection.load_state_dict(state)
        self.device = device

    def __call__(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        # A batch of one sample, which has all the ids of a key.
        lengths = [ids[key].numel() for key in self.keys]
        values = torch.cat([ids[key] for key in self.keys]).to(self.device)
        features = KeyedJaggedTensor(
            self.keys,
            values,
            lengths=torch.tensor(lengths, dtype=values.dtype, device=self.device),
            stride=1,
            length_per_key=lengths,
        )
        device = next(iter(ids.values())).device
        return {key: rows.values().to(device) for key, rows in self.collection(features).items()}


Tables = FloatTables | Int8Tables


def save_tables(path: Path, kind: str, weights: dict[str, Tensor], table_of: dict[str, str]) -> None:
    """Writes float32 tables from any device, as they are or quantized."""
    weights = {table: weight.detach().cpu().float() for table, weight in weights.items()}
    weights = weights if kind == FLOAT else _quantize(weights, table_of)
    with reporting_file(path) as file:
        torch.save(weights, file)


def load_tables(
    path: Path, kind: str, sizes: dict[str, int], table_of: dict[str, str], embedding_dim: int, device: torch.device
) -> Tables:
    """Reads the tables that `save_tables` wrote.

    Raises:
        ArtifactError: int8 tables, but TorchRec is not installed.
    """
    state = torch.load(path, map_location=device, weights_only=True)
    if kind == FLOAT:
        return FloatTables(state, table_of)
    try:
        return Int8Tables(state, sizes, table_of, embedding_dim, device)
    except ModuleNotFoundError as error:
        raise ArtifactError(
            f"{path.parent} has int8 tables, which need TorchRec, but {error.name} is missing; "
            "export with --tables float32"
        ) from error


def _configs(sizes: dict[str, int], table_of: dict[str, str], embedding_dim: int) -> list:
    from torchrec import EmbeddingConfig

    return [
        EmbeddingConfig(
            name=table,
            embedding_dim=embedding_dim,
            num_embeddings=rows,
            feature_names=[key for key, of in table_of.items() if of == table],
        )
        for table, rows in sizes.items()
    ]


def _quantize(weights: dict[str, Tensor], table_of: dict[str, str]) -> dict[str, Tensor]:
    """The state_dict of a quantized EmbeddingCollection of these tables."""
    from torch import nn
    from torchrec import EmbeddingCollection
    from torchrec.inference.modules import quantize_embeddings
    from torchrec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection

    width = next(iter(weights.values())).size(1)
    sizes = {table: weight.size(0) for table, weight in weights.items()}
    collection = EmbeddingCollection(tables=_configs(sizes, table_of, width), device=torch.device("meta"))
    for table, weight in weights.items():
        collection.embeddings[table].weight = nn.Parameter(weight)
    quantized = quantize_embeddings(
        nn.ModuleDict({"tables": collection}),
        torch.qint8,
        inplace=True,
        additional_qconfig_spec_keys=[EmbeddingCollection],
        additional_mapping={EmbeddingCollection: QuantEmbeddingCollection},
    )
    return quantized["tables"].state_dict()
