"""Target attention forward for few query rows: every history row is read once.

Scores are query rows by history rows, S [M, N]: the T · H/G query rows of a key head, at most 16, are one tile.  Few
warps hold it, so that the running maximum and sum stay within a warp.  Sums are kept by column and reduced at a
sample's end.

Events are rows, rows by id or packed digits, with a bias and a scale each.  ``history`` is (offsets_ptr, v_ptr,
bias_ptr, *rows): v_ptr is None where value = key.  ``rows`` are up to 4 pointers: the keys, and where num_fields is 2
the right half of each row; with num_tables instead the tables whose rows are read by id, through ``indices``, and
summed.  With num_words the keys are words of packed digits.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels import plan
from jfi.kernels.common.combine import RangePartials, partials_layout
from jfi.kernels.common.launch import launchers_of
from jfi.kernels.common.online_softmax import finish, online_softmax_update, scores_gradient
from jfi.kernels.common.primitives import LOG2E
from jfi.kernels.common.stream_k import WEIGHT, end_row, find_range
from jfi.kernels.common.tiles import load_columns, load_digits, load_head, load_rows, query_rows, store_rows
from jfi.kernels.plan import AttentionPlan, AttentionProblem, KernelPlan, Split
from jfi.tables.kernels.gather import INDICES, load_rows_by_id
from jfi.utils.operands import MAX_TABLES, TargetAttentionInputs, ceil_div

# --- Events -----------------------------------------------------------------------------------------------------------
#: Parameters with a number per event: features' events are packed, so theirs begin anywhere.
EVENTS = ["bias_index_ptr", "value_scale_ptr", *INDICES]


def event_pointers(x: TargetAttentionInputs, kernel: KernelPlan) -> tuple:
    """Returns ``history``, the pointers with a number per event, and indices of MAX_TABLES if the kernel takes any."""
    rows = x.tables if x.tables else [x.key, x.second]
    history = (x.offsets, x.value, x.bias, *rows, *[None] * (MAX_TABLES - len(rows)))
    indices = (
        []
        if kernel.kernel.startswith("digit_attention_registers")
        else [*x.indices, *[None] * (MAX_TABLES - len(x.indices))]
    )
    return history, x.bias_index, x.value_scale, *indices


def table_rows_of(x: TargetAttentionInputs, problem: AttentionProblem) -> int:
    """Returns the rows of the table of biases, 0 where there is none."""
    return x.bias.shape[0] if problem.bias_by_index else 0


def query_tiles(x: TargetAttentionInputs, problem: AttentionProblem, block_m: int) -> int:
    """Returns the programs of each range of events: one per key head; over digits one per tile of query rows."""
    return ceil_div(x.query.shape[1] * x.query.shape[2], block_m) if problem.num_words else problem.num_kv_heads


@triton.jit
def query_tile(SPEC: tl.constexpr):
    """Returns (key head, tile of its query rows) of a program; over digits several tiles of one head, else one each."""
    if SPEC.num_words:
        return tl.program_id(1) * 0, tl.program_id(1)
    else:
        return tl.program_id(1), tl.program_id(1) * 0


@triton.jit
def field_columns(ptr, second_ptr, SPEC: tl.constexpr):
    """Returns where a row's columns lie from its first: with two fields in two tensors of D / 2 columns each."""
    WIDTH: tl.constexpr = SPEC.head_dim
    cols = tl.arange(0, SPEC.block_d)
    if SPEC.num_fields == 2:
        BYTES: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
        distance = (second_ptr.to(tl.int64) - ptr.to(tl.int64)) // BYTES
        # Both begin at a multiple of 16 bytes.
        distance = tl.multiple_of(distance, 16 // BYTES)
        cols = cols % (WIDTH // 2) + tl.where(cols < WIDTH // 2, 0, distance)
    return cols


@triton.jit
def load_history(history, indices, cols, n, at, mask, kv_head, dtype, SPEC: tl.constexpr):
    """Keys [N, D] and values [N, E] of the rows from n on, 0 outside the mask; one load where they are shared.

    Rows by id and digits are converted to dtype, that of the queries.
    """
    v_ptr = history[1]
    k_ptr = history[3]
    D: tl.constexpr = SPEC.head_dim
    STRIDE: tl.constexpr = SPEC.num_kv_heads * D // SPEC.num_fields
    if SPEC.num_words:
        k = load_digits(k_ptr, n + at.to(tl.int64), mask, dtype, D, SPEC.num_words, SPEC.block_d)
    elif SPEC.num_tables > 0:
        tables = (history[3], history[4], history[5], history[6])
        of_head = cols + kv_head * D
        TABLES: tl.constexpr = SPEC.num_tables
        k = load_rows_by_id(tables, indices, n, at, of_head, mask, dtype, STRIDE, D, SPEC.block_d, TABLES)
    else:
        k = load_columns(k_ptr + n * STRIDE + kv_head * D, at, cols, mask, STRIDE, D, SPEC.block_d)
    v = k
    if not SPEC.shared_kv:
        v = load_head(v_ptr, n, at, mask, kv_head, SPEC.value_dim, SPEC.block_e, SPEC)
    return k, v


@triton.jit
def load_bias_index(bias_index_ptr, n, at, mask, SPEC: tl.constexpr):
    """Loads [N]: each event's row of the bias table; any number where there is no table."""
    index = at
    if SPEC.bias_by_index:
        index = tl.load(bias_index_ptr + n + at, mask=mask, other=0)
    return index


@triton.jit
def load_value_scale(value_scale_ptr, n, at, mask, SPEC: tl.constexpr):
    """Loads [N]: the number by which each event's value is multiplied; any where there is none."""
    scale = at
    if SPEC.has_value_scale:
        scale = tl.load(value_scale_ptr + n + at, mask=mask, other=0).to(tl.float32)
    return scale


@triton.jit
def load_bias(bias_ptr, index, table_rows, n, mask, q_at, kv_head, SPEC: tl.constexpr):
    """Loads [N, M]: each event's bias for each query's head, 0 outside the mask; of its row of the table if by index.

    An index outside of the table has a bias of 0.
    """
    NUM_HEADS: tl.constexpr = SPEC.num_kv_heads * SPEC.qheads_per_kvhead
    rows = index.to(tl.int32)
    is_row = mask
    if SPEC.bias_by_index:
        is_row = mask & (index >= 0) & (index < table_rows)
    else:
        rows = tl.arange(0, mask.shape[0])
        bias_ptr += n * NUM_HEADS
    where = rows[:, None] * NUM_HEADS + (kv_head * SPEC.qheads_per_kvhead + q_at % SPEC.qheads_per_kvhead)[None, :]
    if SPEC.bias_by_index:
        # Copies of 16 bytes would bypass the L1 cache, and all programs ask for the same few lines.
        where = tl.max_contiguous(where, [1, 1])
    return tl.load(bias_ptr + where, mask=is_row[:, None], other=0.0).to(tl.float32)


@triton.jit
def weights_and_gradient(q, grad, lse, delta, k, v, value_scale, bias, mask, scale, SPEC: tl.constexpr):
    """P times the scale of values [N, M], what dO is multiplied by in dv, and dS, the gradient of the scores."""
    PRECISION: tl.constexpr = SPEC.precision
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale * LOG2E) + (bias - lse[None, :]) * LOG2E
    p = tl.where(mask[:, None], tl.exp2(s), 0.0)
    dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
    weights = p
    if SPEC.has_value_scale:
        dp = dp * value_scale[:, None]
        weights = p * value_scale[:, None]
    return weights, scores_gradient(p, dp, delta[None, :])


# --- Forward ----------------------------------------------------------------------------------------------------------
@triton.jit
def _attend(q, history, indices, events, cols, n, mask, kv_head, q_at, state, scale, SPEC: tl.constexpr):
    """The running maximum (base 2), sums by column and weighted sum after the history rows from n on."""
    maximum, total, acc = state
    bias_index_ptr, value_scale_ptr, table_rows = events
    at = tl.arange(0, SPEC.block_n)
    k, v = load_history(history, indices, cols, n, at, mask, kv_head, q.dtype, SPEC)
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
    maximum = tl.full((SPEC.block_m,), -float("inf"), tl.float32)
    total = tl.zeros((SPEC.block_m, SPEC.block_n), tl.float32)
    return maximum, total, tl.zeros((SPEC.block_m, SPEC.block_e), tl.float32)


@triton.jit(do_not_specialize=["batch", "num_rows", "chunk", "table_rows"], do_not_specialize_on_alignment=EVENTS)
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
    events = (bias_index_ptr, value_scale_ptr, table_rows)
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
    """Fills in the output and the log-sum-exp, see `execute.forward`."""
    batch, num_queries, num_heads, _ = x.query.shape
    problem, kernel = chosen.problem, chosen.forward[0]
    launcher = _launcher
    if chosen.family == "digits_registers":
        from jfi.kernels.digit_attention.registers_kernels import fwd_launcher as launcher
    chunk, programs, partials = 0, batch, None
    if kernel.split is Split.STREAM_K:
        chunk, programs = plan.stream_k(x.key.shape[0], batch, problem.device.num_sms, kernel.programs_per_sm)
        partials = RangePartials(
            programs, chunk, num_queries * num_heads, problem.value_dim, problem.num_words > 0, x.query.device
        )
    tensors = ((x.query, out, lse, None if partials is None else partials.memory), *event_pointers(x, kernel))
    numbers = (batch, num_queries * problem.qheads_per_kvhead, chunk, table_rows_of(x, problem), x.scale)
    grid = (programs, query_tiles(x, problem, kernel.block_m), 1)
    launch(launcher(problem, kernel), grid, tensors, numbers)
    if partials is not None:
        partials.combine(x.offsets, out, lse, launch)
