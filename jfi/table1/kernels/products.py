"""The four products of Table 1: jagged x dense, xᵀ y and x yᵀ of each sample, and [L, M] blocks times y."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import Launcher
from jfi.kernels.common.primitives import find_tile, load_tile, max_tiles, store_tile, widen
from jfi.kernels.plan import device_of, precision_of
from jfi.utils.operands import ceil_div, power_of_two


def _precision(x: Tensor) -> str:
    return precision_of(x.dtype, device_of(x.device))


@triton.jit(do_not_specialize=["batch"])
def _pair_offsets_kernel(x_ptr, y_ptr, out_ptr, batch, BLOCK: tl.constexpr):
    total = tl.zeros((), tl.int64)
    tl.store(out_ptr, total)
    for first in range(0, batch, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < batch
        length = tl.load(x_ptr + at + 1, mask=mask, other=0).to(tl.int64) - tl.load(x_ptr + at, mask=mask, other=0)
        width = tl.load(y_ptr + at + 1, mask=mask, other=0).to(tl.int64) - tl.load(y_ptr + at, mask=mask, other=0)
        tl.store(out_ptr + at + 1, total + tl.cumsum(length * width, 0), mask=mask)
        total += tl.sum(length * width, 0)


@cache
def _pair_offsets_launcher() -> Launcher:
    return Launcher(_pair_offsets_kernel, BLOCK=1024, num_warps=8)


def pair_offsets(x_offsets: Tensor, y_offsets: Tensor) -> Tensor:
    """Returns the offsets [B+1] int64 of the samples' [L, M] blocks in a packed tensor.

    One program computes it in a few microseconds; a parallel scan would take two launches, which cost more.
    """
    out = torch.empty(x_offsets.shape[0], dtype=torch.int64, device=x_offsets.device)
    _pair_offsets_launcher()((1, 1, 1), (x_offsets, y_offsets, out), (x_offsets.shape[0] - 1,))
    return out


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
    """Computes a tile of a sample's rows; the programs of a sample read its matrix from the L2 cache."""
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
def _dense_launcher(width: int, out_width: int, transposed: bool, precision: str) -> tuple[int, Launcher]:
    """Returns (tiles of the output's width, the launcher)."""
    block_d, block_t = power_of_two(width, most=64), power_of_two(out_width, most=64)
    sizes = {"D": width, "T": out_width, "BLOCK_S": 64, "BLOCK_D": block_d, "BLOCK_T": block_t}
    options = {"TRANSPOSED": transposed, "PRECISION": precision, "num_warps": 4}
    return ceil_div(out_width, block_t), Launcher(_jagged_dense_bmm_kernel, **sizes, **options)


def jagged_dense_bmm(x: Tensor, offsets: Tensor, dense: Tensor, transposed: bool) -> Tensor:
    """[S, D], [B, D, T] -> [S, T]; transposed: dense is [B, T, D]."""
    (rows, width), batch = x.shape, dense.shape[0]
    out_width = dense.shape[1] if transposed else dense.shape[2]
    out = torch.empty(rows, out_width, dtype=x.dtype, device=x.device)
    if rows:
        tiles, launch = _dense_launcher(width, out_width, transposed, _precision(x))
        launch((max_tiles(rows, batch, 64), tiles, 1), (x, offsets, dense, out), (batch,))
    return out


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
    """Computes a tile of [D, T] over all rows of a sample."""
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
def _jagged_jagged_launcher(width: int, out_width: int, precision: str) -> tuple[int, Launcher]:
    """Returns (tiles of a sample's output, the launcher)."""
    block_d, block_t = power_of_two(width, most=64), power_of_two(out_width, most=64)
    sizes = {"D": width, "T": out_width, "BLOCK_S": 32, "BLOCK_D": block_d, "BLOCK_T": block_t}
    launcher = Launcher(_jagged_jagged_bmm_kernel, **sizes, PRECISION=precision, num_warps=4)
    return ceil_div(width, block_d) * ceil_div(out_width, block_t), launcher


