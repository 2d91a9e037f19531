"""Ids by owner rank: each goes to the next slot of its owner's part of a buffer, in their order.

A block of ids counts those of each rank; then every block finds where its own begin from the counts of the blocks
before it, and writes them. Ranks and shards are few (`MAX_SHARDS`), so that an id is compared with all.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import Launcher
from jfi.utils import operands
from jfi.utils.operands import ceil_div, power_of_two

#: Events of a sample that a program counts at a time, and events that a program collects.
COUNTED_EVENTS, COLLECTED_EVENTS = 256, 1024


@triton.jit
def _owners(ids, mask, boundaries_ptr, ranks_ptr, NUM_SHARDS: tl.constexpr, NUM_RANKS: tl.constexpr):
    """Returns the rank and the shard of each id; the rank is NUM_RANKS outside the mask."""
    shard = tl.zeros(ids.shape, tl.int32)
    for boundary in range(NUM_SHARDS - 1):
        shard += (ids >= tl.load(boundaries_ptr + boundary)).to(tl.int32)
    rank = tl.load(ranks_ptr + shard, mask=mask, other=NUM_RANKS).to(tl.int32)
    return rank, shard


@triton.jit
def _load_ids(ids_ptr, at, mask, num_rows):
    """Loads ids, -1 outside of the table and mask; returns them and the number outside of the table, -1 excepted."""
    ids = tl.load(ids_ptr + at, mask=mask, other=-1)
    is_row = (ids >= 0) & (ids < num_rows)
    return tl.where(is_row, ids, -1), tl.sum((~is_row & (ids != -1)).to(tl.int32), 0)


@triton.jit
def _block_ids(ids_ptr, offsets_ptr, count, batch, num_rows, BLOCK: tl.constexpr):
    """Loads a block of ids: (positions, mask of ids, ids, number outside); ids behind the last offset are padding."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = (at < count) & (at < tl.load(offsets_ptr + batch).to(tl.int64))
    ids, outside = _load_ids(ids_ptr, at, mask, num_rows)
    return at, mask, ids, outside


