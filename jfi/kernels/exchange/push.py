"""Copies from a tensor into the memory of several GPUs, one kernel."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import Launcher
from jfi.utils.operands import ceil_div

#: Words that a program writes to another GPU, and its warps.
PUSHED_WORDS, PUSH_WARPS = 2048, 8


@triton.jit(do_not_specialize=["count", "stride", "offset"])
def _push_kernel(words_ptr, targets_ptr, addresses_ptr, count, stride, offset, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Copies BLOCK words to a target; numbers count UNIT words, so that 16 bytes move at once. Grid: [blocks, K]."""
    target = tl.program_id(1)
    address = tl.load(addresses_ptr + tl.load(targets_ptr + target))
    to = tl.multiple_of(address.to(tl.pointer_type(words_ptr.dtype.element_ty)), 16) + offset.to(tl.int64) * UNIT
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count.to(tl.int64) * UNIT
    words = tl.load(words_ptr + target.to(tl.int64) * stride * UNIT + at, mask=mask)
    tl.store(to + at, words, mask=mask)


@cache
def _launcher(unit: int) -> Launcher:
    return Launcher(_push_kernel, UNIT=unit, BLOCK=PUSHED_WORDS, num_warps=PUSH_WARPS)


def push(rows: Tensor, targets: Tensor, addresses: Tensor, offset: int, shared: bool) -> None:
    size = rows.numel() * rows.element_size() // (1 if shared else max(targets.size(0), 1))
    if not size or not targets.size(0):
        return
    kind, unit = (torch.int64, 2) if size % 16 == 0 and offset % 16 == 0 else (torch.int32, 1)
    words, count = rows.view(-1).view(kind), size // (kind.itemsize * unit)
    grid = (ceil_div(count * unit, PUSHED_WORDS), targets.size(0), 1)
    numbers = count, 0 if shared else count, offset // (kind.itemsize * unit)
    _launcher(unit)(grid, (words, targets, addresses), numbers)
