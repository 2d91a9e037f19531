"""[S, D], [S, T] -> [B, D, T]: xᵀ y of each sample.  A program computes a tile of [D, T] over a sample's rows."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import Launcher
from jfi.kernels.common.primitives import load_tile, store_tile
from jfi.plan import ceil_div, power_of_two, precision_of


@triton.jit
def _jagged_jagged_bmm_kernel(
    x_ptr,
    y_ptr,
    offsets_ptr,
    out_ptr,
    D: tl.constexpr,
    T: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    sample = tl.program_id(0).to(tl.int64)
    low = tl.load(offsets_ptr + sample).to(tl.int64)
    high = tl.load(offsets_ptr + sample + 1).to(tl.int64)
    tiles_t: tl.constexpr = tl.cdiv(T, BLOCK_T)
    at_d = tl.program_id(1) // tiles_t * BLOCK_D + tl.arange(0, BLOCK_D)
    at_t = tl.program_id(1) % tiles_t * BLOCK_T + tl.arange(0, BLOCK_T)
    acc = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for first in range(low, high, BLOCK_S):
        rows = first + tl.arange(0, BLOCK_S)
        x = load_tile(x_ptr, rows, rows < high, D, at_d, D)
        y = load_tile(y_ptr, rows, rows < high, T, at_t, T)
        acc = tl.dot(tl.trans(y), x, acc, input_precision=PRECISION)
    store_tile(out_ptr + sample * D * T, tl.trans(acc), at_d, at_d < D, T, at_t, T)


@cache
def _launcher(width: int, out_width: int, precision: str, *dtypes: torch.dtype) -> tuple[int, Launcher]:
    """(tiles of a sample's output, the launcher)."""
    block_d, block_t = power_of_two(width, most=64), power_of_two(out_width, most=64)
    launcher = Launcher(
        _jagged_jagged_bmm_kernel,
        D=width,
        T=out_width,
        PRECISION=precision,
        BLOCK_S=32,
        BLOCK_D=block_d,
        BLOCK_T=block_t,
        num_warps=4,
    )
    return ceil_div(width, block_d) * ceil_div(out_width, block_t), launcher


def jagged_jagged_bmm(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    width, out_width, batch = x.shape[1], y.shape[1], offsets.shape[0] - 1
    out = torch.empty(batch, width, out_width, dtype=x.dtype, device=x.device)
    if batch:
        tiles, launch = _launcher(width, out_width, precision_of(x.dtype), x.dtype, offsets.dtype)
        launch((batch, tiles, 1), (x, y, offsets, out), ())
    return out
