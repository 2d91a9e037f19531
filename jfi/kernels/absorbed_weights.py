"""The small products between the weights of multi-head target attention, and their gradients.

By feature f, query t and head h, with the heads' parts of the weights d wide:

    W_qk = W_kᵀ W_q [D_x, D_e]      b_qk = W_kᵀ b_q [D_x]      W_vo = W_vᵀ W_oᵀ [D_x, D]

One launch makes them.  The layer applies them to its targets e and to a, what these attended to: q = W_qk e + b_qk and
o = W_voᵀ a + b_o.  So over a batch, with the gradients dq and do,

    dW_qk = Σ dq eᵀ      db_qk = Σ dq      dW_vo = Σ a doᵀ      db_o = Σ do

and with sums over the queries, which share W_k and W_v,

    dW_q = W_k dW_qk      db_q = W_k db_qk      dW_oᵀ = W_v dW_vo
    dW_k = Σ_t W_q dW_qkᵀ + b_q db_qkᵀ          dW_v = Σ_t W_oᵀ dW_voᵀ

One launch makes the sums over the batch, one the rest.  The sums have few numbers and many terms, so a batch is split
into chunks, and the second launch adds up the chunks' sums in their order.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels import plan
from jfi.kernels.common.launch import Launcher, spec_of
from jfi.kernels.common.primitives import INTERPRET
from jfi.utils.operands import ceil_div, power_of_two

#: Side of a tile of a product.
SIDE = tl.constexpr(64)
#: Programs per SM that the sums over a batch are split for, and the fewest samples of a chunk.
BATCH_PROGRAMS_PER_SM, MIN_BATCH_CHUNK = 2, 512
#: What the products are rounded to; the interpreter rounds nothing.
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


# --- Tiles of matrices of any strides ---------------------------------------------------------------------------------
@triton.jit
def _load_matrix(ptr, row, rows, row_stride, col, cols, col_stride, DTYPE: tl.constexpr):
    """Loads a tile in the dtype of the products."""
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    x = tl.load(ptr + row[:, None] * row_stride + col[None, :] * col_stride, mask=mask, other=0.0)
    if INTERPRET:  # which multiplies half precision wrongly
        return x.to(tl.float32)
    return x.to(DTYPE)


@triton.jit
def _store_matrix(ptr, x, row, rows, row_stride, col, cols, col_stride):
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    tl.store(ptr + row[:, None] * row_stride + col[None, :] * col_stride, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_splits(ptrs, mask, sum_of):
    """The sums of a batch's chunks, added up in order.  sum_of: (how many, from one to the next, if more than one)."""
    splits, stride, SPLIT = sum_of
    x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    if SPLIT:
        for split in range(1, splits, 4):
            for i in tl.static_range(4):  # their loads overlap
                x += tl.load(ptrs + (split + i) * stride, mask=mask & (split + i < splits), other=0.0)
    return x


@triton.jit
def _add_product(acc, a, b, row, rows, col, cols, inner, sum_of, DTYPE: tl.constexpr, SPEC: tl.constexpr):
    """acc + A B of A [rows, inner] and B [inner, cols], each (pointer, its strides); B is what `_add_splits` adds."""
    a_ptr, a_row, a_inner = a
    b_ptr, b_inner, b_col = b
    for first in range(0, inner, SPEC.step):
        at = first + tl.arange(0, SPEC.step)
        left = _load_matrix(a_ptr, row, rows, a_row, at, inner, a_inner, DTYPE)
        mask = (at < inner)[:, None] & (col < cols)[None, :]
        right = _add_splits(b_ptr + at[:, None] * b_inner + col[None, :] * b_col, mask, sum_of)
        acc = tl.dot(left, right if INTERPRET else right.to(DTYPE), acc, input_precision=SPEC.precision)
    return acc


@triton.jit
def _tile_of(tile, cols):
    """Rows and columns of a tile of a matrix with so many columns."""
    across = (cols + SIDE - 1) // SIDE
    return tile // across * SIDE + tl.arange(0, SIDE), tile % across * SIDE + tl.arange(0, SIDE)


