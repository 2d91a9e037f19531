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

from jfi.kernels.common.launch import Launcher
from jfi.kernels.common.primitives import LOG2E, block, cdiv, find_sample

#: What a sample costs beside its rows, in rows.
WEIGHT = tl.constexpr(64)
#: Shares are this long at least.
LEAST_CHUNK = 256
#: A program takes a whole sample where the longest is known to have no more rows and bytes: the last one to start keeps
#: the others waiting for no longer than is saved by finding no share and merging nothing.
WHOLE_ROWS, WHOLE_BYTES = 512, 2**18
#: Samples whose order by length a program finds out.
RANKS = tl.constexpr(32)
#: Samples to a multiprocessor up to which finding their order costs the backward less than it saves at the end.
_ORDERED = 40
#: Lengths from here on count as equal: RANKS times as much must fit 32 bits.
_LONG = tl.constexpr(2**20)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def deal(rows: int, batch: int, device: torch.device, shares_per_multiprocessor: int) -> tuple[int, int]:
    """(positions of a share, number of shares), from what the host knows."""
    line = rows + batch * WEIGHT.value
    chunk = max(LEAST_CHUNK, cdiv(line, multiprocessors(device) * shares_per_multiprocessor))
    return chunk, cdiv(line, chunk)


def fits(max_seqlen: int | None, row_bytes: int) -> bool:
    """Whether samples of at most this length, known or not, are better taken whole, a program each."""
    return max_seqlen is not None and max_seqlen <= WHOLE_ROWS and max_seqlen * row_bytes <= WHOLE_BYTES


def are_ordered(batch: int, device: torch.device) -> bool:
    """Whether the backward's programs, where they take whole samples, had better start with the long ones.

    As with `fits`, the other answer is another kernel, which is compiled when it is first wanted.
    """
    return batch <= _ORDERED * multiprocessors(device)


@triton.jit
def longest_first(program, offsets_ptr, batch):
    """The sample of a program that takes it whole: nearly the longest first, so that no long one starts last.

    Programs start in the order of their numbers.  Of each RANKS samples i, i + stride, i + 2 stride, ... the longest
    goes to program i, the next to program i + stride, and so on: without a table, and without a launch to make one.
    """
    stride = (batch + RANKS - 1) // RANKS
    members = tl.arange(0, RANKS)
    at = program % stride + members * stride
    low = tl.load(offsets_ptr + at, mask=at < batch, other=1)  # a sample that is not there is the last one
    high = tl.load(offsets_ptr + at + 1, mask=at < batch, other=0)
    # No two alike, however long.  Comparing all with all instead of a sort takes several times the instructions, and at
    # D = 256 spills registers.
    lengths = tl.sort(tl.minimum(high - low, _LONG).to(tl.int32) * RANKS + members, descending=True)
    member = tl.sum(tl.where(members == program // stride, lengths & (RANKS - 1), 0), 0)
    return (program % stride + member * stride).to(tl.int64)


@triton.jit
def first_step(offsets_ptr, batch, start, end, BLOCK_N: tl.constexpr):
    """Where a share begins: (sample, its first row, its end row, first row of the share, steps of the share).

    The sample is the first with rows in the share, or an empty one that has its place there, to whom an output is owed
    too; batch if there is none.

    Every load here waits for the one before, at the start of a kernel that lasts as long as 30 of them.  So the search
    stops at a window of samples, and one look at that finds the sample, its rows and the steps.
    """
    WINDOW: tl.constexpr = 128
    NEAR: tl.constexpr = 64
    near = find_sample(offsets_ptr, batch, start, 1, WEIGHT, NEAR)
    sample = near
    steps = tl.zeros((), tl.int32)
    for ahead in range(0, ((end - start) // WEIGHT + NEAR + 2).to(tl.int32), WINDOW):
        at = near + ahead + tl.arange(0, WINDOW)
        real = at < batch
        lows = tl.load(offsets_ptr + at, mask=real, other=0).to(tl.int64)
        highs = tl.load(offsets_ptr + at + 1, mask=real, other=0).to(tl.int64)
        places = lows + at * WEIGHT
        earlier = (places < start) & (places + highs - lows <= start)
        sample += tl.sum((real & earlier).to(tl.int32), 0)
        rows = tl.minimum(highs - lows, end - places) - tl.maximum(start - places, 0)
        tiles = tl.maximum((rows.to(tl.int32) + BLOCK_N - 1) // BLOCK_N, 1)
        steps += tl.sum(tl.where(real & (places < end) & ~earlier, tiles, 0), 0)
    # Read again, from the nearest cache: what a reduction gives would not live in the registers of uniform values.
    low = tl.load(offsets_ptr + sample, mask=sample < batch, other=0).to(tl.int64)
    high = tl.load(offsets_ptr + sample + 1, mask=sample < batch, other=0).to(tl.int64)
    return sample, low, high, low + tl.maximum(start - low - sample * WEIGHT, 0), steps


@triton.jit
def last_row(sample, low, high, end):
    """The end of a sample's rows in a share that ends at position ``end``."""
    return tl.minimum(high, end - sample * WEIGHT)


@triton.jit
def parts(part_ptr, shares, queries, WIDTH: tl.constexpr):
    """Behind partial results [2 · shares, queries, WIDTH]: log-sum-exps [2 · shares, queries], split samples [shares].

    A share that holds the first rows of a split sample names it there; the others say -1.
    """
    part_lse_ptr = part_ptr + (2 * shares * queries).to(tl.int64) * WIDTH
    return part_lse_ptr, (part_lse_ptr + 2 * shares * queries).to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit(do_not_specialize=["chunk", "queries"])
def _merge_kernel(
    offsets_ptr,
    part_ptr,
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
    part_lse_ptr, split_ptr = parts(part_ptr, tl.num_programs(1), queries, WIDTH)
    sample = tl.load(split_ptr + program).to(tl.int64)
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


@cache
def _merge(width: int, weighted: bool, dtype: torch.dtype, offsets_dtype: torch.dtype) -> Launcher:
    block_d = block(width, least=1)
    return Launcher(
        _merge_kernel,
        WIDTH=width,
        WEIGHTED=weighted,
        BLOCK_P=max(2, min(16, 1024 // block_d)),
        BLOCK_D=block_d,
        num_warps=max(1, min(8, block_d // 64)),
    )


class Partials:
    """Room for what split samples leave in their shares, one allocation: see ``parts``."""

    def __init__(self, shares: int, chunk: int, queries: int, width: int, device: torch.device):
        self.shares, self.chunk, self.queries, self.width = shares, chunk, queries, width
        self.memory = torch.empty(shares * (2 * queries * (width + 1) + 1), dtype=torch.float32, device=device)

    def merge(self, offsets: Tensor, out: Tensor, lse: Tensor | None) -> None:
        launch = _merge(self.width, lse is not None, out.dtype, offsets.dtype)
        launch((self.queries, self.shares, 1), (offsets, self.memory, out, lse), (self.chunk, self.queries))
