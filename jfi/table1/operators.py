"""The six operators of Table 1 of the Jagged Flash Attention paper.

Sample b has L rows X[b] of one jagged tensor and M rows Y[b] of another.  The gradients of the products are products of
the same family, with a matrix read down its columns where it is transposed:

    jagged_dense_bmm                 Y = X A         dX = dY Aᵀ          dA = Xᵀ dY
    jagged_jagged_bmm                Z = Xᵀ Y        dX = Y dZᵀ          dY = X dZ
    jagged_jagged_bmm_jagged_out     A = X Yᵀ        dX = dA Y           dY = dAᵀ X
    array_jagged_bmm_jagged_out      X = A Y         dA = dX Yᵀ          dY = Aᵀ dX
    jagged_softmax                   p = exp(x) / Σ exp(x)               dx = p (dp - Σ p dp)        Σ over rows of X
    jagged2_softmax                  the same                                                        Σ along a row of A

The backward of a softmax is an operator with a gradient, too: for the gradient v of dx, that of dp is the same operator
of v, and that of p is v (dp - Σ p dp) - dp Σ p v.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from jfi import reference
from jfi.ops.checks import check_count, check_dim, check_floating, check_impl, check_offsets, may_read
from jfi.ops.dispatch import operator, operators, public


@cache
def _implementation(name: str, impl: str) -> Callable[..., Tensor]:
    return getattr(import_module(f"jfi.table1.{'kernels' if impl == 'triton' else 'cpu'}"), name)


def _operator(
    schema: str, out: Callable[..., Tensor], gradients: dict[int, Callable[..., Tensor]], saves_output: bool = False
) -> None:
    """Registers an operator whose implementations are the functions of its name in kernels/ and cpu.py.

    Args:
        schema: tensors first, ``impl`` last.
        out: empty memory for the output, from the operator's arguments.
        gradients: by an argument's position, its gradient from that of the output and the operator's arguments.
        saves_output: whether ``gradients`` take the output in place of the first argument.
    """
    name, num_tensors = schema[: schema.index("(")], schema.count("Tensor ")

    def forward(*args):
        tensors = [x.contiguous() for x in args[:num_tensors]]
        return _implementation(name, args[-1])(*tensors, *args[num_tensors:-1])

    def save(ctx, inputs, output) -> None:
        first = output if saves_output else inputs[0]
        ctx.save_for_backward(first, *inputs[1:num_tensors])
        ctx.options = inputs[num_tensors:]

    def differentiate(ctx, grad):
        args = (grad, *ctx.saved_tensors, *ctx.options)
        needed = enumerate(ctx.needs_input_grad)
        return tuple([gradients[i](*args) if is_needed and i in gradients else None for i, is_needed in needed])

    operator(name, forward, out, save, differentiate, schema[len(name) :])


def _call(name: str, impl: str, *args: Any, options: tuple = ()) -> Tensor:
    """Returns the operator of (*args, *options, impl), on a GPU with impl="torch" the plain formula of args."""
    impl = check_impl(impl, args[0])
    if impl == "torch" and args[0].is_cuda:
        return getattr(reference, name)(*args)
    return getattr(operators, name)(*args, *options, impl)


_operator(
    "jagged_dense_bmm(Tensor x, Tensor offsets, Tensor dense, bool transposed, str impl) -> Tensor",
    lambda x, offsets, dense, transposed, impl: x.new_empty(x.shape[0], dense.shape[1 if transposed else 2]),
    {
        0: lambda grad, x, offsets, dense, transposed, impl: operators.jagged_dense_bmm(
            grad, offsets, dense, not transposed, impl
        ),
        2: lambda grad, x, offsets, dense, transposed, impl: operators.jagged_jagged_bmm(
            *((grad, x) if transposed else (x, grad)), offsets, impl
        ),
    },
)
_operator(
    "jagged_jagged_bmm(Tensor x, Tensor y, Tensor offsets, str impl) -> Tensor",
    lambda x, y, offsets, impl: x.new_empty(offsets.shape[0] - 1, x.shape[1], y.shape[1]),
    {
        0: lambda grad, x, y, offsets, impl: operators.jagged_dense_bmm(y, offsets, grad, True, impl),
        1: lambda grad, x, y, offsets, impl: operators.jagged_dense_bmm(x, offsets, grad, False, impl),
    },
)
_operator(
    "jagged_jagged_bmm_jagged_out("
    "Tensor x, Tensor y, Tensor x_offsets, Tensor y_offsets, SymInt out_size, str impl) -> Tensor",
    lambda x, y, x_offsets, y_offsets, out_size, impl: x.new_empty(out_size),
    {
        0: lambda grad, x, y, x_offsets, y_offsets, out_size, impl: operators.array_jagged_bmm_jagged_out(
            grad, y, x_offsets, y_offsets, x.shape[0], False, impl
        ),
        1: lambda grad, x, y, x_offsets, y_offsets, out_size, impl: operators.array_jagged_bmm_jagged_out(
            grad, x, x_offsets, y_offsets, y.shape[0], True, impl
        ),
    },
)
_operator(
    "array_jagged_bmm_jagged_out("
    "Tensor a, Tensor y, Tensor x_offsets, Tensor y_offsets, SymInt out_rows, bool transposed, str impl) -> Tensor",
    lambda a, y, x_offsets, y_offsets, out_rows, transposed, impl: y.new_empty(out_rows, y.shape[1]),
    {
        0: lambda grad, a, y, x_offsets, y_offsets, out_rows, transposed, impl: operators.jagged_jagged_bmm_jagged_out(
            *((y, grad) if transposed else (grad, y)), x_offsets, y_offsets, a.shape[0], impl
        ),
        1: lambda grad, a, y, x_offsets, y_offsets, out_rows, transposed, impl: operators.array_jagged_bmm_jagged_out(
            a, grad, x_offsets, y_offsets, y.shape[0], not transposed, impl
        ),
    },
)


def _empty_like_first(x: Tensor, *args: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _softmax_backward_wrt_out(grad: Tensor, dout: Tensor, out: Tensor, offsets: Tensor) -> Tensor:
    """[S, T]: the gradient of out · (dout - Σ out · dout) with respect to out, the sum over each sample's rows."""
    wide = torch.promote_types(out.dtype, torch.float32)
    v, dp, p = (x.to(wide) for x in (grad, dout, out))

    def sums(x: Tensor) -> Tensor:
        return reference.segment_expand(reference.segment_sum(x, offsets), offsets, x.shape[0])

    return (v * (dp - sums(p * dp)) - dp * sums(p * v)).to(out.dtype)


