"""[S, T] -> [S, T]: the softmax over each sample's rows.

One program per sample and tile of columns reads the rows twice, the second time from the cache.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction

from jfi.kernels.common.launch import Launcher
from jfi.plan import ceil_div, power_of_two

BLOCK_S = 64


@triton.jit
def _jagged_softmax_fwd_kernel(
    x_ptr, offsets_ptr, out_ptr, T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr
):
    sample = tl.program_id(0).to(tl.int64)
    low = tl.load(offsets_ptr + sample).to(tl.int64)
    high = tl.load(offsets_ptr + sample + 1).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    top = tl.full((BLOCK_T,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    for first in range(low, high, BLOCK_S):
        rows = first + tl.arange(0, BLOCK_S)
        mask = (rows < high)[:, None] & (cols < T)[None, :]
        x = tl.load(x_ptr + rows[:, None] * T + cols[None, :], mask=mask, other=-float("inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, 0))
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base[None, :]), 0)
        top = new_top
    base = tl.where(top == -float("inf"), 0.0, top)
    total = tl.where(total == 0.0, 1.0, total)
    for first in range(low, high, BLOCK_S):
        rows = first + tl.arange(0, BLOCK_S)
        mask = (rows < high)[:, None] & (cols < T)[None, :]
        x = tl.load(x_ptr + rows[:, None] * T + cols[None, :], mask=mask, other=-float("inf")).to(tl.float32)
        p = tl.exp(x - base[None, :]) / total[None, :]
        tl.store(out_ptr + rows[:, None] * T + cols[None, :], p.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _jagged_softmax_bwd_kernel(
    grad_ptr, out_ptr, offsets_ptr, dx_ptr, T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr
):
    sample = tl.program_id(0).to(tl.int64)
    low = tl.load(offsets_ptr + sample).to(tl.int64)
    high = tl.load(offsets_ptr + sample + 1).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    delta = tl.zeros((BLOCK_T,), tl.float32)
    for first in range(low, high, BLOCK_S):
        rows = first + tl.arange(0, BLOCK_S)
        mask = (rows < high)[:, None] & (cols < T)[None, :]
        at = rows[:, None] * T + cols[None, :]
        p = tl.load(out_ptr + at, mask=mask, other=0.0).to(tl.float32)
        delta += tl.sum(p * tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32), 0)
    for first in range(low, high, BLOCK_S):
        rows = first + tl.arange(0, BLOCK_S)
        mask = (rows < high)[:, None] & (cols < T)[None, :]
        at = rows[:, None] * T + cols[None, :]
        p = tl.load(out_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dx = p * (tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32) - delta[None, :])
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@cache
def _launcher(kernel: JITFunction, width: int, *dtypes: torch.dtype) -> tuple[int, Launcher]:
    """(tiles of the width, the launcher)."""
    block_t = power_of_two(width, least=1, most=32)
    return ceil_div(width, block_t), Launcher(kernel, T=width, BLOCK_S=BLOCK_S, BLOCK_T=block_t, num_warps=4)


def _launch(kernel: JITFunction, inputs: tuple[Tensor, ...], offsets: Tensor) -> Tensor:
    rows, width = inputs[0].shape
    out = torch.empty_like(inputs[0])
    if rows:
        tiles, launch = _launcher(kernel, width, out.dtype, offsets.dtype)
        launch((offsets.shape[0] - 1, tiles, 1), (*inputs, offsets, out), ())
    return out


def forward(x: Tensor, offsets: Tensor) -> Tensor:
    return _launch(_jagged_softmax_fwd_kernel, (x,), offsets)


def backward(grad: Tensor, out: Tensor, offsets: Tensor) -> Tensor:
    return _launch(_jagged_softmax_bwd_kernel, (grad, out), offsets)
