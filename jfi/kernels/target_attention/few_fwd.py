"""Target attention forward for few query rows: every history row is read once.

Query rows by history rows, S [M, N]: the T · H / G query rows that meet a key head, at most FEW, are one tile, so one
warp or two hold it, and the running maximum and sum never cross warps.  Sums are kept by column and added up at a
sample's end.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import Launcher
from jfi.kernels.common.primitives import LN2, LOG2E
from jfi.kernels.common.stream_k import WEIGHT, Partials, deal, first_step, fits, last_row, parts
from jfi.kernels.target_attention.tiles import (
    EVENTS,
    FEW,
    Tile,
    field_columns,
    load_bias,
    load_columns,
    load_events,
    load_rows,
    query_rows,
    store_rows,
)

#: Rows of the longest history up to which large steps would often be half empty.
_SHORT_ROWS = 384


@triton.jit
def _attend(q, k, v, value_scale, bias, top, total, acc, scale, SCALED: tl.constexpr, PRECISION: tl.constexpr):
    """Take a tile of history rows into the running maximum (in base 2), the sums by column and the weighted sum."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E) + bias
    new_top = tl.maximum(top, tl.max(s, 1))
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    p = tl.exp2(s - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink[:, None] + p
    if SCALED:
        p = p * value_scale[None, :]
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return new_top, total, acc


@triton.jit
def _result(top, total, acc):
    """The output and the log-sum-exp of the scores, 0 and -inf where nothing was weighed."""
    total = tl.sum(total, 1)
    sums_or_one = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, -float("inf"), (top + tl.log2(sums_or_one)) * LN2)
    return acc * (1.0 / sums_or_one)[:, None], lse


