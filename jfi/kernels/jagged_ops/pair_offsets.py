"""The offsets of the samples' [L, M] blocks in a packed tensor."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import Launcher


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
def _launcher(*dtypes: torch.dtype) -> Launcher:
    return Launcher(_pair_offsets_kernel, BLOCK=1024, num_warps=8)


def pair_offsets(x_offsets: Tensor, y_offsets: Tensor) -> Tensor:
    """[B+1] int64: the cumulative sum of L·M.

    One program computes it in a few microseconds; a parallel scan would take two launches, which cost more.
    """
    out = torch.empty(x_offsets.shape[0], dtype=torch.int64, device=x_offsets.device)
    launch = _launcher(x_offsets.dtype, y_offsets.dtype)
    launch((1, 1, 1), (x_offsets, y_offsets, out), (x_offsets.shape[0] - 1,))
    return out
