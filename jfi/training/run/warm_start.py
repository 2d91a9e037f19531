"""Starts a run from the parameters of another one: known ids keep their rows, new ones have fresh rows."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from jfi.data import DataConfig, DataSchema
from jfi.data.prepared.summary import date_of
from jfi.data.schema.schema import as_array
from jfi.models import SequenceDLRM
from jfi.training.config import Config, ConfigError
from jfi.training.defaults import with_bias
from jfi.training.model.build_model import build_model, shards_of, table_configs
from jfi.training.run.best_epoch import BestEpoch

#: Before the names of the maps of tables that grow.
_MAPS = "growing_ids.maps."
#: Where a row of a table has no row in the other run.
FRESH = -1


def warm_start(
    path: str | Path,
    state: Mapping[str, Tensor | ShardedTensor],
    tables: dict[str, BaseEmbeddingConfig],
    schema: DataSchema,
) -> dict[str, Tensor]:
    """Copies the parameters of the best epoch of a run into those of a new model.

    A table's row is copied where the other run knows its value. A table without a vocabulary, such as that of
    quantiles, is copied by id if it has as many rows; one that grows with the map of its ids, if the capacity is the
    same. All rows that are not copied, and tables that the other run
    lacks, stay as they are. All other parameters must be in both, with the same shapes.

    Args:
        path: the run folder.
        state: the new model's `state_dict()`, which is filled in place; under torchrun with this process' shards.
        tables: the result of `table_configs` of the new model.
        schema: of the new run's data.

    Returns:
        By table `[rows]` bool, the rows that are copied.

    Raises:
        ConfigError: not a run folder, or its model has other keys, names or shapes, as one line.
        DataError: its schema is damaged.
    """
    best = BestEpoch.of(path, "training.warm_start: run")
    _check_keys(path, schema, best.schema)
    _, shapes, there = _meta_model(best.config, best.schema)
    _check_shapes(path, state, tables, shapes, there)

    dense = {name: torch.empty(shapes[name], dtype=state[name].dtype) for name in state if name not in tables}
    best.read(dense)
    for name, values in dense.items():
        state[name].copy_(values)
    copied = {}
    for name, table in tables.items():
        source = _sources(table, schema, best.schema) if table.name in there else np.full(table.num_embeddings, FRESH)
        copied[table.name] = torch.from_numpy(source != FRESH)
        if not copied[table.name].any():
            continue
        # One whole table at a time: any number of processes may have written it.
        values = torch.empty(shapes[there[table.name]])
        best.read({there[table.name]: values})
        for shard, row, column in shards_of(state[name]):
            rows = torch.from_numpy(source[row : row + shard.shape[0]])
            known = rows != FRESH
            found = values[rows[known], column : column + shard.shape[1]]
            shard[known.to(shard.device)] = found.to(shard.device, shard.dtype)
    return copied


def check_warm_start(path: str | Path, config: Config) -> tuple[list[str], Config]:
    """Checks what the config alone tells of a warm start, before any table is read; `warm_start` checks the rest.

    Returns:
        A line for each label that is another rule or column than in the other run, and one where the config leaves
        `training.rows_after` to jfi; and the config with that setting.

    Raises:
        ConfigError, DataError: as `warm_start`.
    """
    given, best = config, BestEpoch.of(path, "training.warm_start: run")
    config = with_bias(given)
    changed = _check_labels(path, config, best.config.data)
    _, shapes, there = _meta_model(best.config, best.schema)
    # With the schema of the other run the models differ where the sections `model` and `encoder` do.
    model, _, _ = _meta_model(config, best.schema)
    _check_shapes(path, model.state_dict(), table_configs(model), shapes, there)
    after, lines = _rows_after(path, config, best)
    return changed + lines, given.with_training(rows_after=after)


def _rows_after(path: str | Path, config: Config, best: BestEpoch) -> tuple[float | Literal["auto"] | None, list[str]]:
    """The value of `training.rows_after`, and a line about it where the config says `auto`."""
    if config.training.rows_after != "auto":
        return config.training.rows_after, []
    after = best.newest if math.isfinite(best.newest) else None
    by_user = [data.split for data in (config.data, best.config.data) if data.split in ("leave_one_out", "user")]
    if by_user:
        after = None
        why = f", since with data.split: {by_user[0]} new rows of a user may be older than rows of another"
    elif best.epoch < 1:
        why = f", since the best evaluation of {path} lies within its first epoch, which has seen only part of its rows"
    else:
        why = ", the newest row that the run of training.warm_start has trained on"
    which = "all rows" if after is None else f"rows newer than {date_of(after) or after}"
    return after, [f"training.rows_after: auto takes {which}{why}"]


def _meta_model(config: Config, schema: DataSchema) -> tuple[SequenceDLRM, dict[str, tuple[int, ...]], dict[str, str]]:
    """The model of a config without memory, the shapes of its parameters, and by table the name of its parameter."""
    with torch.device("meta"):
        model = build_model(config.model, config.encoder, schema, torch.device("meta"))
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    return model, shapes, {table.name: name for name, table in table_configs(model).items()}


def _sources(table: BaseEmbeddingConfig, schema: DataSchema, other: DataSchema) -> np.ndarray:
    """`[rows]` int64: by row of a table the row of the other run's table, or FRESH."""
    column = next(spec.column for spec in schema.features if spec.table == table.name)
    new, old = (one.encodings.vocabularies.get(column) for one in (schema, other))
    if new is None or old is None:
        (rows, was_raw), (_, is_raw) = (
            next((spec.num_embeddings, spec.raw) for spec in one.features if spec.table == table.name)
            for one in (other, schema)
        )
        same = new is None and old is None and rows == table.num_embeddings and was_raw == is_raw
        return np.arange(rows) if same else np.full(table.num_embeddings, FRESH)
    found = pc.index_in(as_array(new.values), value_set=as_array(old.values))
    # Row 0 is that of unknown values in both.
    found = np.append(-1, pc.fill_null(found, FRESH - 1).to_numpy()) + 1
    return found.astype(np.int64)


