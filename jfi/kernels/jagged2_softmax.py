"""[Σ L·M] -> [Σ L·M], the softmax along each row of each sample's [L, M] block.

Programs are dealt out over the elements, so that neither the number of rows nor any length is needed on the host: a
program takes the rows that begin in its share of CHUNK elements.  A row of up to BLOCK_M entries is read once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.tiles import find_sample, pair_offsets

CHUNK = 4096


@triton.jit
def _first_row(position, low, width):
    """The first row of a block at ``low`` that begins at or behind position."""
    return (tl.maximum(position - low, 0) + width - 1) // width


@triton.jit
def _load(ptr, at, mask, other):
    return tl.load(ptr + at, mask=mask, other=other).to(tl.float32)


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
    empty: tl.constexpr = 0.0 if BACKWARD else -float("inf")
    while (sample < batch) & (low < start + CHUNK):
        high = tl.load(pair_offsets_ptr + sample + 1)
        length = tl.load(x_offsets_ptr + sample + 1).to(tl.int64) - tl.load(x_offsets_ptr + sample)
        width = ((high - low) // tl.maximum(length, 1)).to(tl.int32)
        if width > 0:
            end_row = tl.minimum(length, _first_row(start + CHUNK, low, width))
            for first in range(_first_row(start, low, width), end_row, BLOCK_L):
                rows = first + tl.arange(0, BLOCK_L)
                cols = tl.arange(0, BLOCK_M)
                at = low + rows[:, None] * width + cols[None, :]
                mask = (rows < end_row)[:, None] & (cols < width)[None, :]
                x = _load(x_ptr, at, mask, empty)
                if BACKWARD:
                    dp = _load(grad_ptr, at, mask, 0.0)
                    total = tl.sum(x * dp, 1)
                    for col in range(BLOCK_M, width, BLOCK_M):
                        more = mask & (col + cols < width)[None, :]
                        total += tl.sum(_load(x_ptr, at + col, more, 0.0) * _load(grad_ptr, at + col, more, 0.0), 1)
                    tl.store(out_ptr + at, (x * (dp - total[:, None])).to(out_ptr.dtype.element_ty), mask=mask)
                    for col in range(BLOCK_M, width, BLOCK_M):
                        more = mask & (col + cols < width)[None, :]
                        dx = _load(x_ptr, at + col, more, 0.0) * (_load(grad_ptr, at + col, more, 0.0) - total[:, None])
                        tl.store(out_ptr + at + col, dx.to(out_ptr.dtype.element_ty), mask=more)
                else:
                    top = tl.max(x, 1)
                    for col in range(BLOCK_M, width, BLOCK_M):
                        more = mask & (col + cols < width)[None, :]
                        top = tl.maximum(top, tl.max(_load(x_ptr, at + col, more, empty), 1))
                    top = tl.where(top == -float("inf"), 0.0, top)
                    p = tl.exp(x - top[:, None])
                    total = tl.sum(p, 1)
                    for col in range(BLOCK_M, width, BLOCK_M):
                        more = mask & (col + cols < width)[None, :]
                        total += tl.sum(tl.exp(_load(x_ptr, at + col, more, empty) - top[:, None]), 1)
                    total = tl.where(total == 0.0, 1.0, total)
                    tl.store(out_ptr + at, (p / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
                    for col in range(BLOCK_M, width, BLOCK_M):
                        more = mask & (col + cols < width)[None, :]
                        p = tl.exp(_load(x_ptr, at + col, more, empty) - top[:, None]) / total[:, None]
                        tl.store(out_ptr + at + col, p.to(out_ptr.dtype.element_ty), mask=more)
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
