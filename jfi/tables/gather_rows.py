"""Rows of embedding tables by id, and the sum over several aligned tables.

    Y[s] = Σ_k table_k[indices_k[s]]        dtable_k[r] = Σ_{s: indices_k[s] = r} dY[s]

An index of -1 is a missing row: zero, without a gradient. Every other index outside of its table is an error on a CPU,
and becomes -1 on a GPU (`bound_ids`), so that no kernel reads or steps a row that no index names. The gradient to a
table is dense, [N, D], summed in a fixed order; `jfi.FusedEmbeddingCollection` steps the rows of large tables instead.
"""

from collections.abc import Sequence
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
    check_size,
    may_read,
)
from jfi.ops.dispatch import PLAIN, operator, operators, public
from jfi.utils import compat
from jfi.utils.context import interprets, is_traced
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


def _save(ctx, inputs: tuple, output: Tensor | None) -> None:
    tables, indices, _, _ = inputs
    ctx.tables = [(table.shape[0], table.dtype) for table in tables]
    ctx.save_for_backward(*indices)


def _gradients(ctx, grad: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
    wanted = zip(ctx.saved_tensors, ctx.tables, needed, strict=True)
    return [table_gradient(grad, index, *table) if is_needed else None for index, table, is_needed in wanted]


def _differentiate(ctx, grad: Tensor) -> tuple:
    gradients = _gradients(ctx, grad, ctx.needs_input_grad[0])
    return gradients, [None] * len(gradients), None, None


_gather_rows = operator("gather_rows", _forward, _like_rows)
torch.library.register_autograd("jfi::gather_rows", _differentiate, setup_context=_save)


class Lookup(torch.autograd.Function):
    """Rows of tables by id; backward returns dense gradients of the tables."""

    @staticmethod
    def forward(ctx, indices: Sequence[Tensor], dtype: torch.dtype, impl: str | None, *tables: Tensor) -> Tensor:
        """Reads the rows; with impl=None returns a zero-stride placeholder of them."""
        _save(ctx, (tables, indices, dtype, impl), None)
        if impl is None:
            return rows_without_memory(tables[0], dtype, indices[0].shape[0])
        return _forward(list(tables), list(indices), dtype, impl)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_gradients(ctx, grad, ctx.needs_input_grad[3:])


def rows_without_memory(like: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    """Returns a tensor [count, W], of which no element is ever read, for rows like those [.., W]."""
    return like.new_zeros((), dtype=dtype).expand(count, like.shape[1])


def check_indices(
    name: str, indices: Tensor, num_rows: int, rows_of: str, lengths: Tensor | None = None, padded: bool = True
) -> bool:
    """Checks indices of a table's rows where they may be read: on the CPU, and on a GPU under `validation`.

    Returns whether they were read, and so none is outside of the table.

    Args:
        name: of the indices, for the message.
        indices: [S].
        num_rows: N; an index is from 0 to N - 1.
        rows_of: what has the rows, for the message.
        lengths: their sum says how many of the indices must be rows; those behind are padding and must be -1.
        padded: whether -1 is allowed anywhere without lengths.

    Raises:
        ValueError: an index is out of range.
    """
    if not may_read(indices):
        return False
    least, count = -1 if padded else 0, indices.shape[0]
    if lengths is not None:
        least, count = 0, min(count, int(lengths.sum()))
        padding, indices = indices[count:], indices[:count]
        if padding.numel() and bool((padding != -1).any()):
            got = int(padding[padding != -1][0])
            raise ValueError(f"{name} must be -1 behind the {count} that its lengths count, got {got}")
    if not count:
        return True
    low, high = (int(bound) for bound in torch.aminmax(indices))
    if low < least or high >= num_rows:
        got = low if low < least else high
        raise ValueError(f"{name} must be from 0 to {num_rows - 1}, rows of {rows_of}, got {got}")
    return True


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
    for k, (table, one) in enumerate(zip(tables, indices, strict=True)):
        check_indices(f"indices[{k}]", one, table.shape[0], f"tables[{k}]")
    return gather_bounded(tables, bound_ids(list(indices), [table.shape[0] for table in tables]), dtype, impl)


def gather_bounded(
    tables: Sequence[Tensor], indices: Sequence[Tensor], dtype: torch.dtype, impl: str = "auto"
) -> Tensor:
    """`gather_rows` of checked arguments and of indices that `bound_ids` has returned."""
    impl = "torch" if "torch" in {check_impl(impl, table) for table in tables} else "triton"
    tables, indices = [table.contiguous() for table in tables], [one.contiguous() for one in indices]
    plain = all([type(x) in PLAIN and not x.is_meta for x in tables + indices])
    if not plain or is_traced() or compat.profiler_enabled():
        return _gather_rows(tables, indices, dtype, impl)
    if torch.is_grad_enabled() and any([table.requires_grad for table in tables]):
        return Lookup.apply(indices, dtype, impl, *tables)
    return _forward(tables, indices, dtype, impl)


def read_rows(history: tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]) -> Tensor:
    """Returns the rows [S, W] of a `RowsById`; their gradient is that of ``history.rows``."""
    return _Read.apply(*history)


class _Read(torch.autograd.Function):
    """Reads rows by id; their gradient is that of the placeholder."""

    @staticmethod
    def forward(ctx, rows: Tensor, tables: tuple[Tensor, ...], indices: tuple[Tensor, ...]) -> Tensor:
        return gather_bounded(tables, indices, rows.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


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
        check_dim(f"tables[{k}]", table, "[N, D]")
        check_dtype(f"tables[{k}]", table)
        check_size(f"tables[{k}]", table.shape[1], tables[0].shape[1], "D")
        check_device(f"tables[{k}]", table, "tables[0]", tables[0])
        check_index(f"indices[{k}]", index, indices[0].shape[0] if k else None, "tables[0]", tables[0])