def jagged_jagged_bmm(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """[S, D], [S, T] -> [B, D, T]."""
    width, out_width, batch = x.shape[1], y.shape[1], offsets.shape[0] - 1
    out = torch.empty(batch, width, out_width, dtype=x.dtype, device=x.device)
    if batch:
        tiles, launch = _jagged_jagged_launcher(width, out_width, _precision(x))
        launch((batch, tiles, 1), (x, y, offsets, out), ())
    return out


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
    """Computes the pairs of a tile of x rows with all rows of y of the sample."""
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
def _pairs_launcher(width: int, precision: str, dtype: torch.dtype) -> Launcher:
    # 3xTF32 keeps both parts of both operands in registers: a tile has half the columns, a step more of D.
    split = precision == "tf32x3"
    block_d = power_of_two(width, most=64 if split else 128 // dtype.itemsize)
    sizes = {"D": width, "BLOCK_S": 64, "BLOCK_R": 64 if split else 128, "BLOCK_D": block_d}
    return Launcher(_jagged_jagged_bmm_jagged_out_kernel, **sizes, PRECISION=precision, STAGES=3, num_warps=4)


def jagged_jagged_bmm_jagged_out(x: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, out_size: int) -> Tensor:
    """[S, D], [R, D] -> [Σ L·M]."""
    (rows, width), batch = x.shape, x_offsets.shape[0] - 1
    out = torch.empty(out_size, dtype=x.dtype, device=x.device)
    if rows and out_size:
        launch = _pairs_launcher(width, _precision(x), x.dtype)
        tensors = (x, y, x_offsets, y_offsets, pair_offsets(x_offsets, y_offsets), out)
        launch((max_tiles(rows, batch, 64), 1, 1), tensors, (batch,))
    return out


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
    """Computes a tile of output rows; with TRANSPOSED it reads the blocks of pairs by column.

    Tensor cores read a TF32 operand from shared memory only if its inner dimension is contiguous; that of y is not.  So
    the kernel computes outᵀ = yᵀ aᵀ, where yᵀ is the first operand and can be transposed in registers.
    """
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
def _array_launcher(width: int, transposed: bool, precision: str, dtype: torch.dtype) -> tuple[int, int, Launcher]:
    """Returns (rows a tile, tiles of the width, the launcher)."""
    # 3xTF32 keeps both parts of both operands in registers, so a tile has half the rows.
    split = precision == "tf32x3"
    block_s, block_d = 32 if split else 64, power_of_two(width, most=256)
    sizes = {"D": width, "BLOCK_S": block_s, "BLOCK_R": 64 // dtype.itemsize, "BLOCK_D": block_d}
    options = {"TRANSPOSED": transposed, "PRECISION": precision, "STAGES": 4}
    options["num_warps"] = 8 if block_d == 256 and not split else 4
    return block_s, ceil_div(width, block_d), Launcher(_array_jagged_bmm_kernel, **sizes, **options)


def array_jagged_bmm_jagged_out(
    a: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, out_rows: int, transposed: bool
) -> Tensor:
    """[Σ L·M], [R, D] -> [S, D], the gradient of x in x yᵀ; transposed: [Σ L·M], [S, D] -> [R, D], that of y."""
    width, batch = y.shape[1], x_offsets.shape[0] - 1
    out = torch.empty(out_rows, width, dtype=y.dtype, device=y.device)
    if out_rows == 0:
        return out
    sides = (y_offsets, x_offsets) if transposed else (x_offsets, y_offsets)
    block_s, tiles, launch = _array_launcher(width, transposed, _precision(y), y.dtype)
    tensors = (a, y, *sides, pair_offsets(x_offsets, y_offsets), out)
    launch((max_tiles(out_rows, batch, block_s), tiles, 1), tensors, (batch,))
    return out
