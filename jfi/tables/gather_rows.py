"""Rows of embedding tables by id, and the sum over several aligned tables.

    Y[s] = Σ_k table_k[indices_k[s]]        dtable_k[r] = Σ_{s: indices_k[s] = r} dY[s]

An index of -1 is a missing row: zero, without a gradient. Every other index outside of its table is an error on a CPU,
and becomes -1 on a GPU (`bound_ids`), so that no kernel reads or steps a row that no index names. The gradient to a
table is dense, [N, D], summed in a fixed order; `jfi.FusedEmbeddingCollection` steps the rows of large tables instead.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from jfi import reference
from jfi.ops.checks import (
    FLOATING,
    check_device,
    check_dim,
    check_dtype,
    check_impl,
    check_index,
)
from jfi.ops.dispatch import PLAIN, operator, operators, public
from jfi.utils import compat
from jfi.utils.context import default_impl, interprets, is_traced, may_read
from jfi.utils.operands import MAX_STEPPED_WIDTH


def _forward(tables: list[Tensor], indices: list[Tensor], dtype: torch.dtype, impl: str) -> Tensor:
    table, index = tables[0], indices[0]
    if impl == "triton":
        from jfi.tables.kernels.gather import gather_rows

        return gather_rows(tuple(tables), tuple(indices), dtype)
    if table.is_cpu and len(tables) == 1 and index.numel() and int(index.min()) >= 0:
        return torch.nn.functional.embedding(index, table).to(dtype)  # no index is missing: no mask
    return reference.gather_rows(tuple(tables), tuple(indices), dtype)


def _like_rows(tables: list[Tensor], indices: list[Tensor], dtype: torch.dtype, impl: str) -> Tensor:
    return tables[0].new_empty(indices[0].shape[0], tables[0].shape[1], dtype=dtype)


def table_gradient(grad: Tensor, indices: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """[N, D], of events' gradients [S, D]: each row's are summed in a fixed order, in float32 or float64."""
    sorted_last = torch.where(indices < 0, rows, indices)
    if grad.is_cuda and grad.dtype != torch.float64 and grad.shape[1] <= MAX_STEPPED_WIDTH:
        return operators.table_gradient(grad, sorted_last, rows, dtype)  # of jfi.tables.step_rows
    wide = grad if grad.dtype == torch.float64 else grad.float()
    return torch.ops.aten.embedding_dense_backward(wide, sorted_last, rows + 1, -1, False)[:rows].to(dtype)


def _save(ctx, inputs: tuple, output: Tensor) -> None:
    tables, indices, _, _ = inputs
    ctx.sizes = [(table.shape[0], table.dtype) for table in tables]
    ctx.save_for_backward(*indices)


def _differentiate(ctx, grad: Tensor) -> tuple:
    gradients = dense_gradients([grad], ctx.saved_tensors, ctx.sizes, ctx.needs_input_grad[0])
    return gradients, [None] * len(gradients), None, None


_gather_rows = operator("gather_rows", _forward, _like_rows)
torch.library.register_autograd("jfi::gather_rows", _differentiate, setup_context=_save)


class EventRows(torch.autograd.Function):
    """Rows of events, or placeholders of them, whose gradients a function divides among their sources.

    Args:
        made: the rows, new tensors that were made without autograd.
        divide: takes their gradients, of which some may be None, `saved`, the number of rows and the dtype of each
            source, and which sources need a gradient; returns the gradients of the sources.
        saved: tensors on which the gradients depend.
        sources: of the rows.
    """

    @staticmethod
    def forward(
        ctx, made: tuple[Tensor, ...], divide: Callable, saved: Sequence[Tensor], *sources: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.divide, ctx.sizes = divide, [(source.shape[0], source.dtype) for source in sources]
        ctx.save_for_backward(*saved)
        return made

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[3:]
        if all([grad is None for grad in grads]):
            return (None,) * (3 + len(needed))
        return None, None, None, *ctx.divide(grads, ctx.saved_tensors, ctx.sizes, needed)


def with_gradient(rows: Tensor, sources: Sequence[Tensor], divide: Callable, saved: Sequence[Tensor] = ()) -> Tensor:
    """Returns the rows as `EventRows` of the sources, or as they are if no source requires a gradient."""
    # Dynamo forgets the context of a Function without a gradient whose arguments are as many as `forward` has.
    if not (torch.is_grad_enabled() and any([source.requires_grad for source in sources])):
        return rows
    return EventRows.apply((rows.detach(),), divide, saved, *sources)[0]


def dense_gradients(
    grads: Sequence[Tensor], indices: Sequence[Tensor], sizes: list[tuple[int, torch.dtype]], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Returns the gradients [N, D] of tables whose rows by id were added."""
    wanted = zip(indices, sizes, needed, strict=True)
    return [table_gradient(grads[0], index, *size) if is_needed else None for index, size, is_needed in wanted]


