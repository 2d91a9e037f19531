"""The two softmaxes of Table 1: over the rows of a sample, and along each row of its [L, M] block."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import Launcher
from jfi.kernels.common.primitives import find_sample, max_tiles
from jfi.table1.kernels.products import pair_offsets
from jfi.utils.operands import ceil_div, power_of_two

#: Elements of a program of `jagged2_softmax`.
CHUNK = 4096


@triton.jit
def _entries(first, high, cols, T: tl.constexpr, BLOCK_S: tl.constexpr):
    """Returns the offsets and the mask of rows from ``first`` on, before ``high``, at columns of [S, T]."""
    rows = first + tl.arange(0, BLOCK_S)
    return rows[:, None] * T + cols[None, :], (rows < high)[:, None] & (cols < T)[None, :]


@triton.jit
def _load(ptr, at, mask, other):
    return tl.load(ptr + at, mask=mask, other=other).to(tl.float32)


@triton.jit
def _jagged_softmax_kernel(
    x_ptr,
    grad_ptr,
    offsets_ptr,
    out_ptr,
    T: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Computes a tile of columns of a sample, whose rows it reads twice, the second time from the cache.

    Backward as in `_jagged2_softmax_kernel`.
    """
    sample = tl.program_id(0).to(tl.int64)
    low = tl.load(offsets_ptr + sample).to(tl.int64)
    high = tl.load(offsets_ptr + sample + 1).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    total = tl.zeros((BLOCK_T,), tl.float32)
    if BACKWARD:
        for first in range(low, high, BLOCK_S):
            at, mask = _entries(first, high, cols, T, BLOCK_S)
            total += tl.sum(_load(x_ptr, at, mask, 0.0) * _load(grad_ptr, at, mask, 0.0), 0)
        for first in range(low, high, BLOCK_S):
            at, mask = _entries(first, high, cols, T, BLOCK_S)
            dx = _load(x_ptr, at, mask, 0.0) * (_load(grad_ptr, at, mask, 0.0) - total[None, :])
            tl.store(out_ptr + at, dx.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        top = tl.full((BLOCK_T,), -float("inf"), tl.float32)
        for first in range(low, high, BLOCK_S):
            at, mask = _entries(first, high, cols, T, BLOCK_S)
            x = _load(x_ptr, at, mask, -float("inf"))
            new_top = tl.maximum(top, tl.max(x, 0))
            base = tl.where(new_top == -float("inf"), 0.0, new_top)
            total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base[None, :]), 0)
            top = new_top
        base = tl.where(top == -float("inf"), 0.0, top)
        total = tl.where(total == 0.0, 1.0, total)
        for first in range(low, high, BLOCK_S):
            at, mask = _entries(first, high, cols, T, BLOCK_S)
            p = tl.exp(_load(x_ptr, at, mask, -float("inf")) - base[None, :]) / total[None, :]
            tl.store(out_ptr + at, p.to(out_ptr.dtype.element_ty), mask=mask)


@cache
def _jagged_softmax_launcher(width: int, backward: bool) -> tuple[int, Launcher]:
    """Returns (tiles of the width, the launcher)."""
    block_t = power_of_two(width, least=1, most=32)
    sizes = {"T": width, "BLOCK_S": 64, "BLOCK_T": block_t}
    return ceil_div(width, block_t), Launcher(_jagged_softmax_kernel, **sizes, BACKWARD=backward, num_warps=4)


def _launch_jagged_softmax(x: Tensor, grad: Tensor, offsets: Tensor, backward: bool) -> Tensor:
    rows, width = x.shape
    out = torch.empty_like(x)
    if rows:
        tiles, launch = _jagged_softmax_launcher(width, backward)
        launch((offsets.shape[0] - 1, tiles, 1), (x, grad, offsets, out), ())
    return out


def jagged_softmax(x: Tensor, offsets: Tensor) -> Tensor:
    """[S, T] -> [S, T]."""
    return _launch_jagged_softmax(x, x, offsets, False)


def jagged_softmax_bwd(grad: Tensor, out: Tensor, offsets: Tensor) -> Tensor:
    return _launch_jagged_softmax(out, grad, offsets, True)


