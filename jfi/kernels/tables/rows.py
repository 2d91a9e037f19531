"""Loading rows of embedding tables by id.

A row of a table of integers is D numbers of 8 bits, then their scale and bias in float32, as fbgemm packs them
(FloatToFused8BitRowwiseQuantized): x = number · scale + bias.
"""

import triton
import triton.language as tl

from jfi.kernels.common.primitives import widen

#: Bytes of scale and bias behind the D numbers of a row.
QUANTIZED_TAIL = tl.constexpr(8)


@triton.jit
def _load(
    table, row, cols, mask, STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, QUANTIZED: tl.constexpr
):
    """[rows, BLOCK_D], as stored; float32 of quantized rows."""
    keep = mask[:, None]
    if BLOCK_D != D:
        keep = keep & (tl.arange(0, BLOCK_D) < D)[None, :]
    if QUANTIZED:
        base = row * (STRIDE + QUANTIZED_TAIL)
        x = tl.load(table + base[:, None] + cols[None, :], mask=keep, other=0).to(tl.float32)
        tail = (table + base + STRIDE).to(tl.pointer_type(tl.float32), bitcast=True)
        scale = tl.load(tail, mask=mask, other=0.0)
        bias = tl.load(tail + 1, mask=mask, other=0.0)
        return tl.where(keep, x * scale[:, None] + bias[:, None], 0.0)
    else:
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
    QUANTIZED: tl.constexpr,
):
    """[rows, BLOCK_D] in dtype: for events n + at the sum over the tables of the row that the event names in each.

    0 outside the mask, and where an index is negative.
    """
    row = tl.load(indices[0] + n + at, mask=mask, other=-1).to(tl.int64)
    x = _load(tables[0], row, cols, mask & (row >= 0), STRIDE, D, BLOCK_D, QUANTIZED)
    if NUM_TABLES > 1:
        x = x.to(tl.float32)
        for i in tl.static_range(1, NUM_TABLES):
            row = tl.load(indices[i] + n + at, mask=mask, other=-1).to(tl.int64)
            x += _load(tables[i], row, cols, mask & (row >= 0), STRIDE, D, BLOCK_D, QUANTIZED).to(tl.float32)
    return widen(x.to(dtype))
