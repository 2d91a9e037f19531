"""Embeddings of events that have not been read yet: rows of a table, and digits of semantic IDs."""

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from jfi.modules.adjacent import join
from jfi.ops.rows_by_id import RowsById, read_rows
from jfi.reference import select_words, unpack_digits
from jfi.utils.arguments import check_type, shown


class UnreadRows(JaggedTensor):
    """A JaggedTensor of embeddings that `values()` reads at first use; attention may do without them.

    Attributes:
        rows: [S, D] of the embeddings' dtype and device. Its values are never read and take no memory.
    """

    rows: Tensor

    def __init__(
        self, rows: Tensor, lengths: Tensor | None, offsets: Tensor | None, weights: Tensor | None = None
    ) -> None:
        self.rows = rows
        super().__init__(rows, lengths=lengths, offsets=offsets, weights=weights)
        self._read: Tensor | None = None

    def read(self) -> Tensor:
        """The embeddings [S, D]; their gradient too."""
        raise NotImplementedError

    def with_parts(self, lengths: Tensor | None, offsets: Tensor | None, weights: Tensor | None) -> "UnreadRows":
        """The same embeddings with these lengths, offsets and weights."""
        raise NotImplementedError

    @property
    def is_trained(self) -> bool:
        """Whether the embeddings have a gradient."""
        raise NotImplementedError

    @property
    def is_read(self) -> bool:
        """Whether the embeddings [S, D] have been made."""
        return self._read is not None

    @property
    def _values(self) -> Tensor:
        # What JaggedTensor's own methods read.
        wants_grad = torch.is_grad_enabled() and self.is_trained
        if self._read is None or (wants_grad and not self._read.requires_grad):
            self._read = self.read()
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
            check_type(argument, value, Tensor, "a Tensor")
        check_type("weights", weights, (Tensor, type(None)), "a Tensor or None")
        for argument, value in (("lengths", lengths), ("offsets", offsets)):
            if value is not None and (not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64)):
                raise TypeError(f"{argument} must be an int32 or int64 Tensor or None, got {shown(value)}")
        if lengths is None and offsets is None:
            raise ValueError("lengths or offsets must be given, got None for both")
        self.table, self.ids = table, ids
        super().__init__(rows, lengths, offsets, weights)

    @property
    def by_id(self) -> RowsById:
        """The rows as the attention operators take them."""
        return RowsById(self.rows, (self.table.contiguous(),), (self.ids.contiguous(),))

    def read(self) -> Tensor:
        return read_rows(self.by_id)

    def with_parts(self, lengths: Tensor | None, offsets: Tensor | None, weights: Tensor | None) -> "TableRows":
        return TableRows(self.table, self.ids, self.rows, lengths, offsets, weights)

    @property
    def is_trained(self) -> bool:
        return self.rows.requires_grad


class DigitRows(UnreadRows):
    """A JaggedTensor of embeddings of semantic IDs, given by the IDs; `values()` makes them at first use.

    The embedding of an ID is a linear map of its digits d: P [d, 1, 0], and P [0, 0, 1] of UNKNOWN_SID. Attention takes
    `embedding.words(ids)`, which are these L + 2 digits, and P, `embedding.digit_weight()`.

    Args:
        ids: [S] int64; of an embedding with a catalogue its items, int32 or int64.
        embedding: the SemanticIDEmbedding, with read="digits".
        dtype: of the embeddings.
        lengths: [B]; None if offsets are given.
        offsets: [B + 1].
        weights: [S], of the events.
    """

    def __init__(
        self,
        ids: Tensor,
        embedding: nn.Module,
        dtype: torch.dtype,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        self.ids, self.embedding, self._words = ids, embedding, None
        rows = torch.zeros((), dtype=dtype, device=ids.device).expand(ids.size(0), embedding.embedding_dim)
        super().__init__(rows, lengths, offsets, weights)

    @property
    def words(self) -> Tensor:
        """[S, ceil((L + 2) / 16)] int32, made once however many layers read them; or the catalogue's, of which
        `indices` are the events'.
        """
        if self._words is None:
            self._words = self.embedding.words(self.ids)
        return self._words

    @property
    def indices(self) -> Tensor | None:
        """[S], the rows of `words` if these are the catalogue's."""
        return None if self.embedding.catalogue is None else self.ids

    def read(self) -> Tensor:
        return self.embedding.embed(self.ids).to(self.rows.dtype)

    def with_parts(self, lengths: Tensor | None, offsets: Tensor | None, weights: Tensor | None) -> "DigitRows":
        return DigitRows(self.ids, self.embedding, self.rows.dtype, lengths, offsets, weights)

    def to_dtype(self, dtype: torch.dtype) -> "DigitRows":
        """The same embeddings of another dtype."""
        parts = self.lengths_or_none(), self.offsets_or_none(), self.weights_or_none()
        return DigitRows(self.ids, self.embedding, dtype, *parts)

    @property
    def is_trained(self) -> bool:
        return any([one.requires_grad for one in self.embedding.parameters()])


def join_words(events: tuple[DigitRows, ...]) -> tuple[Tensor, Tensor | None]:
    """The words and the indices of events of one embedding, one after another, as `digit_attention` takes them."""
    if events[0].indices is None:
        return join([one.words for one in events]), None
    return events[0].words, join([one.indices for one in events])


def digit_numbers(events: tuple[DigitRows, ...]) -> Tensor:
    """[S, L + 2]: the digits of events of one embedding as numbers of the embeddings' dtype, without a gradient."""
    words, indices = join_words(events)
    words = words if indices is None else select_words(words, indices)
    return unpack_digits(words, events[0].embedding.layout.num_digits + 2).to(events[0].rows.dtype)


def with_weights(events: JaggedTensor, weights: Tensor | None) -> JaggedTensor:
    """The events with weights of their own."""
    parts = {"lengths": events.lengths_or_none(), "offsets": events.offsets_or_none(), "weights": weights}
    if isinstance(events, UnreadRows):
        return events.with_parts(**parts)
    return JaggedTensor(values=events.values(), **parts)
