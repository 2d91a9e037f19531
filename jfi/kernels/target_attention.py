"""Target attention in Triton: one tile for few query rows to a key head, many tiles for more."""

import torch
from torch import Tensor

from jfi.kernels import (
    target_attention_bwd,
    target_attention_fwd,
    target_attention_many_bwd,
    target_attention_many_fwd,
)
from jfi.kernels.target_attention_tiles import FEW


def _are_few(query: Tensor, key: Tensor) -> bool:
    return query.shape[1] * query.shape[2] <= FEW * key.shape[1]


def forward(query: Tensor, key: Tensor, *rest) -> tuple[Tensor, Tensor]:
    """Arguments and results as those of target_attention_fwd.forward."""
    if _are_few(query, key):
        return target_attention_fwd.forward(query, key, *rest)
    with torch.cuda.device_of(query):
        return target_attention_many_fwd.forward(query, key, *rest)


def backward(grad: Tensor, query: Tensor, key: Tensor, *rest) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Arguments and results as those of target_attention_bwd.backward."""
    if _are_few(query, key):
        return target_attention_bwd.backward(grad, query, key, *rest)
    with torch.cuda.device_of(query):
        return target_attention_many_bwd.backward(grad, query, key, *rest)
