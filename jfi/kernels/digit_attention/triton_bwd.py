"""Attention over digits, backward, for any GPU: the weights are recomputed, and digits have no gradient.

P = exp(S - L)      dS = P (dO·d - Δ)      dq = scale Σ dS d      dbias = Σ_t dS
"""

import triton
import triton.language as tl

from jfi.kernels.common.combine import behind_partials
from jfi.kernels.common.online_softmax import hide_empty, scores_gradient
from jfi.kernels.common.primitives import LOG2E
from jfi.kernels.common.stream_k import WEIGHT, end_row, find_range
from jfi.kernels.common.tiles import load_rows, row_products, store_rows
from jfi.kernels.digit_attention.tiles import EVENTS, load_event_bias, load_event_digits, load_event_scale


@triton.jit(
    do_not_specialize=["batch", "num_rows", "chunk", "num_events", "table_rows", "digit_rows"],
    do_not_specialize_on_alignment=EVENTS,
)
def digit_attention_bwd_kernel(
    queries,
    events,
    index_ptr,
    bias_index_ptr,
    value_scale_ptr,
    grads,
    batch,
    num_rows,
    chunk,
    num_events,
    table_rows,
    digit_rows,
    scale,
    SPEC: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """With BLOCK_R the bias is a table of so few rows that each program sums its gradient; else dbias is by event.

    ``grads`` are pointers to dq, dbias and the ranges' parts of dq, None for what is not needed.
    """
    L: tl.constexpr = SPEC.num_digits
    H: tl.constexpr = SPEC.num_heads
    PRECISION: tl.constexpr = SPEC.precision
    q_ptr, grad_ptr, out_ptr, lse_ptr = queries
    digits_ptr, bias_ptr, offsets_ptr = events
    dq_ptr, dbias_ptr, partial_ptr = grads
    program, tile = tl.program_id(0), tl.program_id(1)
    start = program.to(tl.int64) * chunk
    end = start + chunk
    row = tile * SPEC.block_m + tl.arange(0, SPEC.block_m)
    row_mask = row < num_rows
    at = tl.arange(0, SPEC.block_n)
    if dbias_ptr is not None:
        # Which query row has which head: dS times it sums over the query rows of a head.
        of_head = (((row % H)[:, None] == tl.arange(0, BLOCK_H)[None, :]) & row_mask[:, None]).to(tl.float32)
    if BLOCK_R > 0:
        table_at = tl.arange(0, BLOCK_R)
        dtable = tl.zeros((SPEC.block_m, BLOCK_R), tl.float32)
    if dq_ptr is not None:
        _partial_lse_ptr, split_ptr = behind_partials(partial_ptr, tl.num_programs(0), num_rows, L)
    split = tl.full((), -1, tl.int64)
    sample, low, high, n, _tiles = find_range(offsets_ptr, batch, start, end, SPEC.block_n)
    while (sample < batch) & (low + sample * WEIGHT < end):
        next_high = tl.load(offsets_ptr + sample + 2, mask=sample + 1 < batch, other=0).to(tl.int64)
        last = end_row(sample, high, end)
        base = sample * num_rows
        q = load_rows(q_ptr + base * L, row, row_mask, L, L, SPEC.block_l)
        grad = load_rows(grad_ptr + base * L, row, row_mask, L, L, SPEC.block_l)
        out = load_rows(out_ptr + base * L, row, row_mask, L, L, SPEC.block_l)
        delta = row_products(grad, out)
        lse = hide_empty(tl.load(lse_ptr + base + row, mask=row_mask, other=float("inf")))
        dq = tl.zeros((SPEC.block_m, SPEC.block_l), tl.float32)
        for first in range(n, last, SPEC.block_n):
            mask = at < (last - first).to(tl.int32)
            digits = load_event_digits(digits_ptr, index_ptr, digit_rows, first, at, mask, q_ptr.dtype.element_ty, SPEC)
            bias = load_event_bias(bias_ptr, bias_index_ptr, table_rows, first, at, mask, row, SPEC)
            s = tl.dot(q, tl.trans(digits), input_precision=PRECISION) * (scale * LOG2E)
            p = tl.exp2(s + (bias - lse[:, None]) * LOG2E)
            dp = tl.dot(grad, tl.trans(digits), input_precision=PRECISION)
            if SPEC.has_value_scale:
                dp = dp * load_event_scale(value_scale_ptr, first, at, mask)
            ds = scores_gradient(p, dp, delta[:, None])
            if dbias_ptr is not None:
                if BLOCK_R > 0:
                    # Which events have which row of the table: they are summed in their order.
                    index = tl.load(bias_index_ptr + first + at, mask=mask, other=0)
                    of_row = (index[:, None] == table_at[None, :]).to(digits.dtype)
                    dtable = tl.dot(ds.to(digits.dtype), of_row, dtable, input_precision=PRECISION)
                else:
                    dbias = tl.dot(tl.trans(ds), of_head, input_precision="tf32x3")
                    to = dbias_ptr + (tile.to(tl.int64) * num_events + first) * H
                    store_rows(to, dbias, at, mask, H, H, BLOCK_H)
            if dq_ptr is not None:
                dq = tl.dot(ds.to(digits.dtype), digits, dq, input_precision=PRECISION)
        if dq_ptr is not None:
            dq = dq * scale
            begins = low + sample * WEIGHT >= start
            if begins & (last == high):
                store_rows(dq_ptr + base * L, dq, row, row_mask, L, L, SPEC.block_l)
            else:
                place = (2 * program + begins.to(tl.int32)).to(tl.int64) * num_rows
                store_rows(partial_ptr + place * L, dq, row, row_mask, L, L, SPEC.block_l)
            split = tl.where(begins & (last < high), sample, split)
        sample += 1
        low = high
        n = high
        high = next_high
    if (BLOCK_R > 0) and (dbias_ptr is not None):
        dtable = tl.dot(tl.trans(dtable), of_head, input_precision="tf32x3")
        to = dbias_ptr + (program.to(tl.int64) * tl.num_programs(1) + tile) * (table_rows * H)
        store_rows(to, dtable, table_at, table_at < table_rows, H, H, BLOCK_H)
    if dq_ptr is not None:
        tl.store(split_ptr + program, split.to(tl.int32))
