"""The small products between the weights of multi-head target attention, in one launch each way.

By feature f, query t and head h, with the heads' parts of the weights d wide:

    W_qk = W_kᵀ W_q [D_x, D_e]      b_qk = W_kᵀ b_q [D_x]      W_vo = W_vᵀ W_oᵀ [D_x, D]

and of their gradients, with sums over the queries, which share W_k and W_v:

    dW_q = W_k dW_qk      db_q = W_k db_qk      dW_oᵀ = W_v dW_vo
    dW_k = Σ_t W_q dW_qkᵀ + b_q db_qkᵀ          dW_v = Σ_t W_oᵀ dW_voᵀ
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.launch import Launcher
from jfi.kernels.tiles import INTERPRET, block, cdiv, precision

#: Side of a tile of a product.
SIDE = 64


@triton.jit
def _load(ptr, row, rows, row_stride, col, cols, col_stride, like):
    """A tile of a matrix of any strides, in the dtype of the products."""
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    x = tl.load(ptr + row[:, None] * row_stride + col[None, :] * col_stride, mask=mask, other=0.0)
    if INTERPRET:  # which multiplies half precision wrongly
        return x.to(tl.float32)
    return x.to(like.dtype.element_ty)


@triton.jit
def _store(ptr, x, row, rows, row_stride, col, cols, col_stride):
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    tl.store(ptr + row[:, None] * row_stride + col[None, :] * col_stride, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_product(
    acc,
    a_ptr,
    a_row,
    a_inner,
    b_ptr,
    b_inner,
    b_col,
    row,
    rows,
    col,
    cols,
    inner,
    like,
    PRECISION: tl.constexpr,
    STEP: tl.constexpr,
):
    """acc + A B, with A [rows, inner] and B [inner, cols] given by their strides."""
    for first in range(0, inner, STEP):
        at = first + tl.arange(0, STEP)
        a = _load(a_ptr, row, rows, a_row, at, inner, a_inner, like)
        b = _load(b_ptr, at, inner, b_inner, col, cols, b_col, like)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _tile_of(tile, cols, SIDE: tl.constexpr):
    """Rows and columns of a tile of a matrix with so many columns."""
    across = (cols + SIDE - 1) // SIDE
    return tile // across * SIDE + tl.arange(0, SIDE), tile % across * SIDE + tl.arange(0, SIDE)


@triton.jit
def _merge_kernel(
    w_q_ptr,
    b_q_ptr,
    w_k_ptr,
    w_v_ptr,
    w_o_ptr,
    w_qk_ptr,
    b_qk_ptr,
    w_vo_ptr,
    T: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    D_X: tl.constexpr,
    D_E: tl.constexpr,
    PRECISION: tl.constexpr,
    SIDE: tl.constexpr,
    STEP: tl.constexpr,
):
    """A program a tile of W_qk, with its part of b_qk, or of W_vo."""
    D: tl.constexpr = H * WIDTH
    QUERY_END: tl.constexpr = ((D_X + SIDE - 1) // SIDE) * ((D_E + SIDE - 1) // SIDE)
    part, tile = tl.program_id(0), tl.program_id(1)
    feature, query = part // (T * H), part // H % T
    history = feature * (D * D_X) + part % H * (WIDTH * D_X)
    first = query * D + part % H * WIDTH
    acc = tl.zeros((SIDE, SIDE), tl.float32)
    if tile < QUERY_END:
        row, col = _tile_of(tile, D_E, SIDE)
        k_ptr = w_k_ptr + history
        q_ptr = w_q_ptr + (feature * (T * D) + first) * D_E
        acc = _add_product(acc, k_ptr, 1, D_X, q_ptr, D_E, 1, row, D_X, col, D_E, WIDTH, w_qk_ptr, PRECISION, STEP)
        _store(w_qk_ptr + part * (D_X * D_E), acc, row, D_X, D_E, col, D_E, 1)
        if tile % tl.cdiv(D_E, SIDE) == 0:
            bias = tl.zeros((SIDE,), tl.float32)
            for start in range(0, WIDTH, STEP):
                at = start + tl.arange(0, STEP)
                k = _load(k_ptr, row, D_X, 1, at, WIDTH, D_X, w_qk_ptr).to(tl.float32)
                b = tl.load(b_q_ptr + feature * (T * D) + first + at, mask=at < WIDTH, other=0.0).to(tl.float32)
                bias += tl.sum(k * b[None, :], 1)
            tl.store(b_qk_ptr + part * D_X + row, bias.to(b_qk_ptr.dtype.element_ty), mask=row < D_X)
    else:
        row, col = _tile_of(tile - QUERY_END, D, SIDE)
        o_ptr = w_o_ptr + feature * (D * T * D) + first
        acc = _add_product(
            acc, w_v_ptr + history, 1, D_X, o_ptr, 1, T * D, row, D_X, col, D, WIDTH, w_qk_ptr, PRECISION, STEP
        )
        _store(w_vo_ptr + part * (D_X * D), acc, row, D_X, D, col, D, 1)


@triton.jit
def _split_kernel(
    dw_qk_ptr,
    db_qk_ptr,
    dw_vo_ptr,
    w_q_ptr,
    b_q_ptr,
    w_k_ptr,
    w_v_ptr,
    w_o_ptr,
    dw_q_ptr,
    db_q_ptr,
    dw_k_ptr,
    dw_v_ptr,
    dw_o_ptr,
    T: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    D_X: tl.constexpr,
    D_E: tl.constexpr,
    PRECISION: tl.constexpr,
    SIDE: tl.constexpr,
    STEP: tl.constexpr,
):
    """A program a tile of dW_q, with its part of db_q, of dW_oᵀ, of dW_k or of dW_v."""
    D: tl.constexpr = H * WIDTH
    DOWN: tl.constexpr = (WIDTH + SIDE - 1) // SIDE
    # Where the tiles of each gradient end.
    QUERY_END: tl.constexpr = DOWN * ((D_E + SIDE - 1) // SIDE)
    OUTPUT_END: tl.constexpr = QUERY_END + DOWN * ((D + SIDE - 1) // SIDE)
    KEY_END: tl.constexpr = OUTPUT_END + DOWN * ((D_X + SIDE - 1) // SIDE)
    part, tile = tl.program_id(0), tl.program_id(1)
    feature, query = part // (T * H), part // H % T
    history = feature * (D * D_X) + part % H * (WIDTH * D_X)
    first = query * D + part % H * WIDTH
    q_ptr = w_q_ptr + (feature * (T * D) + first) * D_E
    o_ptr = w_o_ptr + feature * (D * T * D) + first
    bias_ptr = b_q_ptr + feature * (T * D) + first
    qk_ptr, vo_ptr = dw_qk_ptr + part * (D_X * D_E), dw_vo_ptr + part * (D_X * D)
    acc = tl.zeros((SIDE, SIDE), tl.float32)
    if tile < QUERY_END:
        row, col = _tile_of(tile, D_E, SIDE)
        k_ptr = w_k_ptr + history
        acc = _add_product(acc, k_ptr, D_X, 1, qk_ptr, D_E, 1, row, WIDTH, col, D_E, D_X, dw_qk_ptr, PRECISION, STEP)
        _store(dw_q_ptr + (feature * (T * D) + first) * D_E, acc, row, WIDTH, D_E, col, D_E, 1)
        if tile % tl.cdiv(D_E, SIDE) == 0:
            bias = tl.zeros((SIDE,), tl.float32)
            for start in range(0, D_X, STEP):
                at = start + tl.arange(0, STEP)
                k = _load(k_ptr, row, WIDTH, D_X, at, D_X, 1, dw_qk_ptr).to(tl.float32)
                bias += tl.sum(k * tl.load(db_qk_ptr + part * D_X + at, mask=at < D_X, other=0.0).to(tl.float32), 1)
            to = db_q_ptr + feature * (T * D) + first + row
            tl.store(to, bias.to(db_q_ptr.dtype.element_ty), mask=row < WIDTH)
    elif tile < OUTPUT_END:
        row, col = _tile_of(tile - QUERY_END, D, SIDE)
        acc = _add_product(
            acc, w_v_ptr + history, D_X, 1, vo_ptr, D, 1, row, WIDTH, col, D, D_X, dw_qk_ptr, PRECISION, STEP
        )
        _store(dw_o_ptr + feature * (D * T * D) + first, acc, row, WIDTH, 1, col, D, T * D)
    elif query == 0:
        # Heads of all queries share their part of W_k and of W_v.
        row, col = _tile_of((tile - OUTPUT_END) % (KEY_END - OUTPUT_END), D_X, SIDE)
        if tile < KEY_END:
            for t in range(T):
                a_ptr, b_ptr = q_ptr + t * (D * D_E), qk_ptr + t * (H * D_X * D_E)
                acc = _add_product(
                    acc, a_ptr, D_E, 1, b_ptr, 1, D_E, row, WIDTH, col, D_X, D_E, dw_qk_ptr, PRECISION, STEP
                )
                b = tl.load(bias_ptr + t * D + row, mask=row < WIDTH, other=0.0).to(tl.float32)
                db = tl.load(db_qk_ptr + (part + t * H) * D_X + col, mask=col < D_X, other=0.0).to(tl.float32)
                acc += b[:, None] * db[None, :]
            _store(dw_k_ptr + history, acc, row, WIDTH, D_X, col, D_X, 1)
        else:
            for t in range(T):
                a_ptr, b_ptr = o_ptr + t * D, vo_ptr + t * (H * D_X * D)
                acc = _add_product(
                    acc, a_ptr, 1, T * D, b_ptr, 1, D, row, WIDTH, col, D_X, D, dw_qk_ptr, PRECISION, STEP
                )
            _store(dw_v_ptr + history, acc, row, WIDTH, D_X, col, D_X, 1)


@cache
def _launchers(
    times: int, heads: int, width: int, d_x: int, d_e: int, rounding: str, *_dtypes: torch.dtype
) -> tuple[tuple[Launcher, int], tuple[Launcher, int]]:
    """The kernels and their tiles for a part."""
    sizes = {"T": times, "H": heads, "WIDTH": width, "D_X": d_x, "D_E": d_e}
    options = {"PRECISION": rounding, "SIDE": SIDE, "num_warps": 4}
    down, across = cdiv(width, SIDE), [cdiv(x, SIDE) for x in (d_e, heads * width, d_x)]
    merge = Launcher(_merge_kernel, **sizes, **options, STEP=block(width, most=SIDE))
    split = Launcher(_split_kernel, **sizes, **options, STEP=32)
    return (merge, across[2] * (across[0] + across[1])), (split, down * (across[0] + across[1] + 2 * across[2]))


def _kernels(weights: tuple[Tensor, ...], times: int, heads: int, products: tuple[Tensor, ...]) -> tuple:
    w_q, _, w_k, _, w_o = weights
    sizes = (w_o.shape[1] // heads, w_k.shape[2], w_q.shape[2])
    return _launchers(times, heads, *sizes, precision(), *(x.dtype for x in (*weights, *products)))


def merge(weights: tuple[Tensor, ...], times: int, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Products of the weights, in ``dtype``.

    Args:
        weights: W_q [F, T · D, D_e], b_q [F, T · D], W_k and W_v [F, D, D_x], W_o [F, D, T · D], contiguous.
        times, heads: T and H, which divides D.

    Returns:
        W_qk [F, T · H · D_x, D_e], b_qk [F, T · H · D_x], W_vo [F, T · H · D_x, D].
    """
    w_q, _, w_k, _, w_o = weights
    features, rows = w_q.shape[0], times * heads * w_k.shape[2]
    w_qk = w_q.new_empty(features, rows, w_q.shape[2], dtype=dtype)
    b_qk = w_q.new_empty(features, rows, dtype=dtype)
    w_vo = w_q.new_empty(features, rows, w_o.shape[1], dtype=dtype)
    (launch, tiles), _ = _kernels(weights, times, heads, (w_qk, b_qk, w_vo))
    launch((features * times * heads, tiles, 1), (*weights, w_qk, b_qk, w_vo), ())
    return w_qk, b_qk, w_vo


def split(
    grads: tuple[Tensor, Tensor, Tensor], weights: tuple[Tensor, ...], times: int, heads: int
) -> tuple[Tensor, ...]:
    """The gradients of ``merge``'s weights from those of its results, contiguous."""
    out = tuple(torch.empty_like(x) for x in weights)
    _, (launch, tiles) = _kernels(weights, times, heads, grads)
    launch((weights[0].shape[0] * times * heads, tiles, 1), (*grads, *weights, *out), ())
    return out
