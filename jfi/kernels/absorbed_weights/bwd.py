"""The gradients of multi-head target attention's weights, through the products of `jfi.kernels.absorbed_weights.fwd`.

By feature f, query t and head h, with the heads' parts of the weights d wide:

    W_qk = W_kᵀ W_q [D_x, D_e]      b_qk = W_kᵀ b_q [D_x]      W_vo = W_vᵀ W_oᵀ [D_x, D]

The layer applies them to its targets e and to a, what these attended to: q = W_qk e + b_qk and o = W_voᵀ a + b_o.  So
over a batch, with the gradients dq and do,

    dW_qk = Σ dq eᵀ      db_qk = Σ dq      dW_vo = Σ a doᵀ      db_o = Σ do

and with sums over the queries, which share W_k and W_v,

    dW_q = W_k dW_qk      db_q = W_k db_qk      dW_oᵀ = W_v dW_vo
    dW_k = Σ_t W_q dW_qkᵀ + b_q db_qkᵀ          dW_v = Σ_t W_oᵀ dW_voᵀ

One launch makes the sums over the batch, one the rest.  The sums have few numbers and many terms, so a batch is split
into chunks, and the second launch adds up the chunks' sums in their order.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels import plan
from jfi.kernels.absorbed_weights.products import (
    SIDE,
    add_product,
    add_splits,
    load_matrix,
    product_options,
    sizes_of,
    store_matrix,
    tile_of,
)
from jfi.kernels.common.launch import Launcher
from jfi.kernels.plan import precision_of
from jfi.utils.integers import ceil_div

#: Programs per SM that the sums over a batch are split for, and the fewest samples of a chunk.
BATCH_PROGRAMS_PER_SM, MIN_BATCH_CHUNK = 2, 512


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


@triton.jit(do_not_specialize=["batch", "chunk"])
def _batch_kernel(
    rows,
    sums,
    batch,
    chunk,
    N: tl.constexpr,
    D_E: tl.constexpr,
    D: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    SIDE: tl.constexpr,
    STEP: tl.constexpr,
):
    """A program per tile of dW_qk, of dW_vo, of db_qk or of db_o, over a chunk of the batch."""
    dquery_ptr, target_ptr, attended_ptr, grad_ptr = rows
    dw_qk_ptr, db_qk_ptr, dw_vo_ptr, db_o_ptr = sums
    DOWN: tl.constexpr = (N + SIDE - 1) // SIDE
    ACROSS: tl.constexpr = (D + SIDE - 1) // SIDE
    # Where the tiles of each end.
    QUERY_END: tl.constexpr = DOWN * ((D_E + SIDE - 1) // SIDE)
    OUTPUT_END: tl.constexpr = QUERY_END + DOWN * ACROSS
    BIAS_END: tl.constexpr = OUTPUT_END + DOWN
    feature, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = feature.to(tl.int64) * batch + split * chunk
    count = tl.minimum(chunk, batch - split * chunk)
    place = split * tl.num_programs(0) + feature
    if tile < QUERY_END:
        out_ptr = dw_qk_ptr + place * (N * D_E)
        _tile_over_rows(out_ptr, dquery_ptr, target_ptr, tile, N, D_E, start, count, DTYPE, PRECISION, SIDE, STEP)
    elif tile < OUTPUT_END:
        out_ptr = dw_vo_ptr + place * (N * D)
        _tile_over_rows(
            out_ptr, attended_ptr, grad_ptr, tile - QUERY_END, N, D, start, count, DTYPE, PRECISION, SIDE, STEP
        )
    elif tile < BIAS_END:
        _sum_over_rows(db_qk_ptr + place * N, dquery_ptr, tile - OUTPUT_END, N, start, count, DTYPE, SIDE, STEP)
    else:
        _sum_over_rows(db_o_ptr + place * D, grad_ptr, tile - BIAS_END, D, start, count, DTYPE, SIDE, STEP)


@triton.jit(do_not_specialize=["splits"])
def _weights_kernel(
    sums,
    weights,
    grads,
    splits,
    T: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    D_X: tl.constexpr,
    D_E: tl.constexpr,
    SPLIT: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    SIDE: tl.constexpr,
    STEP: tl.constexpr,
):
    """A program per tile of dW_q, with its rows of db_q, of dW_oᵀ, with its columns of db_o, of dW_k or of dW_v."""
    dw_qk_ptr, db_qk_ptr, dw_vo_ptr, db_out_ptr = sums
    w_q_ptr, b_q_ptr, w_k_ptr, w_v_ptr, w_o_ptr = weights
    dw_q_ptr, db_q_ptr, dw_k_ptr, dw_v_ptr, dw_o_ptr, db_o_ptr = grads
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
    # From the sum over one chunk of the batch to the next: a vector of all features.
    vector = tl.num_programs(0) * D_X
    b_sum, qk_sum, vo_sum = (splits, vector, SPLIT), (splits, vector * D_E, SPLIT), (splits, vector * D, SPLIT)
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
                db = add_splits(db_qk_ptr + part * D_X + at, at < D_X, b_sum)
                bias += tl.sum(k * db[None, :], 1)
            to = db_q_ptr + feature * (T * D) + first + row
            tl.store(to, bias.to(db_q_ptr.dtype.element_ty), mask=row < WIDTH)
    elif tile < OUTPUT_END:
        row, col = tile_of(tile - QUERY_END, D, SIDE)
        left, right = (w_v_ptr + history, D_X, 1), (vo_ptr, D, 1)
        acc = add_product(acc, left, right, row, WIDTH, col, D, D_X, vo_sum, DTYPE, PRECISION, STEP)
        store_matrix(dw_o_ptr + feature * (D * T * D) + first, acc, row, WIDTH, 1, col, D, T * D)
        if part % (T * H) + (tile - QUERY_END) // tl.cdiv(D, SIDE) == 0:
            from_split = tl.num_programs(0) // (T * H) * D
            db_o = add_splits(db_out_ptr + feature * D + col, col < D, (splits, from_split, SPLIT))
            tl.store(db_o_ptr + feature * D + col, db_o.to(db_o_ptr.dtype.element_ty), mask=col < D)
    elif query == 0:
        # All queries use the same W_k and W_v of a head.
        row, col = tile_of((tile - OUTPUT_END) % (KEY_END - OUTPUT_END), D_X, SIDE)
        if tile < KEY_END:
            for t in range(T):
                left, right = (q_ptr + t * (D * D_E), D_E, 1), (qk_ptr + t * (H * D_X * D_E), 1, D_E)
                acc = add_product(acc, left, right, row, WIDTH, col, D_X, D_E, qk_sum, DTYPE, PRECISION, STEP)
                b = tl.load(bias_ptr + t * D + row, mask=row < WIDTH, other=0.0).to(tl.float32)
                db = add_splits(db_qk_ptr + (part + t * H) * D_X + col, col < D_X, b_sum)
                acc += b[:, None] * db[None, :]
            store_matrix(dw_k_ptr + history, acc, row, WIDTH, D_X, col, D_X, 1)
        else:
            for t in range(T):
                left, right = (o_ptr + t * D, 1, T * D), (vo_ptr + t * (H * D_X * D), 1, D)
                acc = add_product(acc, left, right, row, WIDTH, col, D_X, D, vo_sum, DTYPE, PRECISION, STEP)
            store_matrix(dw_v_ptr + history, acc, row, WIDTH, D_X, col, D_X, 1)


class _GradientKernels(NamedTuple):
    """The launcher of each launch, and its number of tiles for a feature, or for a feature, query and head."""

    batch: tuple[Launcher, int]
    weights: tuple[Launcher, int]
    weights_split: tuple[Launcher, int]


@cache
def _gradient_kernels_of(
    num_queries: int, num_heads: int, width: int, d_x: int, d_e: int, precision: str, dtype: torch.dtype
) -> _GradientKernels:
    dim, rows = num_heads * width, num_queries * num_heads * d_x
    options = product_options(dtype, precision)
    batch = Launcher(_batch_kernel, N=rows, D_E=d_e, D=dim, **options, STEP=64 if dtype.itemsize == 2 else 32)
    options |= {"T": num_queries, "H": num_heads, "WIDTH": width, "D_X": d_x, "D_E": d_e, "STEP": 32}
    down, long = ceil_div(width, SIDE), ceil_div(rows, SIDE)
    by_target, by_output, by_history = (ceil_div(x, SIDE) for x in (d_e, dim, d_x))
    tiles = down * (by_target + by_output + 2 * by_history)
    return _GradientKernels(
        (batch, long * (by_target + by_output + 1) + by_output),
        (Launcher(_weights_kernel, SPLIT=False, **options), tiles),
        (Launcher(_weights_kernel, SPLIT=True, **options), tiles),
    )


def _split_batch(batch: int, programs: int, num_sms: int) -> tuple[int, int]:
    """Returns (samples of a chunk, chunks) of a sum over a batch that takes so many programs per chunk."""
    most = max(1, BATCH_PROGRAMS_PER_SM * num_sms // programs)
    chunk = max(MIN_BATCH_CHUNK, ceil_div(ceil_div(batch, most), MIN_BATCH_CHUNK) * MIN_BATCH_CHUNK)
    return chunk, max(1, ceil_div(batch, chunk))


def gradients(
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    weights: tuple[Tensor, ...],
    bias_dtype: torch.dtype,
    num_queries: int,
    num_heads: int,
) -> tuple[Tensor, ...]:
    """The gradients of ``absorb``'s weights, each in its dtype, and of b_o [F, D], contiguous.

    Args:
        rows: dq [F, B, T · H · D_x], e [F, B, D_e], a like dq and do [F, B, D], contiguous; products are in do's dtype.
        weights, num_queries, num_heads: as ``absorb`` took them.
        bias_dtype: of b_o.
    """
    dquery, target, _, grad = rows
    features, batch, width = dquery.shape
    kernels = _gradient_kernels_of(*sizes_of(weights, num_queries, num_heads), precision_of(grad.dtype), grad.dtype)
    launch, tiles = kernels.batch
    chunk, splits = _split_batch(batch, features * tiles, plan.device_of(grad.device).num_sms)
    sizes = (width, target.shape[2]), (width,), (width, grad.shape[2]), (grad.shape[2],)
    sums = [torch.empty(splits, features, *size, dtype=torch.float32, device=grad.device) for size in sizes]
    launch((features, tiles, splits), (rows, tuple(sums)), (batch, chunk))
    out = [torch.empty_like(x) for x in weights]
    out.append(weights[1].new_empty(features, grad.shape[2], dtype=bias_dtype))
    launch, tiles = kernels.weights if splits == 1 else kernels.weights_split
    launch((features * num_queries * num_heads, tiles, 1), (tuple(sums), weights, tuple(out)), (splits,))
    return tuple(out)