def cut(grads: Sequence[Tensor], _: object, sizes: list[tuple[int, torch.dtype]], needed: object) -> Sequence[Tensor]:
    """Returns the gradients of sources that follow one another in the rows."""
    return grads[0].split([size for size, _ in sizes])


def share(grads: Sequence[Tensor], _: object, sizes: list, needed: object) -> Sequence[Tensor]:
    """Returns the gradients of sources of which the rows are the sum."""
    return [grads[0]] * len(sizes)


def rows_without_memory(like: Tensor, dtype: torch.dtype | None, count: int) -> Tensor:
    """Returns a tensor [count, W], of which no element is ever read, for rows like those [.., W]."""
    return like.new_zeros((), dtype=dtype).expand(count, like.shape[1])


def check_indices(
    name: str, indices: Tensor, num_rows: int, rows_of: str, count: int | None = None, padded: bool = True
) -> None:
    """Checks that indices [S] are rows of ``rows_of`` where they may be read: on the CPU, on a GPU under `validation`.

    Args:
        count: of the indices that must be rows, only where they may be read; those behind must be -1, padding.
        padded: whether -1 is allowed anywhere without a count.
    """
    if count is None and not may_read(indices):
        return
    least = -1 if padded and count is None else 0
    if count is not None:
        padding, indices = indices[count:], indices[:count]
        if padding.numel() and bool((padding != -1).any()):
            got = int(padding[padding != -1][0])
            raise ValueError(f"{name} must be -1 behind the {count} that its lengths count, got {got}")
    if not indices.numel():
        return
    low, high = map(int, torch.aminmax(indices))
    if low < least or high >= num_rows:
        got = low if low < least else high
        raise ValueError(f"{name} must be from 0 to {num_rows - 1}, rows of {rows_of}, got {got}")


def bound_ids(ids: list[Tensor], sizes: list[int], counts: Tensor | None = None) -> list[Tensor]:
    """Returns ids with -1, a missing row, instead of those outside of their tables.

    Everything that reads ids calls it once, after `check_indices`, which leaves nothing to do on a CPU. It never waits
    for a GPU: one kernel does it for up to 4 tables.

    Args:
        ids: [S] of each table, int32 or int64.
        sizes: N of each table.
        counts: [K] int64, grows by the number of ids outside of each table, in which -1 is not counted; None to count
            none. A compiler or a tracer counts none.

    Returns:
        [S] of each table; from the kernel they are int32 if all tables have fewer than 2**31 rows.
    """
    if all([one.device.type == "cpu" and may_read(one) for one in ids]):
        return ids
    plain = not is_traced() and all([type(one) in PLAIN and not one.is_meta for one in ids])
    if plain and (ids[0].is_cuda or interprets()):
        from jfi.tables.kernels.gather import bound_ids as launch

        return launch([one.contiguous() for one in ids], sizes, counts)
    return [reference.bound_ids(one, size) for one, size in zip(ids, sizes, strict=True)]


