"""Masks, biases, stores and descriptors of the Hopper kernels of jagged attention."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jfi.kernels.common import online_softmax
from jfi.kernels.common.primitives import LOG2E
from jfi.kernels.jagged_attention import buckets, visibility
from jfi.kernels.jagged_attention.buckets import MAX_BUCKETS
from jfi.kernels.jagged_attention.sm90_pipeline import ROWS

visible_keys = gluon.jit(visibility.visible_keys.fn)
seeing_queries = gluon.jit(visibility.seeing_queries.fn)
is_visible = gluon.jit(visibility.is_visible.fn)
exponent_bucket = gluon.jit(buckets.exponent_bucket.fn)
load_bucket = gluon.jit(buckets.load_bucket.fn)
add_bucket_sums = gluon.jit(buckets.add_bucket_sums.fn)
visible_range = gluon.jit(buckets.visible_range.fn)
reference_of = gluon.jit(online_softmax.reference_of.fn)
nonzero = gluon.jit(online_softmax.nonzero.fn)
scores_gradient = gluon.jit(online_softmax.scores_gradient.fn)

INF = gl.constexpr(float("inf"))


class Visible(NamedTuple):
    """The keys that the query rows of a consumer see."""

    position: object  # [M], of each query among the keys; with edges (first key, end of the keys) that it sees
    num_keys: object  # of the sample
    begin: object  # from here to ``end`` all of them see the keys
    end: object
    left: object
    right: object


@gluon.jit
def visible_rows(own_row, mask, first, shift, work_tile, kv_head, schedule, SPEC: gl.constexpr):
    """Returns (query, head) of a consumer's query rows, what they see, and the buckets of their newest keys.

    Without edges only what they see has a meaning.  Edges ascend with the queries.  own_row: [M], within the sample,
    from ``first`` on; rows behind its last stand for the last.
    """
    left, right, edges_ptr = schedule.window
    _tile, q_start, num_queries, _k_start, num_keys = work_tile
    QHEADS_PER_KVHEAD: gl.constexpr = SPEC.qheads_per_kvhead
    if SPEC.num_buckets:
        EDGES: gl.constexpr = SPEC.num_buckets + 1
        query = (q_start + gl.minimum(own_row // QHEADS_PER_KVHEAD, gl.maximum(num_queries - 1, 0))).to(gl.int64)
        head = kv_head * QHEADS_PER_KVHEAD + own_row % QHEADS_PER_KVHEAD
        begin, end, bucket = visible_range(edges_ptr, query, mask, SPEC)
        oldest = q_start + gl.minimum(first // QHEADS_PER_KVHEAD, num_queries - 1)
        newest = q_start + gl.minimum((first + ROWS - 1) // QHEADS_PER_KVHEAD, num_queries - 1)
        is_any = num_queries > 0
        all_from = gl.load(edges_ptr + newest.to(gl.int64) * EDGES + SPEC.num_buckets, mask=is_any, other=0)
        all_to = gl.load(edges_ptr + oldest.to(gl.int64) * EDGES, mask=is_any, other=0) // MAX_BUCKETS
        return (query, head), Visible((begin, end), num_keys, all_from, all_to, left, right), bucket
    else:
        position = own_row // QHEADS_PER_KVHEAD + shift
        begin = num_keys * 0
        end = num_keys
        if SPEC.has_left:
            begin = (first + ROWS - 1) // QHEADS_PER_KVHEAD + shift - left
        if SPEC.has_right:
            end = gl.minimum(end, first // QHEADS_PER_KVHEAD + shift + right + 1)
        return (own_row, own_row), Visible(position, num_keys, begin, end, left, right), own_row


@gluon.jit
def bucket_behind(edges_ptr, rows, bucket, mask, end, SPEC: gl.constexpr):
    """Returns for each row the bucket of its newest key before ``end``; ``bucket`` is that of its newest key."""
    for i in gl.static_range(6):
        later = bucket + (MAX_BUCKETS >> (i + 1))
        edge = gl.load(
            edges_ptr + rows[0] * (SPEC.num_buckets + 1) + later, mask=mask & (later < SPEC.num_buckets), other=0
        )
        bucket = gl.where(edge // MAX_BUCKETS >= end, later, bucket)
    return bucket


@gluon.jit
def begin_buckets(biases, rows, bucket, mask, SPEC: gl.constexpr):
    """The state of rows whose newest key is in ``bucket``.

    It is, of each row [M], the bucket of the newest key that it has not passed, that bucket's bias and edge, and the
    bias and edge of the bucket before it, loaded ahead; last the greatest first key of the present buckets.
    """
    bias, edge = load_bucket(biases, rows, bucket, mask, SPEC)
    next_bias, next_edge = load_bucket(biases, rows, edge % MAX_BUCKETS, edge > 0, SPEC)
    return bucket, bias, edge, next_bias, next_edge, gl.max(edge, 0) // MAX_BUCKETS


@gluon.jit
def _pass_buckets(biases, rows, n, state, SPEC: gl.constexpr):
    """The state after the rows whose bucket ends behind key n have entered the next."""
    bucket, bias, edge, next_bias, next_edge, _top = state
    leaves = edge // MAX_BUCKETS > n
    bucket = gl.where(leaves, edge % MAX_BUCKETS, bucket)
    bias = gl.where(leaves, next_bias, bias)
    edge = gl.where(leaves, next_edge, edge)
    loaded_bias, loaded_edge = load_bucket(biases, rows, edge % MAX_BUCKETS, leaves & (edge > 0), SPEC)
    next_bias = gl.where(leaves, loaded_bias, next_bias)
    next_edge = gl.where(leaves, loaded_edge, next_edge)
    return bucket, bias, edge, next_bias, next_edge, gl.max(edge, 0) // MAX_BUCKETS


@gluon.jit
def scale_and_add_bias(scores, n, biases, rows, buckets, scale2, SPEC: gl.constexpr):
    """(scores [M, N] in base 2 with the bias of the keys from n on, the state behind them, how often rows passed on).

    The scores get the bias of each row's present bucket.  A row that passes to the next changes the bias of all keys
    that remain, so nothing but the difference is added; the scores of keys that are hidden are any finite numbers.
    biases: pointers to the edges and to the table.
    """
    bucket, bias, edge, next_bias, next_edge, top = buckets
    scores = scores * scale2 + bias[:, None]
    passes = n * 0
    while top > n:
        passes += 1
        key = n + gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
        first = edge // MAX_BUCKETS
        change = gl.where(first > n, next_bias - bias, 0.0)
        scores += gl.where(key[None, :] < first[:, None], change[:, None], 0.0)
        state = (bucket, bias, edge, next_bias, next_edge, top)
        bucket, bias, edge, next_bias, next_edge, top = _pass_buckets(biases, rows, n, state, SPEC)
    return scores, (bucket, bias, edge, next_bias, next_edge, top), passes


@gluon.jit
def mask_scores(x, n, visible, other: gl.constexpr, SPEC: gl.constexpr):
    """x [M, N], ``other`` where a query does not see one of the keys from n on."""
    BLOCK_N: gl.constexpr = x.shape[1]
    if (n < visible.begin) | (n + BLOCK_N > visible.end):
        key = n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, x.type.layout))
        if SPEC.num_buckets:
            first, end = visible.position
            seen = (key[None, :] >= first[:, None]) & (key[None, :] < end[:, None])
        else:
            seen = is_visible(key[None, :], visible.position[:, None], visible.left, visible.right, SPEC)
            seen = seen & (key < visible.num_keys)[None, :]
        x = gl.where(seen, x, other)
    return x


@gluon.jit
def load_bias(bias_ptr, row, end, kv_head, smem, SPEC: gl.constexpr):
    """A head's bias, in base 2, of the keys from a row on, to shared memory; 0 from ``end`` on."""
    LENGTH: gl.constexpr = smem.shape[0]
    at = row + gl.arange(0, LENGTH, gl.BlockedLayout([LENGTH // 32], [32], [1], [0]))
    bias = gl.load(bias_ptr + at.to(gl.int64) * SPEC.num_kv_heads + kv_head, mask=at < end, other=0.0)
    smem.store(bias.to(gl.float32) * LOG2E)


@gluon.jit
def add_bias(scores, scale2, bias_smem, SPEC: gl.constexpr):
    """Returns (scores, what remains to scale them by for base 2)."""
    if SPEC.has_bias:
        scores = scores * scale2 + bias_smem.load(gl.SliceLayout(0, scores.type.layout))[None, :]
        scale2 = 1.0
    return scores, scale2


@gluon.jit
def head_rows(ptr, row, head, WIDTH: gl.constexpr, NUM_HEADS: gl.constexpr):
    """(pointers [64, width] to a head's rows from ``row`` on in [rows, heads, width], those rows' numbers [64])."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    at = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    col = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    start = (at.to(gl.int64) * (NUM_HEADS * WIDTH) + head * WIDTH)[:, None]
    return ptr + start + col[None, :], at


@gluon.jit
def store_rows(ptr, x, row, end, head, NUM_HEADS: gl.constexpr):
    """Store a head's [64, width] to the rows from ``row`` on, up to ``end``, of [rows, heads, width]."""
    to, at = head_rows(ptr, row, head, x.shape[1], NUM_HEADS)
    x = gl.convert_layout(x.to(ptr.dtype.element_ty), to.type.layout)
    gl.store(to, x, mask=(at < end)[:, None])


@cache
def _tile(rows: int, width: int, dtype: torch.dtype) -> tuple[list[int], gl.NVMMASharedLayout]:
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return [rows, width], gl.NVMMASharedLayout.get_default_for([rows, width], element)


def tensor_descriptor(x: Tensor, rows: int, qheads_per_kvhead: int = 1) -> TensorDescriptor:
    """A TMA descriptor of [rows, G, width] in tiles [rows, width] of one head.

    qheads_per_kvhead > 1: x is the query and there is one key head, so the rows of all query heads are packed.
    TensorDescriptor's constructor checks its arguments, which takes longer than the rest; here they are known to hold.
    """
    length, columns, width = x.shape
    if qheads_per_kvhead > 1:
        length, columns = length * columns, 1
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.base = x
    descriptor.shape = (length, columns * width)
    descriptor.strides = (columns * width, 1)
    descriptor.block_shape, descriptor.layout = _tile(rows, width, x.dtype)
    return descriptor
