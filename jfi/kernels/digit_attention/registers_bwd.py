"""Attention over digits, backward, in half precision: as the forward, with the weights recomputed.

P = exp(S - L)      dS = P (dO·d - Δ)      dq = scale Σ dS d
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from jfi.kernels.common.combine import behind_partials
from jfi.kernels.common.primitives import LOG2E
from jfi.kernels.common.stream_k import WEIGHT
from jfi.kernels.digit_attention import registers as tile
from jfi.kernels.digit_attention.registers import COLS, EVENTS, LEFT, MMA, RIGHT, ROWS, UNIT

behind_partials = gluon.jit(behind_partials.fn)


@gluon.jit
def _load_queries(queries, first_row, num_rows, SPEC: gl.constexpr):
    """(q, dO, the log-sum-exp in base 2, Δ times UNIT) of a sample."""
    q_ptr, grad_ptr, out_ptr, lse_ptr = queries
    base = first_row * SPEC.head_dim
    q = tile.load_rows(q_ptr + base, num_rows, SPEC)
    grad = tile.load_rows(grad_ptr + base, num_rows, SPEC)
    out = tile.load_rows(out_ptr + base, num_rows, SPEC).to(gl.float32)
    # Fused with 0, since threads that hold the same row must agree on its sum: see `row_products`.
    products = gl.fma(grad.to(gl.float32), out, gl.zeros_like(out))
    delta = gl.convert_layout(gl.sum(gl.sum(products, 2), 1), ROWS) * UNIT
    own_row = gl.arange(0, SPEC.block_m, layout=ROWS)
    lse = gl.load(lse_ptr + first_row + own_row, mask=own_row < num_rows, other=float("inf"))
    return tile.by_column(q), tile.by_column(grad), tile.hide_empty(lse) * LOG2E, delta


@gluon.jit
def _gradients(
    operands,
    table,
    units,
    bias_ptrs,
    value_scale_ptr,
    grads,
    n,
    left,
    rows,
    sums,
    scale,
    BLOCK_R: gl.constexpr,
    SPEC: gl.constexpr,
):
    """(dq, dtable) after the events from n on, at most ``left`` of them; dtable by query row."""
    q, grad, lse2, delta = operands
    along_k, along_n, table_row = units
    dq, dtable = sums
    dq_ptr, dbias_ptr = grads
    at = gl.arange(0, SPEC.block_n, layout=COLS)
    keys = tile.keys_of(along_k, q.dtype, SPEC)
    zero = gl.zeros([SPEC.block_m, SPEC.block_n], gl.float32, MMA)
    s = zero
    if BLOCK_R > 0:
        s = tile.table_scores(table, table_row, BLOCK_R, SPEC)
    s = mma_v2(q, keys, s) * (scale * (LOG2E / UNIT)) - lse2[:, None]
    if SPEC.has_bias and BLOCK_R == 0:
        s += tile.load_bias(bias_ptrs, n, left, rows, SPEC) * LOG2E
    elif left < SPEC.block_n:
        s = gl.where((at < left)[None, :], s, -float("inf"))
    p = gl.exp2(s)
    dp = mma_v2(grad, keys, zero)
    if SPEC.has_value_scale:
        dp = dp * tile.load_scale(value_scale_ptr, n, left, SPEC)
    ds = p * (dp - delta[:, None])  # times UNIT
    weights = gl.convert_layout(ds.to(q.dtype), LEFT, assert_trivial=True)
    if (BLOCK_R > 0) and (dbias_ptr is not None):
        # Which events have which row of the table: they are summed in their order.
        event = gl.arange(0, SPEC.block_n, layout=gl.SliceLayout(1, RIGHT))
        table_row = gl.arange(0, BLOCK_R, layout=gl.SliceLayout(0, RIGHT))
        # From the nearest cache, where the tile's rows have been loaded ahead.
        index = gl.load(bias_ptrs[1] + n + event, mask=event < left, other=0).to(gl.int32)
        of_row = (index[:, None] == table_row[None, :]).to(q.dtype)
        dtable = mma_v2(weights, of_row, dtable)
    elif dbias_ptr is not None:
        row = gl.arange(0, SPEC.block_m, layout=ROWS)
        to = dbias_ptr + n * SPEC.qheads_per_kvhead + at[None, :] * SPEC.qheads_per_kvhead + (rows[0] + row)[:, None]
        keep = (at < left)[None, :] & (row < rows[1])[:, None]
        gl.store(to, (ds * (1 / UNIT)).to(dbias_ptr.dtype.element_ty), mask=keep)
    if dq_ptr is not None:
        dq = mma_v2(weights, tile.values_of(along_n, q.dtype, SPEC), dq)
    return dq, dtable


@gluon.jit(
    do_not_specialize=["batch", "num_rows", "chunk", "num_events", "table_rows", "digit_rows"],
    do_not_specialize_on_alignment=EVENTS,
)
def digit_attention_registers_bwd_kernel(
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
    SPEC: gl.constexpr,
    BLOCK_R: gl.constexpr,
):
    """A program per tile of query rows and stream-K range.

    With BLOCK_R the bias is a table whose gradient each program sums by query row; else dbias is by event.

    ``grads`` are pointers to dq, dbias and the ranges' parts of dq, None for what is not needed.
    """
    L: gl.constexpr = SPEC.head_dim
    H: gl.constexpr = SPEC.qheads_per_kvhead
    COLUMNS: gl.constexpr = tile.units_of(SPEC.num_words) * tile.digits_of_unit(SPEC.num_words)
    offsets_ptr = events[2]
    bias_ptrs = (events[1], bias_index_ptr, table_rows)
    dq_ptr, dbias_ptr, partial_ptr = grads
    program = gl.program_id(0)
    start = program.to(gl.int64) * chunk
    end = start + chunk
    row = gl.program_id(1) * SPEC.block_m
    rows = (row, num_rows - row)
    if dq_ptr is not None:
        _partial_lse_ptr, split_ptr = behind_partials(partial_ptr, gl.num_programs(0), num_rows, L)
    split = start * 0 - 1
    sample, low, high, n = tile.find_range(offsets_ptr, batch, start)
    next_high = gl.load(offsets_ptr + sample + 2, mask=sample + 1 < batch, other=0).to(gl.int64)
    table = (scale, scale)
    if BLOCK_R > 0:
        table = tile.load_table(events[1], row, table_rows, UNIT / scale, BLOCK_R, SPEC)
    units = tile.load_events(events, index_ptr, digit_rows, bias_index_ptr, n, num_events, BLOCK_R, SPEC)
    dtable = gl.zeros([SPEC.block_m, BLOCK_R if BLOCK_R > 0 else 8], gl.float32, MMA)
    while (sample < batch) & (low + sample * WEIGHT < end):
        first_row = sample * num_rows + row
        operands = _load_queries(queries, first_row, rows[1], SPEC)
        dq = gl.zeros([SPEC.block_m, COLUMNS], gl.float32, MMA)
        last = gl.minimum(high, end - sample * WEIGHT)
        for first in range(n, last, SPEC.block_n):
            ahead = gl.minimum(first + SPEC.block_n, last)
            next_units = tile.load_events(
                events, index_ptr, digit_rows, bias_index_ptr, ahead, num_events, BLOCK_R, SPEC
            )
            left = gl.minimum(last - first, SPEC.block_n).to(gl.int32)
            sums = (dq, dtable)
            dq, dtable = _gradients(
                operands,
                table,
                units,
                bias_ptrs,
                value_scale_ptr,
                (dq_ptr, dbias_ptr),
                first,
                left,
                rows,
                sums,
                scale,
                BLOCK_R,
                SPEC,
            )
            units = next_units
        if dq_ptr is not None:
            dq = dq * (scale / (UNIT * UNIT))
            begins = low + sample * WEIGHT >= start
            if begins & (last == high):
                tile.store_sums(dq_ptr + first_row * L, dq, rows[1], SPEC)
            else:
                place = (2 * program + begins.to(gl.int32)).to(gl.int64) * num_rows + row
                tile.store_sums(partial_ptr + place * L, dq, rows[1], SPEC)
            split = gl.where(begins & (last < high), sample, split)
        sample += 1
        low = high
        n = high
        high = next_high
        next_high = gl.load(offsets_ptr + sample + 2, mask=sample + 1 < batch, other=0).to(gl.int64)
    if (BLOCK_R > 0) and (dbias_ptr is not None):
        # [programs, T, R, H]
        own_row = gl.arange(0, SPEC.block_m, layout=ROWS)
        table_row = gl.arange(0, BLOCK_R, layout=COLS)
        base = dbias_ptr + program.to(gl.int64) * (num_rows * table_rows)
        to = (row + own_row) // H * (table_rows * H) + (row + own_row) % H
        keep = (own_row < rows[1])[:, None] & (table_row < table_rows)[None, :]
        gl.store(base + to[:, None] + (table_row * H)[None, :], dtable * (1 / UNIT), mask=keep)
    if dq_ptr is not None:
        gl.store(split_ptr + program, split.to(gl.int32))
