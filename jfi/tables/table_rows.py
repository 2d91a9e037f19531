"""Embeddings of events that have not been read yet: rows of tables, here or on other ranks, and semantic IDs."""

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from jfi.ops.sid_words import sid_words
from jfi.reference import unpack_digits
from jfi.tables.gather_rows import cut, read_rows, with_gradient
from jfi.tables.rows_by_id import RowsById
from jfi.utils.arguments import shown
from jfi.utils.context import is_traced

if TYPE_CHECKING:
    from jfi.modules.sequence_configs import SequenceFeatureConfig


class UnreadRows(JaggedTensor):
    """A JaggedTensor of embeddings that `values()` reads at first use; attention may do without them.

    Attributes:
        rows: [S, D] of the embeddings' dtype and device. Its values are never read and take no memory.
    """

    def __init__(
        self, rows: Tensor, lengths: Tensor | None, offsets: Tensor | None, weights: Tensor | None = None
    ) -> None:
        self.rows = rows
        super().__init__(rows, lengths=lengths, offsets=offsets, weights=weights)
        self._read: Tensor | None = None
        self._has_gradient = False

    def read(self) -> Tensor:
        """Returns the embeddings [S, D], with their gradient."""
        raise NotImplementedError

    def with_parts(self, lengths: Tensor | None, offsets: Tensor | None, weights: Tensor | None) -> "UnreadRows":
        """Returns the same embeddings with these lengths, offsets and weights."""
        other = copy(self)
        UnreadRows.__init__(other, self.rows, lengths, offsets, weights)
        return other

    @property
    def is_read(self) -> bool:
        """Returns whether the embeddings [S, D] have been made."""
        return self._read is not None

    @property
    def _values(self) -> Tensor:  # read by JaggedTensor's methods
        if self._read is None or (torch.is_grad_enabled() and not self._has_gradient):
            self._read, self._has_gradient = self.read(), torch.is_grad_enabled()
        return self._read

    @_values.setter
    def _values(self, values: Tensor) -> None:
        self._read = None

    def device(self) -> torch.device:
        return self.rows.device


