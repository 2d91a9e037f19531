"""Ids mapped to rows by a search among the sorted ids of a table; see `jfi.tables.map_ids`."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import Launcher
from jfi.utils.operands import MISSING, NO_ID, PADDING, IdMap, ceil_div

#: Ids that a program maps; 128 and 2 or 4 warps take as long within 5 %.
_IDS, _WARPS = 256, 4


@triton.jit(do_not_specialize=["count", "num_ids", "num_kept"], do_not_specialize_on_alignment=["ids_ptr", "out_ptr"])
def map_ids_kernel(
    ids_ptr,
    sorted_ptr,
    rows_ptr,
    seen_ptr,
    new_ptr,
    num_new_ptr,
    num_reserved_ptr,
    out_ptr,
    count,
    num_ids,
    num_kept,
    BLOCK: tl.constexpr,
    MISSING: tl.constexpr,
    PADDING: tl.constexpr,
    NO_ID: tl.constexpr,
):
    """A program per BLOCK ids, each of which is searched by halves."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    ids = tl.load(ids_ptr + at, mask=mask, other=MISSING)
    may_have_row = mask & (ids != MISSING) & (ids != PADDING) & (ids != NO_ID)
    # The position of the first sorted id that is not smaller, among `size` from there; the last id is NO_ID.
    position, size = tl.zeros([BLOCK], tl.int64), num_ids
    while size > 1:
        further = position + size // 2
        is_smaller = tl.load(sorted_ptr + further - 1, mask=may_have_row, other=NO_ID) < ids
        position = tl.where(is_smaller, further, position)
        size -= size // 2
    is_known = may_have_row & (tl.load(sorted_ptr + position, mask=may_have_row, other=MISSING) == ids)
    row = tl.load(rows_ptr + position, mask=is_known, other=0)
    tl.store(out_ptr + at, tl.where(ids == PADDING, PADDING, row), mask=mask)
    if seen_ptr is not None:
        # Most are marked: reads of the same mark go in parallel, where writes would wait for each other.
        was_seen = tl.load(seen_ptr + position, mask=is_known, other=1)
        tl.store(seen_ptr + position, tl.full([BLOCK], 1, tl.int1), mask=is_known & (was_seen == 0))
        is_new = may_have_row & ~is_known
        num_found = tl.sum(is_new.to(tl.int64), 0)
        # The order of the new ids is that of the programs; an admission sorts them.
        first = tl.atomic_add(num_new_ptr, num_found, mask=num_found > 0)
        slot = first + tl.cumsum(is_new.to(tl.int64), 0) - 1
        tl.store(new_ptr + slot, ids, mask=is_new & (slot < num_kept))
        reserved = tl.sum((mask & (ids == NO_ID)).to(tl.int64), 0)
        tl.atomic_add(num_reserved_ptr, reserved, mask=reserved > 0)


@cache
def _launcher() -> Launcher:
    special = {"MISSING": MISSING, "PADDING": PADDING, "NO_ID": NO_ID}
    return Launcher(map_ids_kernel, BLOCK=_IDS, **special, num_warps=_WARPS)


def map_ids(ids: Tensor, table: IdMap, records: bool) -> Tensor:
    """Maps contiguous ids, at least one, see `jfi.tables.map_ids.map_ids`."""
    out, recorded = torch.empty_like(ids), table[2:] if records else (None,) * 4
    tensors = (ids, table.sorted_ids, table.rows, *recorded, out)
    sizes = len(ids), len(table.sorted_ids), len(table.new_ids)
    _launcher()((ceil_div(len(ids), _IDS), 1, 1), tensors, sizes)
    return out
