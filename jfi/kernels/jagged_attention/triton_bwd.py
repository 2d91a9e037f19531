"""Jagged attention backward on any GPU: two kernels, so that each gradient has one owner and no sum depends on timing.

    P = exp(S - L)      dS = P (dP - Δ)      Δ = Σ_e dO · O - dL
    dq = scale Σ_keys dS k      dk = scale Σ_queries dS q      dv = Σ_queries P dO

dS is the gradient of the scores through the output and through the log-sum-exp L, whose own derivative is P.  One
kernel has a program per tile of queries, which loops over the keys that they see, the other a program per tile of keys.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import empty_like, launchers_of
from jfi.kernels.common.online_softmax import hide_empty, scores_gradient
from jfi.kernels.common.primitives import LOG2E
from jfi.kernels.common.tile_scheduler import load_work_tile, schedule_tiles
from jfi.kernels.common.tiles import load_bias_tile, load_rows, query_rows, row_products, store_head, store_rows
from jfi.kernels.jagged_attention.buckets import add_bucket_sums, bucket_bias, bucket_of, load_bucket, visible_range
from jfi.kernels.jagged_attention.visibility import (
    Visibility,
    add_totals,
    bounds,
    is_visible,
    keys_and_values,
    load_keys,
    query_parts,
    seeing_queries,
    visible_keys,
)
from jfi.kernels.plan import AttentionPlan
from jfi.utils.operands import JaggedAttentionInputs, ceil_div


@triton.jit(do_not_specialize=["rows"])
def _statistics_kernel(grad_ptr, out_ptr, lse_ptr, dlse_ptr, stats_ptr, rows, SPEC: tl.constexpr):
    """Log-sum-exp in base 2, +inf where a query sees no key, and Δ, of rows [R · H]; to [2, G, R · H/G]."""
    QHEADS_PER_KVHEAD: tl.constexpr = SPEC.qheads_per_kvhead
    E: tl.constexpr = SPEC.value_dim
    first = tl.program_id(0).to(tl.int64) * SPEC.block_m
    at = tl.arange(0, SPEC.block_m)
    mask = first + at < rows
    grad = load_rows(grad_ptr + first * E, at, mask, E, E, SPEC.block_e)
    out = load_rows(out_ptr + first * E, at, mask, E, E, SPEC.block_e)
    delta = row_products(grad, out)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + first + at, mask=mask, other=0.0)
    lse = tl.load(lse_ptr + first + at, mask=mask, other=0.0)
    # Combining empty parts makes a dL of NaN, which weights of 0 would not stop.
    delta = tl.where(lse == -float("inf"), 0.0, delta)
    row = first + at
    head = row % (SPEC.num_kv_heads * QHEADS_PER_KVHEAD)
    query = row // (SPEC.num_kv_heads * QHEADS_PER_KVHEAD)
    to = (
        stats_ptr
        + (head // QHEADS_PER_KVHEAD) * (rows // SPEC.num_kv_heads)
        + query * QHEADS_PER_KVHEAD
        + head % QHEADS_PER_KVHEAD
    )
    tl.store(to, hide_empty(lse * LOG2E), mask=mask)
    tl.store(to + rows, delta, mask=mask)


@triton.jit
def _weights_and_gradient(queries, keys, visible, relative, bias_ptr, kv_head, scale, SPEC: tl.constexpr):
    """P [M, N] and dS, the gradient of the scores; both are 0 where a key is hidden.

    Args:
        queries: (q, dO, L in base 2, Δ, their rows in the sample).
        keys: (k, v, row of the first, numbers from it, which of them are the sample's).
        visible: [M, N], which keys the queries see.
        relative: [M, N], the bias by buckets in base 2; read if there is a table.
    """
    q, grad, lse, delta, row = queries
    k, v, n, key_at, mask = keys
    s = tl.dot(q, tl.trans(k), input_precision=SPEC.precision) * (scale * LOG2E)
    if SPEC.has_bias:
        s += load_bias_tile(bias_ptr, n, key_at, mask, row, kv_head, SPEC)
    if SPEC.has_table:
        s += relative
    p = tl.where(visible, tl.exp2(s - lse[:, None]), 0.0)
    dp = tl.dot(grad, tl.trans(v), input_precision=SPEC.precision)
    return p, scores_gradient(p, dp, delta[:, None])


@triton.jit
def _load_queries(queries, base, at, mask, kv_head, rows, q_start, SPEC: tl.constexpr):
    """Loads the query rows ``at`` of a sample as `_weights_and_gradient` takes them."""
    q_ptr, grad_ptr, stats_ptr = queries
    QHEADS_PER_KVHEAD: tl.constexpr = SPEC.qheads_per_kvhead
    D: tl.constexpr = SPEC.head_dim
    E: tl.constexpr = SPEC.value_dim
    q_at = query_rows(at.to(tl.int64), kv_head, SPEC)
    q = load_rows(q_ptr + base * D, q_at, mask, D, D, SPEC.block_d)
    grad = load_rows(grad_ptr + base * E, q_at, mask, E, E, SPEC.block_e)
    stats = stats_ptr + kv_head.to(tl.int64) * rows + q_start * QHEADS_PER_KVHEAD + at
    lse = tl.load(stats, mask=mask, other=float("inf"))
    delta = tl.load(stats + rows.to(tl.int64) * SPEC.num_kv_heads, mask=mask, other=0.0)
    return q, grad, lse, delta, at


@triton.jit
def _visible(edges_ptr, query, q_mask, position, key, mask, left, right, SPEC: tl.constexpr):
    if SPEC.num_buckets:
        begin, end, _bucket = visible_range(edges_ptr, query, q_mask, SPEC)
        visible = (key[None, :] >= begin[:, None]) & (key[None, :] < end[:, None])
    else:
        visible = is_visible(key[None, :], position[:, None], left, right, SPEC) & mask[None, :]
    return visible


@triton.jit
def _query_and_head(row, q_start, num_queries, kv_head, SPEC: tl.constexpr):
    """Returns the queries of a tile's rows, the last for rows behind it, and their heads."""
    query = tl.minimum(q_start + row // SPEC.qheads_per_kvhead, q_start + tl.maximum(num_queries - 1, 0))
    return query.to(tl.int64), kv_head * SPEC.qheads_per_kvhead + row % SPEC.qheads_per_kvhead


@triton.jit(do_not_specialize=["total", "rows", "first_query", "left", "right"])
def jagged_attention_dquery_kernel(
    queries, keys, biases, tiles_ptr, results, total, rows, first_query, left, right, scale, SPEC: tl.constexpr
):
    """dq, and of a table of biases each row's sums by bucket; ``results`` points to these, None if not needed.

    Args:
        queries: pointers to query, dO and statistics.
        keys: pointers to key and value.
        biases: pointers to the bias by key, the edges and the table of biases by bucket.
        rows: R · H/G.
        first_query: of the launch, whose sums come first.
    """
    k_ptr, v_ptr = keys
    bias_ptr, edges_ptr, table_ptr = biases
    by_bucket = (edges_ptr, table_ptr)
    dq_ptr, sums_ptr = results
    if sums_ptr is not None:
        sums_ptr -= first_query.to(tl.int64) * (SPEC.num_kv_heads * SPEC.qheads_per_kvhead * SPEC.num_buckets)
    QHEADS_PER_KVHEAD: tl.constexpr = SPEC.qheads_per_kvhead
    D: tl.constexpr = SPEC.head_dim
    kv_head = tl.program_id(0) % SPEC.num_kv_heads
    work_tile = load_work_tile(tiles_ptr, tl.program_id(0), total, SPEC.num_kv_heads)
    window = (left, right, edges_ptr)
    first, shift, begin, steps = visible_keys(work_tile, window, SPEC.block_m, SPEC.block_n, SPEC)
    _tile, q_start, num_queries, k_start, num_keys = work_tile
    row = first + tl.arange(0, SPEC.block_m)
    q_mask = row < num_queries * QHEADS_PER_KVHEAD
    q_base = q_start.to(tl.int64) * (SPEC.num_kv_heads * QHEADS_PER_KVHEAD)
    key_at = tl.arange(0, SPEC.block_n)
    operands = _load_queries(queries, q_base, row, q_mask, kv_head, rows, q_start, SPEC)
    query, head = _query_and_head(row, q_start, num_queries, kv_head, SPEC)
    relative = tl.zeros((SPEC.block_m, SPEC.block_n) if SPEC.has_table else (1, 1), tl.float32)
    if SPEC.has_table:
        _begin, _end, bucket = visible_range(edges_ptr, query, q_mask, SPEC)
        bucket_value, bucket_edge = load_bucket(by_bucket, (query, head), bucket, q_mask, SPEC)
    if sums_ptr is not None:
        bucket_sum = tl.zeros((SPEC.block_m,), tl.float32)
    dq = tl.zeros((SPEC.block_m, SPEC.block_d), tl.float32)
    for step in range(0, steps):
        first_key = begin + (steps - 1 - step) * SPEC.block_n
        key = first_key + key_at
        mask = key < num_keys
        n = (k_start + first_key).to(tl.int64)
        k, v = load_keys(k_ptr, v_ptr, n, key_at, mask, kv_head, queries[0].dtype.element_ty, SPEC)
        position = row // QHEADS_PER_KVHEAD + shift
        visible = _visible(edges_ptr, query, q_mask, position, key, mask, left, right, SPEC)
        if SPEC.has_table:
            passed, passed_edge = bucket, bucket_edge
            state = (bucket, bucket_value, bucket_edge)
            relative, bucket, bucket_value, bucket_edge, passes = bucket_bias(
                by_bucket, (query, head), state, key, first_key, SPEC
            )
        _p, ds = _weights_and_gradient(
            operands, (k, v, n, key_at, mask), visible, relative, bias_ptr, kv_head, scale, SPEC
        )
        if dq_ptr is not None:
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=SPEC.precision)
        if sums_ptr is not None:
            state = (passed, passed_edge, bucket_sum)
            bucket_sum = add_bucket_sums(
                by_bucket, sums_ptr, (query, head), state, passes, ds, key, first_key, q_mask, SPEC
            )
    if sums_ptr is not None:
        sums = sums_ptr + (query * (SPEC.num_kv_heads * QHEADS_PER_KVHEAD) + head) * SPEC.num_buckets
        tl.store(sums + bucket, bucket_sum, mask=q_mask)
    if dq_ptr is not None:
        q_at = query_rows(row.to(tl.int64), kv_head, SPEC)
        store_rows(dq_ptr + q_base * D, dq * scale, q_at, q_mask, D, D, SPEC.block_d)


@triton.jit(do_not_specialize=["total", "rows", "left", "right"])
def jagged_attention_dkey_kernel(
    queries, keys, biases, times, tiles_ptr, results, total, rows, left, right, scale, SPEC: tl.constexpr
):
    """dk (if value = key with dv added), dv and dbias, to which ``results`` points; the rest as of dq's kernel.

    Pointers are None for gradients that are not needed, such as those of packed digits.

    times: pointers to the times of queries and keys, None where buckets go by distance.
    """
    k_ptr, v_ptr = keys
    bias_ptr, edges_ptr, table_ptr = biases
    by_bucket = (edges_ptr, table_ptr)
    dk_ptr, dv_ptr, dbias_ptr = results
    QHEADS_PER_KVHEAD: tl.constexpr = SPEC.qheads_per_kvhead
    BLOCK_H: tl.constexpr = SPEC.block_h
    G: tl.constexpr = SPEC.num_kv_heads
    D: tl.constexpr = SPEC.head_dim
    E: tl.constexpr = SPEC.value_dim
    kv_head = tl.program_id(0) % G
    work_tile = load_work_tile(tiles_ptr, tl.program_id(0), total, G)
    window = (left, right, edges_ptr)
    first, shift, begin, steps = seeing_queries(work_tile, window, SPEC.block_m, SPEC.block_n, SPEC)
    _tile, k_start, num_keys, q_start, num_queries = work_tile
    key_at = tl.arange(0, SPEC.block_n)
    key = first + key_at
    mask = key < num_keys
    n = (k_start + first).to(tl.int64)
    k, v = load_keys(k_ptr, v_ptr, n, key_at, mask, kv_head, queries[0].dtype.element_ty, SPEC)
    q_base = q_start.to(tl.int64) * (G * QHEADS_PER_KVHEAD)
    dk = tl.zeros((SPEC.block_n, SPEC.block_d), tl.float32)
    dv = tl.zeros((SPEC.block_n, SPEC.block_e), tl.float32)
    dbias = tl.zeros((SPEC.block_n, BLOCK_H), tl.float32)
    relative = tl.zeros((SPEC.block_m, SPEC.block_n) if SPEC.has_table else (1, 1), tl.float32)
    for step in range(0, steps):
        row = begin + step * SPEC.block_m + tl.arange(0, SPEC.block_m)
        q_mask = row < num_queries * QHEADS_PER_KVHEAD
        operands = _load_queries(queries, q_base, row, q_mask, kv_head, rows, q_start, SPEC)
        q, grad, _lse, _delta, _row = operands
        query, head = _query_and_head(row, q_start, num_queries, kv_head, SPEC)
        position = row // QHEADS_PER_KVHEAD + shift
        visible = _visible(edges_ptr, query, q_mask, position, key, mask, left, right, SPEC)
        if SPEC.has_table:
            _begin, range_end, _bucket = visible_range(edges_ptr, query, q_mask, SPEC)
            newest = tl.minimum(first + SPEC.block_n, num_keys) - 1 + tl.zeros((SPEC.block_m,), tl.int32)
            bucket = bucket_of(times, query, range_end, k_start, newest, q_mask, SPEC.num_buckets, SPEC.is_causal)
            value, edge = load_bucket(by_bucket, (query, head), bucket, q_mask, SPEC)
            relative, _bucket, _value, _edge, _passes = bucket_bias(
                by_bucket, (query, head), (bucket, value, edge), key, first, SPEC
            )
        p, ds = _weights_and_gradient(
            operands, (k, v, n, key_at, mask), visible, relative, bias_ptr, kv_head, scale, SPEC
        )
        if (dv_ptr is not None) or (SPEC.shared_kv and (dk_ptr is not None)):
            dv = tl.dot(tl.trans(p.to(grad.dtype)), grad, dv, input_precision=SPEC.precision)
        if dk_ptr is not None:
            dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision=SPEC.precision)
        if dbias_ptr is not None:
            is_head = ((row % QHEADS_PER_KVHEAD)[:, None] == tl.arange(0, BLOCK_H)[None, :]) & q_mask[:, None]
            dbias = tl.dot(tl.trans(ds), is_head.to(tl.float32), dbias, input_precision=SPEC.sum_precision)
    if dv_ptr is not None:
        store_head(dv_ptr, dv, n, key_at, mask, kv_head, E, SPEC.block_e, SPEC)
    if dk_ptr is not None:
        dk *= scale
        if SPEC.shared_kv:
            dk += dv
        store_head(dk_ptr, dk, n, key_at, mask, kv_head, D, SPEC.block_d, SPEC)
    if dbias_ptr is not None:
        store_head(dbias_ptr, dbias, n, key_at, mask, kv_head, QHEADS_PER_KVHEAD, BLOCK_H, SPEC)


