"""Target attention forward over 8-bit rows by id, for very few query rows: a program per query row and stream-K range.

A row is D numbers of 8 bits, a scale a and a bias b: x = a · number + b.  The numbers themselves are multiplied:

    s = a (q · number) + b Σ q        out = (Σ_n p_n a_n number_n + Σ_n p_n b_n) / Σ_n p_n

The products do not use tensor cores, whose operands would pass through shared memory in two layouts: for one query row
that costs more than the multiplications.  A warp holds a tile of rows in registers, each row in two halves, and loads
the rows of the next tile and the ids of the one after it meanwhile.
"""

import triton
import triton.language as tl
from torch import Tensor

from jfi import plan
from jfi.kernels.common.combine import RangePartials, behind_partials
from jfi.kernels.common.launch import Launcher
from jfi.kernels.common.online_softmax import log_sum_exp, nonzero, reference_of
from jfi.kernels.common.primitives import INTERPRET, LOG2E
from jfi.kernels.common.spec import AttentionSpec
from jfi.kernels.common.stream_k import WEIGHT, end_row, find_range
from jfi.kernels.tables.rows import QUANTIZED_TAIL
from jfi.kernels.target_attention.few_tiles import EVENTS, load_bias_index, load_value_scale
from jfi.plan import AttentionPlan, AttentionProblem, KernelPlan, TargetAttentionInputs, cached

#: Added to a number, it makes the number the second byte of a float32.  Rounding errors of sums grow with it: 2^-9 of
#: a number, which only float32 queries show.
_OFFSET = tl.constexpr(2.0**15)
#: The middle of the numbers.
_CENTRE = tl.constexpr(128.0)


