"""Target attention over parts of each sample's history, and the attention over all of it from theirs.

Events of a sample lie in P parts, on the ranks that own their rows, say. Each part gives an output O_p and the
log-sum-exp L_p of its scores, from which the whole follows without another look at the events:

    L = log Σ_p exp(L_p)        O = Σ_p exp(L_p - L) O_p

Backward, the weights of the whole are exp(score - L) in every part, and with Δ = Σ_e dO·O

    dS = exp(score - L) (dO·v - Δ)

so that a part needs dO, L and Δ, not O. The gradients of its own events are complete, and dq is the sum of the parts'.
"""

import torch
from torch import Tensor

from jfi.ops._dispatch import operators
from jfi.ops.rows_by_id import padded
from jfi.plan import TargetAttentionInputs


def attend_to_part(inputs: TargetAttentionInputs, impl: str) -> tuple[Tensor, Tensor]:
    """A part's output [B, T, H, E] and log-sum-exp [B, T, H]; without an event 0 and -inf. Not differentiable.

    Args:
        inputs: checked, of `prepare_target_attention`.
        impl: "triton" or "torch".
    """
    *tensors, tables, indices, scale, max_seqlen = inputs
    by_id = (*padded(tables), *padded(indices))
    return operators.target_attention_fwd(*tensors, *by_id, scale, max_seqlen, impl)


def part_gradients(
    grad: Tensor, delta: Tensor, lse: Tensor, inputs: TargetAttentionInputs, impl: str
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of a part's query, key, value and key_bias; None of what the part has not.

    Args:
        grad: dO [B, T, H, E], of the whole.
        delta: Δ [B, T, H] float32, of the whole.
        lse: L [B, T, H] float32, of the whole.
        inputs: of the part, as `attend_to_part` took them.
        impl: as `attend_to_part` took it.
    """
    *tensors, tables, indices, scale, max_seqlen = inputs
    by_id = (*padded(tables), *padded(indices))
    # Kernels take Δ as dO·O; any O with that product will do, and a multiple of dO needs none to be sent.
    wide = grad.float()
    square = wide.square().sum(-1).clamp_(min=torch.finfo(torch.float32).tiny)
    out = (wide * (delta / square).unsqueeze(-1)).to(grad.dtype)
    found = iter(operators.target_attention_bwd(grad, *tensors, *by_id, out, lse, scale, max_seqlen, impl))
    dquery, dkey = next(found), next(found)
    dvalue = None if inputs.value is None else next(found)
    return dquery, dkey, dvalue, None if inputs.bias is None else next(found)


def combine_parts(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """The whole's output [..., E], in the dtype of the parts', and log-sum-exp [...] float32.

    Args:
        outs: [P, ..., E].
        lses: [P, ...], -inf for a part without events.

    Example:
        >>> outs, lses = torch.tensor([[1.0], [5.0]]).unsqueeze(-1), torch.tensor([[0.0], [-torch.inf]])
        >>> combine_parts(outs, lses)
        (tensor([[1.]]), tensor([0.]))
    """
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - lse).nan_to_num_(0.0)  # -inf - -inf: nobody has an event
    return (outs.float() * weights.unsqueeze(-1)).sum(0).to(outs.dtype), lse
