"""The small products between the weights of multi-head target attention, in one launch.

By feature f, query t and head h, with the heads' parts of the weights d wide:

    W_qk = W_kᵀ W_q [D_x, D_e]      b_qk = W_kᵀ b_q [D_x]      W_vo = W_vᵀ W_oᵀ [D_x, D]

`jfi.kernels.absorbed_weights.bwd` has their gradients.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.absorbed_weights.products import (
    SIDE,
    add_product,
    load_matrix,
    product_options,
    sizes_of,
    store_matrix,
    tile_of,
)
from jfi.kernels.common.launch import Launcher
from jfi.kernels.plan import precision_of
from jfi.utils.integers import ceil_div, power_of_two


@triton.jit
def _absorb_kernel(
    weights,
    products,
    T: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    D_X: tl.constexpr,
    D_E: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    SIDE: tl.constexpr,
    STEP: tl.constexpr,
):
    """A program per tile of W_qk, with its rows of b_qk, or of W_vo; per feature, query and head."""
    w_q_ptr, b_q_ptr, w_k_ptr, w_v_ptr, w_o_ptr = weights
    w_qk_ptr, b_qk_ptr, w_vo_ptr = products
    D: tl.constexpr = H * WIDTH
    QUERY_END: tl.constexpr = ((D_X + SIDE - 1) // SIDE) * ((D_E + SIDE - 1) // SIDE)
    part, tile = tl.program_id(0), tl.program_id(1)
    feature, query = part // (T * H), part // H % T
    history = feature * (D * D_X) + part % H * (WIDTH * D_X)
    first = query * D + part % H * WIDTH
    acc = tl.zeros((SIDE, SIDE), tl.float32)
    if tile < QUERY_END:
        row, col = tile_of(tile, D_E, SIDE)
        k_ptr = w_k_ptr + history
        q_ptr = w_q_ptr + (feature * (T * D) + first) * D_E
        left, right = (k_ptr, 1, D_X), (q_ptr, D_E, 1)
        acc = add_product(acc, left, right, row, D_X, col, D_E, WIDTH, (1, 0, False), DTYPE, PRECISION, STEP)
        store_matrix(w_qk_ptr + part * (D_X * D_E), acc, row, D_X, D_E, col, D_E, 1)
        if tile % tl.cdiv(D_E, SIDE) == 0:
            bias = tl.zeros((SIDE,), tl.float32)
            for start in range(0, WIDTH, STEP):
                at = start + tl.arange(0, STEP)
                k = load_matrix(k_ptr, row, D_X, 1, at, WIDTH, D_X, DTYPE).to(tl.float32)
                b = tl.load(b_q_ptr + feature * (T * D) + first + at, mask=at < WIDTH, other=0.0).to(tl.float32)
                bias += tl.sum(k * b[None, :], 1)
            tl.store(b_qk_ptr + part * D_X + row, bias.to(b_qk_ptr.dtype.element_ty), mask=row < D_X)
    else:
        row, col = tile_of(tile - QUERY_END, D, SIDE)
        o_ptr = w_o_ptr + feature * (D * T * D) + first
        left, right = (w_v_ptr + history, 1, D_X), (o_ptr, 1, T * D)
        acc = add_product(acc, left, right, row, D_X, col, D, WIDTH, (1, 0, False), DTYPE, PRECISION, STEP)
        store_matrix(w_vo_ptr + part * (D_X * D), acc, row, D_X, D, col, D, 1)


@cache
def _absorb_kernel_of(
    num_queries: int, num_heads: int, width: int, d_x: int, d_e: int, precision: str, dtype: torch.dtype
) -> tuple[Launcher, int]:
    """The launcher, and the tiles of one feature, query and head."""
    sizes = {"T": num_queries, "H": num_heads, "WIDTH": width, "D_X": d_x, "D_E": d_e}
    launcher = Launcher(
        _absorb_kernel, **sizes, **product_options(dtype, precision), STEP=power_of_two(width, most=SIDE)
    )
    return launcher, ceil_div(d_x, SIDE) * (ceil_div(d_e, SIDE) + ceil_div(num_heads * width, SIDE))


def absorb(
    weights: tuple[Tensor, ...], num_queries: int, num_heads: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Products of the weights, in ``dtype``.

    Args:
        weights: W_q [F, T · D, D_e], b_q [F, T · D], W_k and W_v [F, D, D_x], W_o [F, D, T · D], contiguous.
        num_queries, num_heads: T and H, which divides D.

    Returns:
        W_qk [F, T · H · D_x, D_e], b_qk [F, T · H · D_x], W_vo [F, T · H · D_x, D].
    """
    w_q, _, w_k, _, w_o = weights
    features, rows = w_q.shape[0], num_queries * num_heads * w_k.shape[2]
    w_qk = w_q.new_empty(features, rows, w_q.shape[2], dtype=dtype)
    b_qk = w_q.new_empty(features, rows, dtype=dtype)
    w_vo = w_q.new_empty(features, rows, w_o.shape[1], dtype=dtype)
    launch, tiles = _absorb_kernel_of(*sizes_of(weights, num_queries, num_heads), precision_of(dtype), dtype)
    launch((features * num_queries * num_heads, tiles, 1), (weights, (w_qk, b_qk, w_vo)))
    return w_qk, b_qk, w_vo
