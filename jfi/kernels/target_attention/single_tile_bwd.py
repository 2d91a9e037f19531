"""Target attention backward for few query rows: every history row is read once, and its gradient written once.

With the log-sum-exp L of the forward and Δ = Σ_e dO · O, one sweep recomputes the weights and gives all gradients:

    P = exp(S - L)      dS = P (dO·v - Δ)      dk = scale Σ dS q      dv = Σ P dO      dq = scale Σ dS k

Scores are history rows by query rows here, S [N, M]: two of the three GEMMs for gradients need no transposition then.
Gradients that no input needs are neither computed nor stored: their pointers are None.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi import reference
from jfi.kernels import plan
from jfi.kernels.common.combine import RangePartials, partials_layout
from jfi.kernels.common.launch import empty_like, launchers_of
from jfi.kernels.common.stream_k import WEIGHT, end_row, find_range, longest_first
from jfi.kernels.common.tiles import load_rows, load_statistics, query_rows, store_columns, store_head, store_rows
from jfi.kernels.plan import AttentionPlan, Split
from jfi.kernels.target_attention.single_tile_fwd import (
    EVENTS,
    event_pointers,
    field_columns,
    load_bias,
    load_bias_index,
    load_history,
    load_value_scale,
    query_tile,
    query_tiles,
    table_rows_of,
    weights_and_gradient,
)
from jfi.utils.operands import TargetAttentionInputs


@triton.jit
def _store_dbias(dbias_ptr, ds, of_head, first, k_at, mask, SPEC: tl.constexpr):
    """Stores the gradient of the biases of events, summed over the query rows of a tile: over digits [S, tiles, H]."""
    QHEADS: tl.constexpr = SPEC.qheads_per_kvhead
    NUM_HEADS: tl.constexpr = SPEC.num_kv_heads * QHEADS
    dbias = tl.dot(ds, of_head, input_precision=SPEC.sum_precision)
    kv_head, tile = query_tile(SPEC)
    if SPEC.num_words:
        to = dbias_ptr + (first * tl.num_programs(1) + tile) * NUM_HEADS
        store_rows(to, dbias, k_at * tl.num_programs(1), mask, NUM_HEADS, QHEADS, SPEC.block_h)
    else:
        store_head(dbias_ptr, dbias, first, k_at, mask, kv_head, QHEADS, SPEC.block_h, SPEC)


@triton.jit
def _store_dtable(dbias_ptr, dtable, of_head, table_rows, SPEC: tl.constexpr):
    """Stores a program's gradient of the table of biases, of sums [M, rows] by query row."""
    QHEADS: tl.constexpr = SPEC.qheads_per_kvhead
    NUM_HEADS: tl.constexpr = SPEC.num_kv_heads * QHEADS
    kv_head, tile = query_tile(SPEC)
    program = tl.program_id(0).to(tl.int64)
    if SPEC.num_words:
        program = program * tl.num_programs(1) + tile
    table_at = tl.arange(0, SPEC.block_r)
    dtable = tl.dot(tl.trans(dtable), of_head, input_precision=SPEC.sum_precision)
    to = dbias_ptr + program * (table_rows * NUM_HEADS) + kv_head * QHEADS
    store_rows(to, dtable, table_at, table_at < table_rows, NUM_HEADS, QHEADS, SPEC.block_h)


@triton.jit
def _sweep(operands, sums, history, indices, events, grads, rows, scale, SPEC: tl.constexpr):
    """Returns (dq / scale, dtable) after the events ``rows`` of a sample; stores the gradients of the events.

    Args:
        operands: the sample's (q, dO, log-sum-exp, Δ), and which query row has which head.
        sums: (dq, dtable) before them.
        events: (bias_index_ptr, value_scale_ptr, table_rows).
        rows: (first event, end).
    """
    D: tl.constexpr = SPEC.head_dim
    PRECISION: tl.constexpr = SPEC.precision
    K_STRIDE: tl.constexpr = SPEC.num_kv_heads * D // SPEC.num_fields
    q, grad, lse, delta, of_head = operands
    dq, dtable = sums
    bias_index_ptr, value_scale_ptr, table_rows = events
    dq_ptr, dk_ptr, dv_ptr, dbias_ptr, dsecond_ptr, _partial_ptr = grads
    kv_head, tile = query_tile(SPEC)
    at = tile * SPEC.block_m + tl.arange(0, SPEC.block_m)
    k_at = tl.arange(0, SPEC.block_n)
    cols = field_columns(history[3], history[4], SPEC)
    dk_cols = cols
    if dk_ptr is not None:
        dk_cols = field_columns(dk_ptr, dsecond_ptr, SPEC)
    for first in range(rows[0], rows[1], SPEC.block_n):
        mask = k_at < (rows[1] - first).to(tl.int32)
        k, v = load_history(history, indices, cols, first, k_at, mask, kv_head, q.dtype, SPEC)
        bias = 0.0
        index = load_bias_index(bias_index_ptr, first, k_at, mask, SPEC)
        if SPEC.has_bias:
            bias = load_bias(history[2], index, table_rows, first, mask, at, kv_head, SPEC)
        value_scale = load_value_scale(value_scale_ptr, first, k_at, mask, SPEC)
        p, ds = weights_and_gradient(q, grad, lse, delta, k, v, value_scale, bias, mask, scale, SPEC)
        ds_by_query = tl.trans(ds.to(k.dtype))
        if dk_ptr is not None:
            dk = tl.dot((ds * scale).to(q.dtype), q, input_precision=PRECISION)
            if SPEC.shared_kv:
                dk = tl.dot(p.to(grad.dtype), grad, dk, input_precision=PRECISION)
        if dv_ptr is not None:
            dv = tl.dot(p.to(grad.dtype), grad, input_precision=PRECISION)
            store_head(dv_ptr, dv, first, k_at, mask, kv_head, SPEC.value_dim, SPEC.block_e, SPEC)
        if dk_ptr is not None:
            to = dk_ptr + first * K_STRIDE + kv_head * D
            store_columns(to, dk, k_at, dk_cols, mask, K_STRIDE, D, SPEC.block_d)
        if dbias_ptr is not None:
            if SPEC.block_r > 0:
                # Which events have which row of the table: they are summed in their order.
                of_row = (index[:, None] == tl.arange(0, SPEC.block_r)[None, :]).to(k.dtype)
                dtable = tl.dot(ds_by_query, of_row, dtable, input_precision=PRECISION)
            else:
                _store_dbias(dbias_ptr, ds, of_head, first, k_at, mask, SPEC)
        if dq_ptr is not None:
            dq = tl.dot(ds_by_query, k, dq, input_precision=PRECISION)
    return dq, dtable


