"""Each sample's [L, M] block times its M rows of y.

    X[b] = A[b] Y[b]        dA[b] = dX[b] Y[b]ᵀ        dY[b] = A[b]ᵀ dX[b]

dA is jagged_jagged_bmm_jagged_out; dY is this operator with the blocks read down their columns.
"""

from torch import Tensor

from jfi import reference
from jfi.ops._checks import check_count, check_dim, check_floating, check_impl, check_offsets, check_pairs
from jfi.ops._dispatch import operator, operators, public


def _forward(
    a: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, out_rows: int, transposed: bool, impl: str
) -> Tensor:
    if impl == "triton":
        from jfi.kernels.jagged_ops.array_jagged_bmm_jagged_out import array_jagged_bmm_jagged_out
    else:
        from jfi.cpu.jagged_ops import array_jagged_bmm_jagged_out

    return array_jagged_bmm_jagged_out(a.contiguous(), y.contiguous(), x_offsets, y_offsets, out_rows, transposed)


def _fake(a, y, x_offsets, y_offsets, out_rows, transposed, impl):
    return y.new_empty(out_rows, y.shape[1])


def _save(ctx, inputs, output) -> None:
    *tensors, _, ctx.transposed, ctx.impl = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, grad):
    a, y, x_offsets, y_offsets = ctx.saved_tensors
    da = dy = None
    if ctx.needs_input_grad[0]:
        left, right = (y, grad) if ctx.transposed else (grad, y)
        da = operators.jagged_jagged_bmm_jagged_out(left, right, x_offsets, y_offsets, a.shape[0], ctx.impl)
    if ctx.needs_input_grad[1]:
        product = operators.array_jagged_bmm_jagged_out
        dy = product(a, grad, x_offsets, y_offsets, y.shape[0], not ctx.transposed, ctx.impl)
    return da, dy, None, None, None, None, None


_array_jagged_bmm_jagged_out = operator("array_jagged_bmm_jagged_out", _forward, _fake, _save, _differentiate)


@public
def array_jagged_bmm_jagged_out(
    a: Tensor,
    y: Tensor,
    x_offsets: Tensor,
    y_offsets: Tensor | None = None,
    *,
    out_rows: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """Multiply each sample's [L, M] block with its M rows of y.

    Args:
        a: [Σ L·M], floating: the samples' blocks, row-major, one after another.
        y: [R, D].
        x_offsets: [B+1], int32 or int64, from 0 to S.
        y_offsets: [B+1], from 0 to R; None means x_offsets.
        out_rows: S, if known.  Else, where y_offsets is given, it is read from x_offsets: one synchronization on a GPU.
        impl: "triton", "torch" (on a GPU the plain formula, with large intermediates), or "auto": Triton for CUDA
            tensors except float64, PyTorch otherwise.

    Returns:
        [S, D].  A row of a sample with M = 0 is zero.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:
        >>> import torch, jfi
        >>> jfi.ops.array_jagged_bmm_jagged_out(torch.randn(13), torch.randn(5, 4), torch.tensor([0, 2, 5])).shape
        torch.Size([5, 4])
    """
    check_floating(a=a, y=y)
    check_dim("a", a, "[Σ L·M]")
    check_dim("y", y, "[R, D]")
    check_offsets("x_offsets", x_offsets, None, "", y)
    check_count("out_rows", out_rows)
    if out_rows is None:
        out_rows = y.shape[0] if y_offsets is None else int(x_offsets[-1])
    y_offsets = x_offsets if y_offsets is None else y_offsets
    check_offsets("x_offsets", x_offsets, out_rows, "the output (out_rows)", y)
    check_offsets("y_offsets", y_offsets, y.shape[0], "y", y, x_offsets.shape[0] - 1)
    check_pairs("a", a.shape[0], x_offsets, y_offsets)
    impl = check_impl(impl, y)
    if impl == "torch" and y.is_cuda:
        return reference.array_jagged_bmm_jagged_out(a, y, x_offsets, y_offsets, out_rows)
    x_offsets, y_offsets = x_offsets.contiguous(), y_offsets.contiguous()
    return _array_jagged_bmm_jagged_out(a, y, x_offsets, y_offsets, out_rows, False, impl)
