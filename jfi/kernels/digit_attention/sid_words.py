"""Semantic IDs of ternary digits, five to a byte, as words of two bits a digit: one kernel."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import Launcher
from jfi.utils.operands import DIGITS_PER_WORD, ceil_div

_BLOCK = 512


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["sids_ptr"])
def sid_words_kernel(sids_ptr, words_ptr, count, L: tl.constexpr, W: tl.constexpr, BLOCK_S: tl.constexpr):
    """A program per BLOCK_S events."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_S
    at = tl.arange(0, BLOCK_S)
    mask = at < count - first
    sids = tl.load(sids_ptr + first + at, mask=mask, other=0)
    unknown = (sids == -1).to(tl.int32)
    rest = (sids & 255).to(tl.int32)
    for w in tl.static_range(W):
        word = tl.zeros((BLOCK_S,), tl.int32)
        for j in tl.static_range(16):
            if w * 16 + j < L:
                if (w * 16 + j) % 5 == 0:
                    rest = ((sids >> (8 * ((w * 16 + j) // 5))) & 255).to(tl.int32)
                third = (rest * 171) >> 9  # rest // 3, of a rest up to 255
                word |= ((rest - third * 3 - 1) & 3) << (2 * j)
                rest = third
        word = word * (1 - unknown)
        if w == L // 16:
            word |= (1 - unknown) << (2 * (L % 16))
        if w == (L + 1) // 16:
            word |= unknown << (2 * ((L + 1) % 16))
        tl.store(words_ptr + (first + at) * W + w, word, mask=mask)


@cache
def _launcher(num_digits: int) -> Launcher:
    words = ceil_div(num_digits + 2, DIGITS_PER_WORD)
    return Launcher(sid_words_kernel, L=num_digits, W=words, BLOCK_S=_BLOCK, num_warps=4)


def sid_words(sids: Tensor, num_digits: int) -> Tensor:
    """[S, ceil((L + 2) / 16)] int32: the L digits of contiguous IDs [S], then 1 and 0; of -1 zeros, then 0 and 1."""
    launcher = _launcher(num_digits)
    words = torch.empty(sids.shape[0], launcher.constants["W"], dtype=torch.int32, device=sids.device)
    if words.numel():
        launcher((ceil_div(sids.shape[0], _BLOCK), 1, 1), (sids, words), (sids.shape[0],))
    return words
