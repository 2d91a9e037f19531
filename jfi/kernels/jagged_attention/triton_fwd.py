"""Jagged attention forward on any GPU: a program sweeps a tile of queries over the keys it sees.

The softmax runs along: of each row the greatest score so far, the sum of the weights by it, and their sum of values
(Dao et al., 'FlashAttention', 2022).  Scores are kept in base 2.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import Launcher
from jfi.kernels.common.primitives import LN2, LOG2E
from jfi.kernels.common.tile_scheduler import schedule, slot_of
from jfi.kernels.jagged_attention.tiles import bounds, keys_met, score_bias, sees
from jfi.kernels.target_attention.tiles import Tile, load_rows, query_rows, store_rows


@triton.jit(do_not_specialize=["total", "left", "right"])
def _jagged_attention_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    slots_ptr,
    out_ptr,
    lse_ptr,
    total,
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
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    # A compiler that takes the kernel along may give it a scale in float64.
    scale2 = tl.full((), scale * LOG2E, tl.float32)
    for step in range(0, steps):
        key = begin + step * BLOCK_N + key_at
        mask = key < keys
        n = (k_low + begin + step * BLOCK_N).to(tl.int64)
        k = load_rows(k_ptr + n * (GROUPS * D) + group * D, key_at, mask, GROUPS * D, D, BLOCK_D)
        if SHARED:
            v = k
        else:
            v = load_rows(v_ptr + n * (GROUPS * E) + group * E, key_at, mask, GROUPS * E, E, BLOCK_E)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale2
        if HAS_BIAS:
            s += score_bias(bias_ptr, n, key_at, mask, at, group, GROUPS, HEADS)
        seen = sees(key[None, :], place[:, None], left, right, HAS_LEFT, HAS_RIGHT) & mask[None, :]
        s = tl.where(seen, s, -float("inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(top - base)
        weight = weight * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    weight_or_one = tl.where(weight == 0.0, 1.0, weight)
    lse = tl.where(weight == 0.0, -float("inf"), (top + tl.log2(weight_or_one)) * LN2)
    store_rows(out_ptr + row * E, acc / weight_or_one[:, None], q_at, q_mask, E, E, BLOCK_E)
    tl.store(lse_ptr + row + q_at, lse, mask=q_mask)


def _config(tile: Tile) -> tuple[int, int, int, int]:
    """(query rows, keys a step, warps, stages)."""
    if tile.width_bytes > 512:
        return (16, 16, 8, 1) if tile.width_bytes > 1024 else (16, 16, 4, 1)
    return (64, 64, 4, 2) if tile.width_bytes <= 256 else (64, 32, 4, 2)


@cache
def _launcher(tile: Tile, has_left: bool, has_right: bool) -> tuple[int, Launcher]:
    block_m, *rest = _config(tile)
    window = {"HAS_LEFT": has_left, "HAS_RIGHT": has_right}
    return block_m, Launcher(_jagged_attention_fwd_kernel, **window, **tile.constants(block_m, *rest))


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    query_offsets: Tensor,
    key_offsets: Tensor,
    bias: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
) -> tuple[Tensor, Tensor]:
    """Returns the output [R, H, E] and the log-sum-exp of the scores [R, H], -inf where a query sees nothing."""
    rows, heads, _ = query.shape
    tile = Tile.of(query, key, value, key_offsets, bias)
    out = query.new_empty(rows, heads, tile.out_width)
    lse = query.new_empty(rows, heads, dtype=torch.float32)
    block_m, launch = _launcher(tile, left is not None, right is not None)
    slots = schedule(query_offsets, key_offsets, rows, tile.heads, block_m)
    total = slots.shape[0] * tile.groups
    tensors = (query, key, key if value is None else value, bias, slots, out, lse)
    launch((total, 1, 1), tensors, (total, *bounds(left, right), scale))
    return out, lse
