"""Ids with -1 in the place of those outside of their tables, which are counted: one launch for several tables."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import Launcher
from jfi.kernels.plan import cached
from jfi.kernels.tables.gather import INDICES
from jfi.utils.integers import ceil_div
from jfi.utils.operands import MAX_TABLES

_BLOCK = 1024


@triton.jit(
    do_not_specialize=["end_0", "end_1", "end_2", "end_3", "rows_0", "rows_1", "rows_2", "rows_3"],
    do_not_specialize_on_alignment=[*INDICES, "out_ptr", "counts_ptr"],
)
def bound_ids_kernel(
    index_0,
    index_1,
    index_2,
    index_3,
    out_ptr,
    counts_ptr,
    end_0,
    end_1,
    end_2,
    end_3,
    rows_0,
    rows_1,
    rows_2,
    rows_3,
    BLOCK: tl.constexpr,
):
    """A program per BLOCK ids of a table; the ids of table k end at end_k of the result."""
    indices = (index_0, index_1, index_2, index_3)
    ends = (end_0, end_1, end_2, end_3)
    rows = (rows_0, rows_1, rows_2, rows_3)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    for i in tl.static_range(4):
        if indices[i] is not None:  # noqa: SIM102, at compile time
            if tl.program_id(1) == i:
                first = tl.zeros((), tl.int64)
                if i > 0:
                    first += ends[i - 1]
                mask = at < ends[i] - first
                ids = tl.load(indices[i] + at, mask=mask, other=-1).to(tl.int64)
                is_row = (ids >= 0) & (ids < rows[i])
                tl.store(out_ptr + first + at, tl.where(is_row, ids, -1).to(out_ptr.dtype.element_ty), mask=mask)
                if counts_ptr is not None:  # integers: their order does not matter
                    outside = tl.sum((~is_row & (ids != -1)).to(tl.int32), 0)
                    tl.atomic_add(counts_ptr + i, outside.to(tl.int64), mask=outside > 0)


@cached
def _launcher() -> Launcher:
    return Launcher(bound_ids_kernel, BLOCK=_BLOCK, num_warps=4)


def bound_ids(ids: list[Tensor], sizes: list[int], counts: Tensor | None) -> list[Tensor]:
    """Bounds contiguous ids, see `jfi.ops.gather_rows.bound_ids`. A launch takes MAX_TABLES tables."""
    dtype = torch.int32 if max(sizes) < 2**31 else torch.int64
    lengths = [one.shape[0] for one in ids]
    out = torch.empty(sum(lengths), dtype=dtype, device=ids[0].device)
    bounded = list(out.split(lengths))
    for first in range(0, len(ids), MAX_TABLES):
        some = slice(first, first + MAX_TABLES)
        if not any(lengths[some]):
            continue
        own, ends = ids[some], []
        for length in lengths[some]:
            ends.append(length + (ends[-1] if ends else 0))
        absent = MAX_TABLES - len(own)
        to = out[sum(lengths[:first]) :]
        tensors = (*own, *[None] * absent, to, None if counts is None else counts[some])
        numbers = (*ends, *[0] * absent, *sizes[some], *[0] * absent)
        _launcher()((ceil_div(max(lengths[some]), _BLOCK), len(own), 1), tensors, numbers)
    return bounded
