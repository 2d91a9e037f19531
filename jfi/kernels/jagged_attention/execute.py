"""Executes a plan of jagged attention."""

from collections.abc import Sequence

import torch
from torch import Tensor

from jfi.kernels.common.launch import empty_like
from jfi.kernels.jagged_attention import triton_bwd, triton_fwd
from jfi.kernels.plan import AttentionPlan
from jfi.utils.operands import JaggedAttentionInputs

#: Schedules have rows in 32 bits, from which a tile may go on past the last.
_MAX_ROWS = 2**31 - 256


def forward(x: JaggedAttentionInputs, plan: AttentionPlan) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the output [R, H, E] and the log-sum-exp of the scores [R, H], -inf where a query sees no key.

    The third is a schedule that one ``backward`` may take; None if there is none.

    Raises:
        ValueError: the positions of query or key rows do not fit 32 bits.
    """
    heads = plan.problem.qheads_per_kvhead
    if x.query.shape[0] * heads >= _MAX_ROWS:
        raise ValueError(f"query must have fewer than 2³¹ rows · heads per key head, got {x.query.shape[0]} · {heads}")
    if x.key.shape[0] >= _MAX_ROWS:
        raise ValueError(f"key must have fewer than 2³¹ rows, got {x.key.shape[0]}")
    if not (x.query.shape[0] and x.key.shape[0]):
        out = x.query.new_zeros(*x.query.shape[:2], x.value_dim)
        return out, x.query.new_full(x.query.shape[:2], -torch.inf, dtype=torch.float32), None
    if plan.family == "jagged_sm90":
        from jfi.kernels.jagged_attention import sm90  # needs Gluon

        return sm90.forward(x, plan)
    return *triton_fwd.forward(x, plan), None


def backward(
    grad: Tensor,
    dlse: Tensor | None,
    x: JaggedAttentionInputs,
    out: Tensor,
    lse: Tensor,
    needed: Sequence[bool],
    plan: AttentionPlan,
    schedule: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of query, key (with that of value if value = key), value, bias and table.

    Args:
        grad: the gradient of out, contiguous and from a multiple of 16 bytes on, as TMA needs.
        dlse: the gradient of lse, contiguous; None if lse was not used.
        out, lse: what ``forward`` returned.
        needed: of these five, which are needed; the others are None. Packed digits and their factors have none.
        schedule: what ``forward`` returned, or None.
    """
    if not (x.query.shape[0] and x.key.shape[0]):
        grads = empty_like((x.query, x.key, x.value, x.bias, x.table), needed)
        return tuple(None if y is None else y.zero_() for y in grads)
    if plan.family == "jagged_sm90":
        from jfi.kernels.jagged_attention import sm90

        return sm90.backward(grad, dlse, x, out, lse, needed, plan, schedule)
    return triton_bwd.backward(grad, dlse, x, out, lse, needed, plan)
