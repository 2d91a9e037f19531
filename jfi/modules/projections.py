"""Projections of several features at once, whose weights are stacked along the first dimension."""

import torch
from torch import Tensor
from torch.nn import functional


def linear(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """[F, B, M], [F, N, M] and [F, N] -> [F, B, N], in the dtype of the weight."""
    return torch.baddbmm(bias.unsqueeze(1), rows.to(weight.dtype), weight.mT)


def project_events(rows: tuple[Tensor, ...], weight: Tensor, num_heads: int) -> Tensor:
    """Each feature's events [.., D_x] times its weight [D, D_x], concatenated: [S, H, D / H]."""
    weight = weight.to(rows[0].dtype)
    projected = [functional.linear(rows[f], weight[f]) for f in range(len(rows))]
    projected = projected[0] if len(rows) == 1 else torch.cat(projected)
    return projected.view(-1, num_heads, weight.size(1) // num_heads)