def _softmax2_backward_wrt_out(
    grad: Tensor, dout: Tensor, out: Tensor, x_offsets: Tensor, y_offsets: Tensor, impl: str
) -> Tensor:
    rows = reference.Pairs(x_offsets, y_offsets, out.shape[0]).filled_row_offsets()
    return _softmax_backward_wrt_out(grad[:, None], dout[:, None], out[:, None], rows)[:, 0]


_operator(
    "jagged_softmax_bwd(Tensor grad, Tensor out, Tensor offsets, str impl) -> Tensor",
    _empty_like_first,
    {
        0: lambda grad, dout, out, offsets, impl: operators.jagged_softmax_bwd(grad, out, offsets, impl),
        1: lambda grad, dout, out, offsets, impl: _softmax_backward_wrt_out(grad, dout, out, offsets),
    },
)
_operator(
    "jagged_softmax(Tensor x, Tensor offsets, str impl) -> Tensor",
    _empty_like_first,
    {0: lambda grad, *saved: operators.jagged_softmax_bwd(grad, *saved)},
    saves_output=True,
)
_operator(
    "jagged2_softmax_bwd(Tensor grad, Tensor out, Tensor x_offsets, Tensor y_offsets, str impl) -> Tensor",
    _empty_like_first,
    {0: lambda grad, dout, *saved: operators.jagged2_softmax_bwd(grad, *saved), 1: _softmax2_backward_wrt_out},
)
_operator(
    "jagged2_softmax(Tensor a, Tensor x_offsets, Tensor y_offsets, str impl) -> Tensor",
    _empty_like_first,
    {0: lambda grad, *saved: operators.jagged2_softmax_bwd(grad, *saved)},
    saves_output=True,
)


