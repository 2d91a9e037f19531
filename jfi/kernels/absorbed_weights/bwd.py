"""The gradients of multi-head target attention's weights, through the products that `jfi.kernels.merged_weights` makes.

By feature f, query t and head h, with the heads' parts of the weights d wide:

    W_qk = W_kᵀ W_q [D_x, D_e]      b_qk = W_kᵀ b_q [D_x]      W_vo = W_vᵀ W_oᵀ [D_x, D]

The layer applies them to its targets e and to a, what these attended to: q = W_qk e + b_qk and o = W_voᵀ a + b_o.  So
over a batch, with the gradients dq and do,

    dW_qk = Σ dq eᵀ      db_qk = Σ dq      dW_vo = Σ a doᵀ      db_o = Σ do

and with sums over the queries, which share W_k and W_v,

    dW_q = W_k dW_qk      db_q = W_k db_qk      dW_oᵀ = W_v dW_vo
    dW_k = Σ_t W_q dW_qkᵀ + b_q db_qkᵀ          dW_v = Σ_t W_oᵀ dW_voᵀ

One launch for the sums over the batch, one for what follows from them.  The sums are of few numbers where batches are
long, so programs share a batch, and the second launch adds up their parts in order.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.absorbed_weights.tiles import (
    SIDE,
    add_parts,
    add_product,
    load_matrix,
    product_options,
    sizes_of,
    store_matrix,
    tile_of,
)
from jfi.kernels.common.launch import Launcher
from jfi.kernels.common.plan import device_of
from jfi.kernels.common.primitives import cdiv, precision

#: Programs a multiprocessor that share a batch, and the fewest samples of a share.
PROGRAMS, LEAST_SHARE = 2, 512


@triton.jit
def _tile_over_rows(
    out_ptr,
    left_ptr,
    right_ptr,
    tile,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    start,
    rows,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    SIDE: tl.constexpr,
    STEP: tl.constexpr,
):
    """A tile of Σ leftᵀ right, with left [.., N] and right [.., WIDTH], over so many rows from a row on."""
    row, col = tile_of(tile, WIDTH, SIDE)
    acc = tl.zeros((SIDE, SIDE), tl.float32)
    left_ptr += start * N
    right_ptr += start * WIDTH
    at = tl.arange(0, STEP)
    for first in range(0, rows, STEP):
        left = load_matrix(left_ptr, at, rows - first, N, row, N, 1, DTYPE)
        right = load_matrix(right_ptr, at, rows - first, WIDTH, col, WIDTH, 1, DTYPE)
        acc = tl.dot(tl.trans(left), right, acc, input_precision=PRECISION)
        left_ptr += STEP * N  # pointers move: a batch may have more numbers than 32 bits count
        right_ptr += STEP * WIDTH
    store_matrix(out_ptr, acc, row, N, WIDTH, col, WIDTH, 1)


@triton.jit
def _sum_over_rows(
    out_ptr, x_ptr, tile, WIDTH: tl.constexpr, start, rows, DTYPE: tl.constexpr, SIDE: tl.constexpr, STEP: tl.constexpr
):
    """Σ x of SIDE columns, with x [.., WIDTH]."""
    col = tile * SIDE + tl.arange(0, SIDE)
    acc = tl.zeros((STEP, SIDE), tl.float32)
    x_ptr += start * WIDTH
    for first in range(0, rows, STEP):
        acc += load_matrix(x_ptr, tl.arange(0, STEP), rows - first, WIDTH, col, WIDTH, 1, DTYPE).to(tl.float32)
        x_ptr += STEP * WIDTH
    tl.store(out_ptr + col, tl.sum(acc, 0), mask=col < WIDTH)


@triton.jit(do_not_specialize=["batch", "share"])
def _batch_kernel(
    dquery_ptr,
    target_ptr,
    attended_ptr,
    grad_ptr,
    dw_qk_ptr,
    db_qk_ptr,
    dw_vo_ptr,
    db_o_ptr,
    batch,
    share,
    N: tl.constexpr,
    D_E: tl.constexpr,
    D: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    SIDE: tl.constexpr,
    STEP: tl.constexpr,
):
    """A program a tile of dW_qk, of dW_vo, of db_qk or of db_o, over its share of the batch."""
    DOWN: tl.constexpr = (N + SIDE - 1) // SIDE
    ACROSS: tl.constexpr = (D + SIDE - 1) // SIDE
    # Where the tiles of each end.
    QUERY_END: tl.constexpr = DOWN * ((D_E + SIDE - 1) // SIDE)
    OUTPUT_END: tl.constexpr = QUERY_END + DOWN * ACROSS
    BIAS_END: tl.constexpr = OUTPUT_END + DOWN
    feature, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = feature.to(tl.int64) * batch + part * share
    rows = tl.minimum(share, batch - part * share)
    slot = part * tl.num_programs(0) + feature
    if tile < QUERY_END:
        out_ptr = dw_qk_ptr + slot * (N * D_E)
        _tile_over_rows(out_ptr, dquery_ptr, target_ptr, tile, N, D_E, start, rows, DTYPE, PRECISION, SIDE, STEP)
    elif tile < OUTPUT_END:
        out_ptr = dw_vo_ptr + slot * (N * D)
        _tile_over_rows(
            out_ptr, attended_ptr, grad_ptr, tile - QUERY_END, N, D, start, rows, DTYPE, PRECISION, SIDE, STEP
        )
    elif tile < BIAS_END:
        _sum_over_rows(db_qk_ptr + slot * N, dquery_ptr, tile - OUTPUT_END, N, start, rows, DTYPE, SIDE, STEP)
    else:
        _sum_over_rows(db_o_ptr + slot * D, grad_ptr, tile - BIAS_END, D, start, rows, DTYPE, SIDE, STEP)


@triton.jit(do_not_specialize=["parts"])
def _weights_kernel(
    dw_qk_ptr,
    db_qk_ptr,
    dw_vo_ptr,
    db_out_ptr,
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
    db_o_ptr,
    parts,
    T: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    D_X: tl.constexpr,
    D_E: tl.constexpr,
    DIVIDED: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    SIDE: tl.constexpr,
    STEP: tl.constexpr,
):
    """A program a tile of dW_q, with its part of db_q, of dW_oᵀ, with its part of db_o, of dW_k or of dW_v."""
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
    # From one part of the sums over the batch to the next: a vector of all features.
    vector = tl.num_programs(0) * D_X
    b_sum, qk_sum, vo_sum = (parts, vector, DIVIDED), (parts, vector * D_E, DIVIDED), (parts, vector * D, DIVIDED)
    acc = tl.zeros((SIDE, SIDE), tl.float32)
    if tile < QUERY_END:
        row, col = tile_of(tile, D_E, SIDE)
        k_ptr = w_k_ptr + history
        left, right = (k_ptr, D_X, 1), (qk_ptr, D_E, 1)
        acc = add_product(acc, left, right, row, WIDTH, col, D_E, D_X, qk_sum, DTYPE, PRECISION, STEP)
        store_matrix(dw_q_ptr + (feature * (T * D) + first) * D_E, acc, row, WIDTH, D_E, col, D_E, 1)
        if tile % tl.cdiv(D_E, SIDE) == 0:
            bias = tl.zeros((SIDE,), tl.float32)
            for start in range(0, D_X, STEP):
                at = start + tl.arange(0, STEP)
                k = load_matrix(k_ptr, row, WIDTH, D_X, at, D_X, 1, DTYPE).to(tl.float32)
                db = add_parts(db_qk_ptr + part * D_X + at, at < D_X, b_sum)
                bias += tl.sum(k * db[None, :], 1)
            to = db_q_ptr + feature * (T * D) + first + row
            tl.store(to, bias.to(db_q_ptr.dtype.element_ty), mask=row < WIDTH)
    elif tile < OUTPUT_END:
        row, col = tile_of(tile - QUERY_END, D, SIDE)
        left, right = (w_v_ptr + history, D_X, 1), (vo_ptr, D, 1)
        acc = add_product(acc, left, right, row, WIDTH, col, D, D_X, vo_sum, DTYPE, PRECISION, STEP)
        store_matrix(dw_o_ptr + feature * (D * T * D) + first, acc, row, WIDTH, 1, col, D, T * D)
        if part % (T * H) + (tile - QUERY_END) // tl.cdiv(D, SIDE) == 0:
            from_part = tl.num_programs(0) // (T * H) * D
            db_o = add_parts(db_out_ptr + feature * D + col, col < D, (parts, from_part, DIVIDED))
            tl.store(db_o_ptr + feature * D + col, db_o.to(db_o_ptr.dtype.element_ty), mask=col < D)
    elif query == 0:
        # Heads of all queries share their part of W_k and of W_v.
        row, col = tile_of((tile - OUTPUT_END) % (KEY_END - OUTPUT_END), D_X, SIDE)
        if tile < KEY_END:
            for t in range(T):
                left, right = (q_ptr + t * (D * D_E), D_E, 1), (qk_ptr + t * (H * D_X * D_E), 1, D_E)
                acc = add_product(acc, left, right, row, WIDTH, col, D_X, D_E, qk_sum, DTYPE, PRECISION, STEP)
                b = tl.load(bias_ptr + t * D + row, mask=row < WIDTH, other=0.0).to(tl.float32)
                db = add_parts(db_qk_ptr + (part + t * H) * D_X + col, col < D_X, b_sum)
                acc += b[:, None] * db[None, :]
            store_matrix(dw_k_ptr + history, acc, row, WIDTH, D_X, col, D_X, 1)
        else:
            for t in range(T):
                left, right = (o_ptr + t * D, 1, T * D), (vo_ptr + t * (H * D_X * D), 1, D)
                acc = add_product(acc, left, right, row, WIDTH, col, D_X, D, vo_sum, DTYPE, PRECISION, STEP)
            store_matrix(dw_v_ptr + history, acc, row, WIDTH, D_X, col, D_X, 1)


class _GradientKernels(NamedTuple):
    """Of each launch the launcher, and its tiles: a feature's, or those of a part of the weights."""

    batch: tuple[Launcher, int]
    weights: tuple[Launcher, int]
    weights_divided: tuple[Launcher, int]


