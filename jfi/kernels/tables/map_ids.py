"""Ids mapped to rows by a hash index of the ids of a table; see `jfi.ops.map_ids`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import Launcher
from jfi.kernels.plan import cached
from jfi.utils.operands import HASH_FACTOR, MISSING, NO_ID, PADDING, IdMap, SeenIds, ceil_div

#: Ids that a program maps; 128 and 2 or 4 warps take as long within 5 %.
_IDS, _WARPS = 256, 4


@triton.jit(do_not_specialize=["count", "num_kept"], do_not_specialize_on_alignment=["ids_ptr", "out_ptr"])
def map_ids_kernel(
    ids_ptr,
    table,
    seen,
    out_ptr,
    count,
    num_kept,
    FACTOR: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    MISSING: tl.constexpr,
    PADDING: tl.constexpr,
    NO_ID: tl.constexpr,
):
    """A program per BLOCK ids, each of which probes the index from its home on until a free slot.

    ``table`` are pointers to the index, the ids and the rows of an `IdMap`, ``seen`` to `SeenIds`, which may be None.
    """
    index_ptr, sorted_ptr, rows_ptr = table
    known_ptr, new_ptr, num_new_ptr, num_reserved_ptr = seen
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    ids = tl.load(ids_ptr + at, mask=mask, other=MISSING)
    may_have_row = mask & (ids != MISSING) & (ids != PADDING) & (ids != NO_ID)
    slot = ((ids ^ (ids >> 32 & 0xFFFFFFFF)) * FACTOR) >> (64 - BITS) & ((1 << BITS) - 1)
    position = tl.load(index_ptr + slot, mask=may_have_row, other=-1)
    left = position >= 0
    is_known = left & (tl.load(sorted_ptr + position, mask=left, other=MISSING) == ids)
    left = left & ~is_known
    while tl.max(left.to(tl.int32), 0) > 0:
        slot += 1
        further = tl.load(index_ptr + slot, mask=left, other=-1)
        left = further >= 0
        is_equal = left & (tl.load(sorted_ptr + further, mask=left, other=MISSING) == ids)
        position = tl.where(is_equal, further, position)
        is_known = is_known | is_equal
        left = left & ~is_equal
    row = tl.load(rows_ptr + position, mask=is_known, other=0)
    tl.store(out_ptr + at, tl.where(ids == PADDING, PADDING, row), mask=mask)
    if known_ptr is not None:
        # Most are marked: reads of the same mark go in parallel, where writes would wait for each other.
        is_marked = tl.load(known_ptr + position, mask=is_known, other=1)
        tl.store(known_ptr + position, tl.full([BLOCK], 1, tl.int1), mask=is_known & (is_marked == 0))
        is_new = may_have_row & ~is_known
        num_found = tl.sum(is_new.to(tl.int64), 0)
        # The order of the new ids is that of the programs; an admission sorts them.
        first = tl.atomic_add(num_new_ptr, num_found, mask=num_found > 0)
        slot = first + tl.cumsum(is_new.to(tl.int64), 0) - 1
        tl.store(new_ptr + slot, ids, mask=is_new & (slot < num_kept))
        reserved = tl.sum((mask & (ids == NO_ID)).to(tl.int64), 0)
        tl.atomic_add(num_reserved_ptr, reserved, mask=reserved > 0)


@cached
def _launcher(bits: int) -> Launcher:
    special = {"MISSING": MISSING, "PADDING": PADDING, "NO_ID": NO_ID}
    return Launcher(map_ids_kernel, FACTOR=HASH_FACTOR, BITS=bits, BLOCK=_IDS, **special, num_warps=_WARPS)


def map_ids(ids: Tensor, table: IdMap, seen: SeenIds | None) -> Tensor:
    """Maps contiguous ids, at least one, see `jfi.ops.map_ids.map_ids`."""
    out, num_kept = torch.empty_like(ids), 0 if seen is None else len(seen.new_ids)
    tensors = (ids, (table.index, table.sorted_ids, table.rows), tuple(seen or (None,) * 4), out)
    _launcher(table.hash_bits)((ceil_div(len(ids), _IDS), 1, 1), tensors, (len(ids), num_kept))
    return out
