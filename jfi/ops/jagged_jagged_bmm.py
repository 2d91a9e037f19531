"""Jagged times jagged: each sample's xᵀy.

    Z[b] = Σ_s x[s]ᵀ y[s]        dx[s] = y[s] dZ[b]ᵀ        dy[s] = x[s] dZ[b]        s in sample b

Both gradients are jagged_dense_bmm.
"""

from torch import Tensor

from jfi import reference
from jfi.ops._checks import check_dim, check_floating, check_impl, check_offsets, check_size
from jfi.ops._dispatch import operator, operators, public


def _forward(x: Tensor, y: Tensor, offsets: Tensor, impl: str) -> Tensor:
    if impl == "triton":
        from jfi.kernels.jagged_ops.jagged_jagged_bmm import jagged_jagged_bmm
    else:
        from jfi.cpu.jagged_ops import jagged_jagged_bmm

    return jagged_jagged_bmm(x.contiguous(), y.contiguous(), offsets)


def _fake(x, y, offsets, impl):
    return x.new_empty(offsets.shape[0] - 1, x.shape[1], y.shape[1])


def _differentiate(ctx, grad):
    x, y, offsets = ctx.saved_tensors
    dx = operators.jagged_dense_bmm(y, offsets, grad, True, ctx.impl) if ctx.needs_input_grad[0] else None
    dy = operators.jagged_dense_bmm(x, offsets, grad, False, ctx.impl) if ctx.needs_input_grad[1] else None
    return dx, dy, None, None


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.impl = inputs
    ctx.save_for_backward(*tensors)


_jagged_jagged_bmm = operator("jagged_jagged_bmm", _forward, _fake, _save, _differentiate)


@public
def jagged_jagged_bmm(x: Tensor, y: Tensor, offsets: Tensor, *, impl: str = "auto") -> Tensor:
    """Multiply two jagged tensors sample by sample, over the samples' rows.

    Args:
        x: [S, D], floating.
        y: [S, T].
        offsets: [B+1], int32 or int64, from 0 to S, of both.
        impl: "triton", "torch" (on a GPU the plain formula, with large intermediates), or "auto": Triton for CUDA
            tensors except float64, PyTorch otherwise.

    Returns:
        [B, D, T].  An empty sample gives zeros.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:
        >>> import torch, jfi
        >>> jfi.ops.jagged_jagged_bmm(torch.randn(5, 4), torch.randn(5, 3), torch.tensor([0, 2, 5])).shape
        torch.Size([2, 4, 3])
    """
    check_floating(x=x, y=y)
    check_dim("x", x, "[S, D]")
    check_dim("y", y, "[S, T]")
    check_size("y", y.shape[0], x.shape[0], "S")
    check_offsets("offsets", offsets, x.shape[0], "x", x)
    impl = check_impl(impl, x)
    if impl == "torch" and x.is_cuda:
        return reference.jagged_jagged_bmm(x, y, offsets)
    return _jagged_jagged_bmm(x, y, offsets.contiguous(), impl)
