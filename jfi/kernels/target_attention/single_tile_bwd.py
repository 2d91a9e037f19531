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

from jfi import plan, reference
from jfi.kernels.common.combine import RangePartials, behind_partials
from jfi.kernels.common.launch import Launcher, empty_like
from jfi.kernels.common.spec import AttentionSpec
from jfi.kernels.common.stream_k import WEIGHT, end_row, find_range, longest_first
from jfi.kernels.common.tiles import load_rows, load_statistics, query_rows, store_columns, store_rows
from jfi.kernels.target_attention.single_tile_events import (
    EVENTS,
    field_columns,
    gathered_pointers,
    history_pointers,
    load_bias,
    load_bias_index,
    load_history,
    load_value_scale,
    weights_and_gradient,
)
from jfi.operands import TargetAttentionInputs
from jfi.plan import AttentionPlan, AttentionProblem, KernelPlan, Split, cached


@triton.jit(do_not_specialize=["batch", "num_rows", "chunk", "table_rows"], do_not_specialize_on_alignment=EVENTS)
def target_attention_single_tile_bwd_kernel(
    queries,
    history,
    bias_index_ptr,
    value_scale_ptr,
    tables,
    index_0,
    index_1,
    index_2,
    index_3,
    grads,
    batch,
    num_rows,
    chunk,
    table_rows,
    scale,
    SPEC: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PROGRAM_PER_SAMPLE: tl.constexpr,
    LONGEST_FIRST: tl.constexpr,
):
    """A program per stream-K range, or, if PROGRAM_PER_SAMPLE, per sample: the longest first if LONGEST_FIRST.

    With BLOCK_R the bias is a table of so few rows that each program sums its gradient; else dbias is by event.
    ``partial_ptr`` is None where no sample is split, or where nobody needs dq.
    """
    D: tl.constexpr = SPEC.head_dim
    E: tl.constexpr = SPEC.value_dim
    NUM_HEADS: tl.constexpr = SPEC.num_kv_heads * SPEC.qheads_per_kvhead
    PRECISION: tl.constexpr = SPEC.precision
    q_ptr, grad_ptr, out_ptr, lse_ptr = queries
    offsets_ptr = history[4]
    dq_ptr, dk_ptr, dv_ptr, dbias_ptr, dsecond_ptr, partial_ptr = grads
    program, kv_head = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, SPEC.block_m)
    q_at, q_mask = query_rows(at, kv_head, SPEC), at < num_rows
    k_at = tl.arange(0, SPEC.block_n)
    cols = field_columns(history[0], history[3], SPEC)
    gathered = (tables, (index_0, index_1, index_2, index_3))
    dk_cols = cols
    if dk_ptr is not None:
        dk_cols = field_columns(dk_ptr, dsecond_ptr, SPEC)
    K_STRIDE: tl.constexpr = SPEC.num_kv_heads * D // SPEC.num_fields
    V_STRIDE: tl.constexpr = SPEC.num_kv_heads * E
    sample_rows = (num_rows * SPEC.num_kv_heads).to(tl.int64)
    if dbias_ptr is not None:
        # Which query row has which head: dS times it sums over the query rows of a head.
        head = tl.arange(0, BLOCK_H)
        of_head = (((at % SPEC.qheads_per_kvhead)[:, None] == head[None, :]) & q_mask[:, None]).to(tl.float32)
    if BLOCK_R > 0:
        table_at = tl.arange(0, BLOCK_R)
        dtable = tl.zeros((SPEC.block_m, BLOCK_R), tl.float32)
    if PROGRAM_PER_SAMPLE:
        sample = longest_first(program, offsets_ptr, batch) if LONGEST_FIRST else program.to(tl.int64)
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
        _partial_lse_ptr, split_ptr = behind_partials(partial_ptr, tl.num_programs(0), num_rows * SPEC.num_kv_heads, D)
        split = tl.full((), -1, tl.int64)
    while (sample < batch) & (low + sample * WEIGHT < end):
        next_high = high
        last = high
        if not PROGRAM_PER_SAMPLE:
            next_high = tl.load(offsets_ptr + sample + 2, mask=sample + 1 < batch, other=0).to(tl.int64)
            last = end_row(sample, high, end)
        row = sample * sample_rows
        q = load_rows(q_ptr + row * D, q_at, q_mask, D, D, SPEC.block_d)
        grad = load_rows(grad_ptr + row * E, q_at, q_mask, E, E, SPEC.block_e)
        lse, delta = load_statistics(grad, out_ptr + row * E, lse_ptr + row, q_at, q_mask, SPEC)
        dq = tl.zeros((SPEC.block_m, SPEC.block_d), tl.float32)
        for first in range(n, last, SPEC.block_n):
            mask = k_at < (last - first).to(tl.int32)
            k, v = load_history(history, gathered, cols, first, k_at, mask, kv_head, q.dtype, SPEC)
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
                store_rows(dv_ptr + first * V_STRIDE + kv_head * E, dv, k_at, mask, V_STRIDE, E, SPEC.block_e)
            if dk_ptr is not None:
                to = dk_ptr + first * K_STRIDE + kv_head * D
                store_columns(to, dk, k_at, dk_cols, mask, K_STRIDE, D, SPEC.block_d)
            if dbias_ptr is not None:
                if BLOCK_R > 0:
                    # Which events have which row of the table: they are summed in their order.
                    of_row = (index[:, None] == table_at[None, :]).to(k.dtype)
                    dtable = tl.dot(ds_by_query, of_row, dtable, input_precision=PRECISION)
                else:
                    dbias = tl.dot(ds, of_head, input_precision="tf32x3")
                    to = dbias_ptr + first * NUM_HEADS + kv_head * SPEC.qheads_per_kvhead
                    store_rows(to, dbias, k_at, mask, NUM_HEADS, SPEC.qheads_per_kvhead, BLOCK_H)
            if dq_ptr is not None:
                dq = tl.dot(ds_by_query, k, dq, input_precision=PRECISION)
        dq = dq * scale
        if partial_ptr is not None:
            begins = low + sample * WEIGHT >= start
            if begins & (last == high):
                store_rows(dq_ptr + row * D, dq, q_at, q_mask, D, D, SPEC.block_d)
            else:
                place = (2 * program + begins.to(tl.int32)) * sample_rows
                store_rows(partial_ptr + place * D, dq, q_at, q_mask, D, D, SPEC.block_d)
            split = tl.where(begins & (last < high), sample, split)
        elif dq_ptr is not None:
            store_rows(dq_ptr + row * D, dq, q_at, q_mask, D, D, SPEC.block_d)
        sample += 1
        low = high
        n = high
        high = next_high
    if (BLOCK_R > 0) and (dbias_ptr is not None):
        dtable = tl.dot(tl.trans(dtable), of_head, input_precision="tf32x3")
        to = dbias_ptr + program.to(tl.int64) * (table_rows * NUM_HEADS) + kv_head * SPEC.qheads_per_kvhead
        store_rows(to, dtable, table_at, table_at < table_rows, NUM_HEADS, SPEC.qheads_per_kvhead, BLOCK_H)
    if partial_ptr is not None:
        tl.store(split_ptr + program, split.to(tl.int32))


