"""Target attention backward for more query rows than a tile: many candidates, or many heads, to one history.

Two sweeps: one for the gradient of the history, a program a tile of its rows with a loop over the query rows inside;
one for the gradient of the queries, a program a tile of them and share of the rows.  Products outweigh bytes here.
"""

import triton
import triton.language as tl

from jfi.kernels.shares import WEIGHT, first_step, last_row
from jfi.kernels.target_attention_tiles import (
    Tile,
    add_history_gradients,
    load_bias,
    load_rows,
    load_stats,
    query_rows,
    store_history_gradients,
    store_rows,
    weigh,
)
from jfi.kernels.tiles import tile_of


@triton.jit(do_not_specialize=["batch", "queries", "chunk"])
def _target_attention_dhistory_kernel(
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
    split_ptr,
    batch,
    queries,
    chunk,
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
):
    group = tl.program_id(1)
    sample, n, high = tile_of(offsets_ptr, batch, tl.program_id(0), BLOCK_N)
    if n >= high:
        return
    k_at = tl.arange(0, BLOCK_N)
    mask = k_at < (high - n).to(tl.int32)
    row = sample * (queries * GROUPS)
    k = load_rows(k_ptr + n * (GROUPS * D) + group * D, k_at, mask, GROUPS * D, D, BLOCK_D)
    if SHARED:
        v = k
    else:
        v = load_rows(v_ptr + n * (GROUPS * E) + group * E, k_at, mask, GROUPS * E, E, BLOCK_E)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
    dbias = tl.zeros((BLOCK_N, BLOCK_H), tl.float32)
    for first in range(0, queries, BLOCK_M):
        at = first + tl.arange(0, BLOCK_M)
        q_at, q_mask = query_rows(at, group, GROUPS, HEADS), at < queries
        q = load_rows(q_ptr + row * D, q_at, q_mask, D, D, BLOCK_D)
        grad = load_rows(grad_ptr + row * E, q_at, q_mask, E, E, BLOCK_E)
        lse, delta = load_stats(grad, out_ptr + row * E, lse_ptr + row, q_at, q_mask, E, BLOCK_E)
        bias = 0.0
        if HAS_BIAS:
            bias = load_bias(bias_ptr, n, mask, at, group, GROUPS, HEADS, BLOCK_N)
        p, ds = weigh(q, grad, lse, delta, k, v, bias, mask, scale, PRECISION)
        dk, dv, dbias = add_history_gradients(
            dk, dv, dbias, p, ds, q, grad, at, q_mask, scale, HEADS, SHARED, HAS_BIAS, PRECISION, BLOCK_H
        )
    store_history_gradients(
        dk_ptr,
        dv_ptr,
        dbias_ptr,
        dk,
        dv,
        dbias,
        n,
        k_at,
        mask,
        group,
        GROUPS,
        HEADS,
        D,
        E,
        SHARED,
        HAS_BIAS,
        BLOCK_D,
        BLOCK_E,
        BLOCK_H,
    )


@triton.jit(do_not_specialize=["batch", "queries", "chunk"])
def _target_attention_dquery_kernel(
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
    split_ptr,
    batch,
    queries,
    chunk,
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
):
    tile, program, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = program.to(tl.int64) * chunk
    end = start + chunk
    at = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_at, q_mask = query_rows(at, group, GROUPS, HEADS), at < queries
    k_at = tl.arange(0, BLOCK_N)
    q_stride = (queries * GROUPS).to(tl.int64)
    split = tl.full((), -1, tl.int64)
    sample, low, high, n, _steps = first_step(offsets_ptr, batch, start, end, BLOCK_N)
    while (sample < batch) & (low + sample * WEIGHT < end):
        last = last_row(sample, low, high, end)
        row = sample * q_stride
        q = load_rows(q_ptr + row * D, q_at, q_mask, D, D, BLOCK_D)
        grad = load_rows(grad_ptr + row * E, q_at, q_mask, E, E, BLOCK_E)
        lse, delta = load_stats(grad, out_ptr + row * E, lse_ptr + row, q_at, q_mask, E, BLOCK_E)
        dq = tl.zeros((BLOCK_D, BLOCK_M), tl.float32)
        for first in range(n, last, BLOCK_N):
            mask = k_at < (last - first).to(tl.int32)
            k = load_rows(k_ptr + first * (GROUPS * D) + group * D, k_at, mask, GROUPS * D, D, BLOCK_D)
            if SHARED:
                v = k
            else:
                v = load_rows(v_ptr + first * (GROUPS * E) + group * E, k_at, mask, GROUPS * E, E, BLOCK_E)
            bias = 0.0
            if HAS_BIAS:
                bias = load_bias(bias_ptr, first, mask, at, group, GROUPS, HEADS, BLOCK_N)
            _weights, ds = weigh(q, grad, lse, delta, k, v, bias, mask, scale, PRECISION)
            dq = tl.dot(tl.trans(k), (ds * scale).to(k.dtype), dq, input_precision=PRECISION)
        begins = low + sample * WEIGHT >= start
        if begins & (last == high):
            store_rows(dq_ptr + row * D, tl.trans(dq), q_at, q_mask, D, D, BLOCK_D)
        else:
            slot = (2 * program + begins.to(tl.int32)) * q_stride
            store_rows(part_ptr + slot * D, tl.trans(dq), q_at, q_mask, D, D, BLOCK_D)
        split = tl.where(begins & (last < high), sample, split)
        sample += 1
        low = high
        n = high
        high = tl.load(offsets_ptr + sample + 1, mask=sample < batch, other=0).to(tl.int64)
    tl.store(split_ptr + program, split)


def config(tile: Tile, shared: bool) -> tuple[int, int, int, int]:
    """(rows a step, warps, stages, shares a multiprocessor)."""
    row_bytes = tile.width_bytes * (1 if shared else 2)
    if tile.width_bytes > 512:
        return (16, 8, 1, 1) if tile.width_bytes > 1024 else (16, 4, 1, 1)
    return (64, 4, 2, 2) if row_bytes <= 256 else (32, 4, 2, 2)


def launch(arguments: tuple, constants: dict, tiles: int, slots: int, shares: int) -> None:
    """Run both sweeps over so many query tiles, slots of ``tile_of`` and shares."""
    _target_attention_dhistory_kernel[(slots, constants["GROUPS"])](*arguments, **constants)
    _target_attention_dquery_kernel[(tiles, shares, constants["GROUPS"])](*arguments, **constants)
