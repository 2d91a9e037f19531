"""Target attention backward: every history row is read once, and its gradient written once.

With the log-sum-exp L of the forward and Δ = Σ_e dO · O, one sweep rebuilds the weights and has all gradients at hand:

    P = exp(S - L)      dS = P (dO·v - Δ)      dk = scale Σ dS q      dv = Σ P dO      dq = scale Σ dS k

History rows by query rows here, S [N, M]: two of the three products that give gradients then take it as it lies.  Where
the query rows are more than a tile, dq no longer fits beside the gradient of the history, and target_attention_wide.py
sweeps for it by itself.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels import target_attention_wide as wide
from jfi.kernels.shares import WEIGHT, Partials, deal, first_step, last_row
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
from jfi.kernels.tiles import block, tile_slots


@triton.jit(do_not_specialize=["batch", "queries", "chunk"])
def _target_attention_bwd_kernel(
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
    program, group = tl.program_id(0), tl.program_id(1)
    start = program.to(tl.int64) * chunk
    end = start + chunk
    at = tl.arange(0, BLOCK_M)
    q_at, q_mask = query_rows(at, group, GROUPS, HEADS), at < queries
    k_at = tl.arange(0, BLOCK_N)
    q_stride = (queries * GROUPS).to(tl.int64)
    split = tl.full((), -1, tl.int64)
    sample, low, high, n, _steps = first_step(offsets_ptr, batch, start, end, BLOCK_N)
    while (sample < batch) & (low + sample * WEIGHT < end):
        next_high = tl.load(offsets_ptr + sample + 2, mask=sample + 1 < batch, other=0).to(tl.int64)
        last = last_row(sample, low, high, end)
        row = sample * q_stride
        q = load_rows(q_ptr + row * D, q_at, q_mask, D, D, BLOCK_D)
        grad = load_rows(grad_ptr + row * E, q_at, q_mask, E, E, BLOCK_E)
        lse, delta = load_stats(grad, out_ptr + row * E, lse_ptr + row, q_at, q_mask, E, BLOCK_E)
        dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
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
            p, ds = weigh(q, grad, lse, delta, k, v, bias, mask, scale, PRECISION)
            dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
            dv = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
            dbias = tl.zeros((BLOCK_N, BLOCK_H), tl.float32)
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
                first,
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
            dq = tl.dot(tl.trans((ds * scale).to(k.dtype)), k, dq, input_precision=PRECISION)
        begins = low + sample * WEIGHT >= start
        if begins & (last == high):
            store_rows(dq_ptr + row * D, dq, q_at, q_mask, D, D, BLOCK_D)
        else:
            slot = (2 * program + begins.to(tl.int32)) * q_stride
            store_rows(part_ptr + slot * D, dq, q_at, q_mask, D, D, BLOCK_D)
        split = tl.where(begins & (last < high), sample, split)
        sample += 1
        low = high
        n = high
        high = next_high
    tl.store(split_ptr + program, split)


def _config(tile: Tile, shared: bool) -> tuple[int, int, int, int]:
    """(rows a step, warps, stages, shares a multiprocessor), the best of those measured on an H200."""
    if tile.width_bytes > 512:
        return (16, 8, 1, 1) if tile.width_bytes > 1024 else (16, 4, 1, 1)
    if tile.block_m > 16:
        return 32, 4, 2, 2
    if tile.width_bytes <= 128 and shared:
        return 32, 1, 3, 8
    if tile.width_bytes <= 256:
        return 32, 2, 3, 4
    return 16, 2, 3 if shared else 2, 4


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of query, key (key + value where they are shared), value and bias."""
    batch, _, heads, width = query.shape
    rows, groups, _ = key.shape
    out_width = width if value is None else value.shape[2]
    dquery, dkey = torch.empty_like(query), torch.empty_like(key)
    dvalue = None if value is None else torch.empty_like(value)
    dbias = None if bias is None else torch.empty_like(bias)
    if batch == 0:
        return dquery, dkey, dvalue, dbias
    tile = Tile.of(query, key, value)
    one_tile = tile.queries <= tile.block_m
    block_n, warps, stages, shares = (_config if one_tile else wide.config)(tile, value is None)
    chunk, shares = deal(rows, batch, query.device, shares)
    partials = Partials(shares, chunk, query, width, weighted=False)
    arguments = (
        query,
        key,
        key if value is None else value,
        bias,
        offsets,
        grad,
        out,
        lse,
        dquery,
        dkey,
        dvalue,
        dbias,
        partials.values,
        partials.split,
        batch,
        tile.queries,
        chunk,
        scale,
    )
    constants = {
        "GROUPS": groups,
        "HEADS": heads // groups,
        "D": width,
        "E": out_width,
        "SHARED": value is None,
        "HAS_BIAS": bias is not None,
        "PRECISION": tile.precision,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": block_n,
        "BLOCK_D": tile.block_d,
        "BLOCK_E": tile.block_e,
        "BLOCK_H": block(heads // groups),
        "num_warps": warps,
        "num_stages": stages,
    }
    if one_tile:
        _target_attention_bwd_kernel[(shares, groups)](*arguments, **constants)
    else:
        tiles, slots = triton.cdiv(tile.queries, tile.block_m), tile_slots(rows, batch, block_n)
        wide.launch(arguments, constants, tiles, slots, shares)
    partials.merge(offsets, dquery, None)
    return dquery, dkey, dvalue, dbias
