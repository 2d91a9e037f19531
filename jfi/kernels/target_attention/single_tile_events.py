"""Loads of tiles of events for the single-tile kernels: rows, rows by id or packed digits, and a bias and a scale each.

``history`` is (offsets_ptr, v_ptr, bias_ptr, *rows): v_ptr is None where value = key.  ``rows`` are up to 4 pointers:
the keys, and where num_fields is 2 the right half of each row; with num_tables instead the tables whose rows are read
by id, through ``indices``, and summed.  With num_words the keys, or the one table, are words of packed digits.
"""

import triton
import triton.language as tl

from jfi.kernels.common.online_softmax import scores_gradient
from jfi.kernels.common.primitives import LOG2E
from jfi.kernels.common.tiles import load_columns, load_digits, load_head
from jfi.kernels.plan import AttentionProblem
from jfi.tables.kernels.gather import INDICES, load_rows_by_id
from jfi.utils.operands import MAX_TABLES, TargetAttentionInputs, ceil_div

#: Parameters with a number per event: features' events are packed, so theirs begin anywhere.
EVENTS = ["bias_index_ptr", "value_scale_ptr", *INDICES]


def event_pointers(x: TargetAttentionInputs) -> tuple:
    """Returns ``history``, the pointers with a number per event, and an index for each of MAX_TABLES."""
    rows = x.tables if x.tables else [x.key, x.second]
    history = (x.offsets, x.value, x.bias, *rows, *[None] * (MAX_TABLES - len(rows)))
    return history, x.bias_index, x.value_scale, *x.indices, *[None] * (MAX_TABLES - len(x.indices))


def sizes(x: TargetAttentionInputs, problem: AttentionProblem) -> tuple[int, int]:
    """Returns the rows of the table of biases and of the table of digits, 0 where there is none."""
    digit_rows = x.tables[0].shape[0] if problem.num_words and x.tables else 0
    return x.bias.shape[0] if problem.bias_by_index else 0, digit_rows


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
def load_history(history, indices, digit_rows, cols, n, at, mask, kv_head, dtype, SPEC: tl.constexpr):
    """Keys [N, D] and values [N, E] of the rows from n on, 0 outside the mask; one load where they are shared.

    Rows by id and digits are converted to dtype, that of the queries.
    """
    v_ptr = history[1]
    k_ptr = history[3]
    D: tl.constexpr = SPEC.head_dim
    STRIDE: tl.constexpr = SPEC.num_kv_heads * D // SPEC.num_fields
    if SPEC.num_words:
        row = n + at.to(tl.int64)
        keep = mask
        if SPEC.num_tables > 0:
            row = tl.load(indices[0] + row, mask=mask, other=0).to(tl.int64)
            keep = mask & (row >= 0) & (row < digit_rows)
        k = load_digits(k_ptr, row, keep, dtype, D, SPEC.num_words, SPEC.block_d)
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
