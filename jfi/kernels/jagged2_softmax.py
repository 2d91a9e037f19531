"""[Σ L·M] -> [Σ L·M], the softmax along each row of each sample's [L, M] block.

Programs are dealt out over the elements, so that neither the number of rows nor any length is needed on the host: a
program takes the rows that begin in its share of CHUNK elements.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.tiles import find_sample, pair_offsets

CHUNK = 8192


@triton.jit
def _first_row(position, low, width):
    """The first row of a block at ``low`` that begins at or behind position."""
    return (tl.maximum(position - low, 0) + width - 1) // width


@triton.jit(do_not_specialize=["batch"])
def _jagged2_softmax_kernel(
    x_ptr,
    grad_ptr,
    pair_offsets_ptr,
    x_offsets_ptr,
    out_ptr,
    batch,
    BACKWARD: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Forward: x are the scores.  Backward: x are the weights p of the forward, and dx = p (dp - Σ p dp)."""
    start = tl.program_id(0).to(tl.int64) * CHUNK
    sample = find_sample(pair_offsets_ptr, batch, start, 1, 0)
    low = tl.load(pair_offsets_ptr + sample)
    while (sample < batch) & (low < start + CHUNK):
        high = tl.load(pair_offsets_ptr + sample + 1)
        length = tl.load(x_offsets_ptr + sample + 1).to(tl.int64) - tl.load(x_offsets_ptr + sample)
        width = (high - low) // tl.maximum(length, 1)
        if width > 0:
            end_row = tl.minimum(length, _first_row(start + CHUNK, low, width))
            for first in range(_first_row(start, low, width), end_row, BLOCK_L):
                rows = first + tl.arange(0, BLOCK_L)
                top = tl.full((BLOCK_L,), -float("inf"), tl.float32)
                total = tl.zeros((BLOCK_L,), tl.float32)
                for col in range(0, width, BLOCK_M):
                    cols = col + tl.arange(0, BLOCK_M)
                    mask = (rows < end_row)[:, None] & (cols < width)[None, :]
                    at = low + rows[:, None] * width + cols[None, :]
                    if BACKWARD:
                        p = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
                        total += tl.sum(p * tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32), 1)
                    else:
                        x = tl.load(x_ptr + at, mask=mask, other=-float("inf")).to(tl.float32)
                        new_top = tl.maximum(top, tl.max(x, 1))
                        base = tl.where(new_top == -float("inf"), 0.0, new_top)
                        total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base[:, None]), 1)
                        top = new_top
                base = tl.where(top == -float("inf"), 0.0, top)
                scale = tl.where(total == 0.0, 1.0, total)
                for col in range(0, width, BLOCK_M):
                    cols = col + tl.arange(0, BLOCK_M)
                    mask = (rows < end_row)[:, None] & (cols < width)[None, :]
                    at = low + rows[:, None] * width + cols[None, :]
                    if BACKWARD:
                        p = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
                        dp = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
                        result = p * (dp - total[:, None])
                    else:
                        x = tl.load(x_ptr + at, mask=mask, other=-float("inf")).to(tl.float32)
                        result = tl.exp(x - base[:, None]) / scale[:, None]
                    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=mask)
        sample += 1
        low = high


def _launch(x: Tensor, grad: Tensor, x_offsets: Tensor, y_offsets: Tensor, backward: bool) -> Tensor:
    out = torch.empty_like(x)
    if x.shape[0]:
        _jagged2_softmax_kernel[(triton.cdiv(x.shape[0], CHUNK),)](
            x,
            grad,
            pair_offsets(x_offsets, y_offsets),
            x_offsets,
            out,
            x_offsets.shape[0] - 1,
            BACKWARD=backward,
            CHUNK=CHUNK,
            BLOCK_L=8,
            BLOCK_M=256,
            num_warps=4,
        )
    return out


def forward(a: Tensor, x_offsets: Tensor, y_offsets: Tensor) -> Tensor:
    return _launch(a, a, x_offsets, y_offsets, False)


def backward(grad: Tensor, out: Tensor, x_offsets: Tensor, y_offsets: Tensor) -> Tensor:
    return _launch(out, grad, x_offsets, y_offsets, True)
