"""Ids mapped to rows by a binary search among the ascending ids of a table; see `jfi.ops.map_ids`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import Launcher
from jfi.kernels.plan import cached
from jfi.utils.operands import MISSING, NO_ID, PADDING, IdMap, SeenIds, ceil_div

#: Ids that a program maps; others than 128 with 8 warps take as long within 15 %.
_IDS = 256
_WARPS = 8


@triton.jit(do_not_specialize=["count", "last", "num_kept"], do_not_specialize_on_alignment=["ids_ptr", "out_ptr"])
def map_ids_kernel(
    ids_ptr,
    sorted_ptr,
    rows_ptr,
    known_ptr,
    new_ptr,
    num_new_ptr,
    out_ptr,
    count,
    last,
    num_kept,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    MISSING: tl.constexpr,
    PADDING: tl.constexpr,
    NO_ID: tl.constexpr,
):
    """A program per BLOCK ids. The place of an id is the number of smaller ones among the first `last`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    ids = tl.load(ids_ptr + at, mask=mask, other=MISSING)
    place = tl.zeros([BLOCK], tl.int32)
    for step in tl.static_range(STEPS):
        further = place + (1 << (STEPS - 1 - step))
        inside = further <= last
        value = tl.load(sorted_ptr + further - 1, mask=mask & inside, other=NO_ID)
        place = tl.where(inside & (value < ids), further, place)
    is_known = mask & (tl.load(sorted_ptr + place, mask=mask, other=MISSING) == ids) & (ids != NO_ID) & (ids != MISSING)
    row = tl.load(rows_ptr + place, mask=is_known, other=0)
    tl.store(out_ptr + at, tl.where(ids == PADDING, PADDING, row), mask=mask)
    if known_ptr is not None:
        tl.store(known_ptr + place, tl.full([BLOCK], 1, tl.int1), mask=is_known)
        is_new = mask & ~is_known & (ids != MISSING) & (ids != PADDING) & (ids != NO_ID)
        found = tl.sum(is_new.to(tl.int64), 0)
        # The order of the new ids is that of the programs; an admission sorts them.
        first = tl.atomic_add(num_new_ptr, found, mask=found > 0)
        slot = first + tl.cumsum(is_new.to(tl.int64), 0) - 1
        tl.store(new_ptr + slot, ids, mask=is_new & (slot < num_kept))


@cached
def _launcher(steps: int) -> Launcher:
    special = {"MISSING": MISSING, "PADDING": PADDING, "NO_ID": NO_ID}
    return Launcher(map_ids_kernel, STEPS=steps, BLOCK=_IDS, **special, num_warps=_WARPS)


def map_ids(ids: Tensor, table: IdMap, seen: SeenIds | None) -> Tensor:
    """Maps contiguous ids, at least one, see `jfi.ops.map_ids.map_ids`."""
    out, last = torch.empty_like(ids), len(table.sorted_ids) - 1
    num_kept = 0 if seen is None else len(seen.new_ids)
    tensors = (ids, *table, *(seen or (None, None, None)), out)
    _launcher(last.bit_length())((ceil_div(len(ids), _IDS), 1, 1), tensors, (len(ids), last, num_kept))
    return out
