"""Jagged softmax: over each sample's rows, column by column.

p[s,t] = exp(x[s,t]) / Σ_r exp(x[r,t])        dx[s,t] = p[s,t] (dp[s,t] - Σ_r p[r,t] dp[r,t])        r, s in sample b
"""

import torch
from torch import Tensor

from jfi import reference
from jfi.ops._checks import check_dim, check_floating, check_impl, check_offsets
from jfi.ops._dispatch import operator, public


def _forward(x: Tensor, offsets: Tensor) -> Tensor:
    from jfi.kernels.jagged_ops.jagged_softmax import forward

    return forward(x.contiguous(), offsets)


def _forward_fake(x, offsets):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _backward(grad: Tensor, out: Tensor, offsets: Tensor) -> Tensor:
    from jfi.kernels.jagged_ops.jagged_softmax import backward

    return backward(grad.contiguous(), out, offsets)


def _backward_fake(grad, out, offsets):
    return torch.empty_like(out)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(output, inputs[1])


def _differentiate(ctx, grad):
    return _jagged_softmax_bwd(grad, *ctx.saved_tensors), None


_jagged_softmax_bwd = operator("jagged_softmax_bwd", _backward, _backward_fake)
_jagged_softmax_fwd = operator("jagged_softmax_fwd", _forward, _forward_fake, _save, _differentiate)


@public
def jagged_softmax(x: Tensor, offsets: Tensor, *, impl: str = "auto") -> Tensor:
    """Softmax of a jagged tensor over each sample's rows.

    Args:
        x: [S, T], floating; -inf hides an entry.
        offsets: [B+1], int32 or int64, from 0 to S.
        impl: "triton", "torch", or "auto": Triton for CUDA tensors (float64 excepted), PyTorch otherwise.

    Returns:
        [S, T].  A sample's column of nothing but -inf gives zeros.

    Raises:
        ValueError, TypeError: an argument that does not fit, by name.

    Example:
        >>> import torch, jfi
        >>> jfi.ops.jagged_softmax(torch.zeros(5, 1), torch.tensor([0, 4, 5]))[:, 0]
        tensor([0.2500, 0.2500, 0.2500, 0.2500, 1.0000])
    """
    check_floating(x=x)
    check_dim("x", x, "[S, T]")
    check_offsets("offsets", offsets, x.shape[0], "x", x)
    if check_impl(impl, x) == "torch":
        return reference.jagged_softmax(x, offsets)
    return _jagged_softmax_fwd(x, offsets.contiguous())
