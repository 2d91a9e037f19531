"""Stochastic rounding of the new rows of tables in half precision: `jfi.tables.step_rows.round_stochastically`.

All columns of a row share one hash, which is multiplied by an odd number for each: few instructions for an element.
"""

import triton
import triton.language as tl

from jfi.utils.operands import FLOAT16_TINY, ROW_FACTOR

_ROW_FACTOR, _TINY, _TINY_BITS = map(tl.constexpr, (ROW_FACTOR, FLOAT16_TINY, 0x38800000))


@triton.jit
def _mix(x):
    """Returns a hash of uint32, the one of `jfi.tables.step_rows`."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def rounding_keys(step_ptr, cols, SPEC: tl.constexpr):
    """Returns the hash of the step, and an odd number for each column; zeros without stochastic rounding."""
    step_key, columns = 0, 0
    if SPEC.num_seeds > 0:
        step_key = _mix(tl.load(step_ptr).to(tl.uint32))
        columns = _mix((2 * cols + 1).to(tl.uint32)) | 1
    return step_key, columns


@triton.jit
def round_to(dtype: tl.constexpr, x, row, keys, SPEC: tl.constexpr):
    """Returns new rows x [rows, BLOCK_D] in the dtype of the tables, stochastically rounded if they have seeds."""
    if SPEC.num_seeds > 0:
        SEEDS: tl.constexpr = SPEC.seeds
        FIRSTS: tl.constexpr = SPEC.seed_firsts
        SHIFT: tl.constexpr = 16 if dtype == tl.bfloat16 else 19
        step_key, columns = keys
        seed = tl.full(row.shape, SEEDS[0], tl.uint32)
        for i in tl.static_range(1, SPEC.num_seeds):
            seed = tl.where(row >= FIRSTS[i], tl.full(row.shape, SEEDS[i], tl.uint32), seed)
        random = _mix((row.to(tl.uint32) * _ROW_FACTOR + seed) ^ step_key)[:, None] * columns[None, :]
        x = x.to(tl.float32)
        bits = x.to(tl.int32, bitcast=True)
        if dtype == tl.float16:
            tiny = (bits & -(2**31)) | _TINY_BITS
            offset = tl.where(tl.abs(x) < _TINY, tiny.to(tl.float32, bitcast=True), 0.0)
            bits = (x + offset).to(tl.int32, bitcast=True)
        # The minimum keeps NaN, whose bits are 0x7FFFFFFF on a GPU, from overflowing into a number.
        bits = tl.minimum(bits, 0x7FFF0000) + (random >> SHIFT).to(tl.int32)
        x = (bits & -(1 << (32 - SHIFT))).to(tl.float32, bitcast=True)
        if dtype == tl.float16:
            x -= offset
    return x.to(dtype)
