"""Target attention in Triton: one tile for few query rows to a key head, many tiles for more."""

from types import ModuleType

from torch import Tensor

from jfi.kernels import (
    target_attention_bwd,
    target_attention_fwd,
    target_attention_many_bwd,
    target_attention_many_fwd,
)
from jfi.kernels.target_attention_tiles import FEW


def _choose(query: Tensor, key: Tensor, few: ModuleType, many: ModuleType) -> ModuleType:
    return few if query.shape[1] * query.shape[2] <= FEW * key.shape[1] else many


def forward(query: Tensor, key: Tensor, *rest) -> tuple[Tensor, Tensor]:
    """Arguments and results as those of target_attention_fwd.forward."""
    return _choose(query, key, target_attention_fwd, target_attention_many_fwd).forward(query, key, *rest)


def backward(grad: Tensor, query: Tensor, key: Tensor, *rest) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Arguments and results as those of target_attention_bwd.backward."""
    return _choose(query, key, target_attention_bwd, target_attention_many_bwd).backward(grad, query, key, *rest)
