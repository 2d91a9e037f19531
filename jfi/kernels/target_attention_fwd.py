"""Target attention forward: every history row is read once.

Query rows by history rows, S [M, N]: the T · H / G query rows that meet a key head are few, so one warp or two hold all
of a tile, and the running maximum and sum never cross warps.  Sums are kept by column and added up at a sample's end.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.shares import WEIGHT, Partials, deal, first_step, last_row
from jfi.kernels.target_attention_tiles import Tile, load_bias, load_rows, query_rows, store_rows
from jfi.kernels.tiles import LN2, LOG2E


@triton.jit(do_not_specialize=["batch", "queries", "chunk"])
def _target_attention_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    offsets_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
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
):
    tile, program, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = program.to(tl.int64) * chunk
    end = start + chunk
    at = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_at, q_mask = query_rows(at, group, GROUPS, HEADS), at < queries
    k_at = tl.arange(0, BLOCK_N)
    q_stride = (queries * GROUPS).to(tl.int64)
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
        mask = k_at < left
        q = load_rows(q_ptr + sample * q_stride * D, q_at, q_mask, D, D, BLOCK_D)
        k = load_rows(k_ptr + n * (GROUPS * D) + group * D, k_at, mask, GROUPS * D, D, BLOCK_D)
        if SHARED:
            v = k
        else:
            v = load_rows(v_ptr + n * (GROUPS * E) + group * E, k_at, mask, GROUPS * E, E, BLOCK_E)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_BIAS:
            s += tl.trans(load_bias(bias_ptr, n, mask, at, group, GROUPS, HEADS, BLOCK_N))
        s = tl.where(mask[None, :], s, -float("inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        p = tl.exp2((s - base[:, None]) * LOG2E)
        shrink = tl.exp2((top - base) * LOG2E)
        total = total * shrink[:, None] + p
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
        done = left <= BLOCK_N
        if done:
            sums = tl.sum(total, 1)
            sums_or_one = tl.where(sums == 0.0, 1.0, sums)
            result = acc * (1.0 / sums_or_one)[:, None]
            lse = tl.where(sums == 0.0, -float("inf"), top + tl.log2(sums_or_one) * LN2)
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
    tl.store(split_ptr + program, split)


def _config(tile: Tile, shared: bool) -> tuple[int, int, int, int]:
    """(rows a step, warps, stages, shares a multiprocessor), the best of those measured on an H200."""
    row_bytes = tile.width_bytes * (1 if shared else 2)
    if tile.width_bytes > 1024:
        return 16, 8, 1, 1
    if tile.block_m > 16 or row_bytes > 1024:
        return (64, 4, 3, 2) if row_bytes <= 512 else (32, 4, 2, 2) if row_bytes <= 1024 else (16, 4, 1, 1)
    if row_bytes <= 128:
        return 64, 1, 3, 8
    if row_bytes <= 256:
        return 64, 2, 3, 4
    return (32, 4, 3, 2) if shared else (32, 2, 3, 3)


def forward(
    query: Tensor, key: Tensor, value: Tensor | None, offsets: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns the output [B, T, H, E] and the log-sum-exp of the scores [B, T, H], -inf for an empty history."""
    batch, times, heads, width = query.shape
    rows, groups, _ = key.shape
    out_width = width if value is None else value.shape[2]
    out = query.new_empty(batch, times, heads, out_width)
    lse = torch.empty(batch, times, heads, dtype=torch.float32, device=query.device)
    if batch == 0:
        return out, lse
    tile = Tile.of(query, key, value)
    block_n, warps, stages, shares = _config(tile, value is None)
    chunk, shares = deal(rows, batch, query.device, shares)
    partials = Partials(shares, chunk, query, out_width, weighted=True)
    _target_attention_fwd_kernel[(triton.cdiv(tile.queries, tile.block_m), shares, groups)](
        query,
        key,
        key if value is None else value,
        bias,
        offsets,
        out,
        lse,
        partials.values,
        partials.lse,
        partials.split,
        batch,
        tile.queries,
        chunk,
        scale,
        GROUPS=groups,
        HEADS=heads // groups,
        D=width,
        E=out_width,
        SHARED=value is None,
        HAS_BIAS=bias is not None,
        PRECISION=tile.precision,
        BLOCK_M=tile.block_m,
        BLOCK_N=block_n,
        BLOCK_D=tile.block_d,
        BLOCK_E=tile.block_e,
        num_warps=warps,
        num_stages=stages,
    )
    partials.merge(offsets, out, lse)
    return out, lse
