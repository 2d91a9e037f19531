"""Jagged times jagged, transposed: each sample's xyᵀ, all pairs of its rows, packed one after another.

    A[b] = X[b] Y[b]ᵀ        dX[b] = dA[b] Y[b]        dY[b] = dA[b]ᵀ X[b]

Both gradients are array_jagged_bmm_jagged_out, the second with the blocks read down their columns.
"""

from torch import Tensor

from jfi import reference
from jfi.ops._checks import (
    check_count,
    check_dim,
    check_floating,
    check_impl,
    check_offsets,
    check_pairs,
    check_size,
    count_pairs,
)
from jfi.ops._dispatch import operator, operators, public


def _forward(x: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, out_size: int, impl: str) -> Tensor:
    if impl == "triton":
        from jfi.kernels.jagged_ops.jagged_jagged_bmm_jagged_out import jagged_jagged_bmm_jagged_out
    else:
        from jfi.cpu.jagged_ops import jagged_jagged_bmm_jagged_out

    return jagged_jagged_bmm_jagged_out(x.contiguous(), y.contiguous(), x_offsets, y_offsets, out_size)


def _fake(x, y, x_offsets, y_offsets, out_size, impl):
    return x.new_empty(out_size)


def _differentiate(ctx, grad):
    x, y, x_offsets, y_offsets = ctx.saved_tensors
    product = operators.array_jagged_bmm_jagged_out
    dx = product(grad, y, x_offsets, y_offsets, x.shape[0], False, ctx.impl) if ctx.needs_input_grad[0] else None
    dy = product(grad, x, x_offsets, y_offsets, y.shape[0], True, ctx.impl) if ctx.needs_input_grad[1] else None
    return dx, dy, None, None, None, None


def _save(ctx, inputs, output) -> None:
    *tensors, _, ctx.impl = inputs
    ctx.save_for_backward(*tensors)


_jagged_jagged_bmm_jagged_out = operator("jagged_jagged_bmm_jagged_out", _forward, _fake, _save, _differentiate)


@public
def jagged_jagged_bmm_jagged_out(
    x: Tensor,
    y: Tensor,
    x_offsets: Tensor,
    y_offsets: Tensor | None = None,
    *,
    out_size: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """Dot products of each sample's L rows of x with its M rows of y.

    Args:
        x: [S, D], floating.
        y: [R, D].
        x_offsets: [B+1], int32 or int64, from 0 to S.
        y_offsets: [B+1], from 0 to R; None means x_offsets.
        out_size: Σ L·M, if known.  Else it is read from the offsets: one synchronization on a GPU, and a graph break
            under torch.compile.
        impl: "triton", "torch" (on a GPU the plain formula, with large intermediates), or "auto": Triton for CUDA
            tensors except float64, PyTorch otherwise.

    Returns:
        [Σ L·M]: the samples' [L, M] blocks, row-major, one after another.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:
        >>> import torch, jfi
        >>> x = torch.randn(5, 4)
        >>> jfi.ops.jagged_jagged_bmm_jagged_out(x, x, torch.tensor([0, 2, 5])).shape
        torch.Size([13])
    """
    y_offsets = x_offsets if y_offsets is None else y_offsets
    check_floating(x=x, y=y)
    check_dim("x", x, "[S, D]")
    check_dim("y", y, "[R, D]")
    check_size("y", y.shape[1], x.shape[1], "D")
    check_offsets("x_offsets", x_offsets, x.shape[0], "x", x)
    check_offsets("y_offsets", y_offsets, y.shape[0], "y", x, x_offsets.shape[0] - 1)
    check_count("out_size", out_size)
    if out_size is None:
        out_size = count_pairs(x_offsets, y_offsets)
    else:
        check_pairs("out_size", out_size, x_offsets, y_offsets)
    impl = check_impl(impl, x)
    if impl == "torch" and x.is_cuda:
        return reference.jagged_jagged_bmm_jagged_out(x, y, x_offsets, y_offsets, out_size)
    return _jagged_jagged_bmm_jagged_out(x, y, x_offsets.contiguous(), y_offsets.contiguous(), out_size, impl)