@cache
def _gradient_kernels_of(
    times: int, heads: int, width: int, d_x: int, d_e: int, rounding: str, dtype: torch.dtype, *_dtypes: torch.dtype
) -> _GradientKernels:
    dim, rows = heads * width, times * heads * d_x
    options = product_options(dtype, rounding)
    batch = Launcher(_batch_kernel, N=rows, D_E=d_e, D=dim, **options, STEP=64 if dtype.itemsize == 2 else 32)
    options |= {"T": times, "H": heads, "WIDTH": width, "D_X": d_x, "D_E": d_e, "STEP": 32}
    down, long = cdiv(width, SIDE), cdiv(rows, SIDE)
    by_target, by_output, by_history = (cdiv(x, SIDE) for x in (d_e, dim, d_x))
    tiles = down * (by_target + by_output + 2 * by_history)
    return _GradientKernels(
        (batch, long * (by_target + by_output + 1) + by_output),
        (Launcher(_weights_kernel, DIVIDED=False, **options), tiles),
        (Launcher(_weights_kernel, DIVIDED=True, **options), tiles),
    )


def gradients(
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    weights: tuple[Tensor, ...],
    bias_dtype: torch.dtype,
    times: int,
    heads: int,
) -> tuple[Tensor, ...]:
    """The gradients of ``merge``'s weights, each in its dtype, and of b_o [F, D], contiguous.

    Args:
        rows: dq [F, B, T · H · D_x], e [F, B, D_e], a like dq and do [F, B, D], contiguous; products are in do's dtype.
        weights, times, heads: as ``merge`` took them.
        bias_dtype: of b_o.
    """
    dquery, target, _, grad = rows
    features, batch, width = dquery.shape
    dtypes = grad.dtype, bias_dtype, *(x.dtype for x in (*weights, *rows))
    kernels = _gradient_kernels_of(*sizes_of(weights, times, heads), precision(), *dtypes)
    launch, tiles = kernels.batch
    most = max(1, PROGRAMS * device_of(grad.device).num_sms // (features * tiles))
    share = max(LEAST_SHARE, cdiv(cdiv(batch, most), LEAST_SHARE) * LEAST_SHARE)
    parts = max(1, cdiv(batch, share))
    sizes = (width, target.shape[2]), (width,), (width, grad.shape[2]), (grad.shape[2],)
    sums = [torch.empty(parts, features, *size, dtype=torch.float32, device=grad.device) for size in sizes]
    launch((features, tiles, parts), (*rows, *sums), (batch, share))
    out = [torch.empty_like(x) for x in weights]
    out.append(weights[1].new_empty(features, grad.shape[2], dtype=bias_dtype))
    launch, tiles = kernels.weights if parts == 1 else kernels.weights_divided
    launch((features * times * heads, tiles, 1), (*sums, *weights, *out), (parts,))
    return tuple(out)