def _check_labels(path: str | Path, config: Config, other: DataConfig) -> list[str]:
    """Checks that each output starts from that of its own name: the model's outputs have an order and no names."""
    data = config.data
    outputs, there = ([f"{one.name} ({one.task})" for one in data.targets()] for data in (data, other))
    if outputs != there:
        raise ConfigError(
            f"training.warm_start: this run predicts {', '.join(outputs)}, {path} {', '.join(there)}; use the same "
            "data.labels"
        )
    rules, known = ([one.label for one in section.auxiliary_labels()] for section in (data, other))
    if rules != known:
        what = f"the auxiliary ones of data.labels are {rules}, in {path} {known}; use the same, in the same order"
        raise ConfigError(f"training.warm_start: {what}")
    pairs = zip(data.targets(), other.targets(), strict=True)
    return [
        f"training.warm_start: {now.name} is '{now.label}', in {path} it is '{was.label}'"
        for now, was in pairs
        if now.label != was.label
    ]


def _check_keys(path: str | Path, schema: DataSchema, other: DataSchema) -> None:
    def keys(one: DataSchema) -> list[str]:
        own = [spec.key for spec in one.features if spec.role in ("user", "item", "context")]
        events = dict.fromkeys(spec.column for spec in one.features if spec.role == "history")
        return [*own, *(f"history of {name}" for name in events), *(f"number {name}" for name in one.dense_names)]

    if schema.codec is not None and other.codec is not None and schema.codec.fingerprint != other.codec.fingerprint:
        codecs = [one.codec.fingerprint[:12] for one in (schema, other)]
        raise ConfigError(
            f"training.warm_start: the semantic IDs of this run are of the codec {codecs[0]}, those of {path} of "
            f"{codecs[1]}"
        )
    here, there = keys(schema), keys(other)
    for name in here + there:
        if (name in here) != (name in there):
            which = "this run has, but not" if name in here else "this run lacks, but not"
            more = " and data.statistics, which [] turns off" if name.startswith("number past_") else ""
            raise ConfigError(
                f"training.warm_start: '{name}' is an input that {which} {path}; use the same columns{more}"
            )
    if here != there:
        raise ConfigError(f"training.warm_start: {path} has its inputs in another order: {', '.join(there)}")


def _check_shapes(
    path: str | Path,
    state: Mapping[str, Tensor | ShardedTensor],
    tables: dict[str, BaseEmbeddingConfig],
    shapes: dict[str, tuple[int, ...]],
    there: dict[str, str],
) -> None:
    for name, value in state.items():
        if name in tables:
            table = tables[name]
            if table.name in there and shapes[there[table.name]][1] != table.embedding_dim:
                width = shapes[there[table.name]][1]
                raise ConfigError(
                    f"training.warm_start: '{table.name}' is {table.embedding_dim} wide, in {path} {width}; use the "
                    "same model.embedding_dim and widths of data.features"
                )
        elif name.startswith(_MAPS) and shapes.get(name) != tuple(value.shape):
            column = name.removeprefix(_MAPS).split(".")[0]
            raise ConfigError(
                f"training.warm_start: '{column}' has a capacity that it has not in {path}; use the same data.features"
            )
        elif name not in shapes:
            raise ConfigError(f"training.warm_start: {path} has no '{name}'; use the same model, encoder and labels")
        elif tuple(value.shape) != shapes[name]:
            got = f"'{name}' has shape {list(value.shape)}, in {path} it has {list(shapes[name])}"
            raise ConfigError(f"training.warm_start: {got}; use the same model, encoder and labels")
