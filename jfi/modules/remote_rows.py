"""Embeddings of events whose rows lie on several ranks, as the layers see them; `jfi.distributed` makes them."""

import torch
from torch import Tensor

from jfi.modules.table_rows import UnreadRows


class RemoteAttention:
    """Attention to the events of some features of a group, whose rows lie on several ranks."""

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the rows as attention reads them, and of its queries."""
        raise NotImplementedError

    @property
    def feature_names(self) -> list[str]:
        """Returns the features, in the order of the queries that `attend` takes."""
        raise NotImplementedError

    def rows(self, feature: str) -> Tensor:
        """Fetches the rows [S, D] of a feature's events from their ranks."""
        raise NotImplementedError

    def attend(self, query: Tensor, table: Tensor | None, scale: float) -> Tensor:
        """Computes `jfi.ops.target_attention` of the events; all ranks call it together.

        Args:
            query: [F * B, T, H, D], absorbed, of the F features one after the other.
            table: [R, H], the learned bias tables of the whole group, if the features have one.
            scale: of the scores.

        Returns:
            [F * B, T, H, D].
        """
        raise NotImplementedError


class RemoteRows(UnreadRows):
    """A JaggedTensor of embeddings whose rows lie on several ranks; `values()` fetches them at first use.

    Args:
        events: by feature whose history this is, attention to its events.
        rows: [S, D], without memory.
        lengths: [B]; None if offsets are given.
        offsets: [B + 1].
        weights: [S], of the events.
    """

    def __init__(
        self,
        events: dict[str, RemoteAttention],
        rows: Tensor,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        self.events = events
        super().__init__(rows, lengths, offsets, weights)

    def read(self) -> Tensor:
        feature, events = next(iter(self.events.items()))
        return events.rows(feature)

    @property
    def is_trained(self) -> bool:
        return True
