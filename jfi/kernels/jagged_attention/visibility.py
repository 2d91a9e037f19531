"""The constants of the kernels of jagged attention, and which tiles of queries and keys see each other.

Query heads that share a key head are packed into one tile: its rows are (query, head) pairs, H/G per query.  Query i of
a sample has position i + shift among its keys, where shift = num_keys - num_queries puts the last query at the last
key.  It sees the keys from position - left to position + right.

With edges (see jfi/ops/_visibility.py) each query says itself which keys it sees.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.tiles import load_digits, load_head
from jfi.kernels.jagged_attention.buckets import MAX_BUCKETS
from jfi.utils.operands import JaggedAttentionInputs

#: Sums by query row, head and bucket that the gradient of such a table is added up from at a time, 64 MB.
MAX_BUCKET_SUMS = 2**24


class Visibility(NamedTuple):
    """The constants of kernels that say which keys queries see: whether a window has bounds, and the edges."""

    has_left: bool
    has_right: bool
    num_buckets: int  # 0: no edges
    has_table: bool
    is_causal: bool  # with edges: a query sees its own position

    @classmethod
    def of(cls, x: JaggedAttentionInputs) -> "Visibility":
        return cls(x.left is not None, x.right is not None, x.num_buckets, x.table is not None, x.is_causal)


def query_parts(x: JaggedAttentionInputs, by_bucket: bool) -> Iterator[tuple[int, int, Tensor, Tensor | None]]:
    """Yields, for each launch of dq's kernel, (first query row, number of rows, query offsets, sums by bucket).

    Without sums there is one launch.  Those of all rows, [R, H, num_buckets], could be larger than all other memory of
    the backward pass, so the rows are taken in parts that share memory.  Other rows belong to no sample of a part.
    """
    rows, num_heads, _ = x.query.shape
    if not by_bucket:
        yield 0, rows, x.query_offsets, None
        return
    most = min(rows, max(1, MAX_BUCKET_SUMS // (num_heads * x.num_buckets)))
    sums = x.query.new_empty(most, num_heads, x.num_buckets, dtype=torch.float32)
    for first in range(0, rows, most):
        count = min(most, rows - first)
        offsets = x.query_offsets if count == rows else x.query_offsets.clamp(first, first + count)
        yield first, count, offsets, sums[:count].zero_()


def add_totals(totals: list[Tensor], table: Tensor | None) -> Tensor | None:
    """Returns the gradient of a table by bucket from the totals [H, num_buckets] of all parts, in their order."""
    return sum(totals[1:], totals[0]).T.contiguous().to(table.dtype) if totals else None


def bounds(left: int | None, right: int | None) -> tuple[int, int]:
    """The window as the kernels take it, which count rows in 32 bits; 0 where there is no bound."""
    return min(left or 0, 2**30), min(right or 0, 2**30)


@triton.jit
def visible_keys(work_tile, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPEC: tl.constexpr):
    """For a tile of query rows: (its first row within the sample, shift, first key, number of tiles of keys)."""
    left, right, edges_ptr = window
    tile, start, num_queries, _k_start, num_keys = work_tile
    QHEADS_PER_KVHEAD: tl.constexpr = SPEC.qheads_per_kvhead
    shift = num_keys - num_queries
    if SPEC.has_right or SPEC.num_buckets:
        # The last queries see the most keys: they go first.
        tile = tl.maximum((num_queries * QHEADS_PER_KVHEAD + BLOCK_M - 1) // BLOCK_M - 1 - tile, 0)
    first = tile * BLOCK_M
    begin = num_keys * 0
    end = num_keys
    if SPEC.has_right:
        end = tl.minimum(end, (first + BLOCK_M - 1) // QHEADS_PER_KVHEAD + shift + right + 1)
    if SPEC.has_left:
        begin = tl.maximum(begin, first // QHEADS_PER_KVHEAD + shift - left) // BLOCK_N * BLOCK_N
    if SPEC.num_buckets:
        EDGES: tl.constexpr = SPEC.num_buckets + 1
        last = tl.minimum((first + BLOCK_M - 1) // QHEADS_PER_KVHEAD, num_queries - 1)
        edges = edges_ptr + start.to(tl.int64) * EDGES
        begin = tl.load(edges + first // QHEADS_PER_KVHEAD * EDGES + SPEC.num_buckets, mask=num_queries > 0, other=0)
        begin = begin // BLOCK_N * BLOCK_N
        end = tl.load(edges + last * EDGES, mask=num_queries > 0, other=0) // MAX_BUCKETS
    steps = tl.maximum(end - begin + BLOCK_N - 1, 0) // BLOCK_N
    if num_queries == 0:
        steps = 0
    return first, shift, begin, steps


@triton.jit
def _count_up_to(ptr, count, bound, STRIDE: tl.constexpr):
    """Counts those of ``count`` ascending numbers that are at most ``bound``."""
    low = count * 0
    high = count
    while low < high:
        middle = (low + high) // 2
        if tl.load(ptr + middle * STRIDE) <= bound:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def seeing_queries(work_tile, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPEC: tl.constexpr):
    """For a tile of keys: (its first key within the sample, shift, first query row, number of tiles of query rows)."""
    left, right, edges_ptr = window
    tile, _start, num_keys, q_start, num_queries = work_tile
    QHEADS_PER_KVHEAD: tl.constexpr = SPEC.qheads_per_kvhead
    shift = num_keys - num_queries
    first = tile * BLOCK_N
    begin = num_keys * 0
    end = num_queries
    if SPEC.has_right:
        begin = tl.maximum(begin, first - shift - right)
    if SPEC.has_left:
        end = tl.maximum(tl.minimum(end, first + BLOCK_N - shift + left), 0)
    if SPEC.num_buckets:
        # Both edges ascend with the queries, whose times do.
        EDGES: tl.constexpr = SPEC.num_buckets + 1
        edges = edges_ptr + q_start.to(tl.int64) * EDGES
        begin = _count_up_to(edges, num_queries, first * MAX_BUCKETS + MAX_BUCKETS - 1, EDGES)
        end = _count_up_to(edges + SPEC.num_buckets, num_queries, first + BLOCK_N - 1, EDGES)
    begin = begin * QHEADS_PER_KVHEAD // BLOCK_M * BLOCK_M
    steps = tl.maximum(end * QHEADS_PER_KVHEAD - begin + BLOCK_M - 1, 0) // BLOCK_M
    if num_keys == 0:
        steps = 0
    return first, shift, begin, steps


@triton.jit
def is_visible(key, position, left, right, SPEC: tl.constexpr):
    """Returns whether the window lets queries at these positions see these keys."""
    visible = key == key
    if SPEC.has_right:
        visible = visible & (key <= position + right)
    if SPEC.has_left:
        visible = visible & (key >= position - left)
    return visible


def keys_and_values(x: JaggedAttentionInputs) -> tuple[Tensor, Tensor]:
    """Returns the tensors of k_ptr and v_ptr."""
    return x.key, x.key if x.value is None else x.value


@triton.jit
def load_keys(k_ptr, v_ptr, n, key_at, mask, kv_head, dtype, SPEC: tl.constexpr):
    """Loads (k [N, D], v [N, E]) of the rows from n on, in dtype; one tile if value = key."""
    D: tl.constexpr = SPEC.head_dim
    E: tl.constexpr = SPEC.value_dim
    if SPEC.num_words:
        k = load_digits(k_ptr, n + key_at, mask, dtype, D, SPEC.num_words, SPEC.block_d)
    else:
        k = load_head(k_ptr, n, key_at, mask, kv_head, D, SPEC.block_d, SPEC)
    if SPEC.shared_kv:
        v = k
    elif SPEC.num_words:
        v = k * tl.load(v_ptr + n + key_at, mask=mask, other=0.0).to(k.dtype)[:, None]
    else:
        v = load_head(v_ptr, n, key_at, mask, kv_head, E, SPEC.block_e, SPEC)
    return k, v
