"""Attention over digits on a CPU: blocks of samples are decoded, then attended to as rows of numbers.

A block has as many samples as hold some 2^15 events, at least one, so [S, L] is made of no more than that.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from jfi.cpu import target_attention
from jfi.operands import DigitAttentionInputs
from jfi.reference import unpack_digits

_EVENTS = 2**15


def sample_blocks(offsets: Tensor) -> Iterator[tuple[slice, slice]]:
    """(samples, events) of each block."""
    ends, first = offsets.tolist(), 0
    while first < len(ends) - 1:
        last = first + 1
        while last < len(ends) - 1 and ends[last + 1] - ends[first] <= _EVENTS:
            last += 1
        yield slice(first, last), slice(ends[first], ends[last])
        first = last


def _blocks(x: DigitAttentionInputs) -> Iterator[tuple[slice, slice, tuple]]:
    """(samples, events, the arguments key to bias of `target_attention`) of each block."""
    for samples, events in sample_blocks(x.offsets):
        words = x.digits[events] if x.indices is None else x.digits.index_select(0, x.indices[events])
        dtype = torch.promote_types(x.query.dtype, torch.float32)
        key = unpack_digits(words, x.query.shape[3])[:, None].to(dtype)
        value = None if x.value_scale is None else key * x.value_scale[events, None, None].to(dtype)
        bias = None if x.bias is None else x.bias[events]
        yield samples, events, (key, value, x.offsets[samples.start : samples.stop + 1] - events.start, bias)


def forward(x: DigitAttentionInputs) -> tuple[Tensor, Tensor]:
    """Returns the output [B, T, H, L] and the log-sum-exp of the scores [B, T, H], -inf for an empty history."""
    out = torch.empty_like(x.query)
    lse = x.query.new_empty(x.query.shape[:3], dtype=torch.promote_types(x.query.dtype, torch.float32))
    for samples, _, history in _blocks(x):
        out[samples], lse[samples] = target_attention.forward(x.query[samples], *history, x.scale)
    return out, lse


def backward(
    grad: Tensor, x: DigitAttentionInputs, out: Tensor, lse: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of query and bias, None for one that is not needed."""
    needs_query, needs_bias = needed
    dquery = torch.empty_like(x.query) if needs_query else None
    dbias = torch.empty_like(x.bias) if needs_bias else None
    for samples, events, history in _blocks(x):
        saved = (out[samples], lse[samples], x.scale, (needs_query, False, False, needs_bias))
        of_query, _, _, of_bias = target_attention.backward(grad[samples], x.query[samples], *history, *saved)
        if needs_query:
            dquery[samples] = of_query
        if needs_bias:
            dbias[events] = of_bias
    return dquery, dbias
