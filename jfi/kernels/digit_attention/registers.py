"""Digits as operands of tensor cores, decoded from the registers that their words were loaded into (Gluon).

A digit of 2 bits in two's complement is a floating number once it is at bits 15 and 14: the sign and the highest bit of
the exponent, so 0b01 is 2.0, 0b11 is -2.0 and 0b00 is 0.0, in bfloat16 as in float16.  A register holds units of two
neighbours of 16 bits; a shift and a mask make two operands' elements of it.

    mma m16n8k16, B [K, N]: thread 4 g + j holds rows 2j, 2j + 1, 2j + 8, 2j + 9 of column g

Scores take digits along K and events along N, weighted sums events along K and digits along N.  The order of digits is
free, so column c of a decoded tile is digit c // 8 of unit c % 8: then the threads of either product hold whole
units, which they load themselves, and no element changes its thread or its register.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from jfi.kernels.common import online_softmax
from jfi.kernels.common.stream_k import WEIGHT

reference_of = gluon.jit(online_softmax.reference_of.fn)
log_sum_exp = gluon.jit(online_softmax.log_sum_exp.fn)
nonzero = gluon.jit(online_softmax.nonzero.fn)
hide_empty = gluon.jit(online_softmax.hide_empty.fn)

#: What a bias of -inf becomes as an operand, and scores (base 2) below which an event is hidden.
LOWEST, LOWEST_SCORE = gl.constexpr(2.0**100), gl.constexpr(2.0**60)
#: The value of a decoded digit 1.
UNIT = gl.constexpr(2.0)
#: Layout of tiles of query rows by events or digits; a program is one warp.
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA, 2))
ROWS = gl.constexpr(gl.SliceLayout(1, MMA))
COLS = gl.constexpr(gl.SliceLayout(0, MMA))
#: Parameters with a number per event, which may begin anywhere.
EVENTS = ["bias_index_ptr", "value_scale_ptr"]
_LINE = gl.constexpr(gl.BlockedLayout([4], [32], [1], [0]))


def _asm(digits: int, first: int) -> str:
    """Returns assembly that decodes a register of two units, each ``first`` bits below the top of its half."""
    shifts = [first + 2 * (digits - 1 - i) for i in range(digits)]
    lines = [f"shl.b32 t, ${digits}, {shift}; and.b32 ${i}, t, 0xC000C000;" for i, shift in enumerate(shifts)]
    return "{ .reg .b32 t; " + " ".join(lines) + " }"


_ASM_8, _ASM_4 = gl.constexpr(_asm(8, 0)), gl.constexpr(_asm(4, 8))
_CONSTRAINTS_8, _CONSTRAINTS_4 = gl.constexpr("=r," * 8 + "r"), gl.constexpr("=r," * 4 + "r")
_OUTPUTS_8, _OUTPUTS_4 = gl.constexpr((gl.int16,) * 8), gl.constexpr((gl.int16,) * 4)


@gluon.constexpr_function
def units_of(num_words):
    """Units of an event: bytes of up to 2 words, else half words, 8 times a power of two."""
    return 8 if num_words <= 4 else 16


@gluon.constexpr_function
def digits_of_unit(num_words):
    return 4 if num_words <= 2 else 8


@gluon.constexpr_function
def unit_layout(block_n, units, along_k):
    """Layout of units [N, units] from which decoded digits are the right operand of scores, or of weighted sums.

    Along K a unit here is a pair of neighbours.
    """
    events = [[1 << i, 0] for i in range(block_n.bit_length() - 1)]
    blocks = [[0, 1 << i] for i in range(2 if along_k else 3, units.bit_length() - 1)]
    if along_k:
        registers, lanes = [*events[3:], *blocks], [[0, 1], [0, 2], *events[:3]]
    else:
        registers, lanes = [[1, 0], *events[3:], *blocks], [*events[1:3], [0, 1], [0, 2], [0, 4]]
    return gl.DistributedLinearLayout(registers, lanes, [], [], [block_n, units])


@gluon.constexpr_function
def row_layout(units, digits):
    """Layout of query rows [M, units, digits], digits as they lie in memory, that `by_column` takes to tensor cores."""
    digit = [[0, 0, 1 << i] for i in range(digits.bit_length() - 1)]
    blocks = [[0, 1 << i, 0] for i in range(3, units.bit_length() - 1)]
    lanes = [[0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout([*digit, [0, 1, 0], *blocks, [8, 0, 0]], lanes, [], [], [16, units, digits])


@gluon.jit
def load_units(words_ptr, n, left, ALONG_K: gl.constexpr, MASKED: gl.constexpr, SPEC: gl.constexpr):
    """Loads [N, units] of the events from n on, along K [N, pairs of units]; if MASKED, 0 from ``left`` events on."""
    UNITS: gl.constexpr = units_of(SPEC.num_words) // (2 if ALONG_K else 1)
    BITS: gl.constexpr = 2 * digits_of_unit(SPEC.num_words) * (2 if ALONG_K else 1)
    LAYOUT: gl.constexpr = unit_layout(SPEC.block_n, UNITS, ALONG_K)
    STRIDE: gl.constexpr = SPEC.num_words * 32 // BITS
    dtype: gl.constexpr = gl.uint32 if BITS == 32 else gl.uint16 if BITS == 16 else gl.uint8
    at = gl.arange(0, SPEC.block_n, layout=gl.SliceLayout(1, LAYOUT))
    unit = gl.arange(0, UNITS, layout=gl.SliceLayout(0, LAYOUT))
    ptr = words_ptr.to(gl.pointer_type(dtype), bitcast=True)
    mask = (at < left)[:, None]
    ptr += n * STRIDE
    where = (at * STRIDE)[:, None] + unit[None, :]
    if STRIDE < UNITS:
        keep = (unit < STRIDE)[None, :] & (at >= 0)[:, None]
        return gl.load(ptr + where, mask=keep & mask if MASKED else keep, other=0)
    elif MASKED:
        return gl.load(ptr + where, mask=mask & (unit >= 0)[None, :], other=0)
    else:
        return gl.load(ptr + where)


@gluon.jit
def narrow_index(index):
    """Returns an index in 32 bits, negative, and so outside of every table, where it does not fit them."""
    if index.dtype == gl.int64:
        index = gl.where((index >> 32).to(gl.int32) == 0, index.to(gl.int32), -1)
    return index


@gluon.jit
def load_events(events, n, SPEC: gl.constexpr):
    """The units of the events from n on as scores and as weighted sums take them, of any samples; 0 behind the last.

    With block_r the rows of the table of biases [N] too, else a number that nobody reads.

    events: (pointer to the words, pointer to the rows of the table of biases, how many events).
    """
    words_ptr, bias_index_ptr, num_events = events
    table_row = n.to(gl.int32)
    if SPEC.block_r > 0:
        at = gl.arange(0, SPEC.block_n, layout=gl.SliceLayout(0, RIGHT))
        table_row = narrow_index(gl.load(bias_index_ptr + n + at, mask=at < num_events - n, other=0))
    if n + SPEC.block_n <= num_events:
        along_k = load_units(words_ptr, n, SPEC.block_n, True, False, SPEC)
        along_n = load_units(words_ptr, n, SPEC.block_n, False, False, SPEC)
    else:
        left = (num_events - n).to(gl.int32)
        along_k = load_units(words_ptr, n, left, True, True, SPEC)
        along_n = load_units(words_ptr, n, left, False, True, SPEC)
    return along_k, along_n, table_row


@gluon.jit
def _halves(x):
    """Two units from one of twice the size: [N, units] int16 of [N, units / 2]."""
    BITS: gl.constexpr = x.dtype.primitive_bitwidth // 2
    low, high = x.to(gl.int16), (x >> BITS).to(gl.int16)
    return gl.join(low, high).reshape([x.shape[0], 2 * x.shape[1]])


@gluon.jit
def decode(x, dtype: gl.constexpr, SPEC: gl.constexpr):
    """Returns [N, columns] of -UNIT, 0 and UNIT, of units [N, units]."""
    N: gl.constexpr = x.shape[0]
    BLOCKS: gl.constexpr = x.shape[1] // 8
    if digits_of_unit(SPEC.num_words) == 8:
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(_ASM_8, _CONSTRAINTS_8, [x], _OUTPUTS_8, True, 2)
        # New dimensions are last: digit = 4 i + 2 j + k.
        y = gl.join(gl.join(gl.join(a, e), gl.join(c, g)), gl.join(gl.join(b, f), gl.join(d, h)))
        y = y.reshape([N, BLOCKS, 8, 2, 2, 2]).permute([0, 1, 3, 4, 5, 2])
        return y.reshape([N, BLOCKS * 64]).to(dtype, bitcast=True)
    else:
        a, b, c, d = gl.inline_asm_elementwise(_ASM_4, _CONSTRAINTS_4, [x], _OUTPUTS_4, True, 2)
        y = gl.join(gl.join(a, c), gl.join(b, d))
        y = y.reshape([N, BLOCKS, 8, 2, 2]).permute([0, 1, 3, 4, 2])
        return y.reshape([N, BLOCKS * 32]).to(dtype, bitcast=True)


@gluon.jit
def keys_of(along_k, dtype: gl.constexpr, SPEC: gl.constexpr):
    """Right operand [columns, N] of the scores."""
    return gl.convert_layout(decode(_halves(along_k), dtype, SPEC).permute([1, 0]), RIGHT, assert_trivial=True)


@gluon.jit
def values_of(along_n, dtype: gl.constexpr, SPEC: gl.constexpr):
    """Right operand [N, columns] of the weighted sums."""
    return gl.convert_layout(decode(along_n.to(gl.int16), dtype, SPEC), RIGHT, assert_trivial=True)


@gluon.jit
def _rows(num_rows, SPEC: gl.constexpr):
    """Returns (where query rows [M, units, digits] lie from a tile's first, which of them are there)."""
    UNITS: gl.constexpr = units_of(SPEC.num_words)
    DIGITS: gl.constexpr = digits_of_unit(SPEC.num_words)
    LAYOUT: gl.constexpr = row_layout(UNITS, DIGITS)
    row = gl.arange(0, SPEC.block_m, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    unit = gl.arange(0, UNITS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    digit = gl.arange(0, DIGITS, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    at = unit * DIGITS + digit
    keep = (row < num_rows) & (at >= 0)
    if SPEC.head_dim < UNITS * DIGITS:
        keep = keep & (at < SPEC.head_dim)
    return row * SPEC.head_dim + at, keep


@gluon.jit
def load_rows(base, num_rows, SPEC: gl.constexpr):
    """Loads [M, units, digits]: the first ``num_rows`` query rows from a base pointer, 0 where there is none."""
    at, keep = _rows(num_rows, SPEC)
    return gl.load(base + at, mask=keep, other=0.0)


@gluon.jit
def by_column(x):
    """Left operand [M, columns] of the scores, of query rows [M, units, digits]."""
    UNITS: gl.constexpr = x.shape[1]
    DIGITS: gl.constexpr = x.shape[2]
    y = x.reshape([16, UNITS // 8, 8, DIGITS]).permute([0, 1, 3, 2]).reshape([16, UNITS * DIGITS])
    return gl.convert_layout(y, LEFT, assert_trivial=True)


@gluon.jit
def store_sums(base, x, num_rows, SPEC: gl.constexpr):
    """Store weighted sums of digits [M, columns]."""
    UNITS: gl.constexpr = units_of(SPEC.num_words)
    DIGITS: gl.constexpr = digits_of_unit(SPEC.num_words)
    y = x.reshape([16, UNITS // 8, DIGITS, 8]).permute([0, 1, 3, 2]).reshape([16, UNITS, DIGITS])
    y = gl.convert_layout(y, row_layout(UNITS, DIGITS), assert_trivial=True)
    at, keep = _rows(num_rows, SPEC)
    gl.store(base + at, y.to(base.dtype.element_ty), mask=keep)


@gluon.jit
def load_table(bias_ptr, first_row, table_rows, factor, SPEC: gl.constexpr):
    """A table of biases as left operands [M, block_r], by query row: times ``factor``, in two parts of bfloat16.

    A product with 0 must be 0, so -inf is a finite number; `hide_lowest` makes it -inf again.
    """
    row = gl.arange(0, SPEC.block_m, layout=gl.SliceLayout(1, LEFT))
    table_row = gl.arange(0, SPEC.block_r, layout=gl.SliceLayout(0, LEFT))
    where = (table_row * SPEC.qheads_per_kvhead)[None, :] + ((first_row + row) % SPEC.qheads_per_kvhead)[:, None]
    keep = (table_row < table_rows)[None, :] & (row >= 0)[:, None]
    table = gl.load(bias_ptr + where, mask=keep, other=0.0).to(gl.float32) * factor
    table = gl.where(table < -LOWEST, -LOWEST, table)  # NaN stays
    high = table.to(gl.bfloat16)
    return high, (table - high.to(gl.float32)).to(gl.bfloat16)


@gluon.jit
def table_scores(table, table_row, SPEC: gl.constexpr):
    """[M, N]: each event's bias, products of the table with columns that are 1 at the event's row and 0 elsewhere.

    An event whose row is outside of the table has no such column, and a bias of 0.
    """
    high, low = table
    row = gl.arange(0, SPEC.block_r, layout=gl.SliceLayout(1, RIGHT))
    table_row = gl.minimum(table_row.to(gl.uint32, bitcast=True), SPEC.block_r).to(gl.int32, bitcast=True)
    # 1.0 in bfloat16, shifted to its half of a register of two neighbours, or out of it: shifts are clamped.
    shift = (table_row[None, :] - (row & -2)[:, None]) * 16
    ones = gl.inline_asm_elementwise("shl.b32 $0, 0x3F80, $1;", "=r,r,r", [shift], gl.int16, True, 2)
    ones = ones.to(gl.bfloat16, bitcast=True)
    s = mma_v2(low, ones, gl.zeros([SPEC.block_m, SPEC.block_n], gl.float32, MMA))
    return mma_v2(high, ones, s)


@gluon.jit
def hide_lowest(maximum):
    """A maximum (base 2) of hidden events alone as -inf: `log_sum_exp` and sums are then those of no event."""
    return gl.where(maximum < -LOWEST_SCORE, -float("inf"), maximum)


@gluon.jit
def load_bias(bias_ptrs, n, left, rows, SPEC: gl.constexpr):
    """Loads [M, N]: each event's bias for each query row's head, -inf from ``left`` events on.

    If by index 0 where the index is outside of the table.
    """
    bias_ptr, bias_index_ptr, table_rows = bias_ptrs
    first_row, num_rows = rows
    row = gl.arange(0, SPEC.block_m, layout=ROWS)
    at = gl.arange(0, SPEC.block_n, layout=COLS)
    event = n + at.to(gl.int64)
    is_row = at < left
    if SPEC.bias_by_index:
        event = gl.load(bias_index_ptr + event, mask=at < left, other=0).to(gl.int64)
        is_row = is_row & (event >= 0) & (event < table_rows)
    where = (event * SPEC.qheads_per_kvhead)[None, :] + ((first_row + row) % SPEC.qheads_per_kvhead)[:, None]
    keep = is_row[None, :] & (row < num_rows)[:, None]
    bias = gl.load(bias_ptr + where, mask=keep, other=0.0).to(gl.float32)
    return gl.where((at < left)[None, :], bias, -float("inf"))


@gluon.jit
def load_scale(value_scale_ptr, n, left, SPEC: gl.constexpr):
    """Loads [1, N]: the factor of each event's value."""
    at = gl.arange(0, SPEC.block_n, layout=COLS)
    return gl.load(value_scale_ptr + n + at, mask=at < left, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def find_range(offsets_ptr, batch, start):
    """(sample, its first row, its end row, first row in the range) where a range begins: as `stream_k.find_range`."""
    low = start * 0
    high = low + batch
    lane = gl.arange(0, 128, layout=_LINE)
    while high - low > 1:
        step = (high - low + 127) // 128
        at = low + lane * step
        position = gl.load(offsets_ptr + at, mask=at < high, other=0).to(gl.int64) + at * WEIGHT
        below = (position <= start) & (at < high)
        low += (gl.maximum(gl.sum(below.to(gl.int32), 0), 1) - 1) * step
        high = gl.minimum(low + step, high)
    sample = low
    row = gl.load(offsets_ptr + sample).to(gl.int64)
    end = gl.load(offsets_ptr + sample + 1).to(gl.int64)
    position = row + sample * WEIGHT
    is_over = (position < start) & (position + end - row <= start)
    sample += is_over.to(gl.int64)
    row = gl.load(offsets_ptr + sample, mask=sample < batch, other=0).to(gl.int64)
    end = gl.load(offsets_ptr + sample + 1, mask=sample < batch, other=0).to(gl.int64)
    return sample, row, end, row + gl.maximum(start - row - sample * WEIGHT, 0)
