"""Executes a plan of jagged attention."""

import torch
from torch import Tensor

from jfi.kernels.jagged_attention import triton_bwd, triton_fwd
from jfi.plan import AttentionPlan, JaggedAttentionInputs


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
    grad: Tensor, dlse: Tensor | None, x: JaggedAttentionInputs, out: Tensor, lse: Tensor, plan: AttentionPlan
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key (with that of value if value = key), value, bias and table, None for those not given.

    Packed digits, and factors of theirs, have none.

    Args:
        out, lse: what ``forward`` returned.
        grad: the gradient of out, contiguous and from a multiple of 16 bytes on, as TMA needs.
        dlse: the gradient of lse, contiguous; None if lse was not used.
    """
    if not (x.query.shape[0] and x.key.shape[0]):
        inputs = (x.query, *x.trained_keys, x.bias, x.table)
        return tuple(None if y is None else torch.zeros_like(y) for y in inputs)
    if plan.family == "jagged_sm90":
        from jfi.kernels.jagged_attention import sm90

        return sm90.backward(grad, dlse, x, out, lse, plan)
    return triton_bwd.backward(grad, dlse, x, out, lse, plan)
