"""Jagged attention forward on any GPU: a program per tile of queries loops over the keys that they see.

Scores are kept in base 2; the softmax is computed online (Dao et al., 'FlashAttention', 2022).
"""

import operator
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import launchers_of
from jfi.kernels.common.online_softmax import log_sum_exp, no_sums, nonzero, online_softmax_update
from jfi.kernels.common.primitives import LOG2E
from jfi.kernels.common.tile_scheduler import load_work_tile, schedule_tiles
from jfi.kernels.common.tiles import load_bias_tile, load_rows, query_rows, store_rows
from jfi.kernels.jagged_attention.buckets import bucket_bias, load_bucket, visible_range
from jfi.kernels.jagged_attention.visibility import (
    Visibility,
    bounds,
    is_visible,
    keys_and_values,
    load_keys,
    visible_keys,
)
from jfi.kernels.plan import AttentionPlan
from jfi.utils.operands import JaggedAttentionInputs


@triton.jit(do_not_specialize=["total", "left", "right"])
def jagged_attention_fwd_kernel(inputs, biases, tiles_ptr, results, total, left, right, scale, SPEC: tl.constexpr):
    q_ptr, k_ptr, v_ptr = inputs
    bias_ptr, edges_ptr, table_ptr = biases
    out_ptr, lse_ptr = results
    QHEADS_PER_KVHEAD: tl.constexpr = SPEC.qheads_per_kvhead
    D: tl.constexpr = SPEC.head_dim
    E: tl.constexpr = SPEC.value_dim
    kv_head = tl.program_id(0) % SPEC.num_kv_heads
    work_tile = load_work_tile(tiles_ptr, tl.program_id(0), total, SPEC.num_kv_heads)
    first, shift, begin, steps = visible_keys(work_tile, (left, right, edges_ptr), SPEC.block_m, SPEC.block_n, SPEC)
    _tile, q_start, num_queries, k_start, num_keys = work_tile
    row = first + tl.arange(0, SPEC.block_m)
    q_mask = row < num_queries * QHEADS_PER_KVHEAD
    q_at = query_rows(row.to(tl.int64), kv_head, SPEC)
    q_base = q_start.to(tl.int64) * (SPEC.num_kv_heads * QHEADS_PER_KVHEAD)
    position = row // QHEADS_PER_KVHEAD + shift
    key_at = tl.arange(0, SPEC.block_n)
    if SPEC.num_buckets:
        query = tl.minimum(q_start + row // QHEADS_PER_KVHEAD, q_start + num_queries - 1).to(tl.int64)
        head = kv_head * QHEADS_PER_KVHEAD + row % QHEADS_PER_KVHEAD
        range_begin, range_end, bucket = visible_range(edges_ptr, query, q_mask, SPEC)
        if SPEC.has_table:
            by_bucket, rows = (edges_ptr, table_ptr), (query, head)
            bucket_value, bucket_edge = load_bucket(by_bucket, rows, bucket, q_mask, SPEC)
    q = load_rows(q_ptr + q_base * D, q_at, q_mask, D, D, SPEC.block_d)
    maximum, weight, acc = no_sums(SPEC.block_m, SPEC.block_e)
    # AOTInductor passes the scale in float64.
    scale2 = tl.full((), scale * LOG2E, tl.float32)
    for step in range(0, steps):
        first_key = begin + (steps - 1 - step) * SPEC.block_n
        key = first_key + key_at
        mask = key < num_keys
        n = (k_start + first_key).to(tl.int64)
        k, v = load_keys(k_ptr, v_ptr, n, key_at, mask, kv_head, q_ptr.dtype.element_ty, SPEC)
        s = tl.dot(q, tl.trans(k), input_precision=SPEC.precision) * scale2
        if SPEC.has_bias:
            s += load_bias_tile(bias_ptr, n, key_at, mask, row, kv_head, SPEC)
        if SPEC.num_buckets:
            visible = (key[None, :] >= range_begin[:, None]) & (key[None, :] < range_end[:, None])
            if SPEC.has_table:
                state = (bucket, bucket_value, bucket_edge)
                relative, bucket, bucket_value, bucket_edge, _passes = bucket_bias(
                    by_bucket, rows, state, key, first_key, SPEC
                )
                s += relative
        else:
            visible = is_visible(key[None, :], position[:, None], left, right, SPEC) & mask[None, :]
        p, maximum, factor = online_softmax_update(tl.where(visible, s, -float("inf")), maximum)
        weight = weight * factor + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * factor[:, None], input_precision=SPEC.precision)
    store_rows(out_ptr + q_base * E, acc / nonzero(weight)[:, None], q_at, q_mask, E, E, SPEC.block_e)
    tl.store(lse_ptr + q_base + q_at, log_sum_exp(maximum, weight), mask=q_mask)


_launcher = launchers_of(jagged_attention_fwd_kernel)


def forward(
    x: JaggedAttentionInputs, plan: AttentionPlan, launch: Callable[..., None] = operator.call
) -> tuple[Tensor, Tensor]:
    """Returns the output and its log-sum-exp, see `execute.forward`; launch: calls a launcher with its arguments."""
    rows, num_heads, _ = x.query.shape
    (kernel,), problem = plan.forward, plan.problem
    out = x.query.new_empty(rows, num_heads, problem.value_dim)
    lse = x.query.new_empty(rows, num_heads, dtype=torch.float32)
    tiles = schedule_tiles(x.query_offsets, x.key_offsets, rows, problem.qheads_per_kvhead, kernel.block_m, launch)
    total = tiles.shape[0] * problem.num_kv_heads
    tensors = ((x.query, *keys_and_values(x)), (x.bias, x.edges, x.table), tiles, (out, lse))
    launcher = _launcher(problem, kernel, Visibility.of(x))
    launch(launcher, (total, 1, 1), tensors, (total, *bounds(x.left, x.right), x.scale))
    return out, lse
