"""The sweep of many query rows over the history that gives their gradient; with few enough of them, all gradients."""

import triton
import triton.language as tl

from jfi.kernels.common.combine import chunk_partial
from jfi.kernels.common.online_softmax import scaled_scores_gradient
from jfi.kernels.common.primitives import LOG2E
from jfi.kernels.common.tiles import load_bias_tile, load_rows, load_statistics, store_rows
from jfi.kernels.target_attention.multi_tile_chunks import (
    STATISTICS,
    find_chunk,
    load_history,
    query_places,
    store_history_tile,
    sum_heads,
)


@triton.jit
def _step(
    queries,
    dq,
    desc,
    history,
    grads,
    n,
    mask,
    kv_head,
    scale,
    MASKED: tl.constexpr,
    SPEC: tl.constexpr,
):
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
            store_history_tile(dv_ptr, dv, n, k_at, mask, kv_head, SPEC.value_dim, SPEC.block_e, SPEC)
        if dk_ptr is not None:
            if SPEC.shared_kv:
                dk = tl.dot(tl.trans(ds), q, dv, input_precision=PRECISION)
            else:
                dk = tl.dot(tl.trans(ds), q, input_precision=PRECISION)
            if BY_TMA and SPEC.shared_kv:
                desc[2].store([n.to(tl.int32), kv_head * SPEC.head_dim], dk.to(dk_ptr.dtype.element_ty))
            else:
                store_history_tile(dk_ptr, dk, n, k_at, mask, kv_head, SPEC.head_dim, SPEC.block_d, SPEC)
        if dbias_ptr is not None:
            dbias = sum_heads(tl.trans(score), at, q_mask, SPEC)
            store_history_tile(dbias_ptr, dbias, n, k_at, mask, kv_head, SPEC.qheads_per_kvhead, SPEC.block_h, SPEC)
    if dq_ptr is not None:
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["batch", "num_rows", "tiles", "chunk"])
def target_attention_multi_tile_dquery_kernel(
    k_desc,
    v_desc,
    dk_desc,
    queries,
    history,
    outputs,
    batch,
    num_rows,
    tiles,
    chunk,
    scale,
    SPEC: tl.constexpr,
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
    place, q_at = query_places(first, at, kv_head, SPEC)
    q_mask = at < num_rows
    k_at = tl.arange(0, SPEC.block_n)
    row = sample * (num_rows * SPEC.num_kv_heads) + place
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
            partial = chunk_partial(low, n, chunk) * (num_rows * SPEC.num_kv_heads) + place
            store_rows(partial_ptr + partial * D, dq, q_at, q_mask, D, D, SPEC.block_d)
