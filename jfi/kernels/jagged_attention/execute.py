"""Executes a plan of jagged attention."""

from collections.abc import Sequence

import torch
from torch import Tensor

from jfi.kernels.common.launch import empty_like
from jfi.kernels.jagged_attention import triton_bwd, triton_fwd
from jfi.kernels.plan import AttentionPlan
from jfi.utils.operands import JaggedAttentionInputs


def forward(x: JaggedAttentionInputs, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
    """The output [R, H, E] and the log-sum-exp of the scores [R, H], -inf where a query sees no key."""
    if not (x.query.shape[0] and x.key.shape[0]):
        out = x.query.new_zeros(*x.query.shape[:2], x.value_dim)
        return out, x.query.new_full(x.query.shape[:2], -torch.inf, dtype=torch.float32)
    if plan.family == "jagged_sm90":
        from jfi.kernels.jagged_attention import sm90  # needs Gluon

        return sm90.forward(x, plan)
    return triton_fwd.forward(x, plan)


def backward(
    grad: Tensor,
    dlse: Tensor | None,
    x: JaggedAttentionInputs,
    out: Tensor,
    lse: Tensor,
    needed: Sequence[bool],
    plan: AttentionPlan,
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of query, key (with that of value if value = key), value, bias and table.

    Args:
        grad: the gradient of out, contiguous and from a multiple of 16 bytes on, as TMA needs.
        dlse: the gradient of lse, contiguous; None if lse was not used.
        out, lse: what ``forward`` returned.
        needed: of these five, which are needed; the others are None. Packed digits and their factors have none.
    """
    if not (x.query.shape[0] and x.key.shape[0]):
        grads = empty_like((x.query, x.key, x.value, x.bias, x.table), needed)
        return tuple(None if y is None else y.zero_() for y in grads)
    if plan.family == "jagged_sm90":
        from jfi.kernels.jagged_attention import sm90

        return sm90.backward(grad, dlse, x, out, lse, needed, plan)
    return triton_bwd.backward(grad, dlse, x, out, lse, needed, plan)
