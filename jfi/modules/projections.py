"""Projections of several features at once around an attention, on the targets' side or on that of the history.

The weights of F features are stacked along the first dimension and ordered as `jfi.ops.absorbed_target_attention` takes
them. `jfi.modules.stacked_attention` derives both sides.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from jfi.modules.events import Events
from jfi.ops import absorb_weights
from jfi.utils.context import without_autocast

#: Attention of queries [F * B, T, H, D] to given or bound keys and values; returns outputs of this shape.
Attention = Callable[..., Tensor]


def linear(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Maps [F, B, M] by weights [F, N, M] and biases [F, N] to [F, B, N], in the dtype of the weight."""
    return torch.baddbmm(bias.unsqueeze(1), rows.to(weight.dtype), weight.mT)


def absorbed(events: Events, weights: tuple[Tensor, ...], num_heads: int, attention: Attention) -> Tensor:
    """Returns the outputs [F, B, D] with all projections on the targets' side.

    Args:
        events: for the targets, and the dtype of the events.
        weights: those of keys and values are of events of width D_x.
        num_heads: H.
        attention: of queries [F * B, T, H, D_x] to raw events.
    """
    *projections, output_bias = weights
    device = events.fields[0].device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else projections[0].dtype
    with without_autocast(device):
        w_qk, b_qk, w_vo = absorb_weights(tuple(projections), num_heads, dtype)
        num_queries = projections[0].size(1) // projections[2].size(1)
        query = linear(events.target, w_qk, b_qk).view(-1, num_queries, num_heads, projections[2].size(2))
        attended = attention(query.to(events.fields[0].dtype))
        return linear(attended.reshape(output_bias.size(0), -1, w_vo.size(1)), w_vo.mT, output_bias.to(dtype))


def projected(
    events: Events, rows: Tensor, weights: tuple[Tensor, ...], num_heads: int, attention: Attention
) -> Tensor:
    """Returns the outputs [F, B, D] with keys and values projected on the history's side.

    Args:
        events: for the targets, and the number of events of each feature.
        rows: [S, D_x], the events.
        weights: of keys and values [F, D, D_x].
        num_heads: H.
        attention: of queries [F * B, T, H, D / H] to keys and values [S, H, D / H].
    """
    query_weight, query_bias, key_weight, value_weight, output_weight, output_bias = weights
    query = linear(events.target, query_weight, query_bias)
    by_feature = rows.split(events.counts)
    key, value = (_project(by_feature, weight, num_heads) for weight in (key_weight, value_weight))
    query = query.view(-1, query_weight.size(1) // key_weight.size(1), num_heads, key.size(2))
    attended = attention(query.to(key.dtype), key, value)
    return linear(attended.reshape(output_bias.size(0), -1, output_weight.size(2)), output_weight, output_bias)


def _project(rows: tuple[Tensor, ...], weight: Tensor, num_heads: int) -> Tensor:
    """Returns each feature's events [.., D_x] times its weight [D, D_x], concatenated: [S, H, D / H]."""
    weight = weight.to(rows[0].dtype)
    found = [functional.linear(rows[f], weight[f]) for f in range(len(rows))]
    found = found[0] if len(rows) == 1 else torch.cat(found)
    return found.view(-1, num_heads, weight.size(1) // num_heads)
