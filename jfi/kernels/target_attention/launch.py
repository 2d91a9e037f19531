"""Target attention in Triton: one tile for few query rows to a key head, many tiles for more.

So many that each sample alone has several tiles of them are jagged attention with T queries in every sample.
"""

import torch
from torch import Tensor

from jfi.kernels.common.stream_k import multiprocessors
from jfi.kernels.jagged_attention import launch as jagged_attention
from jfi.kernels.target_attention import few_bwd, few_fwd, many_bwd, many_fwd
from jfi.kernels.target_attention.tiles import FEW

#: Query rows to a key head from which on Hopper's kernels for jagged attention waste little of a tile.
_TILES = 256
#: Query rows to a multiprocessor from which on no history need be split: four tiles.
_FILLING = 512


def _query_rows(query: Tensor, key: Tensor) -> int:
    """Query rows of a sample that meet a key head."""
    return query.shape[1] * query.shape[2] // key.shape[1]


def _are_jagged(query: Tensor, key: Tensor, value: Tensor | None, bias: Tensor | None, scale: float) -> bool:
    """Whether Hopper's kernels take them, and each multiprocessor has work though no history is split."""
    batch, times, heads, _ = query.shape
    fills = batch * times * heads >= _FILLING * multiprocessors(query.device)
    if _query_rows(query, key) < _TILES or not fills:
        return False
    return jagged_attention.hopper_for(query.flatten(0, 1), key, value, bias, scale) is not None


def _query_offsets(query: Tensor) -> Tensor:
    batch, times = query.shape[:2]
    return torch.arange(0, (batch + 1) * times, times, device=query.device)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    buckets: Tensor | None,
    value_scale: Tensor | None,
    second: Tensor | None,
    scale: float,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results as those of few_fwd.forward."""
    if _query_rows(query, key) <= FEW:
        return few_fwd.forward(query, key, value, offsets, bias, buckets, value_scale, second, scale, max_seqlen)
    with torch.cuda.device_of(query):
        if _are_jagged(query, key, value, bias, scale):
            rows = query.flatten(0, 1)
            query_offsets = _query_offsets(query)
            out, lse = jagged_attention.forward(rows, key, value, query_offsets, offsets, bias, scale, None, None)
            return out.view(*query.shape[:3], -1), lse.view(query.shape[:3])
        return many_fwd.forward(query, key, value, offsets, bias, scale, max_seqlen)


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    buckets: Tensor | None,
    value_scale: Tensor | None,
    second: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    max_seqlen: int | None,
) -> tuple[Tensor | None, ...]:
    """Arguments and results as those of few_bwd.backward; the kernels for more know no second."""
    if _query_rows(query, key) <= FEW:
        return few_bwd.backward(
            grad, query, key, value, offsets, bias, buckets, value_scale, second, out, lse, scale, max_seqlen
        )
    with torch.cuda.device_of(query):
        if _are_jagged(query, key, value, bias, scale):
            grad, rows, out, lse = (x.flatten(0, 1) for x in (grad, query, out, lse))
            inputs = (rows, key, value, _query_offsets(query), offsets, bias, out, lse, scale, None, None)
            dquery, *others = jagged_attention.backward(grad, None, *inputs)
            return dquery.view_as(query), *others
        return many_bwd.backward(grad, query, key, value, offsets, bias, out, lse, scale, max_seqlen)
