"""Jagged attention backward on any GPU: two sweeps, so that each gradient has one owner and no sum depends on timing.

    P = exp(S - L)      dS = P (dP - Δ)
    dq = scale Σ_keys dS k      dk = scale Σ_queries dS q      dv = Σ_queries P dO

One sweep takes a tile of queries over the keys it sees, the other a tile of keys over the queries that see it.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import Launcher
from jfi.kernels.common.primitives import LOG2E, block
from jfi.kernels.common.tile_scheduler import schedule, slot_of
from jfi.kernels.jagged_attention.tiles import bounds, keys_met, queries_met, score_bias, sees, statistics
from jfi.kernels.target_attention.tiles import Tile, load_rows, query_rows, store_rows


@triton.jit
def _weigh(
    queries,
    keys,
    bias_ptr,
    group,
    window,
    scale,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The weights P [M, N] and the gradient dS of their scores, 0 where nothing is seen.

    Args:
        queries: (q, dO, L in base 2, Δ, their rows in the sample, their places among the keys).
        keys: (k, v, row of the first, places from it, those places in the sample, which are the sample's).
    """
    q, grad, lse, delta, at, place = queries
    k, v, n, key_at, key, mask = keys
    left, right = window
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
    if HAS_BIAS:
        s += score_bias(bias_ptr, n, key_at, mask, at, group, GROUPS, HEADS)
    seen = sees(key[None, :], place[:, None], left, right, HAS_LEFT, HAS_RIGHT) & mask[None, :]
    p = tl.where(seen, tl.exp2(s - lse[:, None]), 0.0)
    dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    return p, p * (dp - delta[:, None])


