"""The moving average of a model's parameters, which evaluation uses."""

import copy

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from jfi.modules import FusedEmbeddingBagCollection, FusedEmbeddingCollection, GrowingIds

_FUSED = (FusedEmbeddingCollection, FusedEmbeddingBagCollection)


class ModelAverage(nn.Module):
    """torch's AveragedModel of a model whose tables are in fused collections, which keep the averages of their rows.

    `module` is a copy of the model, with TorchRec's collections over those averages. A step averages the parameters
    outside of the tables here and rows of the batch with their step; `flush()` brings the other rows to the present.

    Args:
        model: its collections have an `average` of the same decay.
        decay: of the average.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self._collections = [module for module in model.modules() if isinstance(module, _FUSED)]
        # A copy of the model is made with these instead of its collections.
        averaged = {id(collection): collection.averaged() for collection in self._collections}
        averaged |= {id(one): one for one in model.modules() if isinstance(one, GrowingIds)}  # one map for both
        self.module = copy.deepcopy(model, dict(averaged))
        tables = {p for collection in self._collections for p in collection.parameters()}
        averages = dict(self.module.named_parameters())
        pairs = [(averages[name], p) for name, p in model.named_parameters() if p not in tables]
        self._own, self._new = [list(side) for side in zip(*pairs, strict=True)]
        self._new_buffers = list(model.buffers())
        self.register_buffer("n_averaged", torch.tensor(0, device=pairs[0][1].device))
        self._has_begun = False
        self._average = get_ema_multi_avg_fn(decay)

    @torch.no_grad()
    def update(self) -> None:
        """Takes the model's parameters after a step into the average; the first ones are the average."""
        if not self._has_begun:  # read from a GPU at most twice after a start
            self._has_begun = int(self.n_averaged) > 0
        if self._has_begun:
            self._average(self._own, self._new, self.n_averaged)
        else:
            torch._foreach_copy_(self._own, self._new)
        for own, new in zip(self.module.buffers(), self._new_buffers, strict=True):
            own.copy_(new)
        self.n_averaged += 1

    def flush(self) -> None:
        """Brings the averages of all rows of the tables to the present."""
        for collection in self._collections:
            collection.averages()