def _count_pairs(x_offsets: Tensor, y_offsets: Tensor) -> int:
    """Returns Σ L·M, read on the host."""
    return int((x_offsets.diff().long() * y_offsets.diff()).sum())


def _check_pairs(name: str, count: int, x_offsets: Tensor, y_offsets: Tensor) -> None:
    """Checks that there are Σ L·M pairs, where offsets may be read."""
    if may_read(x_offsets) and count != (pairs := _count_pairs(x_offsets, y_offsets)):
        raise ValueError(f"{name} must have Σ L·M = {pairs}, got {count}")


@public
def jagged_dense_bmm(x: Tensor, offsets: Tensor, dense: Tensor, *, impl: str = "auto") -> Tensor:
    """Multiplies every row of a jagged tensor by its sample's matrix.

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
        >>> import torch, jfi.table1
        >>> jfi.table1.jagged_dense_bmm(torch.randn(5, 4), torch.tensor([0, 2, 5]), torch.randn(2, 4, 3)).shape
        torch.Size([5, 3])
    """
    check_floating(x=x, dense=dense)
    check_dim("x", x, "[S, D]")
    check_dim("dense", dense, "[B, D, T]", D=x.shape[1])
    check_offsets("offsets", offsets, x.shape[0], "x", x, dense.shape[0])
    return _call("jagged_dense_bmm", impl, x, offsets, dense, options=(False,))


@public
def jagged_jagged_bmm(x: Tensor, y: Tensor, offsets: Tensor, *, impl: str = "auto") -> Tensor:
    """Multiplies two jagged tensors sample by sample, over the samples' rows.

    Args:
        x: [S, D], floating.
        y: [S, T].
        offsets: [B+1], int32 or int64, from 0 to S, of both.
        impl: as in ``jagged_dense_bmm``.

    Returns:
        [B, D, T].  An empty sample gives zeros.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:
        >>> import torch, jfi.table1
        >>> jfi.table1.jagged_jagged_bmm(torch.randn(5, 4), torch.randn(5, 3), torch.tensor([0, 2, 5])).shape
        torch.Size([2, 4, 3])
    """
    check_floating(x=x, y=y)
    check_dim("x", x, "[S, D]")
    check_dim("y", y, "[S, T]", S=x.shape[0])
    check_offsets("offsets", offsets, x.shape[0], "x", x)
    return _call("jagged_jagged_bmm", impl, x, y, offsets)