@triton.jit(do_not_specialize=["total", "rows", "left", "right"])
def _jagged_attention_dquery_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    slots_ptr,
    grad_ptr,
    stats_ptr,
    dq_ptr,
    total,
    rows,
    left,
    right,
    scale,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    group = tl.program_id(0) % GROUPS
    slot = slot_of(slots_ptr, tl.program_id(0), total, GROUPS)
    first, shift, begin, steps = keys_met(slot, left, right, HEADS, HAS_LEFT, HAS_RIGHT, BLOCK_M, BLOCK_N)
    _tile, q_low, queries, k_low, keys = slot
    at = first + tl.arange(0, BLOCK_M)
    q_mask = at < queries * HEADS
    q_at = query_rows(at.to(tl.int64), group, GROUPS, HEADS)
    row = q_low.to(tl.int64) * (GROUPS * HEADS)
    place = at // HEADS + shift
    key_at = tl.arange(0, BLOCK_N)
    q = load_rows(q_ptr + row * D, q_at, q_mask, D, D, BLOCK_D)
    grad = load_rows(grad_ptr + row * E, q_at, q_mask, E, E, BLOCK_E)
    stats = stats_ptr + group.to(tl.int64) * rows + q_low * HEADS + at
    lse = tl.load(stats, mask=q_mask, other=float("inf"))
    delta = tl.load(stats + rows.to(tl.int64) * GROUPS, mask=q_mask, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for step in range(0, steps):
        key = begin + step * BLOCK_N + key_at
        mask = key < keys
        n = (k_low + begin + step * BLOCK_N).to(tl.int64)
        k = load_rows(k_ptr + n * (GROUPS * D) + group * D, key_at, mask, GROUPS * D, D, BLOCK_D)
        if SHARED:
            v = k
        else:
            v = load_rows(v_ptr + n * (GROUPS * E) + group * E, key_at, mask, GROUPS * E, E, BLOCK_E)
        _p, ds = _weigh(
            (q, grad, lse, delta, at, place),
            (k, v, n, key_at, key, mask),
            bias_ptr,
            group,
            (left, right),
            scale,
            GROUPS,
            HEADS,
            HAS_BIAS,
            HAS_LEFT,
            HAS_RIGHT,
            PRECISION,
        )
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_rows(dq_ptr + row * D, dq * scale, q_at, q_mask, D, D, BLOCK_D)


@triton.jit(do_not_specialize=["total", "rows", "left", "right"])
def _jagged_attention_dkey_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    slots_ptr,
    grad_ptr,
    stats_ptr,
    dk_ptr,
    dv_ptr,
    dbias_ptr,
    total,
    rows,
    left,
    right,
    scale,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """dk (and dv in it where value = key), dv and dbias."""
    group = tl.program_id(0) % GROUPS
    slot = slot_of(slots_ptr, tl.program_id(0), total, GROUPS)
    first, shift, begin, steps = queries_met(slot, left, right, HEADS, HAS_LEFT, HAS_RIGHT, BLOCK_M, BLOCK_N)
    _tile, k_low, keys, q_low, queries = slot
    key_at = tl.arange(0, BLOCK_N)
    key = first + key_at
    mask = key < keys
    n = (k_low + first).to(tl.int64)
    k = load_rows(k_ptr + n * (GROUPS * D) + group * D, key_at, mask, GROUPS * D, D, BLOCK_D)
    if SHARED:
        v = k
    else:
        v = load_rows(v_ptr + n * (GROUPS * E) + group * E, key_at, mask, GROUPS * E, E, BLOCK_E)
    row = q_low.to(tl.int64) * (GROUPS * HEADS)
    stats = stats_ptr + group.to(tl.int64) * rows + q_low * HEADS
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
    dbias = tl.zeros((BLOCK_N, BLOCK_H), tl.float32)
    for step in range(0, steps):
        at = begin + step * BLOCK_M + tl.arange(0, BLOCK_M)
        q_mask = at < queries * HEADS
        q_at = query_rows(at.to(tl.int64), group, GROUPS, HEADS)
        q = load_rows(q_ptr + row * D, q_at, q_mask, D, D, BLOCK_D)
        grad = load_rows(grad_ptr + row * E, q_at, q_mask, E, E, BLOCK_E)
        lse = tl.load(stats + at, mask=q_mask, other=float("inf"))
        delta = tl.load(stats + rows.to(tl.int64) * GROUPS + at, mask=q_mask, other=0.0)
        p, ds = _weigh(
            (q, grad, lse, delta, at, at // HEADS + shift),
            (k, v, n, key_at, key, mask),
            bias_ptr,
            group,
            (left, right),
            scale,
            GROUPS,
            HEADS,
            HAS_BIAS,
            HAS_LEFT,
            HAS_RIGHT,
            PRECISION,
        )
        dv = tl.dot(tl.trans(p.to(grad.dtype)), grad, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=PRECISION)
        if HAS_BIAS:
            own = ((at % HEADS)[:, None] == tl.arange(0, BLOCK_H)[None, :]) & q_mask[:, None]
            dbias = tl.dot(tl.trans(ds), own.to(tl.float32), dbias, input_precision="tf32x3")
    dk *= scale
    if SHARED:
        dk += dv
    else:
        store_rows(dv_ptr + n * (GROUPS * E) + group * E, dv, key_at, mask, GROUPS * E, E, BLOCK_E)
    store_rows(dk_ptr + n * (GROUPS * D) + group * D, dk, key_at, mask, GROUPS * D, D, BLOCK_D)
    if HAS_BIAS:
        to = dbias_ptr + n * (GROUPS * HEADS) + group * HEADS
        store_rows(to, dbias, key_at, mask, GROUPS * HEADS, HEADS, BLOCK_H)


def _config(tile: Tile) -> tuple[int, int, int, int]:
    """(query rows, keys, warps, stages) of either sweep."""
    if tile.width_bytes > 512:
        return (16, 16, 8, 1) if tile.width_bytes > 1024 else (16, 16, 4, 1)
    if tile.width_bytes > 256:
        return 32, 32, 4, 1
    return 64, 64, 4, 2 if tile.dtype.itemsize == 2 else 1


@cache
def _launchers(tile: Tile, has_left: bool, has_right: bool) -> tuple[int, int, Launcher, Launcher]:
    block_m, block_n, *_ = config = _config(tile)
    constants = {"HAS_LEFT": has_left, "HAS_RIGHT": has_right, **tile.constants(*config)}
    dquery = Launcher(_jagged_attention_dquery_kernel, **constants)
    return block_m, block_n, dquery, Launcher(_jagged_attention_dkey_kernel, BLOCK_H=block(tile.heads), **constants)


def backward(
    grad: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    query_offsets: Tensor,
    key_offsets: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    left: int | None,
    right: int | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of query, key (key + value where they are shared), value and bias."""
    rows = query.shape[0]
    dquery, dkey = torch.empty_like(query), torch.empty_like(key)
    dvalue = None if value is None else torch.empty_like(value)
    dbias = None if bias is None else torch.empty_like(bias)
    tile = Tile.of(query, key, value, key_offsets, bias)
    block_m, block_n, launch_dquery, launch_dkey = _launchers(tile, left is not None, right is not None)
    stats = statistics(grad, out, lse, dlse, tile.groups)
    inputs = (query, key, key if value is None else value, bias)
    numbers = (rows * tile.heads, *bounds(left, right), scale)
    slots = schedule(query_offsets, key_offsets, rows, tile.heads, block_m)
    total = slots.shape[0] * tile.groups
    launch_dquery((total, 1, 1), (*inputs, slots, grad, stats, dquery), (total, *numbers))
    slots = schedule(key_offsets, query_offsets, key.shape[0], 1, block_n)
    total = slots.shape[0] * tile.groups
    launch_dkey((total, 1, 1), (*inputs, slots, grad, stats, dkey, dvalue, dbias), (total, *numbers))
    return dquery, dkey, dvalue, dbias
