"""Dealing out tiles of packed rows: one slot a tile, the samples with most work first.

The host knows the rows and the samples, no length.  A kernel writes, for each slot, which rows its tile has and which
rows of the other side it meets; slots left over come last and have none.  Programs take slots in order, so they begin
with the long ones and end with the short ones, which fill what the long ones leave: longest processing time first
(Graham, 'Bounds on Multiprocessing Timing Anomalies', 1969), within the width of a bucket.  Programs that live for many
slots take the next when they have time for it: two counters in the table say how many are taken, one for each sweep.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import Launcher
from jfi.kernels.common.primitives import cdiv

#: Samples a program.
OWN = 32
#: Two buckets for each doubling of the work.
BUCKETS = tl.constexpr(64)
#: Numbers to a slot, of which ``slot_of`` reads the first five: 32 bytes, a sector of memory.
FIELDS = tl.constexpr(8)
#: Where counters stand among the numbers of the first slot.
COUNTER = tl.constexpr(5)
OTHER_COUNTER = tl.constexpr(6)


@triton.jit
def _work(rows, others, heads, BLOCK: tl.constexpr):
    """(tiles, bucket) of each sample."""
    bucket = (2.0 * tl.log2(others.to(tl.float32) + 1.0)).to(tl.int32)
    return (rows * heads + BLOCK - 1) // BLOCK, tl.minimum(bucket, BUCKETS - 1)


@triton.jit(do_not_specialize=["batch", "heads", "slots"])
def _schedule_kernel(
    tiled_ptr, other_ptr, slots_ptr, batch, heads, slots, BLOCK: tl.constexpr, OWN: tl.constexpr, CHUNK: tl.constexpr
):
    """Tiles by bucket, all and those of samples before this program's; then each of its samples has its place.

    The offsets are loaded here and not in functions: torch.compile takes whatever a function was given for written to
    where the address of a store follows from what it returned.
    """
    first = tl.program_id(0) * OWN
    buckets = tl.arange(0, BUCKETS)
    count = tl.zeros((BUCKETS,), tl.int32)
    before = tl.zeros((BUCKETS,), tl.int32)
    for start in range(0, batch, CHUNK):
        at = start + tl.arange(0, CHUNK)
        rows = tl.load(tiled_ptr + at + 1, mask=at < batch, other=0) - tl.load(tiled_ptr + at, mask=at < batch, other=0)
        met = tl.load(other_ptr + at + 1, mask=at < batch, other=0) - tl.load(other_ptr + at, mask=at < batch, other=0)
        tiles, bucket = _work(rows.to(tl.int32), met.to(tl.int32), heads, BLOCK)
        here = tl.where(bucket[:, None] == buckets[None, :], tiles[:, None], 0)
        count += tl.sum(here, 0)
        before += tl.sum(tl.where((at < first)[:, None], here, 0), 0)
    total = tl.sum(count, 0)
    before += total - tl.cumsum(count, 0)
    own = first + tl.arange(0, OWN)
    low = tl.load(tiled_ptr + own, mask=own < batch, other=0)
    own_rows = (tl.load(tiled_ptr + own + 1, mask=own < batch, other=0) - low).to(tl.int32)
    other = tl.load(other_ptr + own, mask=own < batch, other=0)
    others = (tl.load(other_ptr + own + 1, mask=own < batch, other=0) - other).to(tl.int32)
    tiles, bucket = _work(own_rows, others, heads, BLOCK)
    mine = bucket[:, None] == buckets[None, :]
    # An earlier sample of the same bucket goes first.
    place = tl.where(mine, tl.cumsum(tl.where(mine, tiles[:, None], 0), 0) - tiles[:, None] + before[None, :], 0)
    place = tl.sum(place, 1)
    none = tl.zeros((OWN,), tl.int32)
    for tile in range(0, tl.max(tiles, 0)):
        to = slots_ptr + (place + tile).to(tl.int64) * FIELDS
        mask = tile < tiles
        tl.store(to, none + tile, mask=mask)
        tl.store(to + 1, low.to(tl.int32), mask=mask)
        tl.store(to + 2, own_rows, mask=mask)
        tl.store(to + 3, other.to(tl.int32), mask=mask)
        tl.store(to + 4, others, mask=mask)
    if first == 0:
        tl.store(slots_ptr + COUNTER, 0)
        tl.store(slots_ptr + OTHER_COUNTER, 0)
        for left_over in range(total, slots, OWN):
            to = left_over + tl.arange(0, OWN)
            for field in tl.static_range(5):
                tl.store(slots_ptr + to.to(tl.int64) * FIELDS + field, none, mask=to < slots)


@triton.jit
def slot_of(slots_ptr, at, total, GROUPS: tl.constexpr):
    """(tile, first row, rows, first row of the other side, its rows) of the slot that is place ``at`` of the grid.

    A slot has a place for each key head.  Of a slot without a tile, or past the end, all are 0.
    """
    to = slots_ptr + (at // GROUPS).to(tl.int64) * FIELDS
    mask = at < total
    tile = tl.load(to, mask=mask, other=0)
    low = tl.load(to + 1, mask=mask, other=0)
    rows = tl.load(to + 2, mask=mask, other=0)
    other = tl.load(to + 3, mask=mask, other=0)
    others = tl.load(to + 4, mask=mask, other=0)
    return tile, low, rows, other, others


@cache
def _launcher(block: int, tiled: torch.dtype, other: torch.dtype) -> Launcher:
    return Launcher(_schedule_kernel, BLOCK=block, OWN=OWN, CHUNK=128, num_warps=4)


def schedule(tiled: Tensor, other: Tensor, rows: int, heads: int, block: int) -> Tensor:
    """Which tile each slot is.

    Args:
        tiled: [B+1], offsets of the rows to be cut into tiles of ``block``, ``heads`` to a row.
        other: [B+1], offsets of the rows that every tile of a sample meets: its work.
        rows: where ``tiled`` ends.

    Returns:
        [slots, 8] int32: what ``slot_of`` reads; at least as many slots as tiles.  The counters are 0.

    Raises:
        ValueError: rows · heads do not fit 32 bits.
    """
    if rows * heads >= 2**31 - 256:
        raise ValueError(f"query must have fewer than 2³¹ rows · heads to a key head, got {rows} · {heads}")
    batch = tiled.shape[0] - 1
    slots = rows * heads // block + batch
    table = torch.empty(slots, FIELDS.value, dtype=torch.int32, device=tiled.device)
    launch = _launcher(block, tiled.dtype, other.dtype)
    launch((cdiv(batch, OWN), 1, 1), (tiled, other, table), (batch, heads, slots))
    return table
