"""Target attention over parts of each sample's history, and the attention over all of it from theirs.

Events of a sample lie in P parts, on the ranks that own their rows, say. Each part gives an output O_p and the
log-sum-exp L_p of its scores, from which the whole follows without another look at the events:

    L = log Σ_p exp(L_p)        O = Σ_p exp(L_p - L) O_p

Backward, the weights of the whole are exp(score - L) in every part, and with Δ = Σ_e dO·O

    dS = exp(score - L) (dO·v - Δ)

so that a part needs dO, L and Δ, not O. The gradients of its own events are complete, and dq is the sum of the parts'.

Everywhere impl is "triton" or "torch".
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from jfi.ops.dispatch import operators
from jfi.utils.operands import TargetAttentionInputs


def attend_to_part(inputs: TargetAttentionInputs, impl: str) -> tuple[Tensor, Tensor]:
    """A part's output [B, T, H, E] and log-sum-exp [B, T, H]; without an event 0 and -inf. Not differentiable."""
    return operators.target_attention_fwd(*inputs, impl)


def part_gradients(
    grad: Tensor, out: Tensor, lse: Tensor, needed: Sequence[bool], inputs: TargetAttentionInputs, impl: str
) -> list[Tensor | None]:
    """Returns the gradients of a part's query, key, value and key_bias, None for those that are not needed.

    Args:
        grad: dO [B, T, H, E], of the whole.
        out: O [B, T, H, E] of the whole, or any other with the same Δ = dO·O.
        lse: L [B, T, H] float32, of the whole.
        needed: of the four, which are needed.
        inputs: of the part, as `attend_to_part` took them.
    """
    gradients = iter(operators.target_attention_bwd(grad, None, *inputs, out, lse, [*needed, False], impl))
    return [next(gradients) if need else None for need in needed]


def pack_part(out: Tensor, lse: Tensor, impl: str) -> Tensor:
    """[..., E + n]: what a part sends: its output [..., E] and, as n elements, its log-sum-exp [...] float32."""
    if kernels := _kernels(out.size(-1), out.dtype, impl):
        return kernels.pack(out, None, lse)
    return torch.cat([out, _as_elements(lse, out.dtype)], -1)


def combine_parts(parts: Tensor, impl: str) -> tuple[Tensor, Tensor]:
    """The whole's output [..., E], in the dtype of the parts, and log-sum-exp [...] float32.

    Args:
        parts: [P, ..., E + n] of `pack_part`; a part without events has a log-sum-exp of -inf.

    Example:
        >>> outs, lses = torch.tensor([[1.0], [5.0]]).unsqueeze(-1), torch.tensor([[0.0], [-torch.inf]])
        >>> combine_parts(pack_part(outs, lses, "torch"), "torch")
        (tensor([[1.]]), tensor([0.]))
    """
    count = 4 // parts.dtype.itemsize  # elements of a float32 number
    width = parts.size(-1) - count
    if kernels := _kernels(width, parts.dtype, impl):
        return kernels.combine(parts)
    outs, lses = parts.split([width, count], -1)
    lses = _as_numbers(lses)
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - lse).nan_to_num_(0.0)  # -inf - -inf: nobody has an event
    return (outs.float() * weights.unsqueeze(-1)).sum(0).to(outs.dtype), lse


def pack_gradient(grad: Tensor, out: Tensor, lse: Tensor, impl: str) -> Tensor:
    """[..., E + 2n]: what a part needs in the backward pass: dO [..., E] of the whole, Δ and the log-sum-exp [...]."""
    if kernels := _kernels(out.size(-1), out.dtype, impl):
        return kernels.pack(grad, out, lse)
    delta = (grad.float() * out.float()).sum(-1)
    return torch.cat([grad, _as_elements(delta, grad.dtype), _as_elements(lse, grad.dtype)], -1)


def unpack_gradient(packed: Tensor, width: int, scale: float, impl: str) -> tuple[Tensor, Tensor, Tensor]:
    """dO · scale [..., E], an O with the same dO·O as the whole's, and L, as `part_gradients` takes them.

    Args:
        packed: [..., E + 2n] of `pack_gradient`.
        width: E.
        scale: factor of the gradient.
    """
    if kernels := _kernels(width, packed.dtype, impl):
        return kernels.unpack(packed, width, scale)
    count = 4 // packed.dtype.itemsize
    grad, delta, lse = packed.split([width, count, count], -1)
    # A multiple of dO, so that O need not be sent.
    wide = grad.float() * scale
    square = wide.square().sum(-1).clamp_(min=torch.finfo(torch.float32).tiny)
    out = wide * (_as_numbers(delta) * scale / square).unsqueeze(-1)
    return wide.to(grad.dtype), out.to(grad.dtype), _as_numbers(lse)


def add_parts(parts: Tensor, scale: float, impl: str) -> Tensor:
    """[..., D]: the sum of the parts' gradients [P, ..., D] of the query, in float32, times scale, in their dtype."""
    if kernels := _kernels(parts.size(-1), parts.dtype, impl):
        return kernels.add(parts, scale)
    return (parts.float().sum(0) * scale).to(parts.dtype)


def _kernels(width: int, dtype: torch.dtype, impl: str):
    """The module of kernels for such rows, or None."""
    if impl != "triton":
        return None
    from jfi.kernels.target_attention import partials_message

    return partials_message if partials_message.fits_message(width, dtype) else None


def _as_elements(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 numbers [...] as their bits in another dtype: [..., 1] or [..., 2]."""
    return numbers.unsqueeze(-1).contiguous().view(dtype)


def _as_numbers(bits: Tensor) -> Tensor:
    return bits.contiguous().view(torch.float32).squeeze(-1)