@triton.jit
def _narrow_rows(
    x_ptr, grad_ptr, out_ptr, count, width, BACKWARD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Softmax of ``count`` rows of up to COLS entries, ROWS rows a step; the next step's loads overlap with a step.

    Tiles are [pieces of rows, 32], which keeps a row within one warp; Triton would spread [rows, columns] over all
    warps.  ROWS is a multiple of the number of warps.
    """
    PIECES: tl.constexpr = COLS // 32
    SHAPE: tl.constexpr = (PIECES, ROWS, 32)
    piece = tl.arange(0, PIECES * ROWS)
    rows = (piece % ROWS)[:, None]
    cols = (piece // ROWS * 32)[:, None] + tl.arange(0, 32)[None, :]
    inside = cols < width
    at = rows * width + cols
    empty: tl.constexpr = 0.0 if BACKWARD else -float("inf")
    x = _load(x_ptr, at, (rows < count) & inside, empty)
    if BACKWARD:
        dp = _load(grad_ptr, at, (rows < count) & inside, 0.0)
    for first in range(0, count, ROWS):
        more = (first + ROWS + rows < count) & inside
        next_x = _load(x_ptr, at + ROWS * width, more, empty)
        x = tl.reshape(x, SHAPE)
        if BACKWARD:
            next_dp = _load(grad_ptr, at + ROWS * width, more, 0.0)
            dp = tl.reshape(dp, SHAPE)
            out = x * (dp - tl.sum(tl.sum(x * dp, 0), 1)[None, :, None])
            dp = next_dp
        else:
            top = tl.max(tl.max(x, 0), 1)
            p = tl.exp(x - tl.where(top == -float("inf"), 0.0, top)[None, :, None])
            total = tl.sum(tl.sum(p, 0), 1)
            out = p * (1.0 / tl.where(total == 0.0, 1.0, total))[None, :, None]
        out = tl.reshape(out, (PIECES * ROWS, 32))
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=(first + rows < count) & inside)
        at += ROWS * width
        x = next_x


@triton.jit
def _wide_row(x_ptr, grad_ptr, out_ptr, width, BACKWARD: tl.constexpr, COLS: tl.constexpr):
    """Softmax of one row of any width, COLS columns a step; later sweeps read the row from the cache."""
    cols = tl.arange(0, COLS)
    total = tl.zeros((COLS,), tl.float32)
    if BACKWARD:
        for first in range(0, width, COLS):
            at = first + cols
            total += _load(x_ptr, at, at < width, 0.0) * _load(grad_ptr, at, at < width, 0.0)
        delta = tl.sum(total, 0)
        for first in range(0, width, COLS):
            at = first + cols
            dx = _load(x_ptr, at, at < width, 0.0) * (_load(grad_ptr, at, at < width, 0.0) - delta)
            tl.store(out_ptr + at, dx.to(out_ptr.dtype.element_ty), mask=at < width)
    else:
        top = tl.full((COLS,), -float("inf"), tl.float32)
        for first in range(0, width, COLS):
            at = first + cols
            top = tl.maximum(top, _load(x_ptr, at, at < width, -float("inf")))
        base = tl.max(top, 0)
        base = tl.where(base == -float("inf"), 0.0, base)
        for first in range(0, width, COLS):
            at = first + cols
            total += tl.exp(_load(x_ptr, at, at < width, -float("inf")) - base)
        scale = tl.sum(total, 0)
        scale = 1.0 / tl.where(scale == 0.0, 1.0, scale)
        for first in range(0, width, COLS):
            at = first + cols
            p = tl.exp(_load(x_ptr, at, at < width, -float("inf")) - base) * scale
            tl.store(out_ptr + at, p.to(out_ptr.dtype.element_ty), mask=at < width)


@triton.jit(do_not_specialize=["batch"])
def _jagged2_softmax_kernel(
    x_ptr,
    grad_ptr,
    pair_offsets_ptr,
    x_offsets_ptr,
    y_offsets_ptr,
    out_ptr,
    batch,
    BACKWARD: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Forward: x holds the scores.  Backward: x holds the forward's weights p, and dx = p (dp - Σ p dp).

    The host knows neither the number of rows nor their lengths, so programs get equal numbers of elements: each handles
    as many rows of one sample as hold CHUNK elements.  One warp reads a row of up to 512 entries once and keeps it in
    registers.
    """
    program = tl.program_id(0)
    sample = find_sample(pair_offsets_ptr, batch, program, CHUNK, 1)
    low = tl.load(pair_offsets_ptr + sample)
    length = tl.load(x_offsets_ptr + sample + 1).to(tl.int64) - tl.load(x_offsets_ptr + sample)
    width = (tl.load(y_offsets_ptr + sample + 1) - tl.load(y_offsets_ptr + sample)).to(tl.int32)
    if width == 0:
        return
    # Rounded up to whole steps, so that a sample needs at most one program more than it has CHUNKs of elements.
    step = tl.where(width <= 512, ROWS, 1)
    rows_per_program = tl.cdiv(tl.cdiv(CHUNK, width), step) * step
    first = (program - low // CHUNK - sample) * rows_per_program
    count = tl.minimum(length - first, rows_per_program).to(tl.int32)
    if count <= 0:
        return
    start = low + first * width
    x_ptr += start
    grad_ptr += start
    out_ptr += start
    if width <= 64:
        _narrow_rows(x_ptr, grad_ptr, out_ptr, count, width, BACKWARD, ROWS, 64)
    elif width <= 128:
        _narrow_rows(x_ptr, grad_ptr, out_ptr, count, width, BACKWARD, ROWS, 128)
    elif width <= 256:
        _narrow_rows(x_ptr, grad_ptr, out_ptr, count, width, BACKWARD, ROWS, 256)
    elif width <= 512:
        _narrow_rows(x_ptr, grad_ptr, out_ptr, count, width, BACKWARD, ROWS // 2, 512)
    else:
        for _ in range(count):
            _wide_row(x_ptr, grad_ptr, out_ptr, width, BACKWARD, 1024)
            x_ptr += width
            grad_ptr += width
            out_ptr += width


@cache
def _jagged2_softmax_launcher(backward: bool) -> Launcher:
    return Launcher(_jagged2_softmax_kernel, BACKWARD=backward, CHUNK=CHUNK, ROWS=8, num_warps=4)


def _launch_jagged2_softmax(x: Tensor, grad: Tensor, x_offsets: Tensor, y_offsets: Tensor, backward: bool) -> Tensor:
    out = torch.empty_like(x)
    if x.shape[0]:
        batch = x_offsets.shape[0] - 1
        tensors = (x, grad, pair_offsets(x_offsets, y_offsets), x_offsets, y_offsets, out)
        _jagged2_softmax_launcher(backward)((max_tiles(x.shape[0], batch, CHUNK), 1, 1), tensors, (batch,))
    return out


def jagged2_softmax(a: Tensor, x_offsets: Tensor, y_offsets: Tensor) -> Tensor:
    """[Σ L·M] -> [Σ L·M]."""
    return _launch_jagged2_softmax(a, a, x_offsets, y_offsets, False)


def jagged2_softmax_bwd(grad: Tensor, out: Tensor, x_offsets: Tensor, y_offsets: Tensor) -> Tensor:
    return _launch_jagged2_softmax(out, grad, x_offsets, y_offsets, True)