@cached
def _launcher(problem: AttentionProblem, kernel: KernelPlan) -> Launcher:
    spec = AttentionSpec.of(problem, kernel.block_m, kernel.block_n)
    return Launcher(target_attention_single_tile_bwd_kernel, SPEC=spec, **kernel.constants)


def backward(
    grad: Tensor, x: TargetAttentionInputs, out: Tensor, lse: Tensor, needed: Sequence[bool], chosen: AttentionPlan
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of query, key (key + value where they are shared), value, bias and second.

    Those that are not needed are None, but for one half of a row whose other half needs its gradient.
    """
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
            partials = RangePartials(programs, chunk, num_queries * num_heads, head_dim, device)
    table_rows = x.bias.shape[0] if problem.bias_by_index else 0
    sums_table = needs_bias and table_rows > 0 and kernel.constants["BLOCK_R"] > 0
    if not needs_bias:
        dbias = None
    elif sums_table:
        dbias = x.bias.new_empty(programs, table_rows, num_heads, dtype=torch.float32)
    else:
        dtype = torch.float32 if table_rows else x.bias.dtype
        dbias = torch.empty(num_keys, num_heads, dtype=dtype, device=device)
    queries = (x.query, grad, out, lse)
    inputs = (history_pointers(x), x.bias_index, x.value_scale, *gathered_pointers(x))
    grads = (dquery, dkey, dvalue, dbias, dsecond, None if partials is None else partials.memory)
    numbers = (batch, num_queries * problem.qheads_per_kvhead, chunk, table_rows, x.scale)
    grid = (programs, problem.num_kv_heads, 1)
    _launcher(problem, kernel)(grid, (queries, *inputs, grads), numbers)
    if partials is not None:
        partials.combine(x.offsets, dquery, None)
    if sums_table:
        dbias = dbias.sum(0).to(x.bias.dtype)
    elif needs_bias and table_rows:
        # Sorts the events by index: no sum in an order that changes from run to run. It leaves out -1.
        index = reference.bound_ids(x.bias_index, table_rows)
        dbias = torch.ops.aten.embedding_dense_backward(dbias, index, table_rows, -1, False).to(x.bias.dtype)
    return dquery, dkey, dvalue, dbias, dsecond
