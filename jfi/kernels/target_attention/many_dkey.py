"""The sweep of history rows over many query rows that gives the gradients of keys, values and bias."""

import triton
import triton.language as tl

from jfi.kernels.common.primitives import LOG2E
from jfi.kernels.target_attention.many_tiles import (
    STATS,
    bias_tile,
    head_sums,
    history_tile,
    query_places,
    scores_gradient,
    store_history_tile,
)
from jfi.kernels.target_attention.tiles import load_rows


@triton.jit
def _query_tile(
    desc,
    ptr,
    sample,
    row,
    first,
    at,
    mask,
    group,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """[M, D] of a sample's query rows from ``first`` on; what lies outside the sample is 0."""
    if DESCRIBED:
        return desc.load([sample.to(tl.int32), first, group * WIDTH]).reshape(BLOCK_M, BLOCK_D)
    else:
        place, q_at = query_places(first, at, group, GROUPS, HEADS)
        return load_rows(ptr + (row + place) * WIDTH, q_at, mask, WIDTH, WIDTH, BLOCK_D)


@triton.jit(do_not_specialize=["batch", "queries"])
def target_attention_many_dhistory_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    offsets_ptr,
    grad_ptr,
    dk_ptr,
    dv_ptr,
    dbias_ptr,
    stats_ptr,
    slots_ptr,
    q_desc,
    grad_desc,
    batch,
    queries,
    scale,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """S [N, M] here: P and dS go from registers into the products that give dv and dk."""
    slot, group = tl.program_id(0), tl.program_id(1)
    sample = tl.load(slots_ptr + slot).to(tl.int64)
    low = tl.load(offsets_ptr + sample).to(tl.int64)
    high = tl.load(offsets_ptr + sample + 1).to(tl.int64)
    n = low + (slot - low // BLOCK_N - sample) * BLOCK_N
    if n >= high:
        return
    k_at = tl.arange(0, BLOCK_N)
    mask = k_at < (high - n).to(tl.int32)
    row = sample * (queries * GROUPS)
    padded = (queries + STATS - 1) // STATS * STATS
    stats = stats_ptr + (sample * GROUPS + group) * (2 * padded)
    k = history_tile(None, k_ptr, n, k_at, mask, group, GROUPS, D, BLOCK_D, False)
    if SHARED:
        v = k
    else:
        v = history_tile(None, v_ptr, n, k_at, mask, group, GROUPS, E, BLOCK_E, False)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
    dbias = tl.zeros((BLOCK_N, BLOCK_H), tl.float32)
    for first in range(0, queries, BLOCK_M):
        at = first + tl.arange(0, BLOCK_M)
        q_mask = at < queries
        q = _query_tile(
            q_desc, q_ptr, sample, row, first, at, q_mask, group, GROUPS, HEADS, D, BLOCK_M, BLOCK_D, DESCRIBED
        )
        grad = _query_tile(
            grad_desc, grad_ptr, sample, row, first, at, q_mask, group, GROUPS, HEADS, E, BLOCK_M, BLOCK_E, DESCRIBED
        )
        lse = tl.load(stats + at)
        delta = tl.load(stats + padded + at)
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale * LOG2E)
        dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        if HAS_BIAS:
            s += tl.trans(bias_tile(bias_ptr, n, k_at, mask, at, group, GROUPS, HEADS))
        p = tl.exp2(s - lse[None, :])
        if SHARED:
            dk = tl.dot(p.to(grad.dtype), grad, dk, input_precision=PRECISION)
        else:
            dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
        score, ds = scores_gradient(p, dp, delta[None, :], scale, HAS_BIAS)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        if HAS_BIAS:
            dbias += head_sums(score, at, q_mask, HEADS, BLOCK_H)
    store_history_tile(None, dk_ptr, dk, n, k_at, mask, group, GROUPS, D, BLOCK_D, False)
    if not SHARED:
        store_history_tile(None, dv_ptr, dv, n, k_at, mask, group, GROUPS, E, BLOCK_E, False)
    if HAS_BIAS:
        store_history_tile(None, dbias_ptr, dbias, n, k_at, mask, group, GROUPS, HEADS, BLOCK_H, False)
