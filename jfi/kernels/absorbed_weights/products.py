"""Tiles of matrices of any strides, and products of them, for the kernels of absorbed weights."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.primitives import INTERPRET

#: Side of a tile of a product.
SIDE = 64
#: What the products are rounded to; the interpreter rounds nothing.
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def load_matrix(ptr, row, rows, row_stride, col, cols, col_stride, DTYPE: tl.constexpr):
    """A tile of a matrix of any strides, in the dtype of the products."""
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    x = tl.load(ptr + row[:, None] * row_stride + col[None, :] * col_stride, mask=mask, other=0.0)
    if INTERPRET:  # which multiplies half precision wrongly
        return x.to(tl.float32)
    return x.to(DTYPE)


@triton.jit
def store_matrix(ptr, x, row, rows, row_stride, col, cols, col_stride):
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    tl.store(ptr + row[:, None] * row_stride + col[None, :] * col_stride, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_splits(ptrs, mask, sum_of):
    """The sums of a batch's chunks, added up in order.  sum_of: (how many, from one to the next, if more than one)."""
    splits, stride, SPLIT = sum_of
    x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    if SPLIT:
        for split in range(1, splits, 4):
            for i in tl.static_range(4):  # their loads overlap
                x += tl.load(ptrs + (split + i) * stride, mask=mask & (split + i < splits), other=0.0)
    return x


@triton.jit
def add_product(
    acc, a, b, row, rows, col, cols, inner, sum_of, DTYPE: tl.constexpr, PRECISION: tl.constexpr, STEP: tl.constexpr
):
    """acc + A B of A [rows, inner] and B [inner, cols], each (pointer, its strides); B is what ``add_splits`` adds."""
    a_ptr, a_row, a_inner = a
    b_ptr, b_inner, b_col = b
    for first in range(0, inner, STEP):
        at = first + tl.arange(0, STEP)
        left = load_matrix(a_ptr, row, rows, a_row, at, inner, a_inner, DTYPE)
        mask = (at < inner)[:, None] & (col < cols)[None, :]
        right = add_splits(b_ptr + at[:, None] * b_inner + col[None, :] * b_col, mask, sum_of)
        acc = tl.dot(left, right if INTERPRET else right.to(DTYPE), acc, input_precision=PRECISION)
    return acc


@triton.jit
def tile_of(tile, cols, SIDE: tl.constexpr):
    """Rows and columns of a tile of a matrix with so many columns."""
    across = (cols + SIDE - 1) // SIDE
    return tile // across * SIDE + tl.arange(0, SIDE), tile % across * SIDE + tl.arange(0, SIDE)


def product_options(dtype: torch.dtype, precision: str) -> dict[str, object]:
    """A launcher's constants for products in this dtype."""
    return {"DTYPE": _DTYPES[dtype], "PRECISION": precision, "SIDE": SIDE, "num_warps": 4}


def sizes_of(weights: tuple[Tensor, ...], num_queries: int, num_heads: int) -> tuple[int, ...]:
    """T, H, d, D_x and D_e."""
    w_q, _, w_k, _, w_o = weights
    return num_queries, num_heads, w_o.shape[1] // num_heads, w_k.shape[2], w_q.shape[2]