_statistics_launcher = launchers_of(_statistics_kernel)
_dquery_launcher = launchers_of(jagged_attention_dquery_kernel)
_dkey_launcher = launchers_of(jagged_attention_dkey_kernel)


def backward(
    grad: Tensor,
    dlse: Tensor | None,
    x: JaggedAttentionInputs,
    out: Tensor,
    lse: Tensor,
    needed: Sequence[bool],
    plan: AttentionPlan,
) -> tuple[Tensor | None, ...]:
    """Returns the gradients, see `execute.backward`."""
    problem, (statistics, dquery_plan, dkey_plan) = plan.problem, plan.backward
    num_kv_heads, qheads_per_kvhead = problem.num_kv_heads, problem.qheads_per_kvhead
    rows = x.query.shape[0] * qheads_per_kvhead
    dquery, dkey, dvalue, dbias = empty_like((x.query, x.key, x.value, x.bias), needed[:4])
    totals, stats = [], lse.new_empty(2, num_kv_heads, rows)
    total, visibility = rows * num_kv_heads, Visibility.of(x)
    launch = _statistics_launcher(problem, statistics, visibility)
    launch((ceil_div(total, statistics.block_m), 1, 1), (grad, out, lse, dlse, stats), (total,))
    inputs = ((x.query, grad, stats), keys_and_values(x), (x.bias, x.edges, x.table))
    numbers = (*bounds(x.left, x.right), x.scale)
    launch = _dquery_launcher(problem, dquery_plan, visibility)
    for first, count, offsets, sums in query_parts(x, needed[4]) if needed[0] or needed[4] else ():
        tiles = schedule_tiles(offsets, x.key_offsets, count, qheads_per_kvhead, dquery_plan.block_m)
        total = tiles.shape[0] * num_kv_heads
        launch((total, 1, 1), (*inputs, tiles, (dquery, sums)), (total, rows, first, *numbers))
        if sums is not None:
            totals.append(sums.sum(0))
    if any(needed[1:4]):
        tiles = schedule_tiles(x.key_offsets, x.query_offsets, x.key.shape[0], 1, dkey_plan.block_n)
        total, times = tiles.shape[0] * num_kv_heads, (x.query_time, x.key_time)
        launch = _dkey_launcher(problem, dkey_plan, visibility)
        launch((total, 1, 1), (*inputs, times, tiles, (dkey, dvalue, dbias)), (total, rows, *numbers))
    return dquery, dkey, dvalue, dbias, add_totals(totals, x.table)
