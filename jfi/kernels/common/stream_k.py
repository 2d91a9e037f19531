"""Stream-K partition of packed rows: equal ranges of all samples' rows, one for each program, without reading a length.

On a line where sample b takes its length and WEIGHT more (its cost in addition to its rows), program p owns positions
p · chunk to (p+1) · chunk and walks over the samples that it finds there, BLOCK_N rows a step.  So 64 users of 16,384
events fill the GPU as well as 4,096 of 500.  `jfi.kernels.plan.stream_k` chooses the chunk.

A range begins inside at most one sample and ends inside at most one; those two leave partial results, which
`jfi.kernels.common.combine` combines.

A range is one loop over its tiles, not a loop over samples around a loop over rows: the loads of the next sample are
then under way while the last rows of this one are computed, and a sample of 30 rows costs hardly more than its rows.

Where one program handles one sample, `longest_first` gives programs their samples in the order of their lengths.
"""

import triton
import triton.language as tl

from jfi.kernels import plan
from jfi.kernels.common.primitives import find_sample

WEIGHT = tl.constexpr(plan.SAMPLE_WEIGHT)
#: Samples whose order by length a program finds out.
RANKS = tl.constexpr(32)
#: Lengths from here on count as equal: RANKS times as much must fit 32 bits.
_LONG = tl.constexpr(2**20)


@triton.jit
def longest_first(program, offsets_ptr, batch):
    """The sample of a program that handles one: nearly the longest first, so that no long one starts last.

    Programs start in the order of their numbers.  Of each RANKS samples i, i + stride, i + 2 stride, ... the longest
    goes to program i, the next to program i + stride, and so on: without a table, and without a launch to make one.
    """
    stride = (batch + RANKS - 1) // RANKS
    members = tl.arange(0, RANKS)
    at = program % stride + members * stride
    low = tl.load(offsets_ptr + at, mask=at < batch, other=1)  # a sample past the end gets length -1: it comes last
    high = tl.load(offsets_ptr + at + 1, mask=at < batch, other=0)
    # Distinct keys, however long the samples.  Comparing all with all instead of sorting takes several times the
    # instructions, and at D = 256 spills registers.
    lengths = tl.sort(tl.minimum(high - low, _LONG).to(tl.int32) * RANKS + members, descending=True)
    member = tl.sum(tl.where(members == program // stride, lengths & (RANKS - 1), 0), 0)
    return (program % stride + member * stride).to(tl.int64)


@triton.jit
def find_range(offsets_ptr, batch, start, end, BLOCK_N: tl.constexpr):
    """Finds where a range begins: (sample, its first row, its end row, first row in the range, tiles of the range).

    The sample is the first with rows in the range, or an empty one whose position is there, since its output must be
    written too; batch if there is none.

    Every load here waits for the one before, at the start of a kernel that lasts as long as 30 of them.  So the search
    stops at a window of samples, and one look at that finds the sample, its rows and the tiles.
    """
    WINDOW: tl.constexpr = 128
    NEAR: tl.constexpr = 64
    near = find_sample(offsets_ptr, batch, start, 1, WEIGHT, NEAR)
    sample = near
    tiles = tl.zeros((), tl.int32)
    for ahead in range(0, ((end - start) // WEIGHT + NEAR + 2).to(tl.int32), WINDOW):
        at = near + ahead + tl.arange(0, WINDOW)
        real = at < batch
        lows = tl.load(offsets_ptr + at, mask=real, other=0).to(tl.int64)
        highs = tl.load(offsets_ptr + at + 1, mask=real, other=0).to(tl.int64)
        positions = lows + at * WEIGHT
        earlier = (positions < start) & (positions + highs - lows <= start)
        sample += tl.sum((real & earlier).to(tl.int32), 0)
        rows = tl.minimum(highs - lows, end - positions) - tl.maximum(start - positions, 0)
        sample_tiles = tl.maximum((rows.to(tl.int32) + BLOCK_N - 1) // BLOCK_N, 1)
        tiles += tl.sum(tl.where(real & (positions < end) & ~earlier, sample_tiles, 0), 0)
    # Read again, from the nearest cache: the result of a reduction would not live in the registers of uniform values.
    low = tl.load(offsets_ptr + sample, mask=sample < batch, other=0).to(tl.int64)
    high = tl.load(offsets_ptr + sample + 1, mask=sample < batch, other=0).to(tl.int64)
    return sample, low, high, low + tl.maximum(start - low - sample * WEIGHT, 0), tiles


@triton.jit
def end_row(sample, high, end):
    """The end of a sample's rows in a range that ends at position ``end``."""
    return tl.minimum(high, end - sample * WEIGHT)
