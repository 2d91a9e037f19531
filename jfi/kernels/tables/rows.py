"""Loads rows of embedding tables by id."""

import triton
import triton.language as tl

from jfi.kernels.common.primitives import widen


@triton.jit
def _load(table, row, cols, mask, STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Returns [rows, BLOCK_D], as stored."""
    keep = mask[:, None]
    if BLOCK_D != D:
        keep = keep & (tl.arange(0, BLOCK_D) < D)[None, :]
    return tl.load(table + (row * STRIDE)[:, None] + cols[None, :], mask=keep, other=0.0)


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
    x = _load(tables[0], row, cols, mask & (row >= 0), STRIDE, D, BLOCK_D)
    if NUM_TABLES > 1:
        x = x.to(tl.float32)
        for i in tl.static_range(1, NUM_TABLES):
            row = tl.load(indices[i] + n + at, mask=mask, other=-1).to(tl.int64)
            x += _load(tables[i], row, cols, mask & (row >= 0), STRIDE, D, BLOCK_D).to(tl.float32)
    return widen(x.to(dtype))