# --- Products ---------------------------------------------------------------------------------------------------------
@triton.jit
def _absorb_kernel(weights, products, DTYPE: tl.constexpr, SPEC: tl.constexpr):
    """A program per tile of W_qk, with its rows of b_qk, or of W_vo; per feature, query and head."""
    w_q_ptr, b_q_ptr, w_k_ptr, w_v_ptr, w_o_ptr = weights
    w_qk_ptr, b_qk_ptr, w_vo_ptr = products
    T: tl.constexpr = SPEC.num_queries
    H: tl.constexpr = SPEC.num_heads
    WIDTH: tl.constexpr = SPEC.width
    D_X: tl.constexpr = SPEC.d_x
    D_E: tl.constexpr = SPEC.d_e
    D: tl.constexpr = H * WIDTH
    QUERY_END: tl.constexpr = ((D_X + SIDE - 1) // SIDE) * ((D_E + SIDE - 1) // SIDE)
    part, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    feature, query = part // (T * H), part // H % T
    history = feature * (D * D_X) + part % H * (WIDTH * D_X)
    first = query * D + part % H * WIDTH
    acc = tl.zeros((SIDE, SIDE), tl.float32)
    if tile < QUERY_END:
        row, col = _tile_of(tile, D_E)
        k_ptr = w_k_ptr + history
        q_ptr = w_q_ptr + (feature * (T * D) + first) * D_E
        left, right = (k_ptr, 1, D_X), (q_ptr, D_E, 1)
        acc = _add_product(acc, left, right, row, D_X, col, D_E, WIDTH, (1, 0, False), DTYPE, SPEC)
        _store_matrix(w_qk_ptr + part * (D_X * D_E), acc, row, D_X, D_E, col, D_E, 1)
        if tile % tl.cdiv(D_E, SIDE) == 0:
            bias = tl.zeros((SIDE,), tl.float32)
            for start in range(0, WIDTH, SPEC.step):
                at = start + tl.arange(0, SPEC.step)
                k = _load_matrix(k_ptr, row, D_X, 1, at, WIDTH, D_X, DTYPE).to(tl.float32)
                b = tl.load(b_q_ptr + feature * (T * D) + first + at, mask=at < WIDTH, other=0.0).to(tl.float32)
                bias += tl.sum(k * b[None, :], 1)
            tl.store(b_qk_ptr + part * D_X + row, bias.to(b_qk_ptr.dtype.element_ty), mask=row < D_X)
    else:
        row, col = _tile_of(tile - QUERY_END, D)
        o_ptr = w_o_ptr + feature * (D * T * D) + first
        left, right = (w_v_ptr + history, 1, D_X), (o_ptr, 1, T * D)
        acc = _add_product(acc, left, right, row, D_X, col, D, WIDTH, (1, 0, False), DTYPE, SPEC)
        _store_matrix(w_vo_ptr + part * (D_X * D), acc, row, D_X, D, col, D, 1)


def _sizes_of(weights: tuple[Tensor, ...], num_queries: int, num_heads: int) -> tuple[int, ...]:
    w_q, _, w_k, _, w_o = weights
    return num_queries, num_heads, w_o.shape[-2] // num_heads, w_k.shape[-1], w_q.shape[-1]


@cache
def _absorb_launcher(
    num_queries: int, num_heads: int, width: int, d_x: int, d_e: int, precision: str, dtype: torch.dtype
) -> tuple[Launcher, int]:
    """Returns the launcher, and the tiles of one feature, query and head."""
    sizes = {"num_queries": num_queries, "num_heads": num_heads, "width": width, "d_x": d_x, "d_e": d_e}
    spec = spec_of(**sizes, precision=precision, step=power_of_two(width, most=SIDE.value))
    tiles = _tiles(d_x) * (_tiles(d_e) + _tiles(num_heads * width))
    return Launcher(_absorb_kernel, DTYPE=_DTYPES[dtype], SPEC=spec, num_warps=4), tiles


def _tiles(length: int) -> int:
    return ceil_div(length, SIDE.value)


def absorb(
    weights: tuple[Tensor, ...], num_queries: int, num_heads: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `jfi.ops.absorbed_target_attention.absorb` of contiguous weights.

    Raises:
        ValueError: a product of one feature has 2³¹ numbers or more.
    """
    w_q, _, w_k, _, w_o = weights
    stacked, rows = w_q.shape[:-2], num_queries * num_heads * w_k.shape[-1]
    if rows * max(w_q.shape[-1], w_o.shape[-2]) >= 2**31:  # positions within a feature's product have 32 bits
        sizes = f"{num_queries} · {num_heads} · {w_k.shape[-1]} · {max(w_q.shape[-1], w_o.shape[-2])}"
        raise ValueError(f"num_queries · num_heads · D_x · max(D_e, D) must be below 2**31, got {sizes}")
    w_qk = w_q.new_empty(*stacked, rows, w_q.shape[-1], dtype=dtype)
    b_qk = w_q.new_empty(*stacked, rows, dtype=dtype)
    w_vo = w_q.new_empty(*stacked, rows, w_o.shape[-2], dtype=dtype)
    precision = plan.precision_of(dtype, plan.device_of(w_q.device))
    launch, tiles = _absorb_launcher(*_sizes_of(weights, num_queries, num_heads), precision, dtype)
    launch((stacked.numel() * num_queries * num_heads, tiles, 1), (weights, (w_qk, b_qk, w_vo)))
    return w_qk, b_qk, w_vo


# --- Gradients --------------------------------------------------------------------------------------------------------
@triton.jit
def _tile_over_rows(
    out_ptr, left_ptr, right_ptr, tile, N: tl.constexpr, WIDTH: tl.constexpr, start, rows, DTYPE, SPEC: tl.constexpr
):
    """A tile of Σ leftᵀ right, with left [.., N] and right [.., WIDTH], over so many rows from a row on."""
    row, col = _tile_of(tile, WIDTH)
    acc = tl.zeros((SIDE, SIDE), tl.float32)
    left_ptr += start * N
    right_ptr += start * WIDTH
    at = tl.arange(0, SPEC.step)
    for first in range(0, rows, SPEC.step):
        left = _load_matrix(left_ptr, at, rows - first, N, row, N, 1, DTYPE)
        right = _load_matrix(right_ptr, at, rows - first, WIDTH, col, WIDTH, 1, DTYPE)
        acc = tl.dot(tl.trans(left), right, acc, input_precision=SPEC.precision)
        left_ptr += SPEC.step * N  # pointers move: a batch may have more numbers than 32 bits count
        right_ptr += SPEC.step * WIDTH
    _store_matrix(out_ptr, acc, row, N, WIDTH, col, WIDTH, 1)


@triton.jit
def _sum_over_rows(out_ptr, x_ptr, tile, WIDTH: tl.constexpr, start, rows, DTYPE, SPEC: tl.constexpr):
    """Σ x of SIDE columns, with x [.., WIDTH]."""
    col = tile * SIDE + tl.arange(0, SIDE)
    acc = tl.zeros((SPEC.step, SIDE), tl.float32)
    x_ptr += start * WIDTH
    for first in range(0, rows, SPEC.step):
        acc += _load_matrix(x_ptr, tl.arange(0, SPEC.step), rows - first, WIDTH, col, WIDTH, 1, DTYPE).to(tl.float32)
        x_ptr += SPEC.step * WIDTH
    tl.store(out_ptr + col, tl.sum(acc, 0), mask=col < WIDTH)


@triton.jit(do_not_specialize=["batch", "chunk"])
def _batch_kernel(rows, sums, batch, chunk, DTYPE: tl.constexpr, SPEC: tl.constexpr):
    """A program per tile of dW_qk, of dW_vo, of db_qk or of db_o, over a chunk of the batch."""
    dquery_ptr, target_ptr, attended_ptr, grad_ptr = rows
    dw_qk_ptr, db_qk_ptr, dw_vo_ptr, db_o_ptr = sums
    N: tl.constexpr = SPEC.rows
    D_E: tl.constexpr = SPEC.d_e
    D: tl.constexpr = SPEC.dim
    DOWN: tl.constexpr = (N + SIDE - 1) // SIDE
    ACROSS: tl.constexpr = (D + SIDE - 1) // SIDE
    # Where the tiles of each end.
    QUERY_END: tl.constexpr = DOWN * ((D_E + SIDE - 1) // SIDE)
    OUTPUT_END: tl.constexpr = QUERY_END + DOWN * ACROSS
    BIAS_END: tl.constexpr = OUTPUT_END + DOWN
    feature, tile, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    start = feature * batch + split * chunk
    count = tl.minimum(chunk, batch - split * chunk)
    matrix = split * tl.num_programs(0) + feature
    if tile < QUERY_END:
        _tile_over_rows(dw_qk_ptr + matrix * (N * D_E), dquery_ptr, target_ptr, tile, N, D_E, start, count, DTYPE, SPEC)
    elif tile < OUTPUT_END:
        out_ptr = dw_vo_ptr + matrix * (N * D)
        _tile_over_rows(out_ptr, attended_ptr, grad_ptr, tile - QUERY_END, N, D, start, count, DTYPE, SPEC)
    elif tile < BIAS_END:
        _sum_over_rows(db_qk_ptr + matrix * N, dquery_ptr, tile - OUTPUT_END, N, start, count, DTYPE, SPEC)
    else:
        _sum_over_rows(db_o_ptr + matrix * D, grad_ptr, tile - BIAS_END, D, start, count, DTYPE, SPEC)


@triton.jit(do_not_specialize=["splits"])
def _weights_kernel(sums, weights, grads, splits, DTYPE: tl.constexpr, SPEC: tl.constexpr):
    """A program per tile of dW_q, with its rows of db_q, of dW_oᵀ, with its columns of db_o, of dW_k or of dW_v."""
    dw_qk_ptr, db_qk_ptr, dw_vo_ptr, db_out_ptr = sums
    w_q_ptr, b_q_ptr, w_k_ptr, w_v_ptr, w_o_ptr = weights
    dw_q_ptr, db_q_ptr, dw_k_ptr, dw_v_ptr, dw_o_ptr, db_o_ptr = grads
    T: tl.constexpr = SPEC.num_queries
    H: tl.constexpr = SPEC.num_heads
    WIDTH: tl.constexpr = SPEC.width
    D_X: tl.constexpr = SPEC.d_x
    D_E: tl.constexpr = SPEC.d_e
    SPLIT: tl.constexpr = SPEC.split
    D: tl.constexpr = H * WIDTH
    DOWN: tl.constexpr = (WIDTH + SIDE - 1) // SIDE
    # Where the tiles of each gradient end.
    QUERY_END: tl.constexpr = DOWN * ((D_E + SIDE - 1) // SIDE)
    OUTPUT_END: tl.constexpr = QUERY_END + DOWN * ((D + SIDE - 1) // SIDE)
    KEY_END: tl.constexpr = OUTPUT_END + DOWN * ((D_X + SIDE - 1) // SIDE)
    part, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
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
        row, col = _tile_of(tile, D_E)
        k_ptr = w_k_ptr + history
        left, right = (k_ptr, D_X, 1), (qk_ptr, D_E, 1)
        acc = _add_product(acc, left, right, row, WIDTH, col, D_E, D_X, qk_sum, DTYPE, SPEC)
        _store_matrix(dw_q_ptr + (feature * (T * D) + first) * D_E, acc, row, WIDTH, D_E, col, D_E, 1)
        if tile % tl.cdiv(D_E, SIDE) == 0:
            bias = tl.zeros((SIDE,), tl.float32)
            for start in range(0, D_X, SPEC.step):
                at = start + tl.arange(0, SPEC.step)
                k = _load_matrix(k_ptr, row, WIDTH, D_X, at, D_X, 1, DTYPE).to(tl.float32)
                db = _add_splits(db_qk_ptr + part * D_X + at, at < D_X, b_sum)
                bias += tl.sum(k * db[None, :], 1)
            to = db_q_ptr + feature * (T * D) + first + row
            tl.store(to, bias.to(db_q_ptr.dtype.element_ty), mask=row < WIDTH)
    elif tile < OUTPUT_END:
        row, col = _tile_of(tile - QUERY_END, D)
        left, right = (w_v_ptr + history, D_X, 1), (vo_ptr, D, 1)
        acc = _add_product(acc, left, right, row, WIDTH, col, D, D_X, vo_sum, DTYPE, SPEC)
        _store_matrix(dw_o_ptr + feature * (D * T * D) + first, acc, row, WIDTH, 1, col, D, T * D)
        if part % (T * H) + (tile - QUERY_END) // tl.cdiv(D, SIDE) == 0:
            from_split = tl.num_programs(0) // (T * H) * D
            db_o = _add_splits(db_out_ptr + feature * D + col, col < D, (splits, from_split, SPLIT))
            tl.store(db_o_ptr + feature * D + col, db_o.to(db_o_ptr.dtype.element_ty), mask=col < D)
    elif query == 0:
        # All queries use the same W_k and W_v of a head.
        row, col = _tile_of((tile - OUTPUT_END) % (KEY_END - OUTPUT_END), D_X)
        if tile < KEY_END:
            for t in range(T):
                left, right = (q_ptr + t * (D * D_E), D_E, 1), (qk_ptr + t * (H * D_X * D_E), 1, D_E)
                acc = _add_product(acc, left, right, row, WIDTH, col, D_X, D_E, qk_sum, DTYPE, SPEC)
                b = tl.load(bias_ptr + t * D + row, mask=row < WIDTH, other=0.0).to(tl.float32)
                db = _add_splits(db_qk_ptr + (part + t * H) * D_X + col, col < D_X, b_sum)
                acc += b[:, None] * db[None, :]
            _store_matrix(dw_k_ptr + history, acc, row, WIDTH, D_X, col, D_X, 1)
        else:
            for t in range(T):
                left, right = (o_ptr + t * D, 1, T * D), (vo_ptr + t * (H * D_X * D), 1, D)
                acc = _add_product(acc, left, right, row, WIDTH, col, D_X, D, vo_sum, DTYPE, SPEC)
            _store_matrix(dw_v_ptr + history, acc, row, WIDTH, D_X, col, D_X, 1)


@cache
def _gradient_launchers(
    num_queries: int, num_heads: int, width: int, d_x: int, d_e: int, precision: str, dtype: torch.dtype
) -> tuple[tuple[Launcher, int], ...]:
    """Returns, of the sums over a batch, of the rest and of the rest where the batch is split, (launcher, tiles).

    Tiles are those of a feature, or of a feature, query and head.
    """
    dim, rows = num_heads * width, num_queries * num_heads * d_x
    options = {"DTYPE": _DTYPES[dtype], "num_warps": 4}
    spec = spec_of(rows=rows, d_e=d_e, dim=dim, precision=precision, step=64 if dtype.itemsize == 2 else 32)
    batch = Launcher(_batch_kernel, SPEC=spec, **options)
    sizes = {"num_queries": num_queries, "num_heads": num_heads, "width": width, "d_x": d_x, "d_e": d_e}
    specs = [spec_of(**sizes, precision=precision, step=32, split=split) for split in (False, True)]
    tiles = _tiles(width) * (_tiles(d_e) + _tiles(dim) + 2 * _tiles(d_x))
    weights = [(Launcher(_weights_kernel, SPEC=spec, **options), tiles) for spec in specs]
    return (batch, _tiles(rows) * (_tiles(d_e) + _tiles(dim) + 1) + _tiles(dim)), *weights


def gradients(
    rows: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    bias_dtype: torch.dtype,
    num_queries: int,
    num_heads: int,
) -> tuple[Tensor, ...]:
    """Computes `jfi.ops.absorbed_target_attention.weight_gradients` of contiguous rows and weights."""
    dquery, target, _, grad = rows
    batch, width = dquery.shape[-2:]
    stacked = dquery.shape[:-2]
    features = stacked.numel()
    sizes = _sizes_of(weights, num_queries, num_heads)
    device = plan.device_of(grad.device)
    (launch, tiles), *by_split = _gradient_launchers(*sizes, plan.precision_of(grad.dtype, device), grad.dtype)
    # Distances between the sums of chunks have 32 bits.
    most = (2**31 - 1) // (features * width * max(target.shape[-1], grad.shape[-1]))
    most = max(1, min(most, BATCH_PROGRAMS_PER_SM * device.num_sms // (features * tiles)))
    chunk = max(MIN_BATCH_CHUNK, ceil_div(ceil_div(batch, most), MIN_BATCH_CHUNK) * MIN_BATCH_CHUNK)
    splits = max(1, ceil_div(batch, chunk))
    shapes = (width, target.shape[-1]), (width,), (width, grad.shape[-1]), (grad.shape[-1],)
    sums = [torch.empty(splits, features, *shape, dtype=torch.float32, device=grad.device) for shape in shapes]
    launch((features, tiles, splits), (rows, tuple(sums)), (batch, chunk))
    out = [torch.empty_like(x) for x in weights]
    out.append(weights[1].new_empty(*stacked, grad.shape[-1], dtype=bias_dtype))
    launch, tiles = by_split[splits > 1]
    launch((features * num_queries * num_heads, tiles, 1), (tuple(sums), weights, tuple(out)), (splits,))
    return tuple(out)
