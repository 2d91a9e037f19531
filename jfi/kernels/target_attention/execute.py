"""Target attention in Triton, as planned: one tile of few query rows per key head, or tiles of many of them."""

import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from jfi.kernels.common.launch import empty_like
from jfi.kernels.plan import AttentionPlan
from jfi.kernels.target_attention import multi_tile_bwd, multi_tile_fwd, single_tile_bwd, single_tile_fwd
from jfi.utils.operands import JaggedAttentionInputs, TargetAttentionInputs


def forward(
    x: TargetAttentionInputs, chosen: AttentionPlan, launch: Callable[..., None] = operator.call
) -> tuple[Tensor, Tensor]:
    """Returns output [B, T, H, E] and log-sum-exp [B, T, H], -inf for an empty history; launch: calls a launcher."""
    batch, num_queries, num_heads, _ = x.query.shape
    out = x.query.new_empty(batch, num_queries, num_heads, chosen.problem.value_dim)
    lse = x.query.new_empty(batch, num_queries, num_heads, dtype=torch.float32)
    if not isinstance(batch, int) or batch:  # a symbol under torch.export, where batches have samples
        kernels = multi_tile_fwd if chosen.family == "target_multi_tile" else single_tile_fwd
        kernels.forward(x, chosen, out, lse, launch)
    return out, lse


def backward(
    grad: Tensor,
    x: TargetAttentionInputs,
    out: Tensor,
    lse: Tensor,
    needed: Sequence[bool],
    chosen: AttentionPlan,
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of query, key (key + value where they are shared), value, bias and second.

    Args:
        grad, x, out, lse: the gradient of the output, and the inputs and results of ``forward``.
        needed: of these five, which are needed; the others are None.
        chosen: as ``forward`` got it.
    """
    if not x.query.shape[0]:
        grads = empty_like((x.query, x.key, x.value, x.bias, x.second), needed)
        return tuple(None if y is None else y.zero_() for y in grads)
    kernels = multi_tile_bwd if chosen.family == "target_multi_tile" else single_tile_bwd
    return kernels.backward(grad, x, out, lse, needed, chosen)


def as_jagged(x: TargetAttentionInputs) -> JaggedAttentionInputs:
    """T queries for every sample."""
    batch, num_queries = x.query.shape[:2]
    query_offsets = torch.arange(0, (batch + 1) * num_queries, num_queries, device=x.query.device)
    tensors = (x.query.flatten(0, 1), x.key, x.value, query_offsets, x.offsets, x.bias)
    # No edges, no table of biases, no times, no window.
    return JaggedAttentionInputs(*tensors, None, None, None, None, x.scale, None, None, False)
