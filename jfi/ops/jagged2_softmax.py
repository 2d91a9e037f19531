"""Softmax along each row of each sample's [L, M] block.

p[i,j] = exp(a[i,j]) / Σ_k exp(a[i,k])        da[i,j] = p[i,j] (dp[i,j] - Σ_k p[i,k] dp[i,k])
"""

import torch
from torch import Tensor

from jfi import reference
from jfi.ops._checks import check_dim, check_floating, check_impl, check_offsets, check_pairs
from jfi.ops._dispatch import operator, public


def _forward(a: Tensor, x_offsets: Tensor, y_offsets: Tensor) -> Tensor:
    from jfi.kernels.jagged_ops.jagged2_softmax import forward

    return forward(a.contiguous(), x_offsets, y_offsets)


def _forward_fake(a, x_offsets, y_offsets):
    return torch.empty_like(a, memory_format=torch.contiguous_format)


def _backward(grad: Tensor, out: Tensor, x_offsets: Tensor, y_offsets: Tensor) -> Tensor:
    from jfi.kernels.jagged_ops.jagged2_softmax import backward

    return backward(grad.contiguous(), out, x_offsets, y_offsets)


def _backward_fake(grad, out, x_offsets, y_offsets):
    return torch.empty_like(out)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(output, *inputs[1:])


def _differentiate(ctx, grad):
    return _jagged2_softmax_bwd(grad, *ctx.saved_tensors), None, None


_jagged2_softmax_bwd = operator("jagged2_softmax_bwd", _backward, _backward_fake)
_jagged2_softmax_fwd = operator("jagged2_softmax_fwd", _forward, _forward_fake, _save, _differentiate)


@public
def jagged2_softmax(a: Tensor, x_offsets: Tensor, y_offsets: Tensor | None = None, *, impl: str = "auto") -> Tensor:
    """Softmax of packed blocks along their rows, over each row's M entries.

    Args:
        a: [Σ L·M], floating: the samples' [L, M] blocks, row-major, one behind another; -inf hides an entry.
        x_offsets: [B+1], int32 or int64: the samples' L.
        y_offsets: [B+1]: the samples' M; None means x_offsets.
        impl: "triton", "torch", or "auto": Triton for CUDA tensors (float64 excepted), PyTorch otherwise.

    Returns:
        [Σ L·M].  A row of nothing but -inf gives zeros.

    Raises:
        ValueError, TypeError: an argument that does not fit, by name.

    Example:
        >>> import torch, jfi
        >>> jfi.ops.jagged2_softmax(torch.zeros(5), torch.tensor([0, 2, 3]))
        tensor([0.5000, 0.5000, 0.5000, 0.5000, 1.0000])
    """
    y_offsets = x_offsets if y_offsets is None else y_offsets
    check_floating(a=a)
    check_dim("a", a, "[Σ L·M]")
    check_offsets("x_offsets", x_offsets, None, "", a)
    check_offsets("y_offsets", y_offsets, None, "", a, x_offsets.shape[0] - 1)
    check_pairs("a", a.shape[0], x_offsets, y_offsets)
    if check_impl(impl, a) == "torch":
        return reference.jagged2_softmax(a, x_offsets, y_offsets)
    return _jagged2_softmax_fwd(a, x_offsets.contiguous(), y_offsets.contiguous())
