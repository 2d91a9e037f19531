"""The embedding tables of an artifact: float32, or int8 in TorchRec's quantized EmbeddingCollection.

Both are called with ids [n] by key and return embeddings [n, D] by key, D of the key's table. The ids of a table that
grows are raw; it comes with the raw id of each of its rows, under the name `<table>.ids`.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from jfi.serving.artifact import ArtifactError
from jfi.serving.schema import Table
from jfi.utils.encoding import UNKNOWN
from jfi.utils.files import naming

FLOAT, INT8 = "float32", "int8"


class RowsOfIds:
    """The rows of raw ids in a table that grows; row 0 is that of all ids without one.

    Args:
        ids: [N] int64, the raw id of each row, 0 for none.

    Example:
        >>> RowsOfIds(torch.tensor([0, 90071, 0, 515]))(torch.tensor([515, 7, 0, 90071]))
        tensor([3, 0, 0, 1])
    """

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids
        self._sorted, self._rows = ids.sort(stable=True)  # of ids 0 the first is row 0

    def changed(self, rows: Tensor, ids: Tensor) -> "RowsOfIds":
        """Returns the rows of ids after rows [M] have got the ids [M], 0 for none; itself if they have them already."""
        rows, ids = rows.to(self.ids.device), ids.to(self.ids.device)
        if torch.equal(self.ids[rows], ids):
            return self
        own = self.ids.clone()
        own[rows] = ids
        return RowsOfIds(own)

    def __call__(self, ids: Tensor) -> Tensor:
        ids = ids.to(self._sorted.device)
        index = torch.searchsorted(self._sorted, ids).clamp(max=len(self._sorted) - 1)
        return torch.where(self._sorted[index] == ids, self._rows[index], UNKNOWN)


class FloatTables:
    """Float32 tables.

    Args:
        weights: by table its rows [N, D].
        table_of: by key the name of its table.
        ids: by table that grows the raw id [N] of each row.
    """

    def __init__(
        self, weights: dict[str, Tensor], table_of: dict[str, str], ids: dict[str, Tensor] | None = None
    ) -> None:
        self.tensors, self._table_of = weights, table_of
        #: By table that grows the rows of its ids.
        self.rows = {table: RowsOfIds(own) for table, own in (ids or {}).items()}

    def read_rows(self, table: str, rows: Tensor) -> tuple[Tensor, RowsOfIds | None]:
        """Returns rows [n] of a table, and the rows of all ids in a table that grows, for `write_rows`."""
        return self.tensors[table][rows], self.rows.get(table)

    def all_rows(self) -> dict[str, tuple[Tensor, Tensor, Tensor | None]]:
        """Returns by table its rows [N], their values [N, D] and, of a table that grows, their raw ids [N]."""
        ids = {table: own.ids for table, own in self.rows.items()}
        own = {table: self.tensors[table] for table in self._table_of.values()}
        return {table: (torch.arange(len(one)), one, ids.get(table)) for table, one in own.items()}

    def write_rows(self, table: str, rows: Tensor, values: Tensor, rows_of_ids: RowsOfIds | None = None) -> None:
        """Replaces rows [n] of a table by values [n, D], in place, and the rows of all ids in a table that grows."""
        self.tensors[table].index_copy_(0, rows, values)
        if rows_of_ids is not None:
            self.rows[table] = rows_of_ids

    def __call__(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for key, values in ids.items():
            table = self._table_of[key]
            weight, rows_of_ids = self.tensors[table], self.rows.get(table)
            rows = values.to(weight.device) if rows_of_ids is None else rows_of_ids(values)
            found[key] = F.embedding(rows, weight).to(values.device)
        return found


class Int8Tables:
    """Quantized EmbeddingCollections, one for each width: one byte per element, a scale and an offset per row.

    Args:
        state: what the collections' state_dicts have, whose names are by table.
        ids: by table that grows the raw id [N] of each row.

    Raises:
        ValueError: the state is of other tables.
    """

    def __init__(
        self,
        state: dict[str, Tensor],
        tables: Mapping[str, Table],
        device: torch.device,
        ids: dict[str, Tensor] | None = None,
    ) -> None:
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
        rows = {table: RowsOfIds(own) for table, own in (ids or {}).items()}
        self._rows_of_key = {key: own for table, own in rows.items() for key in tables[table].keys}

    def __call__(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        found, devices = {}, {key: values.device for key, values in ids.items()}
        ids = {key: self._rows_of_key[key](own) if key in self._rows_of_key else own for key, own in ids.items()}
        for collection, keys in self.collections:
            # A batch of one sample, which has all the ids of a key.
            lengths = [ids[key].numel() for key in keys]
            values = torch.cat([ids[key].to(self.device) for key in keys])
            features = KeyedJaggedTensor(
                keys,
                values,
                lengths=torch.tensor(lengths, dtype=values.dtype, device=self.device),
                stride=1,
                length_per_key=lengths,
            )
            found |= {key: rows.values().to(devices[key]) for key, rows in collection(features).items()}
        return found


Tables = FloatTables | Int8Tables


def save_tables(
    path: Path,
    kind: str,
    weights: dict[str, Tensor],
    tables: Mapping[str, Table],
    ids: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes float32 tables from any device, as they are or quantized, and `ids` of those that grow."""
    state = {name: weight.detach().cpu().float() for name, weight in weights.items()}
    state = state if kind == FLOAT else _quantize(state, tables)
    state |= {f"{table}.ids": own.cpu() for table, own in (ids or {}).items()}
    write_tensors(path, state)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Has safetensors write tensors to a file, with the mode of any new file and the errors of the storage."""
    with naming(path):
        path.touch()
        mode = path.stat().st_mode
        try:
            # It replaces the file by one that only its owner can read.
            save_file({name: one.cpu().contiguous() for name, one in tensors.items()}, path)
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
        growing = {name: f"{name}.ids" for name, one in tables.items() if one.grows}
        _check_tensors(state, {of: (torch.int64, (tables[name].rows,)) for name, of in growing.items()})
        ids = {name: state[of] for name, of in growing.items()}
        if any(own[0] != UNKNOWN for own in ids.values()):
            raise ValueError("row 0 of a table that grows has an id")
        if kind == INT8:
            return Int8Tables(state, tables, device, ids)
        _check_tensors(state, {name: (torch.float32, (one.rows, one.width)) for name, one in tables.items()})
        return FloatTables(state, {key: name for name, one in tables.items() for key in one.keys}, ids)
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
