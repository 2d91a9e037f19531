"""Helpers of all kernels: they find a program's sample, and load and store tiles under a mask."""

import triton
import triton.language as tl
from triton import knobs

#: Triton's interpreter multiplies bfloat16 wrongly, so kernels convert half precision to float32 as they load it there.
INTERPRET = tl.constexpr(bool(knobs.runtime.interpret))

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def find_sample(offsets_ptr, batch, position, DIVISOR: tl.constexpr, weight, NEAR: tl.constexpr = 1):
    """The last sample b with offsets[b] // DIVISOR + b * weight <= position, or one at most NEAR - 1 before it.

    The sum grows with b, so every sample, even an empty one, owns a range of positions.  The host knows the number of
    positions from those of rows and samples, so it assigns positions to programs without a device-to-host copy.
    """
    FAN: tl.constexpr = 128
    low = tl.zeros((), tl.int64)
    high = low + batch
    while high - low > NEAR:
        step = (high - low + FAN - 1) // FAN
        at = low + tl.arange(0, FAN) * step
        starts = tl.load(offsets_ptr + at, mask=at < high, other=0).to(tl.int64)
        below = (starts // DIVISOR + at * weight <= position) & (at < high)
        low += (tl.maximum(tl.sum(below.to(tl.int32), 0), 1) - 1) * step
        high = tl.minimum(low + step, high)
    return low


@triton.jit
def find_tile(offsets_ptr, batch, tile, BLOCK: tl.constexpr):
    """Returns (sample, first row, end row) of a tile number; sample b owns the numbers from offsets[b] // BLOCK + b on.

    A number without a tile gets a first row >= the end row.
    """
    sample = find_sample(offsets_ptr, batch, tile, BLOCK, 1)
    low = tl.load(offsets_ptr + sample).to(tl.int64)
    high = tl.load(offsets_ptr + sample + 1).to(tl.int64)
    return sample, low + (tile - low // BLOCK - sample) * BLOCK, high


def max_tiles(rows: int, batch: int, block: int) -> int:
    """Returns an upper bound of the tile numbers that ``find_tile`` takes, from sizes that the host knows."""
    return rows // block + batch


@triton.jit
def widen(x):
    """Convert half precision to float32 under the interpreter; do nothing on a GPU."""
    if INTERPRET and x.dtype.primitive_bitwidth == 16:
        x = x.to(tl.float32)
    return x


@triton.jit
def load_tile(ptr, rows, row_mask, stride, cols, WIDTH: tl.constexpr):
    """Load [rows, cols] of a row-major matrix; rows outside the mask and columns from WIDTH on are 0."""
    mask = row_mask[:, None] & (cols < WIDTH)[None, :]
    return widen(tl.load(ptr + rows.to(tl.int64)[:, None] * stride + cols[None, :], mask=mask, other=0.0))


@triton.jit
def store_tile(ptr, x, rows, row_mask, stride, cols, WIDTH: tl.constexpr):
    mask = row_mask[:, None] & (cols < WIDTH)[None, :]
    tl.store(ptr + rows.to(tl.int64)[:, None] * stride + cols[None, :], x.to(ptr.dtype.element_ty), mask=mask)