@triton.jit
def _load_history(
    k_ptr,
    k_cols,
    v_ptr,
    bias_ptr,
    buckets_ptr,
    value_scale_ptr,
    n,
    mask,
    at,
    group,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BY_BUCKET: tl.constexpr,
    SCALED: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Keys, values, their scale, and bias in base 2, [M, N] or [1, N], of the rows from n on.

    Outside of the mask they are 0, and the bias -inf.
    """
    k_at = tl.arange(0, BLOCK_N)
    STRIDE: tl.constexpr = GROUPS * D // FIELDS
    k = load_columns(k_ptr + n * STRIDE + group * D, k_at, k_cols, mask, STRIDE, D, BLOCK_D)
    v = k
    if not SHARED:
        v = load_rows(v_ptr + n * (GROUPS * E) + group * E, k_at, mask, GROUPS * E, E, BLOCK_E)
    value_scale = k_at
    if SCALED:
        value_scale = load_events(value_scale_ptr, n, mask, BLOCK_N).to(tl.float32)
    if HAS_BIAS:
        buckets = k_at
        if BY_BUCKET:
            buckets = load_events(buckets_ptr, n, mask, BLOCK_N)
        bias = tl.trans(load_bias(bias_ptr, buckets, n, mask, at, group, GROUPS, HEADS, BY_BUCKET)) * LOG2E
    else:
        bias = tl.where(mask, 0.0, -float("inf"))[None, :]
    return k, v, value_scale, bias


@triton.jit(do_not_specialize=["queries"], do_not_specialize_on_alignment=EVENTS)
def _target_attention_fwd_whole_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    buckets_ptr,
    value_scale_ptr,
    second_ptr,
    offsets_ptr,
    out_ptr,
    lse_ptr,
    queries,
    scale,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BY_BUCKET: tl.constexpr,
    SCALED: tl.constexpr,
    FIELDS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """A program a sample: nothing to look for, nothing to merge."""
    sample, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    low = tl.load(offsets_ptr + sample).to(tl.int64)
    length = (tl.load(offsets_ptr + sample + 1) - low).to(tl.int32)
    at = tl.arange(0, BLOCK_M)
    q_at, q_mask = query_rows(at, group, GROUPS, HEADS), at < queries
    k_cols = field_columns(k_ptr, second_ptr, D, FIELDS, BLOCK_D)
    row = sample * (queries * GROUPS)
    q = load_rows(q_ptr + row * D, q_at, q_mask, D, D, BLOCK_D)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    for first in range(0, length, BLOCK_N):
        mask = tl.arange(0, BLOCK_N) < length - first
        k, v, value_scale, bias = _load_history(
            k_ptr,
            k_cols,
            v_ptr,
            bias_ptr,
            buckets_ptr,
            value_scale_ptr,
            low + first,
            mask,
            at,
            group,
            GROUPS,
            HEADS,
            D,
            E,
            SHARED,
            HAS_BIAS,
            BY_BUCKET,
            SCALED,
            FIELDS,
            BLOCK_N,
            BLOCK_D,
            BLOCK_E,
        )
        top, total, acc = _attend(q, k, v, value_scale, bias, top, total, acc, scale, SCALED, PRECISION)
    result, lse = _result(top, total, acc)
    store_rows(out_ptr + row * E, result, q_at, q_mask, E, E, BLOCK_E)
    tl.store(lse_ptr + row + q_at, lse, mask=q_mask)


@triton.jit(do_not_specialize=["batch", "queries", "chunk"], do_not_specialize_on_alignment=EVENTS)
def _target_attention_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    buckets_ptr,
    value_scale_ptr,
    second_ptr,
    offsets_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
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
    BY_BUCKET: tl.constexpr,
    SCALED: tl.constexpr,
    FIELDS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """A program a share of the rows of all samples (see shares.py)."""
    program, group = tl.program_id(0), tl.program_id(1)
    start = program.to(tl.int64) * chunk
    end = start + chunk
    at = tl.arange(0, BLOCK_M)
    q_at, q_mask = query_rows(at, group, GROUPS, HEADS), at < queries
    k_cols = field_columns(k_ptr, second_ptr, D, FIELDS, BLOCK_D)
    q_stride = (queries * GROUPS).to(tl.int64)
    part_lse_ptr, split_ptr = parts(part_ptr, tl.num_programs(0), queries * GROUPS, E)
    split = tl.full((), -1, tl.int64)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    sample, low, high, n, steps = first_step(offsets_ptr, batch, start, end, BLOCK_N)
    for _ in range(steps):
        # Asked for now, needed when this sample ends.
        next_high = tl.load(offsets_ptr + sample + 2, mask=sample + 1 < batch, other=0).to(tl.int64)
        last = last_row(sample, low, high, end)
        left = (last - n).to(tl.int32)
        mask = tl.arange(0, BLOCK_N) < left
        q = load_rows(q_ptr + sample * q_stride * D, q_at, q_mask, D, D, BLOCK_D)
        k, v, value_scale, bias = _load_history(
            k_ptr,
            k_cols,
            v_ptr,
            bias_ptr,
            buckets_ptr,
            value_scale_ptr,
            n,
            mask,
            at,
            group,
            GROUPS,
            HEADS,
            D,
            E,
            SHARED,
            HAS_BIAS,
            BY_BUCKET,
            SCALED,
            FIELDS,
            BLOCK_N,
            BLOCK_D,
            BLOCK_E,
        )
        top, total, acc = _attend(q, k, v, value_scale, bias, top, total, acc, scale, SCALED, PRECISION)
        done = left <= BLOCK_N
        if done:
            result, lse = _result(top, total, acc)
            begins = low + sample * WEIGHT >= start
            if begins & (last == high):
                store_rows(out_ptr + sample * q_stride * E, result, q_at, q_mask, E, E, BLOCK_E)
                tl.store(lse_ptr + sample * q_stride + q_at, lse, mask=q_mask)
            else:
                slot = (2 * program + begins.to(tl.int32)) * q_stride
                store_rows(part_ptr + slot * E, result, q_at, q_mask, E, E, BLOCK_E)
                tl.store(part_lse_ptr + slot + q_at, lse, mask=q_mask)
            split = tl.where(begins & (last < high), sample, split)
            top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            acc = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
        n = tl.where(done, high, n + BLOCK_N)
        low = tl.where(done, high, low)
        high = tl.where(done, next_high, high)
        sample += done.to(tl.int64)
    tl.store(split_ptr + program, split.to(tl.int32))


def _config(tile: Tile) -> tuple[int, int, int, int]:
    """(rows a step, warps, stages, shares a multiprocessor), the best of those measured on an H200."""
    if tile.width_bytes > 1024:
        return 16, 8, 1, 1
    if tile.row_bytes > 1024:
        return 16, 4, 1, 1
    if tile.row_bytes <= 128:
        return 64, 1, 3, 8
    if tile.row_bytes <= 256:
        # A step loads the queries again: fewer steps where they are many.
        return (128, 4, 3, 2) if tile.rows > 4 else (64, 2, 3, 4)
    return (32, 4, 3, 2) if tile.shared else (32, 2, 3, 3)


def _whole_config(tile: Tile, short: bool) -> tuple[int, int, int]:
    """(rows a step, warps, stages) where a program takes a whole sample."""
    if tile.width_bytes == 512:
        return 16, 1 if tile.shared else 2, 3
    if short and tile.width_bytes <= 256:
        return 16, 1, 4
    if tile.row_bytes <= 256:
        return (32, 1, 4) if tile.row_bytes <= 128 else (64, 2, 3)
    return _config(tile)[:3]


@cache
def _plan(tile: Tile) -> tuple[int, Launcher]:
    """Shares a multiprocessor, and the launcher of programs that take a share each."""
    *steps, shares = _config(tile)
    return shares, Launcher(_target_attention_fwd_kernel, **tile.events, **tile.constants(FEW, *steps))


@cache
def _whole_plan(tile: Tile, short: bool) -> Launcher:
    """The launcher of programs that take a sample each."""
    constants = tile.constants(FEW, *_whole_config(tile, short))
    return Launcher(_target_attention_fwd_whole_kernel, **tile.events, **constants)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    buckets: Tensor | None,
    value_scale: Tensor | None,
    second: Tensor | None,
    scale: float,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor]:
    """Returns the output [B, T, H, E] and the log-sum-exp of the scores [B, T, H], -inf for an empty history."""
    batch, times, heads, _ = query.shape
    tile = Tile.of(query, key, value, offsets, bias, buckets, value_scale, second)
    out = query.new_empty(batch, times, heads, tile.out_width)
    lse = query.new_empty(batch, times, heads, dtype=torch.float32)
    if batch == 0:
        return out, lse
    queries = times * heads // tile.groups
    tensors = (query, key, key if value is None else value, bias, buckets, value_scale, second, offsets, out, lse)
    if fits(max_seqlen, tile.row_bytes):
        launch = _whole_plan(tile, max_seqlen <= _SHORT_ROWS)
        launch((batch, tile.groups, 1), tensors, (queries, scale))
        return out, lse
    shares, launch = _plan(tile)
    chunk, shares = deal(key.shape[0], batch, query.device, shares)
    partials = Partials(shares, chunk, times * heads, tile.out_width, query.device)
    launch((shares, tile.groups, 1), (*tensors, partials.memory), (batch, queries, chunk, scale))
    partials.merge(offsets, out, lse)
    return out, lse
