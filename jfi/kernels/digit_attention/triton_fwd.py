"""Attention over digits, forward, for any GPU: a program per tile of 16 query rows and stream-K range of events.

Every event is read and decoded once for the scores and the weighted sum.
"""

import triton
import triton.language as tl

from jfi.kernels.common.combine import behind_partials
from jfi.kernels.common.online_softmax import finish, online_softmax_update
from jfi.kernels.common.primitives import LOG2E
from jfi.kernels.common.stream_k import WEIGHT, end_row, find_range
from jfi.kernels.common.tiles import load_rows, store_rows
from jfi.kernels.digit_attention.tiles import EVENTS, load_event_bias, load_event_digits, load_event_scale


@triton.jit(
    do_not_specialize=["batch", "num_rows", "chunk", "table_rows", "digit_rows"], do_not_specialize_on_alignment=EVENTS
)
def digit_attention_fwd_kernel(
    q_ptr,
    events,
    index_ptr,
    bias_index_ptr,
    value_scale_ptr,
    outputs,
    batch,
    num_rows,
    chunk,
    table_rows,
    digit_rows,
    scale,
    SPEC: tl.constexpr,
):
    L: tl.constexpr = SPEC.num_digits
    digits_ptr, bias_ptr, offsets_ptr = events
    out_ptr, lse_ptr, partial_ptr = outputs
    program = tl.program_id(0)
    start = program.to(tl.int64) * chunk
    end = start + chunk
    row = tl.program_id(1) * SPEC.block_m + tl.arange(0, SPEC.block_m)
    row_mask = row < num_rows
    at = tl.arange(0, SPEC.block_n)
    partial_lse_ptr, split_ptr = behind_partials(partial_ptr, tl.num_programs(0), num_rows, L)
    split = tl.full((), -1, tl.int64)
    sample, low, high, n, _tiles = find_range(offsets_ptr, batch, start, end, SPEC.block_n)
    while (sample < batch) & (low + sample * WEIGHT < end):
        next_high = tl.load(offsets_ptr + sample + 2, mask=sample + 1 < batch, other=0).to(tl.int64)
        last = end_row(sample, high, end)
        q = load_rows(q_ptr + sample * num_rows * L, row, row_mask, L, L, SPEC.block_l)
        maximum = tl.full((SPEC.block_m,), -float("inf"), tl.float32)
        total = tl.zeros((SPEC.block_m, SPEC.block_n), tl.float32)
        acc = tl.zeros((SPEC.block_m, SPEC.block_l), tl.float32)
        for first in range(n, last, SPEC.block_n):
            mask = at < (last - first).to(tl.int32)
            digits = load_event_digits(digits_ptr, index_ptr, digit_rows, first, at, mask, q_ptr.dtype.element_ty, SPEC)
            bias = load_event_bias(bias_ptr, bias_index_ptr, table_rows, first, at, mask, row, SPEC) * LOG2E
            s = tl.dot(q, tl.trans(digits), input_precision=SPEC.precision) * (scale * LOG2E) + bias
            p, maximum, factor = online_softmax_update(s, maximum)
            total = total * factor[:, None] + p
            if SPEC.has_value_scale:
                p = p * load_event_scale(value_scale_ptr, first, at, mask)
            acc = tl.dot(p.to(digits.dtype), digits, acc * factor[:, None], input_precision=SPEC.precision)
        out, lse = finish(maximum, tl.sum(total, 1), acc)
        begins = low + sample * WEIGHT >= start
        if begins & (last == high):
            store_rows(out_ptr + sample * num_rows * L, out, row, row_mask, L, L, SPEC.block_l)
            tl.store(lse_ptr + sample * num_rows + row, lse, mask=row_mask)
        else:
            place = (2 * program + begins.to(tl.int32)).to(tl.int64) * num_rows
            store_rows(partial_ptr + place * L, out, row, row_mask, L, L, SPEC.block_l)
            tl.store(partial_lse_ptr + place + row, lse, mask=row_mask)
        split = tl.where(begins & (last < high), sample, split)
        sample += 1
        low = high
        n = high
        high = next_high
    tl.store(split_ptr + program, split.to(tl.int32))
