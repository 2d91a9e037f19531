"""Rows of an embedding table that have been looked up and not read yet."""

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from jfi.ops.rows_by_id import RowsById, read_rows


class TableRows(JaggedTensor):
    """A JaggedTensor of embeddings, given by the table and the rows' ids; `values()` reads them at first use.

    A kernel that gathers the rows itself takes `table` and `ids`, and `rows` for autograd. Everything else takes
    `values()`, as of any JaggedTensor. The values are those of the table at first use, not at the look-up.

    Args:
        table: [N, D], without a gradient.
        ids: [S], int32 or int64; an id of -1 is padding, whose row is zero.
        rows: [S, D] of the embeddings' dtype. Its values are never read and need no memory; its gradient is that of the
            embeddings.
        lengths: [B]; None if offsets are given.
        offsets: [B + 1].
        weights: [S], of the events.

    Example:
        >>> table, ids = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 0, 1])
        >>> rows = TableRows(table, ids, torch.zeros(()).expand(3, 2), lengths=torch.tensor([2, 1]))
        >>> rows.values()
        tensor([[3., 4.],
                [1., 2.],
                [3., 4.]])
    """

    def __init__(
        self,
        table: Tensor,
        ids: Tensor,
        rows: Tensor,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        self.table, self.ids, self.rows = table, ids, rows
        super().__init__(rows, lengths=lengths, offsets=offsets, weights=weights)
        self._read: Tensor | None = None

    @property
    def by_id(self) -> RowsById:
        """The rows as the attention operators take them."""
        return RowsById(self.rows, (self.table.contiguous(),), (self.ids.contiguous(),))

    @property
    def _values(self) -> Tensor:
        # What JaggedTensor's own methods read.
        wants_grad = torch.is_grad_enabled() and self.rows.requires_grad
        if self._read is None or (wants_grad and not self._read.requires_grad):
            self._read = read_rows(self.by_id)
        return self._read

    @_values.setter
    def _values(self, values: Tensor) -> None:
        self._read = None

    def device(self) -> torch.device:
        return self.table.device


def with_weights(events: JaggedTensor, weights: Tensor | None) -> JaggedTensor:
    """The events with weights of their own."""
    parts = {"lengths": events.lengths_or_none(), "offsets": events.offsets_or_none(), "weights": weights}
    if isinstance(events, TableRows):
        return TableRows(events.table, events.ids, events.rows, **parts)
    return JaggedTensor(values=events.values(), **parts)