class TableRows(UnreadRows):
    """A JaggedTensor of embeddings, given by the table and the rows' ids; `values()` reads them at first use.

    A kernel that gathers the rows itself takes `table` and `ids`, and `rows` for autograd. Everything else takes
    `values()`, as of any JaggedTensor. The values are those of the table at first use, not at the look-up.

    Args:
        table: [N, D], without a gradient.
        ids: [S], int32 or int64, none outside of the table; -1 is a missing row, zeros, which is no row of the table.
        rows: [S, D] of the embeddings' dtype. Its values are never read and need no memory; its gradient is that of the
            embeddings.
        lengths: [B]; None if offsets are given.
        offsets: [B + 1].
        weights: [S], of the events.

    Raises:
        ValueError, TypeError: an argument is no tensor, or neither lengths nor offsets are given.

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
        for argument, value in (("table", table), ("ids", ids), ("rows", rows)):
            if not isinstance(value, Tensor):
                raise TypeError(f"{argument} must be a Tensor, got {shown(value)}")
        if not (weights is None or isinstance(weights, Tensor)):
            raise TypeError(f"weights must be a Tensor or None, got {shown(weights)}")
        for argument, value in (("lengths", lengths), ("offsets", offsets)):
            if value is not None and (not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64)):
                raise TypeError(f"{argument} must be an int32 or int64 Tensor or None, got {shown(value)}")
        if lengths is None and offsets is None:
            raise ValueError("lengths or offsets must be given, got None for both")
        self.table, self.ids, self.by_id = table, ids, RowsById(rows, (table,), (ids,))
        super().__init__(rows, lengths, offsets, weights)

    def read(self) -> Tensor:
        return read_rows(self.by_id)


class RemoteAttention(Protocol):
    """Attention to the events of some features of a group, whose rows lie on several ranks (see `jfi.distributed`)."""

    #: Of the rows as attention reads them, and of its queries.
    dtype: torch.dtype

    def reads(self, feature: "SequenceFeatureConfig", sequences: dict[str, JaggedTensor]) -> bool:
        """Returns whether a layer's events of a feature are those that lie on the ranks, none of its fields replaced.

        Raises:
            ValueError: the ranks have the events of another feature of this name, or other weights or bucket ids.
        """

    def rows(self, feature: str) -> Tensor:
        """Fetches the rows [S, D] of a feature's events from their ranks."""

    def attend(self, queries: dict[str, Tensor], tables: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
        """Computes by feature `jfi.ops.target_attention` of the events; all ranks call it together.

        Args:
            queries: by feature [B, T, H, D], absorbed; others than these features' are left alone.
            tables: by feature the learned bias table [num_buckets, H], if the features have one.
            scale: of the scores.
        """


class RemoteRows(UnreadRows):
    """A JaggedTensor of embeddings whose rows lie on several ranks; `values()` fetches them at first use.

    Args:
        events: by feature whose history this is, attention to its events.
        rows: [S, D], without memory.
        parts: lengths, offsets and weights.
    """

    def __init__(self, events: dict[str, RemoteAttention], rows: Tensor, **parts: Tensor | None) -> None:
        self.events = events
        super().__init__(rows, **parts)

    def read(self) -> Tensor:
        feature, events = next(iter(self.events.items()))
        return events.rows(feature)


class DigitRows(UnreadRows):
    """A JaggedTensor of embeddings of semantic IDs, given by the IDs; `values()` makes them at first use.

    The embedding of an ID is a linear map of its digits d: P [d, 1, 0], and P [0, 0, 1] of UNKNOWN_SID. Attention takes
    these L + 2 digits, `words`, and P, `embedding.digit_weight()`.

    Args:
        ids: [S] int64.
        embedding: the SemanticIDEmbedding, with read="digits".
        dtype: of the embeddings.
        lengths: [B]; None if offsets are given.
        offsets: [B + 1].
        weights: [S], of the events.
    """

    def __init__(
        self,
        ids: Tensor,
        embedding: Any,
        dtype: torch.dtype,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        self.ids, self.embedding = ids, embedding
        rows = torch.zeros((), dtype=dtype, device=ids.device).expand(ids.size(0), embedding.embedding_dim)
        super().__init__(rows, lengths, offsets, weights)

    @cached_property
    def words(self) -> Tensor:
        """Returns the words [S, ceil((L + 2) / 16)] int32 of the digits, as `digit_attention` takes them."""
        return sid_words(self.ids, self.embedding.layout.num_digits)

    def read(self) -> Tensor:
        return self.embedding.embed(self.ids).to(self.rows.dtype)

    def to_dtype(self, dtype: torch.dtype) -> "DigitRows":
        """Returns the same embeddings in another dtype."""
        other = self.with_parts(**parts_of(self))
        other.rows = self.rows.new_zeros((), dtype=dtype).expand_as(self.rows)
        return other


def join_words(events: tuple[DigitRows, ...]) -> Tensor:
    """Returns the words of events of one embedding, concatenated."""
    return join([one.words for one in events])


def digit_numbers(events: tuple[DigitRows, ...]) -> Tensor:
    """Returns the digits [S, L + 2] of events of one embedding, in the embeddings' dtype, without a gradient."""
    return unpack_digits(join_words(events), events[0].embedding.layout.num_digits + 2).to(events[0].rows.dtype)


def parts_of(events: JaggedTensor) -> dict[str, Tensor | None]:
    """Returns the lengths, the offsets and the weights of events, as the constructor of a JaggedTensor takes them."""
    lengths, offsets = events.lengths_or_none(), events.offsets_or_none()
    return {"lengths": lengths, "offsets": offsets, "weights": events.weights_or_none()}


def with_weights(events: JaggedTensor, weights: Tensor | None) -> JaggedTensor:
    """Returns the events with other weights."""
    parts = parts_of(events) | {"weights": weights}
    return events.with_parts(**parts) if isinstance(events, UnreadRows) else JaggedTensor(events.values(), **parts)


def own_rows(rows: Tensor, offsets: Tensor, sources: list[JaggedTensor]) -> Tensor:
    """Returns rows [S, D] of these sources; in a padded batch their gradient is zero behind the last sample.

    Kernels leave the gradient of these rows unwritten, and an nn.Embedding adds up what it gets. The gradient of
    `TableRows` goes to the step of their table, which leaves padding out.
    """
    if all([isinstance(one, TableRows) for one in sources]):
        return rows
    return with_gradient(rows, [rows], _without_padding, [offsets])


def _without_padding(grads: Sequence[Tensor], saved: Sequence[Tensor], *_: object) -> list[Tensor]:
    (grad,), (offsets,) = grads, saved
    behind = torch.arange(grad.size(0), device=grad.device) >= offsets[-1]
    return [grad.masked_fill(behind.unsqueeze(1), 0.0)]


def join(tensors: list[Tensor]) -> Tensor:
    """Concatenates the rows of contiguous tensors, without a copy if they are adjacent in memory already.

    Example:
        >>> rows = torch.arange(6.0).view(3, 2)
        >>> join(list(rows.split([1, 2]))).data_ptr() == rows.data_ptr()
        True
    """
    if len(tensors) == 1:
        return tensors[0]
    span = None if is_traced() else _span(tensors)
    if span is None:
        return torch.cat(tensors)
    return with_gradient(span, tensors, cut)


def _span(tensors: list[Tensor]) -> Tensor | None:
    """Returns one tensor over the memory of tensors that directly follow one another in one storage, else None.

    Tensors without an element may lie elsewhere.
    """
    first, end = None, 0
    for tensor in tensors:
        if type(tensor) is not Tensor:
            return None
        if tensor.numel() == 0:
            continue
        if first is None:
            first, end, dtype, width, count = tensor, tensor.data_ptr(), tensor.dtype, tensor.shape[1:], 0
        if tensor.data_ptr() != end or tensor.dtype != dtype or tensor.shape[1:] != width or not tensor.is_contiguous():
            return None
        end, count = end + tensor.nbytes, count + tensor.numel()
    if first is None:
        return None
    # Different storages may be adjacent too: the first must hold all.
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():
        return None
    return first.detach().as_strided((count,), (1,)).view(-1, *width)
