"""The sweep of many query rows over the history that gives their gradient; with few enough of them, all gradients."""

import triton
import triton.language as tl

from jfi.kernels.common.primitives import LOG2E
from jfi.kernels.target_attention.many_tiles import (
    STATS,
    bias_tile,
    head_sums,
    history_tile,
    part_of,
    query_places,
    scores_gradient,
    slot_rows,
    store_history_tile,
)
from jfi.kernels.target_attention.tiles import load_rows, load_stats, store_rows


@triton.jit
def _statistics(
    grad, out_ptr, lse_ptr, at, mask, scale, E: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_E: tl.constexpr
):
    """L in base 2, inf where there is nothing to weigh, and Δ as ``scores_gradient`` takes it."""
    lse, delta = load_stats(grad, out_ptr, lse_ptr, at, mask, E, BLOCK_E)
    return lse * LOG2E, delta if HAS_BIAS else delta * scale


@triton.jit
def _step(
    q,
    grad,
    lse,
    delta,
    dq,
    k_ptr,
    v_ptr,
    bias_ptr,
    dk_ptr,
    dv_ptr,
    dbias_ptr,
    k_desc,
    v_desc,
    dk_desc,
    n,
    mask,
    at,
    q_mask,
    group,
    scale,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MASKED: tl.constexpr,
    HISTORY: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """dq after the tile of history rows from n on; if HISTORY, stores dk (dv in it where shared), dv and dbias too."""
    k_at = tl.arange(0, BLOCK_N)
    k = history_tile(k_desc, k_ptr, n, k_at, mask, group, GROUPS, D, BLOCK_D, DESCRIBED)
    if SHARED:
        v = k
    else:
        v = history_tile(v_desc, v_ptr, n, k_at, mask, group, GROUPS, E, BLOCK_E, DESCRIBED)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
    dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    if HAS_BIAS:
        s += bias_tile(bias_ptr, n, k_at, mask, at, group, GROUPS, HEADS)
    p = tl.exp2(s - lse[:, None])
    if MASKED:
        p = tl.where(mask[None, :], p, 0.0)
    score, ds = scores_gradient(p, dp, delta[:, None], scale, HAS_BIAS)
    ds = ds.to(k.dtype)
    if HISTORY:
        dv = tl.dot(tl.trans(p.to(grad.dtype)), grad, input_precision=PRECISION)
        if SHARED:
            dk = tl.dot(tl.trans(ds), q, dv, input_precision=PRECISION)
        else:
            store_history_tile(None, dv_ptr, dv, n, k_at, mask, group, GROUPS, E, BLOCK_E, False)
            dk = tl.dot(tl.trans(ds), q, input_precision=PRECISION)
        store_history_tile(dk_desc, dk_ptr, dk, n, k_at, mask, group, GROUPS, D, BLOCK_D, DESCRIBED and SHARED)
        if HAS_BIAS:
            dbias = head_sums(tl.trans(score), at, q_mask, HEADS, BLOCK_H)
            store_history_tile(None, dbias_ptr, dbias, n, k_at, mask, group, GROUPS, HEADS, BLOCK_H, False)
    return tl.dot(ds, k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["batch", "queries", "tiles", "chunk"])
def target_attention_many_dquery_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    offsets_ptr,
    grad_ptr,
    out_ptr,
    lse_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    dbias_ptr,
    part_ptr,
    stats_ptr,
    slots_ptr,
    k_desc,
    v_desc,
    dk_desc,
    batch,
    queries,
    tiles,
    chunk,
    scale,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    HISTORY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SLOT: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """dq of a tile of query rows over a chunk of rows; if HISTORY, where all query rows are in it, the rest as well."""
    program, group = tl.program_id(0), tl.program_id(1)
    sample, low, n, high = slot_rows(offsets_ptr, batch, program // tiles, chunk)
    if (n >= high) & (n > low):
        return
    tile = program % tiles
    first = tile * BLOCK_M
    at = first + tl.arange(0, BLOCK_M)
    place, q_at = query_places(first, at, group, GROUPS, HEADS)
    q_mask = at < queries
    k_at = tl.arange(0, BLOCK_N)
    row = sample * (queries * GROUPS) + place
    q = load_rows(q_ptr + row * D, q_at, q_mask, D, D, BLOCK_D)
    grad = load_rows(grad_ptr + row * E, q_at, q_mask, E, E, BLOCK_E)
    lse, delta = _statistics(grad, out_ptr + row * E, lse_ptr + row, q_at, q_mask, scale, E, HAS_BIAS, BLOCK_E)
    if not HISTORY and n == low:
        padded = (queries + STATS - 1) // STATS * STATS
        stats = stats_ptr + (sample * GROUPS + group) * (2 * padded) + at
        tl.store(stats, lse, mask=at < padded)
        tl.store(stats + padded, delta, mask=at < padded)
        if (tile == 0) & (group == 0):
            # The slots of tile_of that are this sample's, for the other sweep.
            end = high // SLOT + sample + 1
            for ahead in range(low // SLOT + sample, end, 128):
                slot = ahead + tl.arange(0, 128)
                tl.store(slots_ptr + slot, tl.zeros((128,), tl.int32) + sample.to(tl.int32), mask=slot < end)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    left = tl.minimum(high - n, chunk).to(tl.int32)
    whole = left // BLOCK_N * BLOCK_N
    for ahead in range(0, whole, BLOCK_N):
        dq = _step(
            q,
            grad,
            lse,
            delta,
            dq,
            k_ptr,
            v_ptr,
            bias_ptr,
            dk_ptr,
            dv_ptr,
            dbias_ptr,
            k_desc,
            v_desc,
            dk_desc,
            n + ahead,
            k_at < BLOCK_N,
            at,
            q_mask,
            group,
            scale,
            GROUPS,
            HEADS,
            D,
            E,
            SHARED,
            HAS_BIAS,
            False,
            HISTORY,
            PRECISION,
            BLOCK_N,
            BLOCK_D,
            BLOCK_E,
            BLOCK_H,
            DESCRIBED,
        )
    if whole < left:
        dq = _step(
            q,
            grad,
            lse,
            delta,
            dq,
            k_ptr,
            v_ptr,
            bias_ptr,
            dk_ptr,
            dv_ptr,
            dbias_ptr,
            k_desc,
            v_desc,
            dk_desc,
            n + whole,
            k_at < left - whole,
            at,
            q_mask,
            group,
            scale,
            GROUPS,
            HEADS,
            D,
            E,
            SHARED,
            HAS_BIAS,
            True,
            HISTORY,
            PRECISION,
            BLOCK_N,
            BLOCK_D,
            BLOCK_E,
            BLOCK_H,
            False,
        )
    if high - low <= chunk:
        store_rows(dq_ptr + row * D, dq, q_at, q_mask, D, D, BLOCK_D)
    else:
        part = part_of(low, n, chunk) * (queries * GROUPS) + place
        store_rows(part_ptr + part * D, dq, q_at, q_mask, D, D, BLOCK_D)
