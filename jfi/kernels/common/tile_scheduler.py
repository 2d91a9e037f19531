"""Tile scheduler: tiles of packed rows in LPT order, those of the samples with most work first.

The host knows the total number of rows and of samples, but no length.  So a kernel writes the tiles: which rows each
has, and which rows of the other side its sample has.  There are at least as many entries as tiles; those left over come
last and are empty.  Programs take tiles in order, so they start with the long ones and end with the short ones, which
fill the gaps: longest processing time first (Graham, 'Bounds on Multiprocessing Timing Anomalies', 1969), here up to
the width of a bucket of similar work.  Where the tiles of a sample taper, as in causal attention, tile i of n is taken
to see (n - i) / n of the other side's rows.  A persistent kernel's programs take a further tile whenever they are free,
with an atomic counter; the schedule holds three counters: for the forward and for two kernels of the backward.
"""

import operator
from collections.abc import Callable
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import Launcher
from jfi.utils.operands import ceil_div

#: Samples per program of the scheduling kernel.
SAMPLES = 32
#: Samples per step of its loop over all of them.
CHUNK = 128
#: Up to so many samples each program counts all of them: one launch instead of three.
COUNTED_ONCE = 1024
#: Work is sorted into this many buckets, two for each doubling.
BUCKETS = tl.constexpr(64)
#: Integers per entry, of which ``load_work_tile`` reads the first five: 32 bytes, one sector of memory.
ENTRY = tl.constexpr(8)
#: Where the persistent kernels' counters are: unused integers of the first entry.
COUNTER = tl.constexpr(5)
SECOND_COUNTER = tl.constexpr(6)
FORWARD_COUNTER = tl.constexpr(7)


@triton.jit
def _bucket_bounds(tiles, other_rows, TAPERS: tl.constexpr):
    """Returns [samples, BUCKETS] twice, (lo, hi): tile i of n falls in bucket b if lo[b] <= n - i < hi[b].

    The work of a tile is that of the rows of the other side that it sees; bucket b has the work from 2^(b/2) - 1 on.
    """
    bucket = tl.arange(0, BUCKETS)
    return _least_left(tiles, other_rows, bucket, TAPERS), _least_left(tiles, other_rows, bucket + 1, TAPERS)


@triton.jit
def _least_left(tiles, other_rows, bucket, TAPERS: tl.constexpr):
    """Returns the smallest n - i of the tiles whose work reaches the bucket's lower bound; n + 1 if there is none."""
    none = tiles[:, None] + 1
    if TAPERS:
        work = tl.exp2(bucket.to(tl.float32) * 0.5) - 1.0
        share = tiles.to(tl.float32) / tl.maximum(other_rows, 1).to(tl.float32)
        least = tl.minimum(tl.ceil(work[None, :] * share[:, None]), none.to(tl.float32)).to(tl.int32)
        least = tl.where((other_rows == 0)[:, None] & (bucket > 0)[None, :], none, least)
    else:
        work_bucket = (2.0 * tl.log2(other_rows.to(tl.float32) + 1.0)).to(tl.int32)
        least = tl.where(bucket[None, :] <= work_bucket[:, None], 1, none)
    least = tl.minimum(tl.maximum(least, 1), none)
    # All work beyond that of the last bucket is in it.
    return tl.where((bucket == BUCKETS)[None, :], none, least)


