"""Rows of embedding tables by id, summed over aligned fields: [S, D] from K tables, one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import Launcher
from jfi.kernels.common.tiles import COPY_ELEMENTS, COPY_WARPS
from jfi.kernels.plan import cached
from jfi.kernels.tables import rows
from jfi.utils.integers import ceil_div, power_of_two
from jfi.utils.operands import MAX_TABLES

#: Parameters that begin anywhere: features' ids are packed.
INDICES = ["index_0", "index_1", "index_2", "index_3"]


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
    x = rows.load_rows_by_id(tables, indices, first, at, cols, mask, dtype, D, D, BLOCK_D, NUM_TABLES)
    to = out_ptr + first * D + at[:, None] * D + cols[None, :]
    keep = mask[:, None]
    if BLOCK_D != D:
        keep = keep & (cols < D)[None, :]
    if ADDS:
        x += tl.load(to, mask=keep, other=0.0).to(tl.float32)
    tl.store(to, x.to(out_ptr.dtype.element_ty), mask=keep)


@cached
def _launcher(width: int, num_tables: int, adds: bool) -> Launcher:
    block_d = power_of_two(width, 1)
    constants = {"D": width, "BLOCK_D": block_d, "NUM_TABLES": num_tables, "ADDS": adds}
    block_s = max(COPY_ELEMENTS // block_d, 1)
    return Launcher(gather_rows_kernel, **constants, BLOCK_S=block_s, num_warps=COPY_WARPS)


def gather_rows(tables: tuple[Tensor, ...], indices: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """[S, D] in dtype: the sum over K tables [N_k, D] of the row indices[k][s]; a negative index gives zeros.

    Args:
        tables: contiguous, of floating dtypes.
        indices: contiguous, int32 or int64.
        dtype: of the result.
    """
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
