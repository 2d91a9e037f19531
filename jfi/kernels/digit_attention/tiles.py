"""What the kernels over digits share: their constants, digits of a tile of events, and what comes with each event.

``events`` is (digits_ptr, bias_ptr, offsets_ptr); the numbers per event are parameters of their own, since they may
begin anywhere: index_ptr names each event's row of a table of digits, bias_index_ptr its row of a table of biases, and
value_scale_ptr has the factor of its value.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.spec import Constant
from jfi.kernels.common.tiles import load_digits
from jfi.operands import DigitAttentionInputs

#: Parameters with a number per event.
EVENTS = ["index_ptr", "bias_index_ptr", "value_scale_ptr"]


class DigitSpec(NamedTuple):
    """What the kernels of one problem are compiled for, and their tiles.

    Attributes:
        num_heads: H; query row r of a sample's T · H has head r % H.
        num_digits: L, digits of an event.
        num_words: W, int32 words of an event.
        by_id: events name rows of a table of digits.
        has_bias: scores have a bias by event and head.
        bias_by_index: the bias is a table; each event names one of its rows.
        has_value_scale: values are multiplied by a number per event.
        precision: ``input_precision`` of tl.dot.
        block_m: query rows of a tile.
        block_n: events of a tile.
        block_l: the power of two that covers num_digits.
    """

    num_heads: tl.constexpr
    num_digits: tl.constexpr
    num_words: tl.constexpr
    by_id: tl.constexpr
    has_bias: tl.constexpr
    bias_by_index: tl.constexpr
    has_value_scale: tl.constexpr
    precision: tl.constexpr
    block_m: tl.constexpr
    block_n: tl.constexpr
    block_l: tl.constexpr

    @classmethod
    def of(cls, problem, block_m: int, block_n: int) -> "DigitSpec":
        """The spec of a `jfi.plan.DigitProblem` on such tiles."""
        fields = [getattr(problem, name) for name in cls._fields[:8]]
        return cls(*map(Constant, (*fields, block_m, block_n, problem.block_l)))


def event_pointers(x: DigitAttentionInputs) -> tuple[Tensor | None, ...]:
    """``events``, and the numbers per event."""
    return (x.digits, x.bias, x.offsets), x.indices, x.bias_index, x.value_scale


@triton.jit
def load_event_digits(digits_ptr, index_ptr, digit_rows, n, at, mask, dtype, SPEC: tl.constexpr):
    """[N, L] in dtype: the digits of the events n + at, 0 outside the mask and of an index outside of digit_rows."""
    row = n + at.to(tl.int64)
    if SPEC.by_id:
        row = tl.load(index_ptr + row, mask=mask, other=0).to(tl.int64)
        mask = mask & (row >= 0) & (row < digit_rows)
    return load_digits(digits_ptr, row, mask, dtype, SPEC.num_digits, SPEC.num_words, SPEC.block_l)


@triton.jit
def load_event_bias(bias_ptr, bias_index_ptr, table_rows, n, at, mask, row, SPEC: tl.constexpr):
    """[M, N]: each event's bias for each query row's head, -inf outside the mask.

    If by index 0 where the index is outside of the table.
    """
    event = n + at.to(tl.int64)
    if SPEC.has_bias:
        is_row = mask
        if SPEC.bias_by_index:
            event = tl.load(bias_index_ptr + event, mask=mask, other=0).to(tl.int64)
            is_row = mask & (event >= 0) & (event < table_rows)
        where = event[None, :] * SPEC.num_heads + (row % SPEC.num_heads)[:, None]
        keep = tl.broadcast_to(is_row[None, :], where.shape)
        bias = tl.load(bias_ptr + where, mask=keep, other=0.0).to(tl.float32)
        return tl.where(mask[None, :], bias, -float("inf"))
    else:
        return tl.where(mask, 0.0, -float("inf"))[None, :]


@triton.jit
def load_event_scale(value_scale_ptr, n, at, mask):
    """[1, N]: the factor of each event's value."""
    return tl.load(value_scale_ptr + n + at, mask=mask, other=0.0).to(tl.float32)[None, :]
