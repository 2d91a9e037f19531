"""Target attention backward for many query rows: many candidates, or many heads, to one history.

Up to a tile of query rows, one sweep gives all gradients and each history row is read once.  More of them take two
sweeps, since the gradients of both sides do not fit into registers together: one for the gradient of the queries, which
also stores their log-sum-exp and Δ = Σ_e dO · O, and one with a program per tile of history rows that loops over the
query rows.  That is seven GEMMs instead of five, and still faster than one sweep that accumulates the gradient of the
queries in memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from jfi.kernels.common.launch import empty_like
from jfi.kernels.common.primitives import most_tiles
from jfi.kernels.common.spec import attention_launcher
from jfi.kernels.plan import AttentionPlan
from jfi.kernels.target_attention.multi_tile_chunks import (
    STATISTICS,
    history_descriptor,
    query_descriptor,
    split_into_chunks,
)
from jfi.kernels.target_attention.multi_tile_dhistory import target_attention_multi_tile_dhistory_kernel
from jfi.kernels.target_attention.multi_tile_dquery import target_attention_multi_tile_dquery_kernel
from jfi.utils.integers import ceil_div
from jfi.utils.operands import TargetAttentionInputs


def backward(
    grad: Tensor, x: TargetAttentionInputs, out: Tensor, lse: Tensor, needed: Sequence[bool], chosen: AttentionPlan
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of query, key (key + value where they are shared), value and bias, and None for second.

    Those that are not needed are None.
    """
    problem = chosen.problem
    batch, (num_keys, num_kv_heads, head_dim) = x.query.shape[0], x.key.shape
    dquery, dkey, dvalue, dbias = empty_like((x.query, x.key, x.value, x.bias), needed[:4])
    dquery_plan, *dhistory_plan = chosen.backward
    if dkey is None and dvalue is None and dbias is None:
        dhistory_plan = []
    partials, grid, numbers = split_into_chunks(x, problem, dquery_plan.block_m, head_dim)
    num_rows = numbers[1]
    statistics = tile_samples = None
    if dhistory_plan:
        history_tiles = most_tiles(num_keys, batch, dhistory_plan[0].block_n)
        padded = ceil_div(num_rows, STATISTICS.value) * STATISTICS.value
        statistics = lse.new_empty(batch * num_kv_heads * 2 * padded)
        tile_samples = x.offsets.new_empty(history_tiles, dtype=torch.int32)
    descriptors = (None, None, None)
    if dquery_plan.constants["BY_TMA"]:
        shared_gradient = dkey if problem.shared_kv else None
        descriptors = tuple(history_descriptor(y, dquery_plan.block_n) for y in (x.key, x.value, shared_gradient))
    history = (x.key, x.value, x.bias, x.offsets)
    outputs = (dquery, dkey, dvalue, dbias, partials.values, statistics, tile_samples)
    tensors = ((x.query, grad, out, lse), history, outputs)
    launch = attention_launcher(target_attention_multi_tile_dquery_kernel, problem, dquery_plan)
    launch(grid, tensors, (*numbers, x.scale), descriptors)
    if dquery is not None:
        partials.combine(x.offsets, dquery, None)
    if dhistory_plan:
        kernel = dhistory_plan[0]
        launch = attention_launcher(target_attention_multi_tile_dhistory_kernel, problem, kernel)
        descriptors = (None, None)
        if kernel.constants["BY_TMA"]:
            descriptors = tuple(query_descriptor(y, num_kv_heads, kernel.block_m) for y in (x.query, grad))
        tensors = ((x.query, grad, statistics), (*history, tile_samples), (dkey, dvalue, dbias))
        launch((history_tiles, num_kv_heads, 1), tensors, (num_rows, x.scale), descriptors)
    return dquery, dkey, dvalue, dbias, None
