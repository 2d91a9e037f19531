"""Dealing packed rows out to programs in equal shares, and merging what a sample leaves in several of them.

On a line where a sample takes its length and WEIGHT more (what it costs beside its rows), program p owns positions
p · chunk to (p+1) · chunk and walks over the samples that it finds there, BLOCK_N rows a step.  So 64 users of 16,384
events fill the chip as well as 4,096 of 500, without reading a length on the host.

A share begins inside at most one sample and ends inside at most one.  Such a sample leaves a partial result in each of
its shares: slot 2p holds that of the one which began in an earlier share, slot 2p + 1 that of the one which goes on
into a later.  They are merged in the order of the rows, so that the same inputs give the same bits.

A share's steps are one loop, not a loop over samples around a loop over rows: the loads of the next sample are then
under way while the last rows of this one are computed, and a sample of 30 rows costs hardly more than its rows.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.tiles import LOG2E, find_sample

#: What a sample costs beside its rows, in rows.
WEIGHT = tl.constexpr(64)
#: Shares are this long at least.
LEAST_CHUNK = 256


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def deal(rows: int, batch: int, device: torch.device, shares_per_multiprocessor: int) -> tuple[int, int]:
    """(positions of a share, number of shares), from what the host knows."""
    line = rows + batch * WEIGHT.value
    chunk = max(LEAST_CHUNK, triton.cdiv(line, _multiprocessors(device) * shares_per_multiprocessor))
    return chunk, triton.cdiv(line, chunk)


@triton.jit
def first_step(offsets_ptr, batch, start, end, BLOCK_N: tl.constexpr):
    """Where a share begins: (sample, its first row, its end row, first row of the share, steps of the share).

    The sample is the first with rows in the share, or an empty one that has its place there, to whom an output is owed
    too; batch if there is none.
    """
    FAN: tl.constexpr = 128
    sample = find_sample(offsets_ptr, batch, start, 1, WEIGHT)
    low = tl.load(offsets_ptr + sample).to(tl.int64)
    high = tl.load(offsets_ptr + sample + 1).to(tl.int64)
    place = low + sample * WEIGHT
    sample += ((place < start) & (place + high - low <= start)).to(tl.int64)
    steps = tl.zeros((), tl.int32)
    for ahead in range(0, ((end - start) // WEIGHT + 2).to(tl.int32), FAN):
        at = sample + ahead + tl.arange(0, FAN)
        lows = tl.load(offsets_ptr + at, mask=at < batch, other=0).to(tl.int64)
        highs = tl.load(offsets_ptr + at + 1, mask=at < batch, other=0).to(tl.int64)
        places = lows + at * WEIGHT
        rows = tl.minimum(highs - lows, end - places) - tl.maximum(start - places, 0)
        tiles = tl.maximum((rows.to(tl.int32) + BLOCK_N - 1) // BLOCK_N, 1)
        steps += tl.sum(tl.where((at < batch) & (places < end), tiles, 0), 0)
    low = tl.load(offsets_ptr + sample, mask=sample < batch, other=0).to(tl.int64)
    high = tl.load(offsets_ptr + sample + 1, mask=sample < batch, other=0).to(tl.int64)
    return sample, low, high, low + tl.maximum(start - low - sample * WEIGHT, 0), steps


@triton.jit
def last_row(sample, low, high, end):
    """The end of a sample's rows in a share that ends at position ``end``."""
    return tl.minimum(high, end - sample * WEIGHT)


@triton.jit(do_not_specialize=["chunk", "queries"])
def _merge_kernel(
    offsets_ptr,
    split_ptr,
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    chunk,
    queries,
    WIDTH: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """O = Σ_i exp(L_i - L) O_i with L = log Σ_i exp(L_i) if WEIGHTED, else O = Σ_i O_i; a program a query row."""
    program = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0)
    sample = tl.load(split_ptr + program)
    if sample < 0:
        return
    end = tl.load(offsets_ptr + sample + 1).to(tl.int64) + sample * WEIGHT
    cols = tl.arange(0, BLOCK_D)
    top = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(program, (end - 1) // chunk + 1, BLOCK_P):
        share = first + tl.arange(0, BLOCK_P)
        mask = share * chunk < end
        at = (2 * share + (share == program).to(tl.int64)) * queries + row
        part = tl.load(
            part_ptr + at[:, None] * WIDTH + cols[None, :], mask=mask[:, None] & (cols < WIDTH)[None, :], other=0.0
        )
        if WEIGHTED:
            lse = tl.load(part_lse_ptr + at, mask=mask, other=-float("inf"))
            new_top = tl.maximum(top, tl.max(lse, 0))
            base = tl.where(new_top == -float("inf"), 0.0, new_top)
            weight = tl.exp2((lse - base) * LOG2E)
            shrink = tl.exp2((top - base) * LOG2E)
            acc = acc * shrink + tl.sum(part * weight[:, None], 0)
            total = total * shrink + tl.sum(weight, 0)
            top = new_top
        else:
            acc += tl.sum(part, 0)
    if WEIGHTED:
        total_or_one = tl.where(total == 0.0, 1.0, total)
        acc = acc / total_or_one
        lse = tl.where(total == 0.0, -float("inf"), top + tl.log(total_or_one))
        tl.store(lse_ptr + sample * queries + row, lse)
    tl.store(out_ptr + (sample * queries + row) * WIDTH + cols, acc.to(out_ptr.dtype.element_ty), mask=cols < WIDTH)


class Partials:
    """Room for what split samples leave in their shares: [2 · shares, T · H, width], and which samples those are."""

    def __init__(self, shares: int, chunk: int, like: Tensor, width: int, weighted: bool):
        _, times, heads, _ = like.shape
        self.shares, self.chunk, self.queries, self.width = shares, chunk, times * heads, width
        self.values = torch.empty(2 * shares, self.queries, width, dtype=torch.float32, device=like.device)
        self.lse = self.values.new_empty(2 * shares, self.queries) if weighted else None
        self.split = torch.empty(shares, dtype=torch.int64, device=like.device)

    def merge(self, offsets: Tensor, out: Tensor, lse: Tensor | None) -> None:
        block_d = triton.next_power_of_2(self.width)
        _merge_kernel[(self.queries, self.shares)](
            offsets,
            self.split,
            self.values,
            self.lse,
            out,
            lse,
            self.chunk,
            self.queries,
            WIDTH=self.width,
            WEIGHTED=lse is not None,
            BLOCK_P=max(2, min(16, 1024 // block_d)),
            BLOCK_D=block_d,
            num_warps=max(1, min(8, block_d // 64)),
        )
