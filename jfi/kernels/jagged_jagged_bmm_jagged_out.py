"""[S, D], [R, D] -> [Σ L·M], xyᵀ of each sample: one program a tile of x rows, sweeping over the sample's y rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.tiles import block, load_tile, pair_offsets, precision, tile_of, tile_slots

BLOCK_S = 64


@triton.jit(do_not_specialize=["batch"])
def _jagged_jagged_bmm_jagged_out_kernel(
    x_ptr,
    y_ptr,
    x_offsets_ptr,
    y_offsets_ptr,
    pair_offsets_ptr,
    out_ptr,
    batch,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    sample, low, high = tile_of(x_offsets_ptr, batch, tl.program_id(0), BLOCK_S)
    if low >= high:
        return
    y_low = tl.load(y_offsets_ptr + sample).to(tl.int64)
    y_high = tl.load(y_offsets_ptr + sample + 1).to(tl.int64)
    rows = low + tl.arange(0, BLOCK_S)
    place = rows - tl.load(x_offsets_ptr + sample)
    out_ptr += tl.load(pair_offsets_ptr + sample)
    for first in range(y_low, y_high, BLOCK_R):
        cols = first + tl.arange(0, BLOCK_R)
        acc = tl.zeros((BLOCK_S, BLOCK_R), tl.float32)
        for inner in range(0, D, BLOCK_D):
            at = inner + tl.arange(0, BLOCK_D)
            x = load_tile(x_ptr, rows, rows < high, D, at, D)
            y = load_tile(y_ptr, cols, cols < y_high, D, at, D)
            acc = tl.dot(x, tl.trans(y), acc, input_precision=PRECISION)
        mask = (rows < high)[:, None] & (cols < y_high)[None, :]
        at_out = place[:, None] * (y_high - y_low) + (cols - y_low)[None, :]
        tl.store(out_ptr + at_out, acc.to(out_ptr.dtype.element_ty), mask=mask)


def jagged_jagged_bmm_jagged_out(x: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, out_size: int) -> Tensor:
    (rows, width), batch = x.shape, x_offsets.shape[0] - 1
    out = torch.empty(out_size, dtype=x.dtype, device=x.device)
    if rows == 0 or out_size == 0:
        return out
    _jagged_jagged_bmm_jagged_out_kernel[(tile_slots(rows, batch, BLOCK_S),)](
        x,
        y,
        x_offsets,
        y_offsets,
        pair_offsets(x_offsets, y_offsets),
        out,
        batch,
        D=width,
        PRECISION=precision(),
        BLOCK_S=BLOCK_S,
        BLOCK_R=64,
        BLOCK_D=block(width, most=64),
        num_warps=4,
    )
    return out