@partial(public, packed={"offsets": ("indices",)}, result="offsets")
def gather_rows(
    tables: tuple[Tensor, ...], indices: tuple[Tensor, ...], *, dtype: torch.dtype | None = None, impl: str = "auto"
) -> Tensor:
    """Read rows of tables by id; of several tables the sum of their aligned rows.

    Args:
        tables: [N, D] each, floating, all of one width D; N and the dtype may differ. A table that requires a gradient
            gets a dense one, [N, D].
        indices: [S] for each table, int32 or int64, from 0 to N - 1; -1 is a missing row, which gives zeros.
        dtype: of the result; None means that of the first table. Several tables are summed in float32 (float64 for
            float64) and rounded once.
        impl: "triton", "torch" (on a GPU the plain formula), or "auto": Triton for CUDA tensors except float64, PyTorch
            otherwise.

    Returns:
        [S, D], nested if indices are.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type, or an index outside of its table; the message names
            it. On a GPU such an index is a missing row, and an error under `validation`.

    Example:
        >>> import torch, jfi
        >>> items, ratings = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[10.0, 20.0]])
        >>> jfi.ops.gather_rows((items, ratings), (torch.tensor([1, 0, -1]), torch.tensor([0, 0, -1])))
        tensor([[13., 24.],
                [11., 22.],
                [ 0.,  0.]])
    """
    _check(tables, indices)
    if dtype is None:
        dtype = tables[0].dtype
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATING:
        raise TypeError(f"dtype must be float32, bfloat16, float16 or float64, got {dtype}")
    impl = "torch" if "torch" in {check_impl(impl, table) for table in tables} else "triton"
    return gather_bounded(tables, bound_ids(list(indices), [table.shape[0] for table in tables]), dtype, impl)


def gather_bounded(
    tables: Sequence[Tensor], indices: Sequence[Tensor], dtype: torch.dtype, impl: str | None = None
) -> Tensor:
    """`gather_rows` of checked arguments and of indices that `bound_ids` has returned; impl=None is "auto"."""
    impl = impl or ("torch" if "torch" in map(default_impl, tables) else "triton")
    tables, indices = [*map(Tensor.contiguous, tables)], [*map(Tensor.contiguous, indices)]
    plain = all([type(x) in PLAIN and not x.is_meta for x in tables + indices])
    if not plain or is_traced() or compat.profiler_enabled():
        return _gather_rows(tables, indices, dtype, impl)
    rows = _forward([*map(Tensor.detach, tables)], indices, dtype, impl)
    return with_gradient(rows, tables, dense_gradients, indices)


def read_rows(history: tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]) -> Tensor:
    """Returns the rows [S, W] of a `RowsById`; their gradient is that of ``history.rows``."""
    rows, tables, indices = history
    return with_gradient(gather_bounded([*map(Tensor.detach, tables)], indices, rows.dtype), [rows], share)


def _check(tables: tuple[Tensor, ...], indices: tuple[Tensor, ...]) -> None:
    for name, given in {"tables": tables, "indices": indices}.items():
        if not isinstance(given, tuple | list):
            raise TypeError(f"{name} must be a tuple of tensors, got {type(given).__name__}")
    if not tables or len(tables) != len(indices):
        raise ValueError(
            f"tables and indices must have one tensor for each other, at least one, got {len(tables)} and "
            f"{len(indices)}"
        )
    for k, (table, index) in enumerate(zip(tables, indices, strict=True)):
        check_dim(f"tables[{k}]", table, "[N, D]", D=tables[0].shape[1] if k else None)
        check_dtype(f"tables[{k}]", table)
        check_device(f"tables[{k}]", table, "tables[0]", tables[0])
        check_index(f"indices[{k}]", index, indices[0].shape[0] if k else None, "tables[0]", tables[0])
        check_indices(f"indices[{k}]", index, table.shape[0], f"tables[{k}]")
