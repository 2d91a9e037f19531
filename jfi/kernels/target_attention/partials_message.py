"""Messages between ranks that attend to parts of a history: rows, and float32 numbers behind each as its dtype's bits.

    pack     [N, E], L [N]           ->  O | L             forward, of a part
    combine  P of [N, E + L]         ->  O, L              of the whole (`jfi.ops.partial_target_attention`)
    pack     dO, O [N, E], L [N]     ->  dO | Δ = dO·O | L  backward, of the whole
    unpack   [N, E + Δ + L]          ->  dO, O', L         for a part, with any O' for which dO·O' is Δ
    sum      P of [N, D]             ->  [N, D]            the query's gradient

A number takes two elements of a row in half precision, which must then have an even width to be aligned.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.combine import add_partial, weighted_sum
from jfi.kernels.common.launch import Launcher
from jfi.kernels.common.online_softmax import no_sums
from jfi.kernels.common.tiles import COPY_ELEMENTS, COPY_WARPS, load_rows, row_products, store_rows
from jfi.utils.operands import ceil_div, power_of_two


def fits_message(width: int, dtype: torch.dtype) -> bool:
    """Returns whether the kernels take rows of this width."""
    return dtype.itemsize <= 4 and width * dtype.itemsize % 4 == 0


@triton.jit
def _numbers(ptr, row, PLACE: tl.constexpr, STRIDE: tl.constexpr):
    """Addresses of the float32 number that begins at element PLACE of each row."""
    PER_NUMBER: tl.constexpr = 32 // ptr.dtype.element_ty.primitive_bitwidth
    numbers = ptr.to(tl.pointer_type(tl.float32), bitcast=True)
    return numbers + row * (STRIDE // PER_NUMBER) + PLACE // PER_NUMBER


@triton.jit(do_not_specialize=["count"])
def _pack_kernel(
    rows_ptr,
    out_ptr,
    lse_ptr,
    packed_ptr,
    count,
    WIDTH: tl.constexpr,
    WITH_DELTA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program per tile of rows; WITH_DELTA `out` is the other factor of Δ."""
    PER_NUMBER: tl.constexpr = 32 // packed_ptr.dtype.element_ty.primitive_bitwidth
    STRIDE: tl.constexpr = WIDTH + (2 if WITH_DELTA else 1) * PER_NUMBER
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = row < count
    x = load_rows(rows_ptr, row, mask, WIDTH, WIDTH, BLOCK_D)
    store_rows(packed_ptr, x, row, mask, STRIDE, WIDTH, BLOCK_D)
    if WITH_DELTA:
        delta = row_products(x, load_rows(out_ptr, row, mask, WIDTH, WIDTH, BLOCK_D))
        tl.store(_numbers(packed_ptr, row, WIDTH, STRIDE), delta, mask=mask)
    lse = tl.load(lse_ptr + row, mask=mask)
    tl.store(_numbers(packed_ptr, row, STRIDE - PER_NUMBER, STRIDE), lse, mask=mask)