@public
def jagged_softmax(x: Tensor, offsets: Tensor, *, impl: str = "auto") -> Tensor:
    """Softmax of a jagged tensor over each sample's rows.

    Args:
        x: [S, T], floating; -inf hides an entry.
        offsets: [B+1], int32 or int64, from 0 to S.
        impl: as in ``jagged_dense_bmm``.

    Returns:
        [S, T].  A column that is -inf in all rows of a sample gives zeros there.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:
        >>> import torch, jfi.table1
        >>> jfi.table1.jagged_softmax(torch.zeros(5, 1), torch.tensor([0, 4, 5]))[:, 0]
        tensor([0.2500, 0.2500, 0.2500, 0.2500, 1.0000])
    """
    check_floating(x=x)
    check_dim("x", x, "[S, T]")
    check_offsets("offsets", offsets, x.shape[0], "x", x)
    return _call("jagged_softmax", impl, x, offsets)


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
        impl: as in ``jagged_dense_bmm``.

    Returns:
        [Σ L·M]: the samples' [L, M] blocks, row-major, one after another.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:
        >>> import torch, jfi.table1
        >>> x = torch.randn(5, 4)
        >>> jfi.table1.jagged_jagged_bmm_jagged_out(x, x, torch.tensor([0, 2, 5])).shape
        torch.Size([13])
    """
    y_offsets = x_offsets if y_offsets is None else y_offsets
    check_floating(x=x, y=y)
    check_dim("x", x, "[S, D]")
    check_dim("y", y, "[R, D]", D=x.shape[1])
    x_offsets = check_offsets("x_offsets", x_offsets, x.shape[0], "x", x)
    y_offsets = check_offsets("y_offsets", y_offsets, y.shape[0], "y", x, x_offsets.shape[0] - 1)
    check_count("out_size", out_size)
    if out_size is None:
        out_size = _count_pairs(x_offsets, y_offsets)
    else:
        _check_pairs("out_size", out_size, x_offsets, y_offsets)
    return _call("jagged_jagged_bmm_jagged_out", impl, x, y, x_offsets, y_offsets, out_size)


@public
def jagged2_softmax(a: Tensor, x_offsets: Tensor, y_offsets: Tensor | None = None, *, impl: str = "auto") -> Tensor:
    """Softmax of packed blocks along their rows, over each row's M entries.

    Args:
        a: [Σ L·M], floating: the samples' [L, M] blocks, row-major, one after another; -inf hides an entry.
        x_offsets: [B+1], int32 or int64: the samples' L.
        y_offsets: [B+1]: the samples' M; None means x_offsets.
        impl: as in ``jagged_dense_bmm``.

    Returns:
        [Σ L·M].  A row that is -inf throughout gives zeros.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:
        >>> import torch, jfi.table1
        >>> jfi.table1.jagged2_softmax(torch.zeros(5), torch.tensor([0, 2, 3]))
        tensor([0.5000, 0.5000, 0.5000, 0.5000, 1.0000])
    """
    y_offsets = x_offsets if y_offsets is None else y_offsets
    check_floating(a=a)
    check_dim("a", a, "[Σ L·M]")
    check_offsets("x_offsets", x_offsets, None, "", a)
    check_offsets("y_offsets", y_offsets, None, "", a, x_offsets.shape[0] - 1)
    _check_pairs("a", a.shape[0], x_offsets, y_offsets)
    return _call("jagged2_softmax", impl, a, x_offsets, y_offsets)


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
    """Multiplies each sample's [L, M] block with its M rows of y.

    Args:
        a: [Σ L·M], floating: the samples' blocks, row-major, one after another.
        y: [R, D].
        x_offsets: [B+1], int32 or int64, from 0 to S.
        y_offsets: [B+1], from 0 to R; None means x_offsets.
        out_rows: S, if known.  Else, where y_offsets is given, it is read from x_offsets: one synchronization on a GPU.
        impl: as in ``jagged_dense_bmm``.

    Returns:
        [S, D].  A row of a sample with M = 0 is zero.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:
        >>> import torch, jfi.table1
        >>> jfi.table1.array_jagged_bmm_jagged_out(torch.randn(13), torch.randn(5, 4), torch.tensor([0, 2, 5])).shape
        torch.Size([5, 4])
    """
    check_floating(a=a, y=y)
    check_dim("a", a, "[Σ L·M]")
    check_dim("y", y, "[R, D]")
    check_count("out_rows", out_rows)
    if y_offsets is None:
        y_offsets, out_rows = x_offsets, y.shape[0] if out_rows is None else out_rows
    check_offsets("x_offsets", x_offsets, out_rows, "the output (out_rows)", y)
    out_rows = int(x_offsets[-1]) if out_rows is None else out_rows
    check_offsets("y_offsets", y_offsets, y.shape[0], "y", y, x_offsets.shape[0] - 1)
    _check_pairs("a", a.shape[0], x_offsets, y_offsets)
    return _call("array_jagged_bmm_jagged_out", impl, a, y, x_offsets, y_offsets, out_rows, options=(False,))
