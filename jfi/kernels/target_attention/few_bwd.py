"""Target attention backward for few query rows: every history row is read once, and its gradient written once.

With the log-sum-exp L of the forward and Δ = Σ_e dO · O, one sweep rebuilds the weights and has all gradients at hand:

    P = exp(S - L)      dS = P (dO·v - Δ)      dk = scale Σ dS q      dv = Σ P dO      dq = scale Σ dS k

History rows by query rows here, S [N, M]: two of the three products that give gradients then take it as it lies.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import Launcher
from jfi.kernels.common.primitives import block
from jfi.kernels.common.stream_k import (
    WEIGHT,
    Partials,
    are_ordered,
    deal,
    first_step,
    fits,
    last_row,
    longest_first,
    parts,
)
from jfi.kernels.target_attention.tiles import (
    EVENTS,
    FEW,
    Tile,
    field_columns,
    load_bias,
    load_columns,
    load_events,
    load_rows,
    load_stats,
    query_rows,
    store_columns,
    store_rows,
    weigh,
)

#: Rows of a bias table up to which its gradient is summed in the sweep over the history.
TABLE_ROWS = 64
#: Elements of all programs' tables up to which samples are taken whole.
MOST_TABLES = 2**22


@triton.jit(do_not_specialize=["batch", "queries", "chunk", "table_rows"], do_not_specialize_on_alignment=EVENTS)
def _target_attention_bwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    buckets_ptr,
    value_scale_ptr,
    second_ptr,
    offsets_ptr,
    grad_ptr,
    out_ptr,
    lse_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    dbias_ptr,
    dsecond_ptr,
    part_ptr,
    batch,
    queries,
    chunk,
    table_rows,
    scale,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BY_BUCKET: tl.constexpr,
    SCALED: tl.constexpr,
    FIELDS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WHOLE: tl.constexpr,
    ORDERED: tl.constexpr,
):
    """A program a share of the rows of all samples (see shares.py), or WHOLE a sample, the long ones first if ORDERED.

    With BLOCK_R the bias is a table of so few rows that each program sums its gradient; else there is one an event.
    """
    program, group = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, BLOCK_M)
    q_at, q_mask = query_rows(at, group, GROUPS, HEADS), at < queries
    k_at = tl.arange(0, BLOCK_N)
    k_cols = field_columns(k_ptr, second_ptr, D, FIELDS, BLOCK_D)
    dk_cols = field_columns(dk_ptr, dsecond_ptr, D, FIELDS, BLOCK_D)
    K_STRIDE: tl.constexpr = GROUPS * D // FIELDS
    q_stride = (queries * GROUPS).to(tl.int64)
    if HAS_BIAS:
        # Which query has which head: dS times it sums over the queries of a head.
        own = (((at % HEADS)[:, None] == tl.arange(0, BLOCK_H)[None, :]) & q_mask[:, None]).to(tl.float32)
    if BLOCK_R > 0:
        table_at = tl.arange(0, BLOCK_R)
        dtable = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    if WHOLE:
        sample = longest_first(program, offsets_ptr, batch) if ORDERED else program.to(tl.int64)
        low = tl.load(offsets_ptr + sample).to(tl.int64)
        high = tl.load(offsets_ptr + sample + 1).to(tl.int64)
        n = low
        start = low + sample * WEIGHT
        end = start + 1
    else:
        _part_lse_ptr, split_ptr = parts(part_ptr, tl.num_programs(0), queries * GROUPS, D)
        split = tl.full((), -1, tl.int64)
        start = program.to(tl.int64) * chunk
        end = start + chunk
        sample, low, high, n, _steps = first_step(offsets_ptr, batch, start, end, BLOCK_N)
    while (sample < batch) & (low + sample * WEIGHT < end):
        next_high = high
        last = high
        if not WHOLE:
            next_high = tl.load(offsets_ptr + sample + 2, mask=sample + 1 < batch, other=0).to(tl.int64)
            last = last_row(sample, low, high, end)
        row = sample * q_stride
        q = load_rows(q_ptr + row * D, q_at, q_mask, D, D, BLOCK_D)
        grad = load_rows(grad_ptr + row * E, q_at, q_mask, E, E, BLOCK_E)
        lse, delta = load_stats(grad, out_ptr + row * E, lse_ptr + row, q_at, q_mask, E, BLOCK_E)
        dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for first in range(n, last, BLOCK_N):
            mask = k_at < (last - first).to(tl.int32)
            k = load_columns(k_ptr + first * K_STRIDE + group * D, k_at, k_cols, mask, K_STRIDE, D, BLOCK_D)
            if SHARED:
                v = k
            else:
                v = load_rows(v_ptr + first * (GROUPS * E) + group * E, k_at, mask, GROUPS * E, E, BLOCK_E)
            bias = 0.0
            buckets = k_at
            value_scale = k_at
            if BY_BUCKET:
                buckets = load_events(buckets_ptr, first, mask, BLOCK_N)
            if HAS_BIAS:
                bias = load_bias(bias_ptr, buckets, first, mask, at, group, GROUPS, HEADS, BY_BUCKET)
            if SCALED:
                value_scale = load_events(value_scale_ptr, first, mask, BLOCK_N).to(tl.float32)
            p, ds = weigh(q, grad, lse, delta, k, v, value_scale, bias, mask, scale, SCALED, PRECISION)
            ds_by_query = tl.trans(ds.to(k.dtype))
            dk = tl.dot((ds * scale).to(q.dtype), q, input_precision=PRECISION)
            if SHARED:
                dk = tl.dot(p.to(grad.dtype), grad, dk, input_precision=PRECISION)
            else:
                dv = tl.dot(p.to(grad.dtype), grad, input_precision=PRECISION)
                store_rows(dv_ptr + first * (GROUPS * E) + group * E, dv, k_at, mask, GROUPS * E, E, BLOCK_E)
            store_columns(dk_ptr + first * K_STRIDE + group * D, dk, k_at, dk_cols, mask, K_STRIDE, D, BLOCK_D)
            if BLOCK_R > 0:
                # A row of the table meets the events of its bucket, in their order.
                here = (buckets[:, None] == table_at[None, :]).to(k.dtype)
                dtable = tl.dot(ds_by_query, here, dtable, input_precision=PRECISION)
            elif HAS_BIAS:
                dbias = tl.dot(ds, own, input_precision="tf32x3")
                to = dbias_ptr + first * (GROUPS * HEADS) + group * HEADS
                store_rows(to, dbias, k_at, mask, GROUPS * HEADS, HEADS, BLOCK_H)
            dq = tl.dot(ds_by_query, k, dq, input_precision=PRECISION)
        dq = dq * scale
        if WHOLE:
            store_rows(dq_ptr + row * D, dq, q_at, q_mask, D, D, BLOCK_D)
        else:
            begins = low + sample * WEIGHT >= start
            if begins & (last == high):
                store_rows(dq_ptr + row * D, dq, q_at, q_mask, D, D, BLOCK_D)
            else:
                slot = (2 * program + begins.to(tl.int32)) * q_stride
                store_rows(part_ptr + slot * D, dq, q_at, q_mask, D, D, BLOCK_D)
            split = tl.where(begins & (last < high), sample, split)
        sample += 1
        low = high
        n = high
        high = next_high
    if BLOCK_R > 0:
        dtable = tl.dot(tl.trans(dtable), own, input_precision="tf32x3")
        to = dbias_ptr + program.to(tl.int64) * (table_rows * GROUPS * HEADS) + group * HEADS
        store_rows(to, dtable, table_at, table_at < table_rows, GROUPS * HEADS, HEADS, BLOCK_H)
    if not WHOLE:
        tl.store(split_ptr + program, split.to(tl.int32))


def _config(tile: Tile) -> tuple[int, int, int, int]:
    """(rows a step, warps, stages, shares a multiprocessor), the best of those measured on an H200."""
    if tile.width_bytes > 512:
        return (16, 8, 1, 1) if tile.width_bytes > 1024 else (16, 4, 1, 1)
    if tile.width_bytes <= 128 and tile.shared:
        return 32, 1, 3, 8
    if tile.width_bytes <= 256:
        return 32, 2, 3, 4 if tile.row_bytes <= 128 or not tile.shared else 3
    return 16, 2, 3 if tile.shared else 2, 4


def _whole_config(tile: Tile) -> tuple[int, int, int]:
    """(rows a step, warps, stages) where a program takes a whole sample."""
    if tile.width_bytes == 512:
        return 16, 2, 3
    return (16, 1, 4) if tile.width_bytes <= 256 else _config(tile)[:3]


@cache
def _plan(tile: Tile, block_r: int, whole: bool, ordered: bool) -> tuple[int, Launcher]:
    """Shares a multiprocessor, and the launcher of programs that take a share or whole samples."""
    *steps, shares = _config(tile)
    constants = tile.constants(FEW, *(_whole_config(tile) if whole else steps))
    how = {"BLOCK_H": block(tile.heads), "BLOCK_R": block_r, "WHOLE": whole, "ORDERED": ordered}
    return shares, Launcher(_target_attention_bwd_kernel, **how, **tile.events, **constants)


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    buckets: Tensor | None,
    value_scale: Tensor | None,
    second: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of query, key (key + value where they are shared), value, bias and second."""
    batch, times, heads, width = query.shape
    dquery, dkey = torch.empty_like(query), torch.empty_like(key)
    dvalue = None if value is None else torch.empty_like(value)
    dsecond = None if second is None else torch.empty_like(second)
    if batch == 0:
        return dquery, dkey, dvalue, None if bias is None else torch.zeros_like(bias), dsecond
    tile = Tile.of(query, key, value, offsets, bias, buckets, value_scale, second)
    table_rows = 0 if buckets is None else bias.shape[0]
    block_r = block(table_rows) if 0 < table_rows <= TABLE_ROWS else 0
    whole = fits(max_seqlen, tile.row_bytes)
    if block_r and batch * bias.numel() > MOST_TABLES:  # each program's own, which shares are fewer of
        whole = False
    shares, launch = _plan(tile, block_r, whole, whole and are_ordered(batch, query.device))
    chunk, programs = (0, batch) if whole else deal(key.shape[0], batch, query.device, shares)
    if bias is None:
        dbias = None
    elif block_r:
        dbias = bias.new_empty(programs, *bias.shape, dtype=torch.float32)
    else:
        dbias = torch.empty(key.shape[0], heads, dtype=torch.float32 if table_rows else bias.dtype, device=bias.device)
    events = (query, key, key if value is None else value, bias, buckets, value_scale, second, offsets)
    tensors = (*events, grad, out, lse, dquery, dkey, dvalue, dbias, dsecond)
    partials = None if whole else Partials(programs, chunk, times * heads, width, query.device)
    memory = None if whole else partials.memory
    numbers = (batch, times * heads // tile.groups, chunk, table_rows, scale)
    launch((programs, tile.groups, 1), (*tensors, memory), numbers)
    if not whole:
        partials.merge(offsets, dquery, None)
    if block_r:
        dbias = dbias.sum(0).to(bias.dtype)
    elif table_rows:
        # Sorts the events by bucket: no sum in an order that changes from run to run.
        dbias = torch.ops.aten.embedding_dense_backward(dbias, buckets, table_rows, -1, False).to(bias.dtype)
    return dquery, dkey, dvalue, dbias, dsecond
