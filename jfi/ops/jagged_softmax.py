"""Jagged softmax: over each sample's rows, column by column.

    p[s,t] = exp(x[s,t]) / Σ_r exp(x[r,t])        dx[s,t] = p[s,t] (dp[s,t] - Σ_r p[r,t] dp[r,t])      r, s in sample b

The backward is an operator with a gradient, too: for the gradient v of dx, that of dp is the same operator of v, and
that of p[s,t] is v[s,t] (dp[s,t] - Σ_r p[r,t] dp[r,t]) - dp[s,t] Σ_r p[r,t] v[r,t].
"""

import torch
from torch import Tensor

from jfi import reference
from jfi.ops._checks import check_dim, check_floating, check_impl, check_offsets
from jfi.ops._dispatch import operator, public


def _forward(x: Tensor, offsets: Tensor, impl: str) -> Tensor:
    if impl == "triton":
        from jfi.kernels.jagged_ops.jagged_softmax import forward
    else:
        from jfi.cpu.jagged_ops import jagged_softmax as forward

    return forward(x.contiguous(), offsets)


def _forward_fake(x, offsets, impl):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _backward(grad: Tensor, out: Tensor, offsets: Tensor, impl: str) -> Tensor:
    if impl == "triton":
        from jfi.kernels.jagged_ops.jagged_softmax import backward
    else:
        from jfi.cpu.jagged_ops import jagged_softmax_backward as backward

    return backward(grad.contiguous(), out.contiguous(), offsets)


def _backward_fake(grad, out, offsets, impl):
    return torch.empty_like(out, memory_format=torch.contiguous_format)


def _save(ctx, inputs, output) -> None:
    _, offsets, ctx.impl = inputs
    ctx.save_for_backward(output, offsets)


def _differentiate(ctx, grad):
    return _jagged_softmax_bwd(grad, *ctx.saved_tensors, ctx.impl), None, None


def _save_backward(ctx, inputs, output) -> None:
    *tensors, ctx.impl = inputs
    ctx.save_for_backward(*tensors)


def _differentiate_backward(ctx, grad):
    dout, out, offsets = ctx.saved_tensors
    dgrad = _jagged_softmax_bwd(grad, out, offsets, ctx.impl) if ctx.needs_input_grad[0] else None
    return dgrad, softmax_backward_wrt_out(grad, dout, out, offsets) if ctx.needs_input_grad[1] else None, None, None


def softmax_backward_wrt_out(grad: Tensor, dout: Tensor, out: Tensor, offsets: Tensor) -> Tensor:
    """[S, T]: the gradient of out · (dout - Σ out · dout) with respect to out, the sum over each segment's rows."""
    wide = torch.promote_types(out.dtype, torch.float32)
    v, dp, p = (x.to(wide) for x in (grad, dout, out))

    def sums(x: Tensor) -> Tensor:
        return reference.segment_expand(reference.segment_sum(x, offsets), offsets, x.shape[0])

    return (v * (dp - sums(p * dp)) - dp * sums(p * v)).to(out.dtype)


_jagged_softmax_bwd = operator("jagged_softmax_bwd", _backward, _backward_fake, _save_backward, _differentiate_backward)
_jagged_softmax_fwd = operator("jagged_softmax_fwd", _forward, _forward_fake, _save, _differentiate)


@public
def jagged_softmax(x: Tensor, offsets: Tensor, *, impl: str = "auto") -> Tensor:
    """Softmax of a jagged tensor over each sample's rows.

    Args:
        x: [S, T], floating; -inf hides an entry.
        offsets: [B+1], int32 or int64, from 0 to S.
        impl: "triton", "torch" (on a GPU the plain formula, with large intermediates), or "auto": Triton for CUDA
            tensors except float64, PyTorch otherwise.

    Returns:
        [S, T].  A column that is -inf in all rows of a sample gives zeros there.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:
        >>> import torch, jfi
        >>> jfi.ops.jagged_softmax(torch.zeros(5, 1), torch.tensor([0, 4, 5]))[:, 0]
        tensor([0.2500, 0.2500, 0.2500, 0.2500, 1.0000])
    """
    check_floating(x=x)
    check_dim("x", x, "[S, T]")
    check_offsets("offsets", offsets, x.shape[0], "x", x)
    impl = check_impl(impl, x)
    if impl == "torch" and x.is_cuda:
        return reference.jagged_softmax(x, offsets)
    return _jagged_softmax_fwd(x, offsets.contiguous(), impl)
