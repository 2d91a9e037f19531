"""Loading and storing tiles of rows, and where the query rows of a key head lie."""

import triton
import triton.language as tl

from jfi.kernels.common.online_softmax import hide_empty
from jfi.kernels.common.primitives import LOG2E, widen

#: Elements of a tile, and warps, of kernels that copy or add rows.
COPY_ELEMENTS, COPY_WARPS = 2048, 4


@triton.jit
def query_rows(at, kv_head, SPEC: tl.constexpr):
    """Returns where the query rows ``at`` of a key head lie among a sample's [T · H] rows."""
    QHEADS_PER_KVHEAD: tl.constexpr = SPEC.qheads_per_kvhead
    NUM_HEADS: tl.constexpr = SPEC.num_kv_heads * QHEADS_PER_KVHEAD
    return at // QHEADS_PER_KVHEAD * NUM_HEADS + kv_head * QHEADS_PER_KVHEAD + at % QHEADS_PER_KVHEAD


@triton.jit
def tile_mask(mask, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    keep = mask[:, None]
    if BLOCK_D != WIDTH:
        keep = keep & (tl.arange(0, BLOCK_D) < WIDTH)[None, :]
    return keep


@triton.jit
def load_columns(base, at, cols, mask, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """Loads [rows, D] at rows ``at`` from a base pointer: of 32 bits in a loop, which then moves the base alone.

    Rows outside the mask and columns from WIDTH on are 0; column i is ``cols[i]`` elements after a row's first.
    """
    return widen(tl.load(base + at[:, None] * STRIDE + cols[None, :], mask=tile_mask(mask, WIDTH, BLOCK_D), other=0.0))


@triton.jit
def load_rows(base, at, mask, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """``load_columns`` of adjacent columns."""
    return load_columns(base, at, tl.arange(0, BLOCK_D), mask, STRIDE, WIDTH, BLOCK_D)


@triton.jit
def load_digits(digits_ptr, row, mask, dtype, L: tl.constexpr, W: tl.constexpr, BLOCK_L: tl.constexpr):
    """Loads [N, L] in dtype: the packed digits of rows [N] int64, 0 outside the mask and from L on.

    A digit of 2 bits in two's complement is a number once it is at the left end: the sign and the highest bit of the
    exponent, so that 0b01 is 2.0 and 0b11 is -2.0, in float32 and in both half precisions.
    """
    WORDS: tl.constexpr = BLOCK_L // 16
    at = tl.arange(0, WORDS)
    keep = mask[:, None] & (at < W)[None, :]
    word = tl.load(digits_ptr + row[:, None] * W + at[None, :], mask=keep, other=0)
    if L % 16:  # bits behind the last digit are not read
        behind = tl.full((), -1, tl.int32) << (L % 16 * 2)
        word = tl.where(at[None, :] == W - 1, word & ~behind, word)
    bits = (word[:, :, None] << (30 - tl.arange(0, 16) * 2)[None, None, :]) & -1073741824  # 0xC0000000
    bits = tl.reshape(bits, (row.shape[0], BLOCK_L))
    if dtype == tl.float32:
        return bits.to(tl.float32, bitcast=True) * 0.5
    else:
        return widen((bits >> 16).to(tl.int16).to(dtype, bitcast=True)) * 0.5


@triton.jit
def store_columns(base, x, at, cols, mask, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    to = base + at[:, None] * STRIDE + cols[None, :]
    tl.store(to, x.to(base.dtype.element_ty), mask=tile_mask(mask, WIDTH, BLOCK_D))


@triton.jit
def store_rows(base, x, at, mask, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    store_columns(base, x, at, tl.arange(0, BLOCK_D), mask, STRIDE, WIDTH, BLOCK_D)


@triton.jit
def load_head(ptr, n, at, mask, kv_head, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, SPEC: tl.constexpr):
    """Loads [N, D] of a key head's rows from n on, in [rows, G, width]."""
    STRIDE: tl.constexpr = SPEC.num_kv_heads * WIDTH
    return load_rows(ptr + n * STRIDE + kv_head * WIDTH, at, mask, STRIDE, WIDTH, BLOCK_D)


@triton.jit
def store_head(ptr, x, n, at, mask, kv_head, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, SPEC: tl.constexpr):
    STRIDE: tl.constexpr = SPEC.num_kv_heads * WIDTH
    store_rows(ptr + n * STRIDE + kv_head * WIDTH, x, at, mask, STRIDE, WIDTH, BLOCK_D)


@triton.jit
def load_bias_tile(bias_ptr, n, key_at, mask, row, kv_head, SPEC: tl.constexpr):
    """Loads [1, N] or [M, N], in base 2: the bias of the keys from row n on by query row, -inf outside the mask."""
    NUM_HEADS: tl.constexpr = SPEC.num_kv_heads * SPEC.qheads_per_kvhead
    keys = key_at * NUM_HEADS + kv_head * SPEC.qheads_per_kvhead
    if SPEC.qheads_per_kvhead == 1:
        at, keep = keys[None, :], mask[None, :]
    else:
        at = keys[None, :] + (row % SPEC.qheads_per_kvhead)[:, None]
        keep = tl.broadcast_to(mask[None, :], at.shape)
    bias = tl.load(bias_ptr + n * NUM_HEADS + at, mask=keep, other=-float("inf"))
    return bias.to(tl.float32) * LOG2E


@triton.jit
def row_products(x, y):
    """Σ x · y along each row, in float32.

    Threads that hold the same row must agree on its sum to the bit.  A product that the compiler fused with the first
    sum across threads would be rounded by one of two partners and not by the other, so it is fused with 0 before.
    """
    return tl.sum(tl.fma(x.to(tl.float32), y.to(tl.float32), tl.zeros(x.shape, tl.float32)), 1)


@triton.jit
def load_statistics(grad, out_ptr, lse_ptr, at, mask, SPEC: tl.constexpr):
    """The natural log-sum-exp, +inf for an empty row, and Δ = Σ dO · O, by query row."""
    out = load_rows(out_ptr, at, mask, SPEC.value_dim, SPEC.value_dim, SPEC.block_e)
    lse = tl.load(lse_ptr + at, mask=mask, other=float("inf"))
    return hide_empty(lse), row_products(grad, out)