@triton.jit(
    do_not_specialize=["count", "batch", "first_block", "blocks", "num_rows"],
    do_not_specialize_on_alignment=["outside_ptr"],
)
def _count_kernel(
    ids_ptr,
    offsets_ptr,
    boundaries_ptr,
    ranks_ptr,
    counts_ptr,
    outside_ptr,
    count,
    batch,
    first_block,
    blocks,
    num_rows,
    NUM_SHARDS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Counts the ids of a block that each rank owns, [ranks, blocks], and those that are outside. Grid: blocks."""
    _, mask, ids, outside = _block_ids(ids_ptr, offsets_ptr, count, batch, num_rows, BLOCK)
    if outside_ptr is not None:  # integers: their order does not matter
        tl.atomic_add(outside_ptr, outside.to(tl.int64), mask=outside > 0)
    rank, _ = _owners(ids, mask, boundaries_ptr, ranks_ptr, NUM_SHARDS, NUM_RANKS)
    for owner in range(NUM_RANKS):
        num_owned = tl.sum((rank == owner).to(tl.int32), 0)
        tl.store(counts_ptr + owner * blocks + first_block + tl.program_id(0), num_owned)


@triton.jit(do_not_specialize=["count", "batch", "first_block", "blocks", "num_slots", "first", "num_rows"])
def _scatter_kernel(
    sequence,
    outputs,
    count,
    batch,
    first_block,
    blocks,
    num_slots,
    first,
    num_rows,
    NUM_SHARDS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Each program writes one block of ids, as row numbers in the owner's shard, and their payload to the buffer.

    ``sequence`` are pointers to ids, offsets, boundaries, ranks, shifts and payload; ``outputs`` to the counts, the
    buffer and the slots, None where nobody reads these.
    """
    ids_ptr, offsets_ptr, boundaries_ptr, ranks_ptr, shifts_ptr, payload_ptr = sequence
    counts_ptr, buffer_ptr, slots_ptr = outputs
    at, mask, ids, _outside = _block_ids(ids_ptr, offsets_ptr, count, batch, num_rows, BLOCK)
    rank, shard = _owners(ids, mask, boundaries_ptr, ranks_ptr, NUM_SHARDS, NUM_RANKS)
    before = tl.arange(0, BLOCK_B)
    is_before = before < first_block + tl.program_id(0)
    slot = tl.full((BLOCK,), -1, tl.int64)
    for owner in range(NUM_RANKS):
        base = tl.sum(tl.load(counts_ptr + owner * blocks + before, mask=is_before, other=0), 0)
        is_owned = (rank == owner).to(tl.int32)
        within = base + tl.cumsum(is_owned, 0) - is_owned
        fits = (rank == owner) & (within < num_slots)
        slot = tl.where(fits, within.to(tl.int64) + owner * num_slots.to(tl.int64), slot)
    row = ids + tl.load(shifts_ptr + shard, mask=mask, other=0)
    row = tl.where(ids < 0, -1, row).to(tl.int32)
    tl.store(buffer_ptr + slot * COLUMNS, row, mask=slot >= 0)
    for column in tl.static_range(1, COLUMNS):
        other = tl.load(payload_ptr + (first.to(tl.int64) + at) * (COLUMNS - 1) + column - 1, mask=mask, other=0)
        tl.store(buffer_ptr + slot * COLUMNS + column, other, mask=slot >= 0)
    if slots_ptr is not None:
        tl.store(slots_ptr + first.to(tl.int64) + at, slot, mask=at < count)


@triton.jit(do_not_specialize=["samples", "first_sample", "num_rows"])
def _count_samples_kernel(
    ids_ptr,
    offsets_ptr,
    boundaries_ptr,
    ranks_ptr,
    counts_ptr,
    samples,
    first_sample,
    num_rows,
    NUM_SHARDS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Counts the events of a sample that each rank owns, [ranks, samples]. Grid: samples."""
    sample = tl.program_id(0)
    low = tl.load(offsets_ptr + sample).to(tl.int64)
    high = tl.load(offsets_ptr + sample + 1).to(tl.int64)
    ranks = tl.arange(0, BLOCK_R)
    num_owned = tl.zeros((BLOCK_R,), tl.int32)
    for n in range(low, high, BLOCK):
        at = n + tl.arange(0, BLOCK)
        mask = at < high
        ids, _outside = _load_ids(ids_ptr, at, mask, num_rows)
        rank, _ = _owners(ids, mask, boundaries_ptr, ranks_ptr, NUM_SHARDS, NUM_RANKS)
        num_owned += tl.sum((rank[None, :] == ranks[:, None]).to(tl.int32), 1)
    tl.store(counts_ptr + ranks * samples.to(tl.int64) + first_sample + sample, num_owned, mask=ranks < NUM_RANKS)


@triton.jit(do_not_specialize=["capacity", "num_slots"])
def _collect_kernel(
    arrived_ptr,
    ends_ptr,
    padding_ptr,
    out_ptr,
    capacity,
    num_slots,
    NUM_RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Moves a block of events of all ranks together, [columns, capacity]. Grid: blocks of events."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    source = tl.zeros((BLOCK,), tl.int64)
    first = tl.zeros((BLOCK,), tl.int64)
    for rank in range(NUM_RANKS):
        end = tl.load(ends_ptr + rank)
        source += (at >= end).to(tl.int64)
        first = tl.where(at >= end, end, first)
    within = at - first
    mask = (source < NUM_RANKS) & (within < num_slots)
    for column in tl.static_range(COLUMNS):
        padding = tl.load(padding_ptr + column)
        x = tl.load(arrived_ptr + (source * num_slots + within) * COLUMNS + column, mask=mask, other=0)
        tl.store(out_ptr + column * capacity.to(tl.int64) + at, tl.where(mask, x, padding), mask=at < capacity)


@cache
def _launcher(kernel: triton.JITFunction, **constants: object) -> Launcher:
    return Launcher(kernel, **constants, num_warps=4)


def partition(
    sequences: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, Tensor | None]],
    payload: Tensor | None,
    num_ranks: int,
    num_slots: int,
    buffer: Tensor,
    slots: Tensor | None,
) -> Tensor:
    """Computes `jfi.ops.partition_ids.partition_ids`: fills buffer and slots and returns the counts [W, blocks]."""
    blocks = [max(ceil_div(ids.size(0), operands.PARTITIONED_IDS), 1) for ids, *_ in sequences]
    counts = torch.empty(num_ranks, sum(blocks), dtype=torch.int32, device=buffer.device)
    sizes = {"NUM_RANKS": num_ranks, "BLOCK": operands.PARTITIONED_IDS}
    first_block = 0
    for num_blocks, (ids, offsets, boundaries, ranks, _, num_rows, outside) in zip(blocks, sequences, strict=True):
        launcher = _launcher(_count_kernel, NUM_SHARDS=ranks.size(0), **sizes)
        numbers = ids.size(0), offsets.size(0) - 1, first_block, sum(blocks), num_rows
        launcher((num_blocks, 1, 1), (ids, offsets, boundaries, ranks, counts, outside), numbers)
        first_block += num_blocks
    sizes |= {"COLUMNS": buffer.size(1), "BLOCK_B": power_of_two(sum(blocks), 16)}
    first_block = first = 0
    for num_blocks, (ids, offsets, *tables, num_rows, _) in zip(blocks, sequences, strict=True):
        launcher = _launcher(_scatter_kernel, NUM_SHARDS=tables[1].size(0), **sizes)
        numbers = ids.size(0), offsets.size(0) - 1, first_block, sum(blocks), num_slots, first, num_rows
        launcher((num_blocks, 1, 1), ((ids, offsets, *tables, payload), (counts, buffer, slots)), numbers)
        first_block, first = first_block + num_blocks, first + ids.size(0)
    return counts


def count_samples(
    sequences: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, Tensor | None]], num_ranks: int
) -> Tensor:
    """Counts the events of each sample that every rank owns, [W, samples of all sequences] int32."""
    samples = sum(offsets.size(0) - 1 for _, offsets, *_ in sequences)
    counts = torch.empty(num_ranks, samples, dtype=torch.int32, device=sequences[0][0].device)
    first = 0
    for ids, offsets, boundaries, ranks, _, num_rows, _ in sequences:
        batch = offsets.size(0) - 1
        sizes = {"NUM_SHARDS": ranks.size(0), "NUM_RANKS": num_ranks, "BLOCK_R": power_of_two(num_ranks, 2)}
        launcher = _launcher(_count_samples_kernel, **sizes, BLOCK=COUNTED_EVENTS)
        if batch:
            launcher((batch, 1, 1), (ids, offsets, boundaries, ranks, counts), (samples, first, num_rows))
        first += batch
    return counts


def collect(arrived: Tensor, ends: Tensor, padding: Tensor, num_slots: int, capacity: int) -> Tensor:
    out = arrived.new_empty(arrived.size(1), capacity)
    if capacity:
        launcher = _launcher(_collect_kernel, NUM_RANKS=ends.size(0), COLUMNS=arrived.size(1), BLOCK=COLLECTED_EVENTS)
        launcher((ceil_div(capacity, COLLECTED_EVENTS), 1, 1), (arrived, ends, padding, out), (capacity, num_slots))
    return out