@triton.jit
def _byte(words, PLACE: tl.constexpr):
    """_OFFSET plus the byte of each word, in float32: one instruction."""
    if INTERPRET:
        return ((words >> 8 * PLACE) & 0xFF).to(tl.float32) + _OFFSET
    else:
        SELECTOR: tl.constexpr = 0x7404 + 16 * PLACE
        asm: tl.constexpr = f"prmt.b32 $0, $1, 0x47000000, {SELECTOR};"
        return tl.inline_asm_elementwise(asm, "=f,r", [words], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _numbers(words, EXACT: tl.constexpr):
    """[N, D / 2], float32: the numbers in words [N, D / 8] of four each, _OFFSET more or, if EXACT, _CENTRE less."""
    even = tl.join(_byte(words, 0), _byte(words, 2))
    odd = tl.join(_byte(words, 1), _byte(words, 3))
    x = tl.reshape(tl.join(even, odd), (words.shape[0], 4 * words.shape[1]))
    if EXACT:
        x -= _OFFSET + _CENTRE
    return x


@triton.jit
def _load_rows(table, ids, mask, kv_head, SPEC: tl.constexpr):
    """Both halves of the rows, words [N, D / 8], their scales and their biases [N]: 0 where mask or id say so."""
    STRIDE: tl.constexpr = SPEC.num_kv_heads * SPEC.head_dim
    WORDS: tl.constexpr = SPEC.head_dim // 4
    HALF: tl.constexpr = SPEC.block_d // 8
    mask = mask & (ids >= 0)
    row = table + ids.to(tl.int64) * (STRIDE + QUANTIZED_TAIL)
    cols = tl.arange(0, HALF)
    words = row.to(tl.pointer_type(tl.uint32), bitcast=True)[:, None] + kv_head * WORDS + cols[None, :]
    keep = mask[:, None]
    keep_second = keep
    if SPEC.head_dim != 8 * HALF:
        keep = keep & (cols < WORDS)[None, :]
        keep_second = keep_second & (cols + HALF < WORDS)[None, :]
    first = tl.load(words, mask=keep, other=0)
    second = tl.load(words + HALF, mask=keep_second, other=0)
    tail = (row + STRIDE).to(tl.pointer_type(tl.float32), bitcast=True)
    return first, second, tl.load(tail, mask=mask, other=0.0), tl.load(tail + 1, mask=mask, other=0.0)


@triton.jit
def _fold(x, SPEC: tl.constexpr):
    """[ROWS, D / 2]: sums over the rows [N, D / 2] that one thread holds."""
    HALF: tl.constexpr = SPEC.block_d // 2
    ROWS: tl.constexpr = min(SPEC.block_n, max(256 // HALF, 1))
    return tl.sum(tl.reshape(x, (SPEC.block_n // ROWS, ROWS, HALF)), 0)


@triton.jit
def _load_query(ptr, mask, SPEC: tl.constexpr):
    """The halves of a query row."""
    HALF: tl.constexpr = SPEC.block_d // 2
    cols = tl.arange(0, HALF)
    return (
        tl.load(ptr + cols, mask=mask & (cols < SPEC.head_dim), other=0.0),
        tl.load(ptr + cols + HALF, mask=mask & (cols + HALF < SPEC.head_dim), other=0.0),
    )


@triton.jit
def _attend(q, rows, bias, value_scale, state, scale, EXACT: tl.constexpr, SPEC: tl.constexpr):
    """The running maximum (base 2), sums by row of the tile and weighted sums of numbers after a tile of rows."""
    q_first, q_second, q_sum = q
    first, second, row_scale, row_bias = rows
    maximum, total, shift, acc_first, acc_second = state
    first, second = _numbers(first, EXACT), _numbers(second, EXACT)
    row_bias += row_scale * (_CENTRE if EXACT else -_OFFSET)
    products = tl.sum(first * q_first[None, :] + second * q_second[None, :], 1)
    s = (row_scale * products + row_bias * q_sum) * (scale * LOG2E) + bias
    new_maximum = tl.maximum(maximum, tl.max(s, 0))
    base = reference_of(new_maximum)
    p = tl.exp2(s - base)
    factor = tl.exp2(maximum - base)
    total = total * factor + p
    if SPEC.has_value_scale:
        p = p * value_scale
    shift = shift * factor + p * row_bias
    p = (p * row_scale)[:, None]
    acc_first = acc_first * factor + _fold(p * first, SPEC)
    acc_second = acc_second * factor + _fold(p * second, SPEC)
    return new_maximum, total, shift, acc_first, acc_second


@triton.jit
def _nothing(SPEC: tl.constexpr):
    """The state before the first row."""
    HALF: tl.constexpr = SPEC.block_d // 2
    ROWS: tl.constexpr = min(SPEC.block_n, max(256 // HALF, 1))
    sums = tl.zeros((SPEC.block_n,), tl.float32)
    acc = tl.zeros((ROWS, HALF), tl.float32)
    return tl.full((), -float("inf"), tl.float32), sums, sums, acc, acc


@triton.jit
def _store_halves(ptr, first, second, SPEC: tl.constexpr):
    HALF: tl.constexpr = SPEC.block_d // 2
    cols = tl.arange(0, HALF)
    tl.store(ptr + cols, first.to(ptr.dtype.element_ty), mask=cols < SPEC.head_dim)
    tl.store(ptr + cols + HALF, second.to(ptr.dtype.element_ty), mask=cols + HALF < SPEC.head_dim)


@triton.jit
def _query_sum(first, second):
    return tl.sum(first.to(tl.float32), 0) + tl.sum(second.to(tl.float32), 0)


@triton.jit(do_not_specialize=["batch", "sample_rows", "chunk", "table_rows"], do_not_specialize_on_alignment=EVENTS)
def target_attention_numbers_fwd_kernel(
    q_ptr,
    table,
    bias_ptr,
    offsets_ptr,
    bias_index_ptr,
    value_scale_ptr,
    index_0,
    outputs,
    batch,
    sample_rows,
    chunk,
    table_rows,
    scale,
    SPEC: tl.constexpr,
):
    """A program per query row of a sample and stream-K range."""
    D: tl.constexpr = SPEC.head_dim
    HEADS: tl.constexpr = SPEC.num_kv_heads * SPEC.qheads_per_kvhead
    EXACT: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    out_ptr, lse_ptr, partial_ptr = outputs
    query_row, program = tl.program_id(0), tl.program_id(1)
    head = query_row % HEADS
    start = program.to(tl.int64) * chunk
    end = start + chunk
    at = tl.arange(0, SPEC.block_n)
    kv_head = head // SPEC.qheads_per_kvhead
    rows_64 = sample_rows.to(tl.int64)
    partial_lse_ptr, split_ptr = behind_partials(partial_ptr, tl.num_programs(1), sample_rows, D)
    q_ptr += query_row * D
    split = tl.full((), -1, tl.int64)
    maximum, total, shift, acc_first, acc_second = _nothing(SPEC)
    sample, low, high, n, tiles = find_range(offsets_ptr, batch, start, end, SPEC.block_n)
    q_first, q_second = _load_query(q_ptr + sample * rows_64 * D, sample < batch, SPEC)
    q_sum = _query_sum(q_first, q_second)
    events = tl.load(offsets_ptr + batch).to(tl.int64)
    # The first tile and the ids of the second.
    after = tl.load(offsets_ptr + sample + 2, mask=sample + 1 < batch, other=0).to(tl.int64)
    last = end_row(sample, high, end)
    ids = tl.load(index_0 + n + at, mask=at < last - n, other=-1)
    first, second, row_scale, row_bias = _load_rows(table, ids, at < last - n, kv_head, SPEC)
    next_n = tl.where(last - n <= SPEC.block_n, high, n + SPEC.block_n)
    ids = tl.load(index_0 + next_n + at, mask=next_n + at < events, other=-1)
    for _ in range(tiles):
        left = (last - n).to(tl.int32)
        mask = at < left
        done = left <= SPEC.block_n
        # The next tile, the ids of the one after it, and what is needed when this sample ends.
        next_sample = sample + done.to(tl.int64)
        next_low = tl.where(done, high, low)
        next_high = tl.where(done, after, high)
        next_last = end_row(next_sample, next_high, end)
        next_left = (next_last - next_n).to(tl.int32)
        next_first, next_second, next_scale, next_bias = _load_rows(table, ids, at < next_left, kv_head, SPEC)
        after_n = tl.where(next_left <= SPEC.block_n, next_high, next_n + SPEC.block_n)
        ids = tl.load(index_0 + after_n + at, mask=after_n + at < events, other=-1)
        after = tl.load(offsets_ptr + next_sample + 2, mask=next_sample + 1 < batch, other=0).to(tl.int64)
        new_first, new_second = _load_query(q_ptr + (sample + 1) * rows_64 * D, sample + 1 < batch, SPEC)
        if SPEC.has_bias:
            index = load_bias_index(bias_index_ptr, n, at, mask, SPEC)
            own = bias_ptr if SPEC.bias_by_index else bias_ptr + n * HEADS
            is_row = mask & (index >= 0) & (index < table_rows) if SPEC.bias_by_index else mask
            bias = tl.load(own + index.to(tl.int32) * HEADS + head, mask=is_row, other=0.0).to(tl.float32) * LOG2E
            bias = tl.where(mask, bias, -float("inf"))
        else:
            bias = tl.where(mask, 0.0, -float("inf"))
        value_scale = load_value_scale(value_scale_ptr, n, at, mask, SPEC)
        rows = (first, second, row_scale, row_bias)
        state = (maximum, total, shift, acc_first, acc_second)
        q = (q_first.to(tl.float32), q_second.to(tl.float32), q_sum)
        maximum, total, shift, acc_first, acc_second = _attend(q, rows, bias, value_scale, state, scale, EXACT, SPEC)
        if done:
            whole = tl.sum(total, 0)
            lse = log_sum_exp(maximum, whole)
            moved = tl.sum(shift, 0)
            out_first = (tl.sum(acc_first, 0) + moved) / nonzero(whole)
            out_second = (tl.sum(acc_second, 0) + moved) / nonzero(whole)
            begins = low + sample * WEIGHT >= start
            if begins & (last == high):
                place = sample * rows_64 + query_row
                _store_halves(out_ptr + place * D, out_first, out_second, SPEC)
                tl.store(lse_ptr + place, lse)
            else:
                place = (2 * program + begins.to(tl.int32)) * rows_64 + query_row
                _store_halves(partial_ptr + place * D, out_first, out_second, SPEC)
                tl.store(partial_lse_ptr + place, lse)
            split = tl.where(begins & (last < high), sample, split)
            maximum, total, shift, acc_first, acc_second = _nothing(SPEC)
            q_first, q_second = new_first, new_second
            q_sum = _query_sum(q_first, q_second)
        sample, low, high, last, n = next_sample, next_low, next_high, next_last, next_n
        next_n = after_n
        first, second, row_scale, row_bias = next_first, next_second, next_scale, next_bias
    tl.store(split_ptr + program, split.to(tl.int32))


@cached
def _launcher(problem: AttentionProblem, kernel: KernelPlan) -> Launcher:
    spec = AttentionSpec.of(problem, kernel.block_m, kernel.block_n)
    return Launcher(target_attention_numbers_fwd_kernel, SPEC=spec, **kernel.constants)


def forward(x: TargetAttentionInputs, chosen: AttentionPlan, out: Tensor, lse: Tensor) -> None:
    """Fill in the output [B, T, H, D] and the log-sum-exp of the scores [B, T, H], -inf for an empty history."""
    batch, num_queries, num_heads, width = x.query.shape
    problem, kernel = chosen.problem, chosen.forward[0]
    sample_rows = num_queries * num_heads
    chunk, programs = plan.stream_k(x.key.shape[0], batch, problem.device.num_sms, kernel.programs_per_sm)
    partials = RangePartials(programs, chunk, sample_rows, width, x.query.device)
    events = (x.bias, x.offsets, x.bias_index, x.value_scale, x.indices[0])
    tensors = (x.query, x.tables[0], *events, (out, lse, partials.memory))
    table_rows = x.bias.shape[0] if problem.bias_by_index else 0
    numbers = (batch, sample_rows, chunk, table_rows, x.scale)
    _launcher(problem, kernel)((sample_rows, programs, 1), tensors, numbers)
    partials.combine(x.offsets, out, lse)
