"""Counts of ids outside of their tables, kept on the device that reads them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from jfi.utils.arguments import check_module


class OutsideIds:
    """Counts of a collection, which `jfi.tables.gather_rows.bound_ids` adds to.

    Args:
        tables: the table of each look-up.
        counts: [K] int64, by look-up; None begins at 0.
    """

    def __init__(self, tables: Sequence[str], counts: Tensor | None = None) -> None:
        self.tables = tuple(tables)
        self.counts = torch.zeros(len(self.tables), dtype=torch.int64, device="cpu") if counts is None else counts

    def on(self, device: torch.device) -> Tensor:
        """Returns the counts, moved to the device of ids if they are on another one that has memory."""
        if self.counts.device != device and device.type != "meta":
            self.counts = self.counts.to(device)
        return self.counts


def all_outside_ids(model: nn.Module) -> list[OutsideIds]:
    """Returns the counts of all collections of a model."""
    found = [getattr(module, "outside_ids", ()) for module in model.modules()]
    return [one for counts in found if isinstance(counts, tuple) for one in counts]  # not a feature of that name


def outside_ids(model: nn.Module) -> dict[str, int]:
    """Returns by table how many ids of look-ups so far were outside of it, only tables that had any.

    On a GPU such an id gives zeros, has no gradient and steps no row; on a CPU it is an error. An id of -1, a missing
    one, is not counted. `GrowingIds` counts the raw id 2**63 - 1, which never gets a row. Reading the counts waits for
    the device.

    Args:
        model: with FusedEmbedding(Bag)Collections, or the sharded collections of `jfi.distributed`, which count the ids
            of this rank's samples.

    Example:
        >>> from jfi import FusedEmbeddingCollection
        >>> from torchrec import EmbeddingConfig
        >>> table = EmbeddingConfig(name="item", embedding_dim=4, num_embeddings=10, feature_names=["item"])
        >>> outside_ids(FusedEmbeddingCollection([table], torch.optim.SGD, {"lr": 0.1}))
        {}
    """
    check_module("model", model)
    found: dict[str, int] = {}
    for one in all_outside_ids(model):
        for table, count in zip(one.tables, one.counts.tolist(), strict=True):
            if count:
                found[table] = found.get(table, 0) + count
    return found
