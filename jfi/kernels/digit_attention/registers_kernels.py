"""Attention over digits in half precision: digits are decoded into tensor cores' operands in registers.

A program is one warp and takes one stream-K range; scores, weights and sums stay in its registers.  The backward
recomputes the weights:

    P = exp(S - L)      dS = P (dO·d - Δ)      dq = scale Σ dS d
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from jfi.kernels.common.combine import partials_layout
from jfi.kernels.common.launch import launchers_of
from jfi.kernels.common.primitives import LOG2E
from jfi.kernels.common.stream_k import WEIGHT
from jfi.kernels.digit_attention import registers as tile
from jfi.kernels.digit_attention.registers import COLS, EVENTS, LEFT, MMA, RIGHT, ROWS, UNIT

# --- Forward ----------------------------------------------------------------------------------------------------------
partials_layout = gluon.jit(partials_layout.fn)


@gluon.jit
def _attend(q, table, units, bias_ptrs, value_scale_ptr, n, left, rows, state, scale, SPEC: gl.constexpr):
    """The running maximum (base 2), sum and weighted sum after the events from n on, at most ``left`` of them."""
    along_k, along_n, table_row = units
    maximum, total, acc = state
    if SPEC.block_r > 0:
        s = tile.table_scores(table, table_row, SPEC)
    else:
        s = gl.zeros([SPEC.block_m, SPEC.block_n], gl.float32, MMA)
    s = mma_v2(q, tile.keys_of(along_k, q.dtype, SPEC), s)
    factor = scale * (LOG2E / UNIT)
    if SPEC.has_bias and SPEC.block_r == 0:
        s = s * factor + tile.load_bias(bias_ptrs, n, left, rows, SPEC) * LOG2E
        factor = 1.0
    elif left < SPEC.block_n:
        s = gl.where((gl.arange(0, SPEC.block_n, layout=COLS) < left)[None, :], s, -float("inf"))
    # The greatest score is found before scores are scaled, so the scale must be positive.
    new_maximum = gl.maximum(maximum, gl.max(s, 1) * factor)
    base = tile.reference_of(new_maximum)
    p = gl.exp2(s * factor - base[:, None])
    decay = gl.exp2(maximum - base)
    total = total * decay + gl.sum(p, 1)
    if SPEC.has_value_scale:
        p = p * tile.load_scale(value_scale_ptr, n, left, SPEC)
    weights = gl.convert_layout(p.to(q.dtype), LEFT, assert_trivial=True)
    acc = mma_v2(weights, tile.values_of(along_n, q.dtype, SPEC), acc * decay[:, None])
    return new_maximum, total, acc


@gluon.jit(do_not_specialize=["batch", "num_rows", "chunk", "table_rows"], do_not_specialize_on_alignment=EVENTS)
def digit_attention_registers_fwd_kernel(
    queries, history, bias_index_ptr, value_scale_ptr, batch, num_rows, chunk, table_rows, scale, SPEC: gl.constexpr
):
    """While a tile is attended to, the events of the next are under way, be it of the next sample.

    With block_r the bias is a table of at most so many rows, which the program keeps.  Parameters are those of
    `target_attention_single_tile_fwd_kernel` but for indices.
    """
    COLUMNS: gl.constexpr = tile.units_of(SPEC.num_words) * tile.digits_of_unit(SPEC.num_words)
    L: gl.constexpr = SPEC.head_dim
    offsets_ptr, bias_ptr = history[0], history[2]
    bias_ptrs = (bias_ptr, bias_index_ptr, table_rows)
    q_ptr, out_ptr, lse_ptr, partial_ptr = queries
    program = gl.program_id(0)
    start = program.to(gl.int64) * chunk
    end = start + chunk
    row = gl.program_id(1) * SPEC.block_m
    rows = (row, num_rows - row)
    own_row = gl.arange(0, SPEC.block_m, layout=ROWS)
    row_mask = own_row < rows[1]
    partial_lse_ptr, split_ptr = partials_layout(partial_ptr, gl.num_programs(0), num_rows, L)
    split = start * 0 - 1
    num_events = gl.load(offsets_ptr + batch).to(gl.int64)
    sample, low, high, n = tile.find_range(offsets_ptr, batch, start)
    next_high = gl.load(offsets_ptr + sample + 2, mask=sample + 1 < batch, other=0).to(gl.int64)
    table = (scale, scale)
    if SPEC.block_r > 0:
        # In the units of the products of queries and digits.
        table = tile.load_table(bias_ptr, row, table_rows, UNIT / scale, SPEC)
    events = (history[3], bias_index_ptr, num_events)
    units = tile.load_events(events, n, SPEC)
    while (sample < batch) & (low + sample * WEIGHT < end):
        first_row = sample * num_rows + row
        q = tile.by_column(tile.load_rows(q_ptr + first_row * L, rows[1], SPEC))
        maximum = gl.full([SPEC.block_m], -float("inf"), gl.float32, ROWS)
        total = gl.zeros([SPEC.block_m], gl.float32, ROWS)
        acc = gl.zeros([SPEC.block_m, COLUMNS], gl.float32, MMA)
        last = gl.minimum(high, end - sample * WEIGHT)
        for first in range(n, last, SPEC.block_n):
            ahead = gl.minimum(first + SPEC.block_n, last)
            next_units = tile.load_events(events, ahead, SPEC)
            left = gl.minimum(last - first, SPEC.block_n).to(gl.int32)
            state = (maximum, total, acc)
            maximum, total, acc = _attend(
                q, table, units, bias_ptrs, value_scale_ptr, first, left, rows, state, scale, SPEC
            )
            units = next_units
        if SPEC.block_r > 0:
            maximum = tile.hide_lowest(maximum)
            total = gl.where(maximum == -float("inf"), 0.0, total)
            acc = gl.where((maximum == -float("inf"))[:, None], 0.0, acc)
        lse = tile.log_sum_exp(maximum, total)
        out = acc * (1.0 / (UNIT * tile.nonzero(total)))[:, None]
        begins = low + sample * WEIGHT >= start
        if begins & (last == high):
            tile.store_sums(out_ptr + first_row * L, out, rows[1], SPEC)
            gl.store(lse_ptr + first_row + own_row, lse, mask=row_mask)
        else:
            partial_row = (2 * program + begins.to(gl.int32)).to(gl.int64) * num_rows + row
            tile.store_sums(partial_ptr + partial_row * L, out, rows[1], SPEC)
            gl.store(partial_lse_ptr + partial_row + own_row, lse, mask=row_mask)
        split = gl.where(begins & (last < high), sample, split)
        sample += 1
        low = high
        n = high
        high = next_high
        next_high = gl.load(offsets_ptr + sample + 2, mask=sample + 1 < batch, other=0).to(gl.int64)
    gl.store(split_ptr + program, split.to(gl.int32))


fwd_launcher = launchers_of(digit_attention_registers_fwd_kernel)


# --- Backward ---------------------------------------------------------------------------------------------------------
@gluon.jit
def _load_queries(queries, first_row, num_rows, SPEC: gl.constexpr):
    """Loads (q, dO, the log-sum-exp in base 2, Δ times UNIT) of a sample."""
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
def _gradients(operands, units, bias_ptrs, value_scale_ptr, grads, n, left, rows, sums, scale, SPEC: gl.constexpr):
    """Returns (dq, dtable) after the events from n on, at most ``left`` of them; dtable by query row."""
    q, grad, lse2, delta, table = operands
    along_k, along_n, table_row = units
    dq, dtable = sums
    dq_ptr, dbias_ptr = grads
    at = gl.arange(0, SPEC.block_n, layout=COLS)
    keys = tile.keys_of(along_k, q.dtype, SPEC)
    zero = gl.zeros([SPEC.block_m, SPEC.block_n], gl.float32, MMA)
    s = zero
    if SPEC.block_r > 0:
        s = tile.table_scores(table, table_row, SPEC)
    s = mma_v2(q, keys, s) * (scale * (LOG2E / UNIT)) - lse2[:, None]
    if SPEC.has_bias and SPEC.block_r == 0:
        s += tile.load_bias(bias_ptrs, n, left, rows, SPEC) * LOG2E
    elif left < SPEC.block_n:
        s = gl.where((at < left)[None, :], s, -float("inf"))
    p = gl.exp2(s)
    dp = mma_v2(grad, keys, zero)
    if SPEC.has_value_scale:
        dp = dp * tile.load_scale(value_scale_ptr, n, left, SPEC)
    ds = p * (dp - delta[:, None])  # times UNIT
    weights = gl.convert_layout(ds.to(q.dtype), LEFT, assert_trivial=True)
    if (SPEC.block_r > 0) and (dbias_ptr is not None):
        # Which events have which row of the table: they are summed in their order.
        event = gl.arange(0, SPEC.block_n, layout=gl.SliceLayout(1, RIGHT))
        table_row = gl.arange(0, SPEC.block_r, layout=gl.SliceLayout(0, RIGHT))
        # From the nearest cache, where the tile's rows have been loaded ahead.
        index = tile.narrow_index(gl.load(bias_ptrs[1] + n + event, mask=event < left, other=0))
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


@gluon.jit(do_not_specialize=["batch", "num_rows", "chunk", "table_rows"], do_not_specialize_on_alignment=EVENTS)
def digit_attention_registers_bwd_kernel(
    tensors, history, bias_index_ptr, value_scale_ptr, batch, num_rows, chunk, table_rows, scale, SPEC: gl.constexpr
):
    """A program per tile of query rows and stream-K range; sums of a table's gradient are by query row.

    Parameters are those of `target_attention_single_tile_bwd_kernel` but for indices.
    """
    L: gl.constexpr = SPEC.head_dim
    H: gl.constexpr = SPEC.qheads_per_kvhead
    COLUMNS: gl.constexpr = tile.units_of(SPEC.num_words) * tile.digits_of_unit(SPEC.num_words)
    q_ptr, grad_ptr, out_ptr, lse_ptr, dq_ptr, _dk_ptr, _dv_ptr, dbias_ptr, _dsecond_ptr, partial_ptr = tensors
    queries = (q_ptr, grad_ptr, out_ptr, lse_ptr)
    offsets_ptr, bias_ptr = history[0], history[2]
    bias_ptrs = (bias_ptr, bias_index_ptr, table_rows)
    program = gl.program_id(0)
    start = program.to(gl.int64) * chunk
    end = start + chunk
    row = gl.program_id(1) * SPEC.block_m
    rows = (row, num_rows - row)
    grads = (dq_ptr, dbias_ptr)
    if dq_ptr is not None:
        _partial_lse_ptr, split_ptr = partials_layout(partial_ptr, gl.num_programs(0), num_rows, L)
    split = start * 0 - 1
    num_events = gl.load(offsets_ptr + batch).to(gl.int64)
    sample, low, high, n = tile.find_range(offsets_ptr, batch, start)
    next_high = gl.load(offsets_ptr + sample + 2, mask=sample + 1 < batch, other=0).to(gl.int64)
    table = (scale, scale)
    if SPEC.block_r > 0:
        table = tile.load_table(bias_ptr, row, table_rows, UNIT / scale, SPEC)
    events = (history[3], bias_index_ptr, num_events)
    units = tile.load_events(events, n, SPEC)
    dtable = gl.zeros([SPEC.block_m, SPEC.block_r if SPEC.block_r > 0 else 8], gl.float32, MMA)
    while (sample < batch) & (low + sample * WEIGHT < end):
        first_row = sample * num_rows + row
        q, grad, lse2, delta = _load_queries(queries, first_row, rows[1], SPEC)
        operands = (q, grad, lse2, delta, table)
        dq = gl.zeros([SPEC.block_m, COLUMNS], gl.float32, MMA)
        last = gl.minimum(high, end - sample * WEIGHT)
        for first in range(n, last, SPEC.block_n):
            ahead = gl.minimum(first + SPEC.block_n, last)
            next_units = tile.load_events(events, ahead, SPEC)
            left = gl.minimum(last - first, SPEC.block_n).to(gl.int32)
            sums = (dq, dtable)
            dq, dtable = _gradients(
                operands, units, bias_ptrs, value_scale_ptr, grads, first, left, rows, sums, scale, SPEC
            )
            units = next_units
        if dq_ptr is not None:
            dq = dq * (scale / (UNIT * UNIT))
            begins = low + sample * WEIGHT >= start
            if begins & (last == high):
                tile.store_sums(dq_ptr + first_row * L, dq, rows[1], SPEC)
            else:
                partial_row = (2 * program + begins.to(gl.int32)).to(gl.int64) * num_rows + row
                tile.store_sums(partial_ptr + partial_row * L, dq, rows[1], SPEC)
            split = gl.where(begins & (last < high), sample, split)
        sample += 1
        low = high
        n = high
        high = next_high
        next_high = gl.load(offsets_ptr + sample + 2, mask=sample + 1 < batch, other=0).to(gl.int64)
    if (SPEC.block_r > 0) and (dbias_ptr is not None):
        # [programs, T, R, H]
        own_row = gl.arange(0, SPEC.block_m, layout=ROWS)
        table_row = gl.arange(0, SPEC.block_r, layout=COLS)
        base = dbias_ptr + program.to(gl.int64) * (num_rows * table_rows)
        to = (row + own_row) // H * (table_rows * H) + (row + own_row) % H
        keep = (own_row < rows[1])[:, None] & (table_row < table_rows)[None, :]
        gl.store(base + to[:, None] + (table_row * H)[None, :], dtable * (1 / UNIT), mask=keep)
    if dq_ptr is not None:
        gl.store(split_ptr + program, split.to(gl.int32))


bwd_launcher = launchers_of(digit_attention_registers_bwd_kernel)
