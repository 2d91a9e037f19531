"""The sweep of history rows over many query rows that gives the gradients of keys, values and bias."""

import triton
import triton.language as tl

from jfi.kernels.common.online_softmax import scaled_scores_gradient
from jfi.kernels.common.primitives import LOG2E
from jfi.kernels.common.tiles import load_bias_tile, load_rows
from jfi.kernels.target_attention.multi_tile_chunks import (
    STATISTICS,
    load_history,
    query_places,
    store_history_tile,
    sum_heads,
)


@triton.jit
def _load_queries(
    desc,
    ptr,
    sample,
    row,
    first,
    num_rows,
    kv_head,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPEC: tl.constexpr,
):
    """[M, D] of a sample's query rows from ``first`` on, 0 past its last; the sample's begin at row ``row``."""
    if SPEC.by_tma:
        return desc.load([sample.to(tl.int32), first, kv_head * WIDTH]).reshape(SPEC.block_m, BLOCK_D)
    else:
        at = first + tl.arange(0, SPEC.block_m)
        place, q_at = query_places(first, at, kv_head, SPEC)
        return load_rows(ptr + (row + place) * WIDTH, q_at, at < num_rows, WIDTH, WIDTH, BLOCK_D)


@triton.jit(do_not_specialize=["num_rows"])
def target_attention_multi_tile_dhistory_kernel(
    q_desc,
    grad_desc,
    queries,
    history,
    grads,
    num_rows,
    scale,
    SPEC: tl.constexpr,
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
        store_history_tile(dk_ptr, dk, n, k_at, mask, kv_head, D, SPEC.block_d, SPEC)
    if dv_ptr is not None:
        store_history_tile(dv_ptr, dv, n, k_at, mask, kv_head, E, SPEC.block_e, SPEC)
    if dbias_ptr is not None:
        store_history_tile(dbias_ptr, dbias, n, k_at, mask, kv_head, SPEC.qheads_per_kvhead, SPEC.block_h, SPEC)
