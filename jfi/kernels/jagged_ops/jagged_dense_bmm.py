"""[S, D] x [B, D, T] -> [S, T]: each row times its sample's matrix.

One program computes a tile of a sample's rows; the programs of a sample read its matrix from the L2 cache.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import Launcher
from jfi.kernels.common.primitives import find_tile, load_tile, most_tiles, store_tile, widen
from jfi.plan import ceil_div, power_of_two, precision_of

BLOCK_S = 64


@triton.jit(do_not_specialize=["batch"])
def _jagged_dense_bmm_kernel(
    x_ptr,
    offsets_ptr,
    dense_ptr,
    out_ptr,
    batch,
    D: tl.constexpr,
    T: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    sample, low, high = find_tile(offsets_ptr, batch, tl.program_id(0), BLOCK_S)
    if low >= high:
        return
    rows = low + tl.arange(0, BLOCK_S)
    mask = rows < high
    cols = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    dense_ptr += sample * D * T
    acc = tl.zeros((BLOCK_S, BLOCK_T), tl.float32)
    for first in range(0, D, BLOCK_D):
        inner = first + tl.arange(0, BLOCK_D)
        x = load_tile(x_ptr, rows, mask, D, inner, D)
        if TRANSPOSED:
            at = cols[None, :] * D + inner[:, None]
        else:
            at = inner[:, None] * T + cols[None, :]
        dense = widen(tl.load(dense_ptr + at, mask=(inner < D)[:, None] & (cols < T)[None, :], other=0.0))
        acc = tl.dot(x, dense, acc, input_precision=PRECISION)
    store_tile(out_ptr, acc, rows, mask, T, cols, T)


@cache
def _launcher(
    width: int, out_width: int, transposed: bool, precision: str, *dtypes: torch.dtype
) -> tuple[int, Launcher]:
    """(tiles of the output's width, the launcher)."""
    block_t = power_of_two(out_width, most=64)
    launcher = Launcher(
        _jagged_dense_bmm_kernel,
        D=width,
        T=out_width,
        TRANSPOSED=transposed,
        PRECISION=precision,
        BLOCK_S=BLOCK_S,
        BLOCK_D=power_of_two(width, most=64),
        BLOCK_T=block_t,
        num_warps=4,
    )
    return ceil_div(out_width, block_t), launcher


def jagged_dense_bmm(x: Tensor, offsets: Tensor, dense: Tensor, transposed: bool) -> Tensor:
    """x [S, D] times each sample's dense [D, T], or its transpose if stored as [T, D]."""
    (rows, width), batch = x.shape, dense.shape[0]
    out_width = dense.shape[1] if transposed else dense.shape[2]
    out = torch.empty(rows, out_width, dtype=x.dtype, device=x.device)
    if rows:
        tiles, launch = _launcher(width, out_width, transposed, precision_of(x.dtype), x.dtype, offsets.dtype)
        launch((most_tiles(rows, batch, BLOCK_S), tiles, 1), (x, offsets, dense, out), (batch,))
    return out
