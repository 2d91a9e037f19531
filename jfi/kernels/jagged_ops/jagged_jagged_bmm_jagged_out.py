"""[S, D], [R, D] -> [Σ L·M]: x yᵀ of each sample.  One program per tile of x rows loops over the sample's rows of y."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import Launcher
from jfi.kernels.common.primitives import find_tile, load_tile, most_tiles
from jfi.kernels.jagged_ops.pair_offsets import pair_offsets
from jfi.plan import power_of_two, precision_of

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
    STAGES: tl.constexpr,
):
    sample, low, high = find_tile(x_offsets_ptr, batch, tl.program_id(0), BLOCK_S)
    if low >= high:
        return
    y_low = tl.load(y_offsets_ptr + sample).to(tl.int64)
    width = (tl.load(y_offsets_ptr + sample + 1) - y_low).to(tl.int32)
    rows = tl.arange(0, BLOCK_S)
    row_mask = rows < high - low
    x_ptr += low * D
    y_ptr += y_low * D
    out_ptr += tl.load(pair_offsets_ptr + sample) + (low - tl.load(x_offsets_ptr + sample)) * width
    for first in range(0, width, BLOCK_R):
        cols = first + tl.arange(0, BLOCK_R)
        acc = tl.zeros((BLOCK_S, BLOCK_R), tl.float32)
        for inner in tl.range(0, D, BLOCK_D, num_stages=STAGES):
            at = inner + tl.arange(0, BLOCK_D)
            x = load_tile(x_ptr, rows, row_mask, D, at, D)
            y = load_tile(y_ptr, cols, cols < width, D, at, D)
            acc = tl.dot(x, tl.trans(y), acc, input_precision=PRECISION)
        # Loads the width again: addresses computed from this copy take no registers during the loop over D.
        stride = tl.load(y_offsets_ptr + sample + 1).to(tl.int64) - y_low
        out_ptrs = out_ptr + rows[:, None] * stride + cols[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & (cols < width)[None, :])


@cache
def _launcher(width: int, precision: str, dtype: torch.dtype, *offsets_dtypes: torch.dtype) -> Launcher:
    # 3xTF32 keeps both parts of both operands in registers: a tile has half the columns, a step more of D.
    split = precision == "tf32x3"
    return Launcher(
        _jagged_jagged_bmm_jagged_out_kernel,
        D=width,
        PRECISION=precision,
        BLOCK_S=BLOCK_S,
        BLOCK_R=64 if split else 128,
        BLOCK_D=power_of_two(width, most=64 if split else 128 // dtype.itemsize),
        STAGES=3,
        num_warps=4,
    )


def jagged_jagged_bmm_jagged_out(x: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, out_size: int) -> Tensor:
    (rows, width), batch = x.shape, x_offsets.shape[0] - 1
    out = torch.empty(out_size, dtype=x.dtype, device=x.device)
    if rows and out_size:
        launch = _launcher(width, precision_of(x.dtype), x.dtype, x_offsets.dtype, y_offsets.dtype)
        tensors = (x, y, x_offsets, y_offsets, pair_offsets(x_offsets, y_offsets), out)
        launch((most_tiles(rows, batch, BLOCK_S), 1, 1), tensors, (batch,))
    return out
