"""The bias of buckets of age or distance in a tile of scores, the sums of its gradient, and the edges of the buckets.

A row of a tile is a query and a head.  Its state is the bucket of the newest key that it has not passed, that bucket's
bias and its edge: its first key and the bucket before that (jfi/ops/_visibility.py; 0 where the bucket has no end).
A loop over tiles of keys, newest first, only ever moves rows to older buckets, and where no row of a tile moves, the
bias of a row is one number.  What a row enters next is loaded ahead.  Sums of the gradient need no atomics: the loop
passes each bucket of a row once, and stores its sum as it leaves it.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import Launcher
from jfi.kernels.common.primitives import LOG2E
from jfi.utils import operands
from jfi.utils.operands import ceil_div, power_of_two

MAX_BUCKETS = tl.constexpr(operands.MAX_BUCKETS)
#: Elements of a program's tile of searches: a warp, so that a few hundred rows fill a GPU too. One size for any number
#: of rows, so that no new number compiles the kernel again.
ELEMENTS = 32


@triton.jit
def visible_range(edges_ptr, query, mask, SPEC: tl.constexpr):
    """Returns (first key, end of the keys, bucket of the newest) that queries see."""
    at = edges_ptr + query * (SPEC.num_buckets + 1)
    end = tl.load(at, mask=mask, other=0)
    return tl.load(at + SPEC.num_buckets, mask=mask, other=0), end // MAX_BUCKETS, end % MAX_BUCKETS


@triton.jit
def bucket_of(times, query, end, k_start, key, mask, NUM_BUCKETS: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """The bucket of a key, floor(log2(age)) + 1, for each query: its age in time, or its distance from ``end``.

    The exponent of a float64 is the logarithm.  Without the second of its highest bits an integer is not rounded up to
    a power of two.
    """
    query_time_ptr, key_time_ptr = times
    if query_time_ptr is not None:
        age = tl.load(query_time_ptr + query + key * 0, mask=mask, other=0)
        key_time = tl.load(key_time_ptr + k_start.to(tl.int64) + key, mask=mask, other=0)
        if age.dtype.is_int():
            age = age.to(tl.int64) - key_time
            age = tl.maximum(age, 0)
            age = age & ~(age >> 1)
        else:
            age = tl.maximum(age - key_time, 0.0)
    else:
        age = tl.maximum(end - IS_CAUSAL - key, 0)
    return exponent_bucket(age.to(tl.float64), NUM_BUCKETS)


@triton.jit
def exponent_bucket(age, NUM_BUCKETS: tl.constexpr):
    """The bucket of ages in float64, at least 0: their exponents."""
    exponent = (age.to(tl.int64, bitcast=True) >> 52).to(tl.int32) - 1022
    return tl.minimum(tl.maximum(exponent, 0), NUM_BUCKETS - 1)


@triton.jit
def load_bucket(biases, rows, bucket, mask, SPEC: tl.constexpr):
    """Loads (bias in base 2, edge) of a bucket of each row."""
    edges_ptr, table_ptr = biases
    query, head = rows
    NUM_HEADS: tl.constexpr = SPEC.num_kv_heads * SPEC.qheads_per_kvhead
    inner = mask & (bucket + 1 < SPEC.num_buckets)
    edge = tl.load(edges_ptr + query * (SPEC.num_buckets + 1) + bucket + 1, mask=inner, other=0)
    bias = tl.load(table_ptr + bucket * NUM_HEADS + head, mask=mask, other=0.0)
    return bias.to(tl.float32) * LOG2E, edge


@triton.jit
def bucket_bias(biases, rows, state, key, n, SPEC: tl.constexpr):
    """Returns the bias [M, N] of the keys from n on, the state after these keys, and the number of changes of bucket.

    The bias of a key that is hidden is any finite number.

    Args:
        biases: pointers to the edges and to the table.
        rows: (query, head) of each row.
        state: (bucket, its bias, its edge) of each row.
    """
    bucket, bias, edge = state
    tile = bias[:, None] + tl.zeros((bias.shape[0], key.shape[0]), tl.float32)
    passes = n * 0
    while tl.max(edge, 0) // MAX_BUCKETS > n:
        passes += 1
        first = edge // MAX_BUCKETS
        leaves = first > n
        bucket = tl.where(leaves, edge % MAX_BUCKETS, bucket)
        next_bias, next_edge = load_bucket(biases, rows, bucket, leaves, SPEC)
        tile = tl.where(leaves[:, None] & (key[None, :] < first[:, None]), next_bias[:, None], tile)
        bias = tl.where(leaves, next_bias, bias)
        edge = tl.where(leaves, next_edge, edge)
    return tile, bucket, bias, edge, passes


@triton.jit
def add_bucket_sums(biases, sums_ptr, rows, state, passes, ds, key, n, mask, SPEC: tl.constexpr):
    """Add dS [M, N] to the sum of each row's present bucket; store those of the buckets that end in the tile.

    Args:
        state: (bucket, its edge, sum so far), as before the tile; passes: as `bucket_bias` returned.
        sums_ptr: [R, H, num_buckets].
        mask: rows of the sample.
    """
    query, head = rows
    bucket, edge, total = state
    to = sums_ptr + (query * (SPEC.num_kv_heads * SPEC.qheads_per_kvhead) + head) * SPEC.num_buckets
    for _ in range(passes):
        first = edge // MAX_BUCKETS
        leaves = first > n
        bucket_ds = tl.where(leaves[:, None] & (key[None, :] >= first[:, None]), ds, 0.0)
        ds -= bucket_ds
        tl.store(to + bucket, total + tl.sum(bucket_ds, 1), mask=leaves & mask)
        total = tl.where(leaves, 0.0, total)
        bucket = tl.where(leaves, edge % MAX_BUCKETS, bucket)
        _bias, next_edge = load_bucket(biases, rows, bucket, leaves, SPEC)
        edge = tl.where(leaves, next_edge, edge)
    return total + tl.sum(ds, 1)


# --- Edges ------------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["batch", "rows", "max_visible"])
def bucket_edges_kernel(
    query_offsets_ptr,
    key_offsets_ptr,
    query_time_ptr,
    key_time_ptr,
    edges_ptr,
    batch,
    rows,
    max_visible,
    NUM_BUCKETS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    BY_TIME: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Column 0 is the end of the keys that a query sees, columns 1 .. N - 1 the inner edges, column N their begin."""
    query = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = query < rows
    # The query's sample is the last whose first query is not behind it.
    low = tl.zeros((ROWS,), tl.int32)
    high = low + batch
    while tl.max(high - low) > 1:
        middle = (low + high) // 2
        has_begun = tl.load(query_offsets_ptr + middle) <= query
        low, high = tl.where(has_begun, middle, low), tl.where(has_begun, high, middle)
    start = tl.load(key_offsets_ptr + low, mask=mask, other=0).to(tl.int64)
    count = (tl.load(key_offsets_ptr + low + 1, mask=mask, other=0) - start).to(tl.int32)
    column = tl.arange(0, COLUMNS)
    exponent = tl.minimum(tl.maximum(column - 1, 0), 62)
    least = tl.full((COLUMNS,), 1, tl.int64) << exponent.to(tl.int64)
    edge = tl.zeros((ROWS, COLUMNS), tl.int32)
    if BY_TIME or not IS_CAUSAL:
        time = tl.load(query_time_ptr + query, mask=mask, other=0)
        if time.dtype.is_int():
            time = time.to(tl.int64)
        top = edge + count[:, None]
        while tl.max(tl.max(top - edge, 1)) > 0:
            middle = (edge + top) // 2
            searches = edge < top
            at = key_time_ptr + start[:, None] + middle
            key_time = tl.load(at, mask=searches, other=0).to(time.dtype)
            if time.dtype.is_int():  # an age may exceed 64 bits
                is_aged = key_time <= time[:, None] - least[None, :]
            else:  # the age itself, rounded as in `bucket_of`
                is_aged = time[:, None] - key_time >= least[None, :].to(time.dtype)
            before = tl.where((column == 0)[None, :], key_time < time[:, None], is_aged) & searches
            edge, top = tl.where(before, middle + 1, edge), tl.where(before | (edge >= top), top, middle)
    if IS_CAUSAL:
        end = (query - tl.load(query_offsets_ptr + low + 1, mask=mask, other=0)).to(tl.int32) + 1 + count
        newest = end - 1
    else:
        end = tl.sum(tl.where((column == 0)[None, :], edge, 0), 1)
        newest = end
    end = tl.minimum(tl.maximum(end, 0), count)
    begin = tl.maximum(end - max_visible, 0)
    if not BY_TIME:
        edge = (newest[:, None] - tl.minimum(least, 2**30)[None, :].to(tl.int32)) + 1
    edge = tl.minimum(tl.maximum(edge, 0), end[:, None])
    edge = tl.where((column == 0)[None, :], end[:, None], edge)
    # The bucket of the key before each edge.
    times = (query_time_ptr if BY_TIME else None, key_time_ptr if BY_TIME else None)
    before = mask[:, None] & (edge > 0)
    bucket = bucket_of(times, query[:, None], end[:, None], start[:, None], edge - 1, before, NUM_BUCKETS, IS_CAUSAL)
    # Never a bucket behind the edge, whatever the times: loops over buckets end because each edge leads to a later one.
    bucket = tl.maximum(bucket, column[None, :])
    edge = edge * MAX_BUCKETS + tl.where(before, bucket, 0)
    edge = tl.where((column == NUM_BUCKETS)[None, :], begin[:, None], edge)
    to = edges_ptr + query[:, None] * (NUM_BUCKETS + 1) + column[None, :]
    tl.store(to, edge, mask=mask[:, None] & (column <= NUM_BUCKETS)[None, :])


