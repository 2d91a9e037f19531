"""Which keys a tile of queries meets and the other way round, and the statistics that both sweeps of the backward need.

Query heads that share a key head lie in one tile: a tile's rows are (query, head) pairs, HEADS to a query.  Query i of
a sample stands at key i + shift, shift = keys - queries, so that the last query stands at the last key, and sees the
keys from its place - left to its place + right.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import Launcher
from jfi.kernels.common.primitives import LOG2E, block, cdiv
from jfi.kernels.target_attention.tiles import load_rows, row_products


def bounds(left: int | None, right: int | None) -> tuple[int, int]:
    """The window as the kernels take it, whose places are of 32 bits; 0 where there is no bound."""
    return min(left or 0, 2**30), min(right or 0, 2**30)


@triton.jit
def keys_met(
    slot,
    left,
    right,
    HEADS: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Of a slot of queries: (its first row within the sample, shift, first key, tiles of keys)."""
    tile, _low, queries, _other, keys = slot
    shift = keys - queries
    if HAS_RIGHT:
        # The last queries see the most keys: they go first.
        tile = tl.maximum((queries * HEADS + BLOCK_M - 1) // BLOCK_M - 1 - tile, 0)
    first = tile * BLOCK_M
    begin = keys * 0
    end = keys
    if HAS_RIGHT:
        end = tl.minimum(end, (first + BLOCK_M - 1) // HEADS + shift + right + 1)
    if HAS_LEFT:
        begin = tl.maximum(begin, first // HEADS + shift - left) // BLOCK_N * BLOCK_N
    steps = tl.maximum(end - begin + BLOCK_N - 1, 0) // BLOCK_N
    if queries == 0:
        steps = 0
    return first, shift, begin, steps


@triton.jit
def queries_met(
    slot,
    left,
    right,
    HEADS: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Of a slot of keys: (its first key within the sample, shift, first row of queries, tiles of them)."""
    tile, _low, keys, _other, queries = slot
    shift = keys - queries
    first = tile * BLOCK_N
    begin = keys * 0
    end = queries
    if HAS_RIGHT:
        begin = tl.maximum(begin, first - shift - right)
    if HAS_LEFT:
        end = tl.maximum(tl.minimum(end, first + BLOCK_N - shift + left), 0)
    begin = begin * HEADS // BLOCK_M * BLOCK_M
    steps = tl.maximum(end * HEADS - begin + BLOCK_M - 1, 0) // BLOCK_M
    if keys == 0:
        steps = 0
    return first, shift, begin, steps


@triton.jit
def sees(key, place, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Whether queries at these places see these keys, by the window alone."""
    seen = key == key
    if HAS_RIGHT:
        seen = seen & (key <= place + right)
    if HAS_LEFT:
        seen = seen & (key >= place - left)
    return seen


@triton.jit
def score_bias(bias_ptr, n, key, mask, at, group, GROUPS: tl.constexpr, HEADS: tl.constexpr):
    """[M, N], in base 2: the bias of the keys from row n on for each query row's head."""
    where = key[None, :] * (GROUPS * HEADS) + (group * HEADS + at % HEADS)[:, None]
    keep = tl.broadcast_to(mask[None, :], where.shape)
    return tl.load(bias_ptr + n * (GROUPS * HEADS) + where, mask=keep, other=0.0).to(tl.float32) * LOG2E


@triton.jit(do_not_specialize=["rows"])
def _statistics_kernel(
    grad_ptr,
    out_ptr,
    lse_ptr,
    dlse_ptr,
    stats_ptr,
    rows,
    HAS_DLSE: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    at = tl.arange(0, BLOCK_M)
    mask = first + at < rows
    grad = load_rows(grad_ptr + first * E, at, mask, E, E, BLOCK_E)
    out = load_rows(out_ptr + first * E, at, mask, E, E, BLOCK_E)
    delta = row_products(grad, out)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + first + at, mask=mask, other=0.0)
    lse = tl.load(lse_ptr + first + at, mask=mask, other=0.0)
    empty = lse == -float("inf")
    lse = tl.where(empty, float("inf"), lse * LOG2E)
    # Merging empty parts makes a dL of NaN, which 0 weights would not stop.
    delta = tl.where(empty, 0.0, delta)
    row = first + at
    head = row % (GROUPS * HEADS)
    query = row // (GROUPS * HEADS)
    to = stats_ptr + (head // HEADS) * (rows // GROUPS) + query * HEADS + head % HEADS
    tl.store(to, lse, mask=mask)
    tl.store(to + rows, delta, mask=mask)


@cache
def _statistics_launcher(
    dtype: torch.dtype, has_dlse: bool, groups: int, heads: int, width: int
) -> tuple[int, Launcher]:
    wide = block(width)
    block_m = max(2048 // wide, 1)
    constants = {"HAS_DLSE": has_dlse, "GROUPS": groups, "HEADS": heads, "E": width, "BLOCK_M": block_m}
    return block_m, Launcher(_statistics_kernel, **constants, BLOCK_E=wide, num_warps=4)


def statistics(grad: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, groups: int) -> Tensor:
    """The log-sum-exp in base 2, inf where a query sees nothing, and Δ = Σ_e dO · O - dL.

    dS = P (dP - Δ) is then the gradient of the scores through both the output and the log-sum-exp, dL/dS being P.

    Args:
        grad, out: [R, H, E].
        lse, dlse: [R, H]; dlse None where nobody used the log-sum-exp.

    Returns:
        [2, G, R · H/G] float32: the rows that meet a key head lie together.
    """
    rows, heads, width = out.shape
    stats = lse.new_empty(2, groups, rows * heads // groups)
    block_m, launch = _statistics_launcher(out.dtype, dlse is not None, groups, heads // groups, width)
    tensors = (grad, out, lse, dlse, stats)
    launch((cdiv(rows * heads, block_m), 1, 1), tensors, (rows * heads,))
    return stats
