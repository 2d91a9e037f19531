"""Rows of growing tables that begin anew for new ids, in one process and in tables that are sharded."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.optim.keyed import KeyedOptimizer

from jfi.models import SequenceDLRM
from jfi.tables.growing_ids import initial_rows
from jfi.training.model.build_model import shards_of


@torch.no_grad()
def admit_ids(
    model: nn.Module, optimizer: KeyedOptimizer, tables: Mapping[str, BaseEmbeddingConfig]
) -> dict[str, Tensor]:
    """Gives rows to the ids that `GrowingIds` has recorded; these rows begin anew with the optimizer's states.

    It is `SequenceDLRM.admit_ids` for the model of a run, whose tables may be sharded. All processes call it together,
    between two steps; nothing happens in a model whose tables do not grow.

    Args:
        model: of the run, a SequenceDLRM or TorchRec's DistributedModelParallel of one.
        optimizer: of the run, with the states of the tables.
        tables: the result of `table_configs` before the model was sharded.

    Returns:
        By table the rows [M] with a new owner, in the numbers of the whole table, the same in every process.

    Raises:
        ValueError: a batch had more distinct ids than its table has rows.
    """
    inner = next(one for one in model.modules() if isinstance(one, SequenceDLRM))
    if inner.growing_ids is None:
        return {}
    admitted = inner.admit_ids()  # which resets the rows of fused collections
    if not admitted or inner is model:
        return admitted
    weights, states = model.state_dict(), optimizer.state_dict()["state"]
    for name, table in tables.items():
        if table.name in admitted and (shards := shards_of(weights[name])):
            rows = admitted[table.name]
            values = initial_rows(inner.growing_ids.ids(table.name)[rows], table)
            _reset_shards(shards, [shards_of(one) for one in states[name].values()], rows, values)
    for module in inner.modules():
        if isinstance(module, ShardedEmbeddingModule):
            for lookup in module._lookups:
                lookup.purge()  # rows that FBGEMM caches; `state_dict()` has written its changes to the tables
    return admitted


def _reset_shards(
    weights: list[tuple[Tensor, int, int]], states: list[list[tuple[Tensor, int, int]]], rows: Tensor, values: Tensor
) -> None:
    """Writes the values [M, D] to rows [M] of a table's shards, and zeros to those of the states, cut alike."""
    for index, (weight, first, column) in enumerate(weights):
        is_here = (rows >= first) & (rows < first + weight.shape[0])
        own = rows[is_here] - first
        weight[own] = values[is_here, column : column + weight.shape[1]].to(weight.dtype)
        for shards in states:
            state, *_ = shards[index]
            if state.dim():  # not the number of steps
                state[own] = 0