@cache
def _launcher(num_buckets: int, is_causal: bool, by_time: bool) -> Launcher:
    columns = power_of_two(num_buckets + 1, 1)
    constants = {"NUM_BUCKETS": num_buckets, "IS_CAUSAL": is_causal, "BY_TIME": by_time}
    rows = max(ELEMENTS // columns, 1)
    warps = min(max(rows * columns // 32, 1), 4)
    return Launcher(bucket_edges_kernel, **constants, ROWS=rows, COLUMNS=columns, num_warps=warps)


def bucket_edges(
    query_offsets: Tensor,
    key_offsets: Tensor,
    query_time: Tensor | None,
    key_time: Tensor | None,
    rows: int,
    is_causal: bool,
    max_visible: int | None,
    num_buckets: int,
    by_time: bool,
) -> Tensor:
    """Arguments and result as those of the operator in jfi/ops/_visibility.py."""
    edges = torch.empty(rows, num_buckets + 1, dtype=torch.int32, device=query_offsets.device)
    if rows:
        launcher = _launcher(num_buckets, is_causal, by_time)
        programs = ceil_div(rows, launcher.constants["ROWS"])
        tensors = (query_offsets, key_offsets, query_time, key_time, edges)
        most = 2**30 if max_visible is None else min(max_visible, 2**30)
        launcher((programs, 1, 1), tensors, (query_offsets.shape[0] - 1, rows, most))
    return edges
