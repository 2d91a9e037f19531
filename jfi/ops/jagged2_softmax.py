"""Softmax along each row of each sample's [L, M] block.

    p[i,j] = exp(a[i,j]) / Σ_k exp(a[i,k])        da[i,j] = p[i,j] (dp[i,j] - Σ_k p[i,k] dp[i,k])

The backward has a gradient, too: that of jagged_softmax over the rows of the blocks.
"""

import torch
from torch import Tensor

from jfi import reference
from jfi.ops._checks import check_dim, check_floating, check_impl, check_offsets, check_pairs
from jfi.ops._dispatch import operator, public
from jfi.ops.jagged_softmax import softmax_backward_wrt_out


def _forward(a: Tensor, x_offsets: Tensor, y_offsets: Tensor, impl: str) -> Tensor:
    if impl == "triton":
        from jfi.kernels.jagged_ops.jagged2_softmax import forward
    else:
        from jfi.cpu.jagged_ops import jagged2_softmax as forward

    return forward(a.contiguous(), x_offsets, y_offsets)


def _forward_fake(a, x_offsets, y_offsets, impl):
    return torch.empty_like(a, memory_format=torch.contiguous_format)


def _backward(grad: Tensor, out: Tensor, x_offsets: Tensor, y_offsets: Tensor, impl: str) -> Tensor:
    if impl == "triton":
        from jfi.kernels.jagged_ops.jagged2_softmax import backward
    else:
        from jfi.cpu.jagged_ops import jagged2_softmax_backward as backward

    return backward(grad.contiguous(), out.contiguous(), x_offsets, y_offsets)


def _backward_fake(grad, out, x_offsets, y_offsets, impl):
    return torch.empty_like(out, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output) -> None:
    _, *offsets, ctx.impl = inputs
    ctx.save_for_backward(output, *offsets)


def _differentiate(ctx, grad):
    return _jagged2_softmax_bwd(grad, *ctx.saved_tensors, ctx.impl), None, None, None


def _save_backward(ctx, inputs, output) -> None:
    *tensors, ctx.impl = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_backward(ctx, grad):
    dout, out, *offsets = ctx.saved_tensors
    dgrad = dp = None
    if ctx.needs_input_grad[0]:
        dgrad = _jagged2_softmax_bwd(grad, out, *offsets, ctx.impl)
    if ctx.needs_input_grad[1]:
        rows = reference.Pairs(*offsets, out.shape[0]).filled_row_offsets()
        dp = softmax_backward_wrt_out(grad[:, None], dout[:, None], out[:, None], rows)[:, 0]
    return dgrad, dp, None, None, None


_jagged2_softmax_bwd = operator(
    "jagged2_softmax_bwd", _backward, _backward_fake, _save_backward, _differentiate_backward
)
_jagged2_softmax_fwd = operator("jagged2_softmax_fwd", _forward, _forward_fake, _save, _differentiate)


@public
def jagged2_softmax(a: Tensor, x_offsets: Tensor, y_offsets: Tensor | None = None, *, impl: str = "auto") -> Tensor:
    """Softmax of packed blocks along their rows, over each row's M entries.

    Args:
        a: [Σ L·M], floating: the samples' [L, M] blocks, row-major, one after another; -inf hides an entry.
        x_offsets: [B+1], int32 or int64: the samples' L.
        y_offsets: [B+1]: the samples' M; None means x_offsets.
        impl: "triton", "torch" (on a GPU the plain formula, with large intermediates), or "auto": Triton for CUDA
            tensors except float64, PyTorch otherwise.

    Returns:
        [Σ L·M].  A row that is -inf throughout gives zeros.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

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
    impl = check_impl(impl, a)
    if impl == "torch" and a.is_cuda:
        return reference.jagged2_softmax(a, x_offsets, y_offsets)
    return _jagged2_softmax_fwd(a, x_offsets.contiguous(), y_offsets.contiguous(), impl)
