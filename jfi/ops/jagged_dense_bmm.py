"""Jagged times dense: each row of a sample times the sample's matrix.

    y[s] = x[s] A[b]        dx = dy Aᵀ        dA[b] = Σ_s x[s]ᵀ dy[s]        s in sample b

Both gradients are again products of this family: dx is this operator with A read transposed, dA is jagged_jagged_bmm.
"""

from torch import Tensor

from jfi import reference
from jfi.ops._checks import check_dim, check_floating, check_impl, check_offsets, check_size
from jfi.ops._dispatch import operator, operators, public


def _forward(x: Tensor, offsets: Tensor, dense: Tensor, transposed: bool, impl: str) -> Tensor:
    if impl == "triton":
        from jfi.kernels.jagged_ops.jagged_dense_bmm import jagged_dense_bmm
    else:
        from jfi.cpu.jagged_ops import jagged_dense_bmm

    return jagged_dense_bmm(x.contiguous(), offsets, dense.contiguous(), transposed)


def _fake(x, offsets, dense, transposed, impl):
    return x.new_empty(x.shape[0], dense.shape[1 if transposed else 2])


def _save(ctx, inputs, output) -> None:
    x, offsets, dense, ctx.transposed, ctx.impl = inputs
    ctx.save_for_backward(x, offsets, dense)


def _differentiate(ctx, grad):
    x, offsets, dense = ctx.saved_tensors
    dx = ddense = None
    if ctx.needs_input_grad[0]:
        dx = operators.jagged_dense_bmm(grad, offsets, dense, not ctx.transposed, ctx.impl)
    if ctx.needs_input_grad[2]:
        left, right = (grad, x) if ctx.transposed else (x, grad)
        ddense = operators.jagged_jagged_bmm(left, right, offsets, ctx.impl)
    return dx, None, ddense, None, None


_jagged_dense_bmm = operator("jagged_dense_bmm", _forward, _fake, _save, _differentiate)


@public
def jagged_dense_bmm(x: Tensor, offsets: Tensor, dense: Tensor, *, impl: str = "auto") -> Tensor:
    """Multiply every row of a jagged tensor by its sample's matrix.

    Args:
        x: [S, D], floating.
        offsets: [B+1], int32 or int64, from 0 to S.
        dense: [B, D, T].
        impl: "triton", "torch" (on a GPU the plain formula, with large intermediates), or "auto": Triton for CUDA
            tensors except float64, PyTorch otherwise.

    Returns:
        [S, T].

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:
        >>> import torch, jfi
        >>> jfi.ops.jagged_dense_bmm(torch.randn(5, 4), torch.tensor([0, 2, 5]), torch.randn(2, 4, 3)).shape
        torch.Size([5, 3])
    """
    check_floating(x=x, dense=dense)
    check_dim("x", x, "[S, D]")
    check_dim("dense", dense, "[B, D, T]")
    check_size("dense", dense.shape[1], x.shape[1], "D")
    check_offsets("offsets", offsets, x.shape[0], "x", x, dense.shape[0])
    impl = check_impl(impl, x)
    if impl == "torch" and x.is_cuda:
        return reference.jagged_dense_bmm(x, offsets, dense)
    return _jagged_dense_bmm(x, offsets.contiguous(), dense, False, impl)