@triton.jit(do_not_specialize=["count"])
def _unpack_kernel(
    packed_ptr,
    grad_ptr,
    out_ptr,
    lse_ptr,
    count,
    scale,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program per tile of rows; dO and Δ are multiplied by scale."""
    PER_NUMBER: tl.constexpr = 32 // packed_ptr.dtype.element_ty.primitive_bitwidth
    STRIDE: tl.constexpr = WIDTH + 2 * PER_NUMBER
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = row < count
    grad = load_rows(packed_ptr, row, mask, STRIDE, WIDTH, BLOCK_D).to(tl.float32) * scale
    delta = tl.load(_numbers(packed_ptr, row, WIDTH, STRIDE), mask=mask, other=0.0) * scale
    lse = tl.load(_numbers(packed_ptr, row, WIDTH + PER_NUMBER, STRIDE), mask=mask)
    square = tl.maximum(tl.sum(grad * grad, 1), 1.1754943508222875e-38)  # the least normal float32
    store_rows(grad_ptr, grad, row, mask, WIDTH, WIDTH, BLOCK_D)
    store_rows(out_ptr, grad * (delta / square)[:, None], row, mask, WIDTH, WIDTH, BLOCK_D)
    tl.store(lse_ptr + row, lse, mask=mask)


@triton.jit(do_not_specialize=["count"])
def _combine_kernel(
    parts_ptr,
    out_ptr,
    lse_ptr,
    count,
    scale,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program per tile of rows: weighted by the log-sum-exps behind them, or summed and multiplied by scale."""
    PER_NUMBER: tl.constexpr = 32 // parts_ptr.dtype.element_ty.primitive_bitwidth
    STRIDE: tl.constexpr = WIDTH + (PER_NUMBER if WEIGHTED else 0)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = row < count
    maximum, total, acc = no_sums(BLOCK_M, BLOCK_D)
    for part in range(PARTS):
        at = row + part * count.to(tl.int64)
        partial = load_rows(parts_ptr, at, mask, STRIDE, WIDTH, BLOCK_D).to(tl.float32)
        if WEIGHTED:
            lse = tl.load(_numbers(parts_ptr, at, WIDTH, STRIDE), mask=mask, other=-float("inf"))
            maximum, total, acc = add_partial(partial, lse, maximum, total, acc)
        else:
            acc += partial
    if WEIGHTED:
        acc, lse = weighted_sum(maximum, total, acc)
        tl.store(lse_ptr + row, lse, mask=mask)
    else:
        acc *= scale
    store_rows(out_ptr, acc, row, mask, WIDTH, WIDTH, BLOCK_D)


@cache
def _launcher(kernel: triton.JITFunction, width: int, **constants: object) -> Launcher:
    block_d = power_of_two(width, 1)
    block_m = max(COPY_ELEMENTS // block_d, 1)
    sizes = {"WIDTH": width, "BLOCK_M": block_m, "BLOCK_D": block_d}
    return Launcher(kernel, **constants, **sizes, num_warps=COPY_WARPS)


def _launch(launcher: Launcher, tensors: tuple[Tensor | None, ...], count: int, *numbers: float) -> None:
    if count:
        launcher((ceil_div(count, launcher.constants["BLOCK_M"]), 1, 1), tensors, (count, *numbers))


def pack(rows: Tensor, out: Tensor | None, lse: Tensor) -> Tensor:
    """Returns [..., E + n]: rows [..., E], Δ of `rows` and `out` if there is one, and `lse` [...] float32."""
    rows, width = rows.contiguous(), rows.size(-1)
    per_number = 4 // rows.element_size()
    packed = rows.new_empty(*rows.shape[:-1], width + per_number * (1 if out is None else 2))
    launcher = _launcher(_pack_kernel, width, WITH_DELTA=out is not None)
    _launch(launcher, (rows, None if out is None else out.contiguous(), lse.contiguous(), packed), lse.numel())
    return packed


def unpack(packed: Tensor, width: int, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse of `pack` with Δ: returns (dO · scale, O' [..., E], L [...])."""
    shape = packed.shape[:-1]
    grad, out = (packed.new_empty(*shape, width) for _ in range(2))
    lse = packed.new_empty(shape, dtype=torch.float32)
    launcher = _launcher(_unpack_kernel, width)
    _launch(launcher, (packed.contiguous(), grad, out, lse), lse.numel(), scale)
    return grad, out, lse


def combine(parts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (O [..., E], L [...]) of `pack`'s rows [P, ..., E + n] without Δ."""
    shape, width = parts.shape[1:-1], parts.size(-1) - 4 // parts.element_size()
    out, lse = parts.new_empty(*shape, width), parts.new_empty(shape, dtype=torch.float32)
    launcher = _launcher(_combine_kernel, width, PARTS=parts.size(0), WEIGHTED=True)
    _launch(launcher, (parts.contiguous(), out, lse), lse.numel(), 1.0)
    return out, lse


def add(parts: Tensor, scale: float) -> Tensor:
    """Returns [..., D]: the sum of parts [P, ..., D] in float32, multiplied by scale, in their dtype."""
    out = parts.new_empty(parts.shape[1:])
    launcher = _launcher(_combine_kernel, out.size(-1), PARTS=parts.size(0), WEIGHTED=False)
    _launch(launcher, (parts.contiguous(), out, None), out.numel() // max(out.size(-1), 1), scale)
    return out
