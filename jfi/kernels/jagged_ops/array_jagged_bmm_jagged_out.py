"""[Σ L·M], [R, D] -> [S, D]: each sample's [L, M] block times its rows of y.

One program computes a tile of output rows.  With TRANSPOSED it reads the same blocks by column: [Σ L·M], [S, D] ->
[R, D], the gradient of y in x yᵀ.

Tensor cores read a TF32 operand from shared memory only if its inner dimension is contiguous; that of y is not.  So the
kernel computes outᵀ = yᵀ aᵀ, where yᵀ is the first operand and can be transposed in registers.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import Launcher
from jfi.kernels.common.primitives import find_tile, most_tiles, widen
from jfi.kernels.jagged_ops.pair_offsets import pair_offsets
from jfi.plan import ceil_div, power_of_two, precision_of


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
    STAGES: tl.constexpr,
):
    sample, low, high = find_tile(out_offsets_ptr, batch, tl.program_id(0), BLOCK_S)
    if low >= high:
        return
    y_low = tl.load(y_offsets_ptr + sample).to(tl.int64)
    height = (tl.load(y_offsets_ptr + sample + 1) - y_low).to(tl.int32)
    out_low = tl.load(out_offsets_ptr + sample).to(tl.int64)
    if TRANSPOSED:
        row_step, inner_step = 1, high - out_low
    else:
        row_step, inner_step = height, 1
    rows = tl.arange(0, BLOCK_S)
    inner = tl.arange(0, BLOCK_R)
    cols = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row_mask = (rows < (high - low).to(tl.int32))[None, :]
    col_mask = (cols < D)[:, None]
    a_ptr += tl.load(pair_offsets_ptr + sample) + (low - out_low) * row_step
    a_ptrs = a_ptr + rows.to(tl.int64)[None, :] * row_step + inner.to(tl.int64)[:, None] * inner_step
    y_ptrs = y_ptr + y_low * D + cols[:, None] + inner[None, :] * D
    acc = tl.zeros((BLOCK_D, BLOCK_S), tl.float32)
    for first in tl.range(0, height, BLOCK_R, num_stages=STAGES):
        left = inner < height - first
        a = widen(tl.load(a_ptrs, mask=left[:, None] & row_mask, other=0.0))
        y = widen(tl.load(y_ptrs, mask=left[None, :] & col_mask, other=0.0))
        if y.dtype == tl.float32:
            # Makes y a computed value: Triton would pass a loaded one through shared memory and transpose it there.
            y += 0.0
        acc = tl.dot(y, a, acc, input_precision=PRECISION)
        a_ptrs += BLOCK_R * inner_step
        y_ptrs += BLOCK_R * D
    out_ptrs = out_ptr + low * D + cols[:, None] + rows[None, :] * D
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_mask & col_mask)


@cache
def _launcher(
    width: int, transposed: bool, precision: str, dtype: torch.dtype, *offsets_dtypes: torch.dtype
) -> tuple[int, int, Launcher]:
    """(rows a tile, tiles of the width, the launcher)."""
    # 3xTF32 keeps both parts of both operands in registers, so a tile has half the rows.
    split = precision == "tf32x3"
    block_s, block_d = 32 if split else 64, power_of_two(width, most=256)
    launcher = Launcher(
        _array_jagged_bmm_kernel,
        D=width,
        TRANSPOSED=transposed,
        PRECISION=precision,
        BLOCK_S=block_s,
        BLOCK_R=64 // dtype.itemsize,
        BLOCK_D=block_d,
        STAGES=4,
        num_warps=8 if block_d == 256 and not split else 4,
    )
    return block_s, ceil_div(width, block_d), launcher


def array_jagged_bmm_jagged_out(
    a: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, out_rows: int, transposed: bool
) -> Tensor:
    """A block is [L, M], L from x_offsets and M from y_offsets.

    If transposed, y has the rows of x_offsets and the output those of y_offsets.
    """
    width, batch = y.shape[1], x_offsets.shape[0] - 1
    out = torch.empty(out_rows, width, dtype=y.dtype, device=y.device)
    if out_rows == 0:
        return out
    sides = (y_offsets, x_offsets) if transposed else (x_offsets, y_offsets)
    block_s, tiles, launch = _launcher(width, transposed, precision_of(y.dtype), y.dtype, *(x.dtype for x in sides))
    tensors = (a, y, *sides, pair_offsets(x_offsets, y_offsets), out)
    launch((most_tiles(out_rows, batch, block_s), tiles, 1), tensors, (batch,))
    return out