@triton.jit(do_not_specialize=["batch", "num_rows", "chunk", "table_rows"], do_not_specialize_on_alignment=EVENTS)
def target_attention_single_tile_bwd_kernel(
    tensors,
    history,
    bias_index_ptr,
    value_scale_ptr,
    index_0,
    index_1,
    index_2,
    index_3,
    batch,
    num_rows,
    chunk,
    table_rows,
    scale,
    SPEC: tl.constexpr,
):
    """A program per stream-K range or per sample; ``tensors`` are queries, what the forward left, and the gradients.

    ``partial_ptr`` is None where no sample is split, or where nobody needs dq.  With block_r the bias is a table of at
    most so many rows, whose gradient each program sums, else dbias is by event.
    """
    D: tl.constexpr = SPEC.head_dim
    E: tl.constexpr = SPEC.value_dim
    q_ptr, grad_ptr, out_ptr, lse_ptr, dq_ptr, dk_ptr, dv_ptr, dbias_ptr, dsecond_ptr, partial_ptr = tensors
    grads = (dq_ptr, dk_ptr, dv_ptr, dbias_ptr, dsecond_ptr, partial_ptr)
    offsets_ptr = history[0]
    program = tl.program_id(0)
    kv_head, tile = query_tile(SPEC)
    at = tile * SPEC.block_m + tl.arange(0, SPEC.block_m)
    q_at, q_mask = query_rows(at, kv_head, SPEC), at < num_rows
    events = (bias_index_ptr, value_scale_ptr, table_rows)
    indices = (index_0, index_1, index_2, index_3)
    sample_rows = (num_rows * SPEC.num_kv_heads).to(tl.int64)
    of_head = scale
    if dbias_ptr is not None:
        # Which query row has which head: dS times it sums over the query rows of a head.
        head = tl.arange(0, SPEC.block_h)
        of_head = (((at % SPEC.qheads_per_kvhead)[:, None] == head[None, :]) & q_mask[:, None]).to(tl.float32)
    dtable = scale
    if SPEC.block_r > 0:
        dtable = tl.zeros((SPEC.block_m, SPEC.block_r), tl.float32)
    if SPEC.program_per_sample:
        sample = longest_first(program, offsets_ptr, batch) if SPEC.longest_first else program.to(tl.int64)
        low = tl.load(offsets_ptr + sample).to(tl.int64)
        high = tl.load(offsets_ptr + sample + 1).to(tl.int64)
        n = low
        start = low + sample * WEIGHT
        end = start + 1
    else:
        start = program.to(tl.int64) * chunk
        end = start + chunk
        sample, low, high, n, _tiles = find_range(offsets_ptr, batch, start, end, SPEC.block_n)
    if partial_ptr is not None:
        _partial_lse_ptr, split_ptr = partials_layout(partial_ptr, tl.num_programs(0), num_rows * SPEC.num_kv_heads, D)
        split = tl.full((), -1, tl.int64)
    while (sample < batch) & (low + sample * WEIGHT < end):
        next_high = high
        last = high
        if not SPEC.program_per_sample:
            next_high = tl.load(offsets_ptr + sample + 2, mask=sample + 1 < batch, other=0).to(tl.int64)
            last = end_row(sample, high, end)
        row = sample * sample_rows
        q = load_rows(q_ptr + row * D, q_at, q_mask, D, D, SPEC.block_d)
        grad = load_rows(grad_ptr + row * E, q_at, q_mask, E, E, SPEC.block_e)
        lse, delta = load_statistics(grad, out_ptr + row * E, lse_ptr + row, q_at, q_mask, SPEC)
        dq = tl.zeros((SPEC.block_m, SPEC.block_d), tl.float32)
        operands = (q, grad, lse, delta, of_head)
        sums = (dq, dtable)
        dq, dtable = _sweep(operands, sums, history, indices, events, grads, (n, last), scale, SPEC)
        dq = dq * scale
        if partial_ptr is not None:
            begins = low + sample * WEIGHT >= start
            if begins & (last == high):
                store_rows(dq_ptr + row * D, dq, q_at, q_mask, D, D, SPEC.block_d)
            else:
                partial_row = (2 * program + begins.to(tl.int32)) * sample_rows
                store_rows(partial_ptr + partial_row * D, dq, q_at, q_mask, D, D, SPEC.block_d)
            split = tl.where(begins & (last < high), sample, split)
        elif dq_ptr is not None:
            store_rows(dq_ptr + row * D, dq, q_at, q_mask, D, D, SPEC.block_d)
        sample += 1
        low = high
        n = high
        high = next_high
    if (SPEC.block_r > 0) and (dbias_ptr is not None):
        _store_dtable(dbias_ptr, dtable, of_head, table_rows, SPEC)
    if partial_ptr is not None:
        tl.store(split_ptr + program, split.to(tl.int32))


