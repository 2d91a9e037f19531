"""Target attention backward for many query rows: many candidates, or many heads, to one history.

Up to a tile of query rows, one sweep gives all gradients and each history row is read once.  More of them take two
sweeps, since the gradients of both sides do not fit into registers together: one for the gradient of the queries, which
also stores their log-sum-exp and Δ = Σ_e dO · O, and one with a program per tile of history rows that loops over the
query rows.  That is seven GEMMs instead of five, and still faster than one sweep that accumulates the gradient of the
queries in memory.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.combine import chunk_partial
from jfi.kernels.common.launch import empty_like, launchers_of
from jfi.kernels.common.online_softmax import scaled_scores_gradient
from jfi.kernels.common.primitives import LOG2E, max_tiles
from jfi.kernels.common.tiles import load_bias_tile, load_rows, load_statistics, store_head, store_rows
from jfi.kernels.plan import AttentionPlan
from jfi.kernels.target_attention.multi_tile_fwd import (
    STATISTICS,
    find_chunk,
    history_descriptor,
    load_history,
    query_descriptor,
    query_positions,
    split_into_chunks,
    sum_heads,
)
from jfi.utils.operands import TargetAttentionInputs, ceil_div


# --- The sweep over the history ---------------------------------------------------------------------------------------
@triton.jit
def _step(queries, dq, desc, history, grads, n, mask, kv_head, scale, MASKED: tl.constexpr, SPEC: tl.constexpr):
    """dq after the tile of history rows from n on; one tile of all query rows also stores dk, dv and dbias.

    ``grads`` are pointers to dq, dk, dv and dbias, None for those that are not needed.
    """
    PRECISION: tl.constexpr = SPEC.precision
    BY_TMA: tl.constexpr = SPEC.by_tma and not MASKED
    q, grad, lse, delta, at, q_mask = queries
    k_at = tl.arange(0, SPEC.block_n)
    k, v = load_history(desc, history, n, k_at, mask, kv_head, SPEC, BY_TMA)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
    dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    if SPEC.has_bias:
        s += load_bias_tile(history[2], n, k_at, mask, at, kv_head, SPEC)
    p = tl.exp2(s - lse[:, None])
    if MASKED:
        p = tl.where(mask[None, :], p, 0.0)
    score, ds = scaled_scores_gradient(p, dp, delta[:, None], scale, SPEC.has_bias)
    ds = ds.to(k.dtype)
    dq_ptr, dk_ptr, dv_ptr, dbias_ptr = grads
    if SPEC.tile_rows == 0:
        dv = tl.dot(tl.trans(p.to(grad.dtype)), grad, input_precision=PRECISION)
        if dv_ptr is not None:
            store_head(dv_ptr, dv, n, k_at, mask, kv_head, SPEC.value_dim, SPEC.block_e, SPEC)
        if dk_ptr is not None:
            if SPEC.shared_kv:
                dk = tl.dot(tl.trans(ds), q, dv, input_precision=PRECISION)
            else:
                dk = tl.dot(tl.trans(ds), q, input_precision=PRECISION)
            if BY_TMA and SPEC.shared_kv:
                desc[2].store([n.to(tl.int32), kv_head * SPEC.head_dim], dk.to(dk_ptr.dtype.element_ty))
            else:
                store_head(dk_ptr, dk, n, k_at, mask, kv_head, SPEC.head_dim, SPEC.block_d, SPEC)
        if dbias_ptr is not None:
            dbias = sum_heads(tl.trans(score), at, q_mask, SPEC)
            store_head(dbias_ptr, dbias, n, k_at, mask, kv_head, SPEC.qheads_per_kvhead, SPEC.block_h, SPEC)
    if dq_ptr is not None:
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["batch", "num_rows", "tiles", "chunk"])
def target_attention_multi_tile_dquery_kernel(
    k_desc, v_desc, dk_desc, queries, history, outputs, batch, num_rows, tiles, chunk, scale, SPEC: tl.constexpr
):
    """dq of a tile of query rows over a chunk of rows; with tile_rows = 0, where one tile has all query rows, the rest.

    Else it also leaves what the other sweep needs, if there is one: the query rows' statistics, and the sample of each
    tile of tile_rows history rows.
    """
    D: tl.constexpr = SPEC.head_dim
    E: tl.constexpr = SPEC.value_dim
    q_ptr, grad_ptr, out_ptr, lse_ptr = queries
    dq_ptr, dk_ptr, dv_ptr, dbias_ptr, partial_ptr, statistics_ptr, samples_ptr = outputs
    program, kv_head = tl.program_id(0), tl.program_id(1)
    sample, low, n, high = find_chunk(history[3], batch, program // tiles, chunk)
    if (n >= high) & (n > low):
        return
    tile = program % tiles
    first = tile * SPEC.block_m
    at = first + tl.arange(0, SPEC.block_m)
    start, q_at = query_positions(first, at, kv_head, SPEC)
    q_mask = at < num_rows
    k_at = tl.arange(0, SPEC.block_n)
    row = sample * (num_rows * SPEC.num_kv_heads) + start
    q = load_rows(q_ptr + row * D, q_at, q_mask, D, D, SPEC.block_d)
    grad = load_rows(grad_ptr + row * E, q_at, q_mask, E, E, SPEC.block_e)
    lse, delta = load_statistics(grad, out_ptr + row * E, lse_ptr + row, q_at, q_mask, SPEC)
    lse = lse * LOG2E
    if not SPEC.has_bias:
        delta = delta * scale  # as scaled_scores_gradient takes it
    if (statistics_ptr is not None) and n == low:
        padded = (num_rows + STATISTICS - 1) // STATISTICS * STATISTICS
        to = statistics_ptr + (sample * SPEC.num_kv_heads + kv_head) * (2 * padded) + at
        tl.store(to, lse, mask=at < padded)
        tl.store(to + padded, delta, mask=at < padded)
        if (tile == 0) & (kv_head == 0):
            # The tiles that find_tile gives to this sample.
            end = high // SPEC.tile_rows + sample + 1
            for ahead in range(low // SPEC.tile_rows + sample, end, 128):
                at_tile = ahead + tl.arange(0, 128)
                tl.store(samples_ptr + at_tile, tl.zeros((128,), tl.int32) + sample.to(tl.int32), mask=at_tile < end)
    dq = tl.zeros((SPEC.block_m, SPEC.block_d), tl.float32)
    left = tl.minimum(high - n, chunk).to(tl.int32)
    if (SPEC.tile_rows > 0) and (dq_ptr is None):
        left = left * 0  # the statistics are all that is needed
    full = left // SPEC.block_n * SPEC.block_n
    rows = (q, grad, lse, delta, at, q_mask)
    desc = (k_desc, v_desc, dk_desc)
    grads = (dq_ptr, dk_ptr, dv_ptr, dbias_ptr)
    for ahead in range(0, full, SPEC.block_n):
        mask = k_at < SPEC.block_n
        dq = _step(rows, dq, desc, history, grads, n + ahead, mask, kv_head, scale, False, SPEC)
    if full < left:
        n += full
        mask = k_at < left - full
        dq = _step(rows, dq, desc, history, grads, n, mask, kv_head, scale, True, SPEC)
    if dq_ptr is not None:
        if high - low <= chunk:
            store_rows(dq_ptr + row * D, dq, q_at, q_mask, D, D, SPEC.block_d)
        else:
            partial = chunk_partial(low, n, chunk) * (num_rows * SPEC.num_kv_heads) + start
            store_rows(partial_ptr + partial * D, dq, q_at, q_mask, D, D, SPEC.block_d)


# --- The sweep over the query rows ------------------------------------------------------------------------------------
@triton.jit
def _load_queries(
    desc, ptr, sample, row, first, num_rows, kv_head, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, SPEC: tl.constexpr
):
    """Loads [M, D] of a sample's query rows from ``first`` on, 0 past its last; the sample's begin at row ``row``."""
    if SPEC.by_tma:
        return desc.load([sample.to(tl.int32), first, kv_head * WIDTH]).reshape(SPEC.block_m, BLOCK_D)
    else:
        at = first + tl.arange(0, SPEC.block_m)
        start, q_at = query_positions(first, at, kv_head, SPEC)
        return load_rows(ptr + (row + start) * WIDTH, q_at, at < num_rows, WIDTH, WIDTH, BLOCK_D)


@triton.jit(do_not_specialize=["batch", "num_rows"])
def target_attention_multi_tile_dhistory_kernel(
    q_desc, grad_desc, queries, history, grads, batch, num_rows, scale, SPEC: tl.constexpr
):
    """A program per tile of history rows.  S [N, M]: P and dS go from registers into the products of dv and dk.

    ``grads`` are pointers to dk, dv and dbias, None for those that are not needed.
    """
    D: tl.constexpr = SPEC.head_dim
    E: tl.constexpr = SPEC.value_dim
    PRECISION: tl.constexpr = SPEC.precision
    q_ptr, grad_ptr, statistics_ptr = queries
    offsets_ptr, samples_ptr = history[3], history[4]
    dk_ptr, dv_ptr, dbias_ptr = grads
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    # Rows beyond the last sample, of a batch padded to capacity, have no sample.
    if tile >= tl.load(offsets_ptr + batch).to(tl.int64) // SPEC.block_n + batch:
        return
    sample = tl.load(samples_ptr + tile).to(tl.int64)
    low = tl.load(offsets_ptr + sample).to(tl.int64)
    high = tl.load(offsets_ptr + sample + 1).to(tl.int64)
    n = low + (tile - low // SPEC.block_n - sample) * SPEC.block_n
    if n >= high:
        return
    k_at = tl.arange(0, SPEC.block_n)
    mask = k_at < (high - n).to(tl.int32)
    row = sample * (num_rows * SPEC.num_kv_heads)
    padded = (num_rows + STATISTICS - 1) // STATISTICS * STATISTICS
    statistics = statistics_ptr + (sample * SPEC.num_kv_heads + kv_head) * (2 * padded)
    k, v = load_history((None, None), history, n, k_at, mask, kv_head, SPEC, False)
    dk = tl.zeros((SPEC.block_n, SPEC.block_d), tl.float32)
    dv = tl.zeros((SPEC.block_n, SPEC.block_e), tl.float32)
    dbias = tl.zeros((SPEC.block_n, SPEC.block_h), tl.float32)
    for first in range(0, num_rows, SPEC.block_m):
        at = first + tl.arange(0, SPEC.block_m)
        q_mask = at < num_rows
        q = _load_queries(q_desc, q_ptr, sample, row, first, num_rows, kv_head, D, SPEC.block_d, SPEC)
        grad = _load_queries(grad_desc, grad_ptr, sample, row, first, num_rows, kv_head, E, SPEC.block_e, SPEC)
        lse = tl.load(statistics + at)
        delta = tl.load(statistics + padded + at)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale * LOG2E)
        dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        if SPEC.has_bias:
            s += tl.trans(load_bias_tile(history[2], n, k_at, mask, at, kv_head, SPEC))
        p = tl.exp2(s - lse[None, :])
        if dv_ptr is not None:
            dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
        elif SPEC.shared_kv and (dk_ptr is not None):
            dk = tl.dot(p.to(grad.dtype), grad, dk, input_precision=PRECISION)
        score, ds = scaled_scores_gradient(p, dp, delta[None, :], scale, SPEC.has_bias)
        if dk_ptr is not None:
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        if dbias_ptr is not None:
            dbias += sum_heads(score, at, q_mask, SPEC)
    if dk_ptr is not None:
        store_head(dk_ptr, dk, n, k_at, mask, kv_head, D, SPEC.block_d, SPEC)
    if dv_ptr is not None:
        store_head(dv_ptr, dv, n, k_at, mask, kv_head, E, SPEC.block_e, SPEC)
    if dbias_ptr is not None:
        store_head(dbias_ptr, dbias, n, k_at, mask, kv_head, SPEC.qheads_per_kvhead, SPEC.block_h, SPEC)


_dquery_launcher = launchers_of(target_attention_multi_tile_dquery_kernel)
_dhistory_launcher = launchers_of(target_attention_multi_tile_dhistory_kernel)


def backward(
    grad: Tensor, x: TargetAttentionInputs, out: Tensor, lse: Tensor, needed: Sequence[bool], chosen: AttentionPlan
) -> tuple[Tensor | None, ...]:
    """Returns the gradients, see `execute.backward`, and None for second."""
    problem = chosen.problem
    batch, (num_keys, num_kv_heads, head_dim) = x.query.shape[0], x.key.shape
    dquery, dkey, dvalue, dbias = empty_like((x.query, x.key, x.value, x.bias), needed[:4])
    dquery_plan, *dhistory_plan = chosen.backward
    if dkey is None and dvalue is None and dbias is None:
        dhistory_plan = []
    partials, grid, numbers = split_into_chunks(x, problem, dquery_plan.block_m, head_dim)
    num_rows = numbers[1]
    statistics = tile_samples = None
    if dhistory_plan:
        history_tiles = max_tiles(num_keys, batch, dhistory_plan[0].block_n)
        padded = ceil_div(num_rows, STATISTICS.value) * STATISTICS.value
        statistics = lse.new_empty(batch * num_kv_heads * 2 * padded)
        tile_samples = x.offsets.new_empty(history_tiles, dtype=torch.int32)
    descriptors = (None, None, None)
    if dquery_plan.options["BY_TMA"]:
        shared_gradient = dkey if problem.shared_kv else None
        descriptors = tuple(history_descriptor(y, dquery_plan.block_n) for y in (x.key, x.value, shared_gradient))
    history = (x.key, x.value, x.bias, x.offsets)
    outputs = (dquery, dkey, dvalue, dbias, partials.values, statistics, tile_samples)
    tensors = ((x.query, grad, out, lse), history, outputs)
    _dquery_launcher(problem, dquery_plan)(grid, tensors, (*numbers, x.scale), descriptors)
    if dquery is not None:
        partials.combine(x.offsets, dquery, None)
    if dhistory_plan:
        kernel = dhistory_plan[0]
        launch = _dhistory_launcher(problem, kernel)
        descriptors = (None, None)
        if kernel.options["BY_TMA"]:
            descriptors = tuple(query_descriptor(y, num_kv_heads, kernel.block_m) for y in (x.query, grad))
        tensors = ((x.query, grad, statistics), (*history, tile_samples), (dkey, dvalue, dbias))
        launch((history_tiles, num_kv_heads, 1), tensors, (batch, num_rows, x.scale), descriptors)
    return dquery, dkey, dvalue, dbias, None
