"""[Σ L·M], [R, D] -> [S, D], each sample's block times its y: one program a tile of output rows, sweeping over y.

Transposed, the same blocks are read down their columns: [Σ L·M], [S, D] -> [R, D], the gradient of y in xyᵀ.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.tiles import block, load_tile, pair_offsets, precision, store_tile, tile_of, tile_slots, widen

BLOCK_S = 64


@triton.jit(do_not_specialize=["batch"])
def _array_jagged_bmm_kernel(
    a_ptr,
    y_ptr,
    out_offsets_ptr,
    y_offsets_ptr,
    pair_offsets_ptr,
    out_ptr,
    batch,
    D: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    sample, low, high = tile_of(out_offsets_ptr, batch, tl.program_id(0), BLOCK_S)
    if low >= high:
        return
    y_low = tl.load(y_offsets_ptr + sample).to(tl.int64)
    y_high = tl.load(y_offsets_ptr + sample + 1).to(tl.int64)
    out_low = tl.load(out_offsets_ptr + sample).to(tl.int64)
    rows = low + tl.arange(0, BLOCK_S)
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    a_ptr += tl.load(pair_offsets_ptr + sample)
    acc = tl.zeros((BLOCK_S, BLOCK_D), tl.float32)
    for first in range(y_low, y_high, BLOCK_R):
        inner = first + tl.arange(0, BLOCK_R)
        if TRANSPOSED:
            at = (rows - out_low)[:, None] + (inner - y_low)[None, :] * (high - out_low)
        else:
            at = (rows - out_low)[:, None] * (y_high - y_low) + (inner - y_low)[None, :]
        a = widen(tl.load(a_ptr + at, mask=(rows < high)[:, None] & (inner < y_high)[None, :], other=0.0))
        y = load_tile(y_ptr, inner, inner < y_high, D, cols, D)
        acc = tl.dot(a, y, acc, input_precision=PRECISION)
    store_tile(out_ptr, acc, rows, rows < high, D, cols, D)


def array_jagged_bmm_jagged_out(
    a: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, out_rows: int, transposed: bool
) -> Tensor:
    """The blocks are [L, M], x_offsets by y_offsets; transposed, y has the rows of x_offsets and out of y_offsets."""
    width, batch = y.shape[1], x_offsets.shape[0] - 1
    out = torch.empty(out_rows, width, dtype=y.dtype, device=y.device)
    if out_rows == 0:
        return out
    sides = (y_offsets, x_offsets) if transposed else (x_offsets, y_offsets)
    block_d = block(width, most=256)
    _array_jagged_bmm_kernel[(tile_slots(out_rows, batch, BLOCK_S), triton.cdiv(width, block_d))](
        a,
        y,
        *sides,
        pair_offsets(x_offsets, y_offsets),
        out,
        batch,
        D=width,
        TRANSPOSED=transposed,
        # Three tf32 products were measured at half the speed of float32 arithmetic: y lies across their inner loop.
        PRECISION=precision(highest="ieee"),
        BLOCK_S=BLOCK_S,
        BLOCK_R=32,
        BLOCK_D=block_d,
        num_warps=8 if block_d == 256 else 4,
    )
    return out