_launcher = launchers_of(target_attention_single_tile_bwd_kernel)


def backward(
    grad: Tensor, x: TargetAttentionInputs, out: Tensor, lse: Tensor, needed: Sequence[bool], chosen: AttentionPlan
) -> tuple[Tensor | None, ...]:
    """Returns the gradients, see `execute.backward`; those of key and second are computed together."""
    needs_query, needs_key, needs_value, needs_bias, needs_second = needed
    needs_key = needs_second = needs_key or needs_second
    batch, num_queries, num_heads, head_dim = x.query.shape
    problem, kernel = chosen.problem, chosen.backward[0]
    num_keys, device = x.key.shape[0], x.query.device
    shapes, needed = (x.query, x.key, x.value, x.second), (needs_query, needs_key, needs_value, needs_second)
    dquery, dkey, dvalue, dsecond = empty_like(shapes, needed)
    partials, chunk, programs = None, 0, batch
    if kernel.split is Split.STREAM_K:
        chunk, programs = plan.stream_k(num_keys, batch, problem.device.num_sms, kernel.programs_per_sm)
        if needs_query:
            partials = RangePartials(programs, chunk, num_queries * num_heads, head_dim, problem.num_words > 0, device)
    rows, programs_y = table_rows_of(x, problem), query_tiles(x, problem, kernel.block_m)
    sums_table = needs_bias and rows > 0 and kernel.options["BLOCK_R"] > 0
    tiles = programs_y if problem.num_words else 1
    launcher = _launcher
    if kernel.kernel == "digit_attention_registers_bwd":
        from jfi.kernels.digit_attention.registers_kernels import bwd_launcher as launcher

        # By event the bias has a gradient of one query row: the plan takes the kernel above for several.
        tiles = num_queries if sums_table else 1
    dbias = None  # [programs, tiles, N, H] of a table's sums, else [S, tiles, H]
    if sums_table:
        dbias = torch.empty(programs, tiles, rows, num_heads, dtype=torch.float32, device=device)
    elif needs_bias:
        dtype = x.bias.dtype if x.bias_index is None and tiles == 1 else torch.float32
        dbias = torch.empty(num_keys, tiles, num_heads, dtype=dtype, device=device)
    tensors = (x.query, grad, out, lse, dquery, dkey, dvalue, dbias, dsecond)
    tensors += (None if partials is None else partials.memory,)
    numbers = (batch, num_queries * problem.qheads_per_kvhead, chunk, rows, x.scale)
    launcher(problem, kernel)((programs, programs_y, 1), (tensors, *event_pointers(x, kernel)), numbers)
    if partials is not None:
        partials.combine(x.offsets, dquery, None)
    return dquery, dkey, dvalue, _sum_dbias(x, dbias, sums_table), dsecond


def _sum_dbias(x: TargetAttentionInputs, dbias: Tensor | None, sums_table: bool) -> Tensor | None:
    """Sums the gradients of the bias of tiles and of programs or events."""
    if dbias is None:
        return None
    if sums_table:
        return dbias.flatten(0, 1).sum(0).to(x.bias.dtype)
    dbias = dbias.squeeze(1) if dbias.shape[1] == 1 else dbias.sum(1)
    if x.bias_index is not None:
        # Sorts the events by index: no sum in an order that changes from run to run. It leaves out -1.
        rows = x.bias.shape[0]
        dbias = torch.ops.aten.embedding_dense_backward(dbias, reference.bound_ids(x.bias_index, rows), rows, -1, False)
    return dbias.to(x.bias.dtype)
