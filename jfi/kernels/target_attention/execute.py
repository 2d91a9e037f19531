"""Target attention in Triton, as planned: one tile of few query rows per key head, or tiles of many of them.

Where one sample's queries fill several tiles, jagged attention with T queries per sample may be faster.
"""

import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from jfi.kernels.common.launch import empty_like
from jfi.kernels.plan import AttentionPlan, plan_target_attention
from jfi.kernels.target_attention import multi_tile_bwd, multi_tile_fwd, single_tile_bwd, single_tile_fwd
from jfi.utils.operands import JaggedAttentionInputs, TargetAttentionInputs


def forward(x: TargetAttentionInputs, chosen: AttentionPlan | None = None) -> tuple[Tensor, Tensor]:
    """The output [B, T, H, E] and the log-sum-exp of the scores [B, T, H], -inf for an empty history.

    Args:
        x: contiguous operands.
        chosen: None means `plan_target_attention`.
    """
    query = x.query
    chosen = plan_target_attention(x, "triton") if chosen is None else chosen
    batch, num_queries, num_heads, _ = query.shape
    if chosen.family == "jagged_sm90":
        from jfi.kernels.jagged_attention import execute as jagged_attention

        out, lse = jagged_attention.forward(_as_jagged(x), chosen)
        return out.view(batch, num_queries, num_heads, -1), lse.view(batch, num_queries, num_heads)
    if not batch:
        out = query.new_empty(0, num_queries, num_heads, chosen.problem.value_dim)
        return out, query.new_empty(0, num_queries, num_heads, dtype=torch.float32)
    return launch_forward(x, chosen)


def launch_forward(
    x: TargetAttentionInputs, chosen: AttentionPlan, launch: Callable[..., None] = operator.call
) -> tuple[Tensor, Tensor]:
    """Returns the results of `forward` for at least one sample; launch: calls a launcher with its arguments."""
    batch, num_queries, num_heads, _ = x.query.shape
    out = x.query.new_empty(batch, num_queries, num_heads, chosen.problem.value_dim)
    lse = x.query.new_empty(batch, num_queries, num_heads, dtype=torch.float32)
    kernels = multi_tile_fwd if chosen.family == "target_multi_tile" else single_tile_fwd
    kernels.forward(x, chosen, out, lse, launch)
    return out, lse


def backward(
    grad: Tensor,
    x: TargetAttentionInputs,
    out: Tensor,
    lse: Tensor,
    needed: Sequence[bool],
    chosen: AttentionPlan | None = None,
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of query, key (key + value where they are shared), value, bias and second.

    Args:
        grad, x, out, lse: the gradient of the output, and the inputs and results of ``forward``.
        needed: of these five, which are needed; the others are None.
        chosen: None means `plan_target_attention`.
    """
    chosen = plan_target_attention(x, "triton") if chosen is None else chosen
    if not x.query.shape[0]:
        grads = empty_like((x.query, x.key, x.value, x.bias, x.second), needed)
        return tuple(None if y is None else y.zero_() for y in grads)
    if chosen.family == "jagged_sm90":
        from jfi.kernels.jagged_attention import execute as jagged_attention

        grad, out, lse = (y.flatten(0, 1) for y in (grad, out, lse))
        needed = (*needed[:4], False)  # no table of biases
        dquery, *others = jagged_attention.backward(grad, None, _as_jagged(x), out, lse, needed, chosen)
        return None if dquery is None else dquery.view_as(x.query), *others
    kernels = multi_tile_bwd if chosen.family == "target_multi_tile" else single_tile_bwd
    return kernels.backward(grad, x, out, lse, needed, chosen)


def _as_jagged(x: TargetAttentionInputs) -> JaggedAttentionInputs:
    """T queries for every sample."""
    batch, num_queries = x.query.shape[:2]
    query_offsets = torch.arange(0, (batch + 1) * num_queries, num_queries, device=x.query.device)
    rows = x.query.flatten(0, 1)
    tensors = (rows, x.key, x.value, query_offsets, x.offsets, x.bias)
    no_edges = dict.fromkeys(("edges", "table", "query_time", "key_time"))
    return JaggedAttentionInputs(*tensors, **no_edges, scale=x.scale, left=None, right=None, is_causal=False)
