"""Rows of embedding tables by id, and ids with -1 for those outside of their tables."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import Launcher
from jfi.kernels.common.primitives import widen
from jfi.kernels.common.tiles import COPY_ELEMENTS, COPY_WARPS, load_columns, load_rows, store_rows
from jfi.utils.operands import MAX_TABLES, ceil_div, power_of_two

#: Ids that a program bounds.
_BOUNDED_IDS = 1024
#: Parameters that begin anywhere: features' ids are packed.
INDICES = ["index_0", "index_1", "index_2", "index_3"]


@triton.jit
def load_rows_by_id(
    tables,
    indices,
    n,
    at,
    cols,
    mask,
    dtype,
    STRIDE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_TABLES: tl.constexpr,
):
    """Returns [rows, BLOCK_D] in dtype: for each event n + at the sum of its rows of all tables.

    Zeros outside the mask, and for a negative index.
    """
    row = tl.load(indices[0] + n + at, mask=mask, other=-1).to(tl.int64)
    x = load_columns(tables[0], row, cols, mask & (row >= 0), STRIDE, D, BLOCK_D)
    if NUM_TABLES > 1:
        x = x.to(tl.float32)
        for i in tl.static_range(1, NUM_TABLES):
            row = tl.load(indices[i] + n + at, mask=mask, other=-1).to(tl.int64)
            x += load_columns(tables[i], row, cols, mask & (row >= 0), STRIDE, D, BLOCK_D).to(tl.float32)
    return widen(x.to(dtype))


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=INDICES)
def gather_rows_kernel(
    tables,
    index_0,
    index_1,
    index_2,
    index_3,
    out_ptr,
    count,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_TABLES: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """A program per BLOCK_S events; with ADDS the sum is added to what ``out`` holds."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_S
    at = tl.arange(0, BLOCK_S)
    mask = at < count - first
    cols = tl.arange(0, BLOCK_D)
    indices = (index_0, index_1, index_2, index_3)
    dtype = tl.float32 if ADDS else out_ptr.dtype.element_ty
    x = load_rows_by_id(tables, indices, first, at, cols, mask, dtype, D, D, BLOCK_D, NUM_TABLES)
    if ADDS:
        x += load_rows(out_ptr + first * D, at, mask, D, D, BLOCK_D).to(tl.float32)
    store_rows(out_ptr + first * D, x, at, mask, D, D, BLOCK_D)


@cache
def _launcher(width: int, num_tables: int, adds: bool) -> Launcher:
    block_d = power_of_two(width, 1)
    constants = {"D": width, "BLOCK_D": block_d, "NUM_TABLES": num_tables, "ADDS": adds}
    block_s = max(COPY_ELEMENTS // block_d, 1)
    return Launcher(gather_rows_kernel, **constants, BLOCK_S=block_s, num_warps=COPY_WARPS)


def gather_rows(tables: tuple[Tensor, ...], indices: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Computes `jfi.reference.gather_rows` of contiguous tables and indices."""
    width = tables[0].shape[1]
    out = torch.empty(indices[0].shape[0], width, dtype=dtype, device=tables[0].device)
    if not out.numel():
        return out
    for first in range(0, len(tables), MAX_TABLES):
        some, ids = tables[first : first + MAX_TABLES], list(indices[first : first + MAX_TABLES])
        ids += [None] * (MAX_TABLES - len(ids))
        launcher = _launcher(width, len(some), first > 0)
        grid = (ceil_div(out.shape[0], launcher.constants["BLOCK_S"]), 1, 1)
        launcher(grid, (tuple(some), *ids, out), (out.shape[0],))
    return out


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


@cache
def _bound_launcher() -> Launcher:
    return Launcher(bound_ids_kernel, BLOCK=_BOUNDED_IDS, num_warps=4)


def bound_ids(ids: list[Tensor], sizes: list[int], counts: Tensor | None) -> list[Tensor]:
    """Bounds contiguous ids, see `jfi.tables.gather_rows.bound_ids`. A launch takes MAX_TABLES tables."""
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
        _bound_launcher()((ceil_div(max(lengths[some]), _BOUNDED_IDS), len(own), 1), tensors, numbers)
    return bounded
