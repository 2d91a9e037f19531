"""History rows that attention reads from embedding tables by id: the [S, G, D] history is never made.

    x[s] = Σ_k table_k[indices_k[s]]

In autograd such a history is a zero-stride placeholder, `RowsById.rows`, whose gradient is the gradient of the events'
rows. That of a table is dense, each row's events summed in a fixed order; `jfi.FusedEmbeddingCollection` gets the
events' gradients instead and steps the rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from jfi.ops.checks import check_device, check_dim, check_dtype, check_index
from jfi.tables.gather_rows import (
    bound_ids,
    check_indices,
    cut,
    dense_gradients,
    gather_bounded,
    rows_without_memory,
    share,
    with_gradient,
)
from jfi.utils import compat
from jfi.utils.context import is_traced, padding_state
from jfi.utils.operands import MAX_TABLES


class RowsById(NamedTuple):
    """Rows of tables by id, instead of a history.

    Attributes:
        rows: [S, W] of the dtype that the rows are converted to. Its values are never read and take no memory.
        tables: [N_k, W] each, floating, contiguous.
        indices: [S] each, int32 or int64; none is outside of its table, and -1 is a missing row, zeros.
    """

    rows: Tensor
    tables: tuple[Tensor, ...]
    indices: tuple[Tensor, ...]


def rows_by_id(
    tables: Tensor | tuple[object, ...],
    indices: Tensor | tuple[Tensor, ...],
    dtype: torch.dtype,
    width: int,
) -> RowsById:
    """The checked rows of tables that an operator was given, a gradient to each table that requires one.

    Args:
        tables: the argument ``key``: one or several of [N, G, D].
        indices: the argument ``indices``: as many, of one length.
        dtype: that the rows are converted to.
        width: D, of a head.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; an index outside its table, where it may be read.
    """
    tables = tables if isinstance(tables, tuple) else (tables,)
    indices = indices if isinstance(indices, tuple) else (indices,)
    if not tables or len(tables) != len(indices):
        raise ValueError(f"indices must come one to a table of key, got {len(indices)} for {len(tables)}")
    first = tables[0]
    for k, (table, index) in enumerate(zip(tables, indices, strict=True)):
        own = "key" if len(tables) == 1 else f"key[{k}]"
        of = "indices" if len(tables) == 1 else f"indices[{k}]"
        check_dim(own, table, "[N, G, D]", G=first.shape[1] if k else None, D=width)
        check_dtype(own, table)
        if table.dtype != first.dtype:
            raise TypeError(f"{own} must have the dtype of key[0], {first.dtype}, got {table.dtype}")
        check_device(own, table, "key", first)
        check_index(of, index, indices[0].shape[0] if k else None, "key", first)
        check_indices(of, index, table.shape[0], own, padded=padding_state.is_padded)
    return bounded_rows_by_id(tables, bound_ids(list(indices), [table.shape[0] for table in tables]), dtype)


def bounded_rows_by_id(tables: Sequence[Tensor], indices: Sequence[Tensor], dtype: torch.dtype) -> RowsById:
    """`rows_by_id` of checked arguments and of indices that `bound_ids` has returned."""
    indices = tuple([index.contiguous() for index in indices])
    flat = tuple([table.flatten(1) for table in tables])
    rows = rows_without_memory(flat[0], dtype, indices[0].shape[0])
    rows = with_gradient(rows, flat, dense_gradients, indices)
    return RowsById(rows, tuple([table.detach().contiguous() for table in flat]), indices)


class SavedTables:
    """Tables whose rows by id a backward pass reads again, kept by the context of an autograd node.

    A pass that keeps its graph, `retain_graph=True`, makes the rows and keeps them too: a fused collection steps its
    tables at the end of the pass, and the next one needs the rows of before.
    """

    def __init__(self, tables: Sequence[Tensor]) -> None:
        self._tables = list(tables)
        untracked = is_traced() or any([table.is_inference() for table in tables])
        self._versions = None if untracked else [table._version for table in tables]
        self._rows: Tensor | None = None

    def read(self, key: Tensor, indices: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Returns key, tables and indices as an attention's backward takes them: by id, or the rows themselves."""
        if self._rows is not None:
            return self._rows, [], []
        if self._versions not in (None, [table._version for table in self._tables]):
            raise RuntimeError(
                "a table that attention reads by id has been modified by an inplace operation since, such as the step "
                "of another backward pass: compute the loss again; passes over one graph must have retain_graph=True"
            )
        if self._tables and not is_traced() and compat.keeps_graph():
            self._rows = gather_bounded(self._tables, indices, key.dtype).view(key.shape)
            return self._rows, [], []
        return key, self._tables, list(indices)


def sum_rows(histories: list[RowsById]) -> RowsById:
    """Aligned rows by id as one history, the sum of theirs."""
    if len(histories) == 1:
        return histories[0]
    tables = tuple([table for one in histories for table in one.tables])
    indices = tuple([index for one in histories for index in one.indices])
    rows = [one.rows for one in histories]
    return RowsById(with_gradient(rows[0], rows, share), tables, indices)


def join_rows(rows: list[Tensor]) -> Tensor:
    """Placeholders of rows, one after the other."""
    joined = rows_without_memory(rows[0], rows[0].dtype, sum([one.shape[0] for one in rows]))
    return with_gradient(joined, rows, cut)


def fits_kernel(history: RowsById) -> bool:
    """Returns whether attention kernels take so many tables, of one dtype that they convert."""
    dtypes = {table.dtype for table in history.tables}
    return len(history.tables) <= MAX_TABLES and len(dtypes) == 1 and torch.float64 not in dtypes
