"""The bias of buckets of age or distance in a tile of scores, and the sums of its gradient.

A row of a tile is a query and a head.  Its state is the bucket of the newest key that it has not passed, that bucket's
bias and its edge: its first key and the bucket before that (jfi/ops/_visibility.py; 0 where the bucket has no end).
A loop over tiles of keys, newest first, only ever moves rows to older buckets, and where no row of a tile moves, the
bias of a row is one number.  What a row enters next is loaded ahead.  Sums of the gradient need no atomics: the loop
passes each bucket of a row once, and stores its sum as it leaves it.
"""

import triton
import triton.language as tl

from jfi.kernels.common.primitives import LOG2E
from jfi.utils import operands

MAX_BUCKETS = tl.constexpr(operands.MAX_BUCKETS)


@triton.jit
def visible_range(edges_ptr, query, mask, SPEC: tl.constexpr):
    """(first key, end of the keys, bucket of the newest) that queries see."""
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
    """(bias in base 2, edge) of a bucket of each row."""
    edges_ptr, table_ptr = biases
    query, head = rows
    NUM_HEADS: tl.constexpr = SPEC.num_kv_heads * SPEC.qheads_per_kvhead
    inner = mask & (bucket + 1 < SPEC.num_buckets)
    edge = tl.load(edges_ptr + query * (SPEC.num_buckets + 1) + bucket + 1, mask=inner, other=0)
    bias = tl.load(table_ptr + bucket * NUM_HEADS + head, mask=mask, other=0.0)
    return bias.to(tl.float32) * LOG2E, edge


@triton.jit
def bucket_bias(biases, rows, state, key, n, SPEC: tl.constexpr):
    """The bias [M, N] of the keys from n on, the state behind them and how often rows passed on to another bucket.

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
        own = tl.where(leaves[:, None] & (key[None, :] >= first[:, None]), ds, 0.0)
        ds -= own
        tl.store(to + bucket, total + tl.sum(own, 1), mask=leaves & mask)
        total = tl.where(leaves, 0.0, total)
        bucket = tl.where(leaves, edge % MAX_BUCKETS, bucket)
        _bias, next_edge = load_bucket(biases, rows, bucket, leaves, SPEC)
        edge = tl.where(leaves, next_edge, edge)
    return total + tl.sum(ds, 1)
