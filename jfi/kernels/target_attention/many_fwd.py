"""Target attention forward for many query rows: many candidates, or many heads, to one history.

Products outweigh bytes here.  A program takes a tile of query rows and a chunk of a sample's rows; the tiles of a chunk
run side by side, so that its rows come from the cache.  Whole tiles of rows need no mask and are fetched by the copy
engine; a sample's last rows are read by themselves.  Several small programs a multiprocessor overlap the exponentials
of one with the products of another.  Scores are kept in base 2: one multiply-add and one instruction an exponential.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.primitives import LN2, LOG2E, cdiv
from jfi.kernels.target_attention.many_tiles import (
    bias_tile,
    chunk_of,
    chunk_slots,
    describable,
    history_tile,
    history_tiles,
    merge_chunks,
    part_of,
    parts_of,
    query_places,
    slot_rows,
)
from jfi.kernels.target_attention.tiles import Tile, load_rows, store_rows


@triton.jit
def _step(
    q,
    top,
    total,
    acc,
    k_ptr,
    v_ptr,
    bias_ptr,
    k_desc,
    v_desc,
    n,
    mask,
    at,
    group,
    scale2,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """The tile of rows from n on into the running maximum (base 2), sum and output of softmax(S) V; scale2 >= 0."""
    k_at = tl.arange(0, BLOCK_N)
    k = history_tile(k_desc, k_ptr, n, k_at, mask, group, GROUPS, D, BLOCK_D, DESCRIBED)
    if SHARED:
        v = k
    else:
        v = history_tile(v_desc, v_ptr, n, k_at, mask, group, GROUPS, E, BLOCK_E, DESCRIBED)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if HAS_BIAS or MASKED:
        s = s * scale2
        if HAS_BIAS:
            s += bias_tile(bias_ptr, n, k_at, mask, at, group, GROUPS, HEADS)
        if MASKED:
            s = tl.where(mask[None, :], s, -float("inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        p = tl.exp2(s - base[:, None])
    else:
        # Scaled where the maximum is subtracted, in one multiply-add.
        new_top = tl.maximum(top, tl.max(s, 1) * scale2)
        base = new_top
        p = tl.exp2(s * scale2 - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return new_top, total, acc


@triton.jit(do_not_specialize=["batch", "queries", "tiles", "chunk"])
def _target_attention_many_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    offsets_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    k_desc,
    v_desc,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    program, group = tl.program_id(0), tl.program_id(1)
    sample, low, n, high = slot_rows(offsets_ptr, batch, program // tiles, chunk)
    if (n >= high) & (n > low):
        return
    first = program % tiles * BLOCK_M
    at = first + tl.arange(0, BLOCK_M)
    place, q_at = query_places(first, at, group, GROUPS, HEADS)
    q_mask = at < queries
    k_at = tl.arange(0, BLOCK_N)
    q_stride = (queries * GROUPS).to(tl.int64)
    row = sample * q_stride + place
    q = load_rows(q_ptr + row * D, q_at, q_mask, D, D, BLOCK_D)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    left = tl.minimum(high - n, chunk).to(tl.int32)
    whole = left // BLOCK_N * BLOCK_N
    for ahead in range(0, whole, BLOCK_N):
        top, total, acc = _step(
            q,
            top,
            total,
            acc,
            k_ptr,
            v_ptr,
            bias_ptr,
            k_desc,
            v_desc,
            n + ahead,
            k_at < BLOCK_N,
            at,
            group,
            scale * LOG2E,
            GROUPS,
            HEADS,
            D,
            E,
            SHARED,
            HAS_BIAS,
            False,
            PRECISION,
            BLOCK_N,
            BLOCK_D,
            BLOCK_E,
            DESCRIBED,
        )
    if whole < left:
        top, total, acc = _step(
            q,
            top,
            total,
            acc,
            k_ptr,
            v_ptr,
            bias_ptr,
            k_desc,
            v_desc,
            n + whole,
            k_at < left - whole,
            at,
            group,
            scale * LOG2E,
            GROUPS,
            HEADS,
            D,
            E,
            SHARED,
            HAS_BIAS,
            True,
            PRECISION,
            BLOCK_N,
            BLOCK_D,
            BLOCK_E,
            False,
        )
    total_or_one = tl.where(total == 0.0, 1.0, total)
    result = acc * (1.0 / total_or_one)[:, None]
    lse = tl.where(total == 0.0, -float("inf"), (top + tl.log2(total_or_one)) * LN2)
    if high - low <= chunk:
        store_rows(out_ptr + row * E, result, q_at, q_mask, E, E, BLOCK_E)
        tl.store(lse_ptr + row + q_at, lse, mask=q_mask)
    else:
        part = part_of(low, n, chunk) * q_stride + place
        store_rows(part_ptr + part * E, result, q_at, q_mask, E, E, BLOCK_E)
        tl.store(part_lse_ptr + part + q_at, lse, mask=q_mask)


def _config(tile: Tile) -> tuple[int, int, int, int, int | None]:
    """(query rows, history rows a step, warps, stages, registers), the best measured on an H200 for half precision."""
    if tile.width_bytes > 512:
        return (16, 16, 8, 1, None) if tile.width_bytes > 1024 else (16, 16, 4, 1, None)
    if tile.dtype.itemsize > 2:
        return min(64, tile.rows), 64, 4, 1, None
    if tile.width_bytes > 256:
        return (64, 64, 4, 2, None) if tile.shared else (64, 32, 4, 2, None)
    # 168 registers let three programs run at once; a bias by head needs more.
    return 64, 64, 4, 3, None if tile.has_bias and tile.heads > 1 else 168


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    scale: float,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor]:
    """Returns the output [B, T, H, E] and the log-sum-exp of the scores [B, T, H], -inf for an empty history."""
    batch, times, heads, _ = query.shape
    rows = key.shape[0]
    tile = Tile.of(query, key, value, offsets, bias)
    out = query.new_empty(batch, times, heads, tile.out_width)
    lse = query.new_empty(batch, times, heads, dtype=torch.float32)
    if batch == 0:
        return out, lse
    if scale < 0:
        query, scale = -query, -scale
    block_m, block_n, warps, stages, registers = _config(tile)
    queries = times * heads // tile.groups
    tiles = cdiv(queries, block_m)
    chunk = chunk_of(rows, batch, query.device, tiles * tile.groups, max_seqlen)
    parts = parts_of(rows, chunk, times * heads, tile.out_width, query.device)
    described = describable(key, value)
    _target_attention_many_fwd_kernel[(chunk_slots(rows, batch, chunk) * tiles, tile.groups)](
        query,
        key,
        key if value is None else value,
        bias,
        offsets,
        out,
        lse,
        *parts,
        history_tiles(key, block_n) if described else None,
        history_tiles(value, block_n) if described and value is not None else None,
        batch,
        queries,
        tiles,
        chunk,
        scale,
        DESCRIBED=described,
        maxnreg=registers,
        **tile.constants(block_m, block_n, warps, stages),
    )
    if parts[0].shape[0]:
        merge_chunks(parts, offsets, out, lse, chunk)
    return out, lse
