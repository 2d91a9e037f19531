"""Attention over digits on a CPU: blocks of samples are decoded, then attended to as rows of numbers.

A block has as many samples as hold some 2^15 events, at least one, so [S, L] is made of no more than that or the
longest sample.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from jfi.cpu import target_attention
from jfi.reference import unpack_digits

_EVENTS = 2**15


def sample_blocks(offsets: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yields (samples, events) of each block."""
    ends, first = offsets.tolist(), 0
    while first < len(ends) - 1:
        last = first + 1
        while last < len(ends) - 1 and ends[last + 1] - ends[first] <= _EVENTS:
            last += 1
        yield slice(first, last), slice(ends[first], ends[last])
        first = last


def _blocks(
    query: Tensor,
    key: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    value_scale: Tensor | None,
    tables: list[Tensor],
    indices: list[Tensor],
) -> Iterator[tuple[slice, slice, tuple]]:
    """Yields (samples, events, the arguments key to bias of `target_attention`) of each block."""
    for samples, events in sample_blocks(offsets):
        words = tables[0].index_select(0, indices[0][events]) if tables else key[events, 0]
        dtype = torch.promote_types(query.dtype, torch.float32)
        rows = unpack_digits(words, query.shape[3])[:, None].to(dtype)
        value = None if value_scale is None else rows * value_scale[events, None, None].to(dtype)
        own_bias = None if bias is None else bias[events]
        yield samples, events, (rows, value, offsets[samples.start : samples.stop + 1] - events.start, own_bias)


def forward(
    query: Tensor,
    key: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    value_scale: Tensor | None,
    tables: list[Tensor],
    indices: list[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Returns the output [B, T, H, L] and the log-sum-exp of the scores [B, T, H], -inf for an empty history."""
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
    for samples, _, history in _blocks(query, key, offsets, bias, value_scale, tables, indices):
        out[samples], lse[samples] = target_attention.forward(query[samples], *history, scale)
    return out, lse


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    value_scale: Tensor | None,
    tables: list[Tensor],
    indices: list[Tensor],
    scale: float,
    out: Tensor,
    lse: Tensor,
    needed: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of query, key, value, bias and second: of query and bias if needed, else None."""
    dquery = torch.empty_like(query) if needed[0] else None
    dbias = torch.empty_like(bias) if needed[3] else None
    for samples, events, history in _blocks(query, key, offsets, bias, value_scale, tables, indices):
        saved = (out[samples], lse[samples], scale, (needed[0], False, False, needed[3]))
        of_query, _, _, of_bias = target_attention.backward(grad[samples], query[samples], *history, *saved)
        if needed[0]:
            dquery[samples] = of_query
        if needed[3]:
            dbias[events] = of_bias
    return dquery, None, None, dbias, None