@triton.jit(do_not_specialize=["batch", "rows_factor"])
def _count_kernel(
    offsets_ptr,
    other_offsets_ptr,
    counts_ptr,
    batch,
    rows_factor,
    BLOCK: tl.constexpr,
    TAPERS: tl.constexpr,
    SAMPLES: tl.constexpr,
):
    """Count the tiles of SAMPLES samples by bucket: counts [BUCKETS, programs], the bucket of most work first."""
    program = tl.program_id(0)
    at = program * SAMPLES + tl.arange(0, SAMPLES)
    mask = at < batch
    rows = tl.load(offsets_ptr + at + 1, mask=mask, other=0) - tl.load(offsets_ptr + at, mask=mask, other=0)
    other_rows = tl.load(other_offsets_ptr + at + 1, mask=mask, other=0) - tl.load(
        other_offsets_ptr + at, mask=mask, other=0
    )
    tiles = (rows.to(tl.int32) * rows_factor + BLOCK - 1) // BLOCK
    least, most = _bucket_bounds(tiles, other_rows.to(tl.int32), TAPERS)
    to = counts_ptr + (BUCKETS - 1 - tl.arange(0, BUCKETS)) * tl.num_programs(0) + program
    tl.store(to, tl.sum(most - least, 0))


@triton.jit(do_not_specialize=["batch", "rows_factor", "num_entries"])
def _schedule_kernel(
    offsets_ptr,
    other_offsets_ptr,
    sums_ptr,
    schedule_ptr,
    batch,
    rows_factor,
    num_entries,
    BLOCK: tl.constexpr,
    TAPERS: tl.constexpr,
    SAMPLES: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """Write the entries of SAMPLES samples, after those of buckets of more work and of earlier samples in their bucket.

    If COUNTED, ``sums_ptr`` has the inclusive sums of what ``_count_kernel`` counted; else each program counts all
    samples itself, which takes time with the square of the batch.

    torch.compile treats a helper's pointer arguments as mutated if a store address depends on its result, so offsets
    are loaded inline.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    first = program * SAMPLES
    if COUNTED:
        earlier = (BUCKETS - 1 - tl.arange(0, BUCKETS)) * programs + program - 1
        before = tl.load(sums_ptr + earlier, mask=earlier >= 0, other=0)
        total = tl.load(sums_ptr + BUCKETS * programs - 1)
    else:
        count = tl.zeros((BUCKETS,), tl.int32)
        before = tl.zeros((BUCKETS,), tl.int32)
        for chunk in range(0, batch, CHUNK):
            at = chunk + tl.arange(0, CHUNK)
            mask = at < batch
            rows = tl.load(offsets_ptr + at + 1, mask=mask, other=0) - tl.load(offsets_ptr + at, mask=mask, other=0)
            other_rows = tl.load(other_offsets_ptr + at + 1, mask=mask, other=0) - tl.load(
                other_offsets_ptr + at, mask=mask, other=0
            )
            tiles = (rows.to(tl.int32) * rows_factor + BLOCK - 1) // BLOCK
            least, most = _bucket_bounds(tiles, other_rows.to(tl.int32), TAPERS)
            by_bucket = most - least
            count += tl.sum(by_bucket, 0)
            before += tl.sum(tl.where((at < first)[:, None], by_bucket, 0), 0)
        total = tl.sum(count, 0)
        before += total - tl.cumsum(count, 0)
    sample = first + tl.arange(0, SAMPLES)
    mask = sample < batch
    start = tl.load(offsets_ptr + sample, mask=mask, other=0)
    rows = (tl.load(offsets_ptr + sample + 1, mask=mask, other=0) - start).to(tl.int32)
    other_start = tl.load(other_offsets_ptr + sample, mask=mask, other=0)
    other_rows = (tl.load(other_offsets_ptr + sample + 1, mask=mask, other=0) - other_start).to(tl.int32)
    tiles = (rows * rows_factor + BLOCK - 1) // BLOCK
    least, most = _bucket_bounds(tiles, other_rows, TAPERS)
    # Within a bucket, in the order of the samples.
    position = tl.cumsum(most - least, 0) - (most - least) + before[None, :] + most - 1
    index = tl.sum(tl.where(least < most, position, 0), 1) - tiles
    zero = tl.zeros((SAMPLES,), tl.int32)
    for tile in range(0, tl.max(tiles, 0)):
        if TAPERS:
            left = (tiles - tile)[:, None]
            index = tl.sum(tl.where((least <= left) & (left < most), position - left, 0), 1) - tile
        entry = schedule_ptr + (index + tile).to(tl.int64) * ENTRY
        mask = tile < tiles
        tl.store(entry, zero + tile, mask=mask)
        tl.store(entry + 1, start.to(tl.int32), mask=mask)
        tl.store(entry + 2, rows, mask=mask)
        tl.store(entry + 3, other_start.to(tl.int32), mask=mask)
        tl.store(entry + 4, other_rows, mask=mask)
    if first == 0:
        for counter in tl.static_range(3):
            tl.store(schedule_ptr + COUNTER + counter, 0)
    for left_over in range(total + first, num_entries, programs * SAMPLES):
        at = left_over + tl.arange(0, SAMPLES)
        for field in tl.static_range(5):
            tl.store(schedule_ptr + at.to(tl.int64) * ENTRY + field, zero, mask=at < num_entries)


@triton.jit
def load_work_tile(schedule_ptr, index, total, NUM_KV_HEADS: tl.constexpr):
    """Loads (number of the tile within its sample, sample's first row, its rows, the same two of the other side).

    Every entry is a work tile for each key head: work tile ``index`` is that of key head index % NUM_KV_HEADS.  All
    are 0 for an entry without a tile and from ``total`` on.
    """
    entry = schedule_ptr + (index // NUM_KV_HEADS).to(tl.int64) * ENTRY
    mask = index < total
    tile = tl.load(entry, mask=mask, other=0)
    start = tl.load(entry + 1, mask=mask, other=0)
    rows = tl.load(entry + 2, mask=mask, other=0)
    other_start = tl.load(entry + 3, mask=mask, other=0)
    other_rows = tl.load(entry + 4, mask=mask, other=0)
    return tile, start, rows, other_start, other_rows


@cache
def _launchers(block: int, tapers: bool) -> tuple[Launcher, Launcher, Launcher]:
    """Returns those of the kernel that counts, of the one that writes, and of the latter without counts."""
    constants = {"BLOCK": block, "TAPERS": tapers, "SAMPLES": SAMPLES, "num_warps": 4}
    write = (Launcher(_schedule_kernel, **constants, CHUNK=CHUNK, COUNTED=counted) for counted in (True, False))
    return Launcher(_count_kernel, **constants), *write


def schedule_tiles(
    offsets: Tensor,
    other_offsets: Tensor,
    rows: int,
    rows_factor: int,
    block: int,
    launch: Callable[..., None] = operator.call,
    tapers: bool = False,
) -> Tensor:
    """Cut each sample's rows into tiles, and order the tiles by the rows that they see on the other side, most first.

    Args:
        offsets: [B+1] of the rows to be cut.
        other_offsets: [B+1] of the rows that every tile of a sample is combined with.
        rows: the last of ``offsets``.
        rows_factor: rows of a tile per row of ``offsets``: H/G if query heads are packed into the query rows, or 1.
        block: rows of a tile.
        launch: calls a launcher with its arguments.
        tapers: a sample's first tile sees all rows of the other side, and each further one fewer; else all see all.

    Returns:
        [entries, 8] int32, which ``load_work_tile`` reads; the counters are 0, so that each kernel can read it once.
    """
    batch = offsets.shape[0] - 1
    entries = rows * rows_factor // block + batch
    schedule = torch.empty(entries, ENTRY.value, dtype=torch.int32, device=offsets.device)
    programs, (count, write, write_all) = ceil_div(batch, SAMPLES), _launchers(block, tapers)
    # An exported program does not know its batch, and scores requests, which are few samples.
    if isinstance(batch, int) and batch > COUNTED_ONCE:
        counts = offsets.new_empty(BUCKETS.value * programs, dtype=torch.int32)
        launch(count, (programs, 1, 1), (offsets, other_offsets, counts), (batch, rows_factor))
        sums = counts.cumsum(0, dtype=torch.int32)
    else:
        sums, write = None, write_all
    tensors = (offsets, other_offsets, sums, schedule)
    launch(write, (programs, 1, 1), tensors, (batch, rows_factor, entries))
    return schedule
