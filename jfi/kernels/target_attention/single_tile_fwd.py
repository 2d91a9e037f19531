"""Target attention forward for few query rows: every history row is read once.

Scores are query rows by history rows, S [M, N]: the T · H/G query rows of a key head, at most 16, are one tile.  Few
warps hold it, so that the running maximum and sum stay within a warp.  Sums are kept by column and reduced at a
sample's end.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels import plan
from jfi.kernels.common.combine import RangePartials, partials_layout
from jfi.kernels.common.online_softmax import finish, online_softmax_update
from jfi.kernels.common.primitives import LOG2E
from jfi.kernels.common.spec import launchers_of
from jfi.kernels.common.stream_k import WEIGHT, end_row, find_range
from jfi.kernels.common.tiles import load_rows, query_rows, store_rows
from jfi.kernels.plan import AttentionPlan, Split
from jfi.kernels.target_attention.single_tile_events import (
    EVENTS,
    event_pointers,
    field_columns,
    load_bias,
    load_bias_index,
    load_history,
    load_value_scale,
    query_tile,
    query_tiles,
    sizes,
)
from jfi.utils.operands import TargetAttentionInputs


@triton.jit
def _attend(q, history, indices, events, cols, n, mask, kv_head, q_at, state, scale, SPEC: tl.constexpr):
    """The running maximum (base 2), sums by column and weighted sum after the history rows from n on."""
    maximum, total, acc = state
    bias_index_ptr, value_scale_ptr, table_rows, digit_rows = events
    at = tl.arange(0, SPEC.block_n)
    k, v = load_history(history, indices, digit_rows, cols, n, at, mask, kv_head, q.dtype, SPEC)
    value_scale = load_value_scale(value_scale_ptr, n, at, mask, SPEC)
    if SPEC.has_bias:
        index = load_bias_index(bias_index_ptr, n, at, mask, SPEC)
        bias = tl.trans(load_bias(history[2], index, table_rows, n, mask, q_at, kv_head, SPEC)) * LOG2E
        bias = tl.where(mask[None, :], bias, -float("inf"))
    else:
        bias = tl.where(mask, 0.0, -float("inf"))[None, :]
    s = tl.dot(q, tl.trans(k), input_precision=SPEC.precision) * (scale * LOG2E) + bias
    p, maximum, factor = online_softmax_update(s, maximum)
    total = total * factor[:, None] + p
    if SPEC.has_value_scale:
        p = p * value_scale[None, :]
    acc = tl.dot(p.to(v.dtype), v, acc * factor[:, None], input_precision=SPEC.precision)
    return maximum, total, acc


@triton.jit
def _nothing(SPEC: tl.constexpr):
    """The state before the first history row."""
    maximum = tl.full((SPEC.block_m,), -float("inf"), tl.float32)
    total = tl.zeros((SPEC.block_m, SPEC.block_n), tl.float32)
    return maximum, total, tl.zeros((SPEC.block_m, SPEC.block_e), tl.float32)


@triton.jit(
    do_not_specialize=["batch", "num_rows", "chunk", "table_rows", "digit_rows"], do_not_specialize_on_alignment=EVENTS
)
def target_attention_single_tile_fwd_kernel(
    queries,
    history,
    bias_index_ptr,
    value_scale_ptr,
    index_0,
    index_1,
    index_2,
    index_3,
    batch,
    num_rows,
    chunk,
    table_rows,
    digit_rows,
    scale,
    SPEC: tl.constexpr,
):
    """A program per stream-K range, or per sample: then there is no partition to search, and nothing to combine."""
    D: tl.constexpr = SPEC.head_dim
    E: tl.constexpr = SPEC.value_dim
    offsets_ptr = history[0]
    q_ptr, out_ptr, lse_ptr, partial_ptr = queries
    program = tl.program_id(0)
    kv_head, tile = query_tile(SPEC)
    at = tile * SPEC.block_m + tl.arange(0, SPEC.block_m)
    q_at, q_mask = query_rows(at, kv_head, SPEC), at < num_rows
    cols = field_columns(history[3], history[4], SPEC)
    events = (bias_index_ptr, value_scale_ptr, table_rows, digit_rows)
    indices = (index_0, index_1, index_2, index_3)
    maximum, total, acc = _nothing(SPEC)
    if SPEC.program_per_sample:
        sample = program.to(tl.int64)
        low = tl.load(offsets_ptr + sample).to(tl.int64)
        length = (tl.load(offsets_ptr + sample + 1) - low).to(tl.int32)
        row = sample * (num_rows * SPEC.num_kv_heads)
        q = load_rows(q_ptr + row * D, q_at, q_mask, D, D, SPEC.block_d)
        for first in range(0, length, SPEC.block_n):
            mask = tl.arange(0, SPEC.block_n) < length - first
            state = (maximum, total, acc)
            maximum, total, acc = _attend(
                q, history, indices, events, cols, low + first, mask, kv_head, at, state, scale, SPEC
            )
        out, lse = finish(maximum, tl.sum(total, 1), acc)
        store_rows(out_ptr + row * E, out, q_at, q_mask, E, E, SPEC.block_e)
        tl.store(lse_ptr + row + q_at, lse, mask=q_mask)
    else:
        start = program.to(tl.int64) * chunk
        end = start + chunk
        sample_rows = (num_rows * SPEC.num_kv_heads).to(tl.int64)
        partial_lse_ptr, split_ptr = partials_layout(partial_ptr, tl.num_programs(0), num_rows * SPEC.num_kv_heads, E)
        split = tl.full((), -1, tl.int64)
        sample, low, high, n, tiles = find_range(offsets_ptr, batch, start, end, SPEC.block_n)
        for _ in range(tiles):
            # Loaded now, needed when this sample ends.
            next_high = tl.load(offsets_ptr + sample + 2, mask=sample + 1 < batch, other=0).to(tl.int64)
            last = end_row(sample, high, end)
            left = (last - n).to(tl.int32)
            mask = tl.arange(0, SPEC.block_n) < left
            q = load_rows(q_ptr + sample * sample_rows * D, q_at, q_mask, D, D, SPEC.block_d)
            state = (maximum, total, acc)
            maximum, total, acc = _attend(q, history, indices, events, cols, n, mask, kv_head, at, state, scale, SPEC)
            done = left <= SPEC.block_n
            if done:
                out, lse = finish(maximum, tl.sum(total, 1), acc)
                begins = low + sample * WEIGHT >= start
                if begins & (last == high):
                    store_rows(out_ptr + sample * sample_rows * E, out, q_at, q_mask, E, E, SPEC.block_e)
                    tl.store(lse_ptr + sample * sample_rows + q_at, lse, mask=q_mask)
                else:
                    partial_row = (2 * program + begins.to(tl.int32)) * sample_rows
                    store_rows(partial_ptr + partial_row * E, out, q_at, q_mask, E, E, SPEC.block_e)
                    tl.store(partial_lse_ptr + partial_row + q_at, lse, mask=q_mask)
                split = tl.where(begins & (last < high), sample, split)
                maximum, total, acc = _nothing(SPEC)
            n = tl.where(done, high, n + SPEC.block_n)
            low = tl.where(done, high, low)
            high = tl.where(done, next_high, high)
            sample += done.to(tl.int64)
        tl.store(split_ptr + program, split.to(tl.int32))


_launcher = launchers_of(target_attention_single_tile_fwd_kernel)


def forward(
    x: TargetAttentionInputs, chosen: AttentionPlan, out: Tensor, lse: Tensor, launch: Callable[..., None]
) -> None:
    """Fill in the output [B, T, H, E] and the log-sum-exp of the scores [B, T, H], -inf for an empty history.

    ``launch`` calls a launcher with its arguments.
    """
    batch, num_queries, num_heads, _ = x.query.shape
    problem, kernel = chosen.problem, chosen.forward[0]
    launcher = _launcher
    if chosen.family == "digits_registers":
        from jfi.kernels.digit_attention.registers_fwd import launcher
    chunk, programs, partials = 0, batch, None
    if kernel.split is Split.STREAM_K:
        chunk, programs = plan.stream_k(x.key.shape[0], batch, problem.device.num_sms, kernel.programs_per_sm)
        partials = RangePartials(
            programs, chunk, num_queries * num_heads, problem.value_dim, problem.num_words > 0, x.query.device
        )
    tensors = ((x.query, out, lse, None if partials is None else partials.memory), *event_pointers(x))
    numbers = (batch, num_queries * problem.qheads_per_kvhead, chunk, *sizes(x, problem), x.scale)
    grid = (programs, query_tiles(x, problem, kernel.block_m), 1)
    launch(launcher(problem, kernel), grid, tensors, numbers)
    if partials is not None:
        partials.combine(x.offsets, out, lse, launch)
