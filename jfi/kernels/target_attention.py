"""Target attention in Triton: each history row is read once forward, read once and written once backward.

The packed rows are dealt out in equal shares: on a line where a sample takes its length and WEIGHT more (what a sample
costs beside its rows), program p owns positions p · chunk to (p+1) · chunk and walks over the samples it finds there.
So 64 users of 16,384 events fill the chip as well as 4,096 of 500, without reading a length on the host.  A sample
whose rows lie in several shares leaves one partial result in each, which a second kernel merges in order:

    O = Σ_i exp(L_i - L) O_i        L = log Σ_i exp(L_i)        dq = Σ_i dq_i

A share begins inside at most one sample and ends inside at most one: slot 2p holds the first, slot 2p + 1 the second.

Scores are kept [N, M], history rows by query rows: so the rows, which are many, are what the matrix units want most of,
64 at a time, and K and V go to them out of shared memory as they lie.  T · H / G query rows that meet the same key head
are one tile; more than BLOCK_M of them are several, and then dq is swept for by itself, since it no longer fits beside
the gradient of the history.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.tiles import block, find_sample, load_tile, precision, store_tile, widen

#: What a sample costs beside its rows, in rows.
WEIGHT = tl.constexpr(64)
#: Shares are this long at least.
LEAST_CHUNK = 256

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _query_rows(sample, at, group, queries, GROUPS: tl.constexpr, HEADS: tl.constexpr):
    """Where the queries ``at`` that meet a key head lie in the flattened [B · T · H]."""
    return (sample * queries + at // HEADS * HEADS) * GROUPS + group * HEADS + at % HEADS


@triton.jit
def _load_rows(
    ptr, first, mask, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    """[N, D] of packed rows from ``first`` on: one 64-bit base, and offsets that no step of a loop computes anew."""
    at = tl.arange(0, BLOCK_N)[:, None] * STRIDE + tl.arange(0, BLOCK_D)[None, :]
    keep = mask[:, None] & (tl.arange(0, BLOCK_D) < WIDTH)[None, :] if BLOCK_D > WIDTH else mask[:, None]
    return widen(tl.load(ptr + first * STRIDE + at, mask=keep, other=0.0))


@triton.jit
def _store_rows(
    ptr, x, first, mask, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    at = tl.arange(0, BLOCK_N)[:, None] * STRIDE + tl.arange(0, BLOCK_D)[None, :]
    keep = mask[:, None] & (tl.arange(0, BLOCK_D) < WIDTH)[None, :] if BLOCK_D > WIDTH else mask[:, None]
    tl.store(ptr + first * STRIDE + at, x.to(ptr.dtype.element_ty), mask=keep)


@triton.jit
def _load_bias(bias_ptr, first, mask, at, group, GROUPS: tl.constexpr, HEADS: tl.constexpr, BLOCK_N: tl.constexpr):
    """[N, M]: each row's bias for each query's head."""
    where = tl.arange(0, BLOCK_N)[:, None] * (GROUPS * HEADS) + (group * HEADS + at % HEADS)[None, :]
    return tl.load(bias_ptr + first * (GROUPS * HEADS) + where, mask=mask[:, None], other=0.0).to(tl.float32)


@triton.jit
def _finish(acc, total, top):
    """The output [E, M] and the log-sum-exp [M], from sums relative to top."""
    total_or_one = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, -float("inf"), top + tl.log2(total_or_one) * LN2)
    return acc * (1.0 / total_or_one)[None, :], lse


@triton.jit(do_not_specialize=["batch", "queries", "chunk"])
def _fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    offsets_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    split_ptr,
    batch,
    queries,
    chunk,
    scale,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    tile, program, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = program.to(tl.int64) * chunk
    end = start + chunk
    at = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_mask = at < queries
    cols_d = tl.arange(0, BLOCK_D)
    cols_e = tl.arange(0, BLOCK_E)
    split = tl.full((), -1, tl.int64)
    sample = find_sample(offsets_ptr, batch, start, 1, WEIGHT)
    low = tl.load(offsets_ptr + sample).to(tl.int64)
    high = tl.load(offsets_ptr + sample + 1).to(tl.int64)
    while (sample < batch) & (low + sample * WEIGHT < end):
        # The next sample's end is asked for now and needed after this sample's rows.
        next_high = tl.load(offsets_ptr + sample + 2, mask=sample + 1 < batch, other=0).to(tl.int64)
        place = low + sample * WEIGHT
        first = low + tl.maximum(start - place, 0)
        last = tl.minimum(high, low + end - place)
        if (first < last) | ((first == low) & (high == low)):
            q_rows = _query_rows(sample, at, group, queries, GROUPS, HEADS)
            q = tl.trans(load_tile(q_ptr, q_rows, q_mask, D, cols_d, D))
            top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            acc = tl.zeros((BLOCK_E, BLOCK_M), tl.float32)
            for n in range(first, last, BLOCK_N):
                mask = tl.arange(0, BLOCK_N) < (last - n).to(tl.int32)
                k = _load_rows(k_ptr + group * D, n, mask, GROUPS * D, D, BLOCK_N, BLOCK_D)
                s = tl.dot(k, q, input_precision=PRECISION) * scale
                if HAS_BIAS:
                    s += _load_bias(bias_ptr, n, mask, at, group, GROUPS, HEADS, BLOCK_N)
                s = tl.where(mask[:, None], s, -float("inf"))
                new_top = tl.maximum(top, tl.max(s, 0))
                base = tl.where(new_top == -float("inf"), 0.0, new_top)
                p = tl.exp2((s - base[None, :]) * LOG2E)
                shrink = tl.exp2((top - base) * LOG2E)
                total = total * shrink[None, :] + p
                acc = acc * shrink[None, :]
                if SHARED:
                    v = k
                else:
                    v = _load_rows(v_ptr + group * E, n, mask, GROUPS * E, E, BLOCK_N, BLOCK_E)
                acc = tl.dot(tl.trans(v), p.to(v.dtype), acc, input_precision=PRECISION)
                top = new_top
            acc, lse = _finish(acc, tl.sum(total, 0), top)
            if (first == low) & (last == high):
                store_tile(out_ptr, tl.trans(acc), q_rows, q_mask, E, cols_e, E)
                tl.store(lse_ptr + q_rows, lse, mask=q_mask)
            else:
                slot = 2 * program + (first == low).to(tl.int32)
                slot_rows = _query_rows(slot, at, group, queries, GROUPS, HEADS)
                store_tile(part_ptr, tl.trans(acc), slot_rows, q_mask, E, cols_e, E)
                tl.store(part_lse_ptr + slot_rows, lse, mask=q_mask)
                split = tl.where(first == low, sample, split)
        sample += 1
        low = high
        high = next_high
    tl.store(split_ptr + program, split)


@triton.jit
def _split_sample(offsets_ptr, split_ptr, chunk):
    """The sample whose rows begin in this program's share and end in a later one, or -1; and that later share."""
    program = tl.program_id(0).to(tl.int64)
    sample = tl.load(split_ptr + program)
    last = program
    if sample >= 0:
        last = (tl.load(offsets_ptr + sample + 1).to(tl.int64) + sample * WEIGHT - 1) // chunk
    return sample, last


@triton.jit(do_not_specialize=["queries", "chunk"])
def _fwd_merge_kernel(
    offsets_ptr,
    split_ptr,
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    queries,
    chunk,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    program, tile, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sample, last = _split_sample(offsets_ptr, split_ptr, chunk)
    if sample < 0:
        return
    at = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_mask = at < queries
    cols = tl.arange(0, BLOCK_E)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    for share in range(program, last + 1):
        rows = _query_rows(2 * share + (share == program).to(tl.int32), at, group, queries, GROUPS, HEADS)
        lse = tl.load(part_lse_ptr + rows, mask=q_mask, other=-float("inf"))
        part = load_tile(part_ptr, rows, q_mask, E, cols, E)
        new_top = tl.maximum(top, lse)
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        shrink = tl.exp2((top - base) * LOG2E)
        weight = tl.exp2((lse - base) * LOG2E)
        acc = acc * shrink[:, None] + part * weight[:, None]
        total = total * shrink + weight
        top = new_top
    acc, lse = _finish(tl.trans(acc), total, top)
    q_rows = _query_rows(sample, at, group, queries, GROUPS, HEADS)
    store_tile(out_ptr, tl.trans(acc), q_rows, q_mask, E, cols, E)
    tl.store(lse_ptr + q_rows, lse, mask=q_mask)


@triton.jit
def _load_queries(q_ptr, grad_ptr, out_ptr, lse_ptr, rows, mask, cols_d, cols_e, D: tl.constexpr, E: tl.constexpr):
    """q, dO, the log-sum-exp (inf where there is nothing to weigh), and Δ = Σ dO · O."""
    q = load_tile(q_ptr, rows, mask, D, cols_d, D)
    grad = load_tile(grad_ptr, rows, mask, E, cols_e, E)
    out = load_tile(out_ptr, rows, mask, E, cols_e, E)
    lse = tl.load(lse_ptr + rows, mask=mask, other=float("inf"))
    lse = tl.where(lse == -float("inf"), float("inf"), lse)
    return q, grad, lse, tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)


@triton.jit
def _weights(q, grad, lse, delta, k, v, bias, mask, scale, PRECISION: tl.constexpr):
    """The weights P [N, M] of a tile, and dS, the gradient of the scores."""
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale + bias
    p = tl.where(mask[:, None], tl.exp2((s - lse[None, :]) * LOG2E), 0.0)
    dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
    return p, p * (dp - delta[None, :])


@triton.jit(do_not_specialize=["batch", "queries", "chunk"])
def _bwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    offsets_ptr,
    grad_ptr,
    out_ptr,
    lse_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    dbias_ptr,
    part_ptr,
    split_ptr,
    batch,
    queries,
    chunk,
    scale,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    QUERY: tl.constexpr,
    HISTORY: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """QUERY: dq.  HISTORY: dk, dv and dbias.  Both at once where all query rows are one tile; else QUERY has a program
    for each tile, and HISTORY a loop over them inside its loop over the rows."""
    tile, program, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = program.to(tl.int64) * chunk
    end = start + chunk
    at = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_mask = at < queries
    cols_d = tl.arange(0, BLOCK_D)
    cols_e = tl.arange(0, BLOCK_E)
    cols_h = tl.arange(0, BLOCK_H)
    split = tl.full((), -1, tl.int64)
    sample = find_sample(offsets_ptr, batch, start, 1, WEIGHT)
    low = tl.load(offsets_ptr + sample).to(tl.int64)
    high = tl.load(offsets_ptr + sample + 1).to(tl.int64)
    while (sample < batch) & (low + sample * WEIGHT < end):
        next_high = tl.load(offsets_ptr + sample + 2, mask=sample + 1 < batch, other=0).to(tl.int64)
        place = low + sample * WEIGHT
        first = low + tl.maximum(start - place, 0)
        last = tl.minimum(high, low + end - place)
        if (first < last) | ((first == low) & (high == low)):
            q_rows = _query_rows(sample, at, group, queries, GROUPS, HEADS)
            q, grad, lse, delta = _load_queries(q_ptr, grad_ptr, out_ptr, lse_ptr, q_rows, q_mask, cols_d, cols_e, D, E)
            dq = tl.zeros((BLOCK_D, BLOCK_M), tl.float32)
            for n in range(first, last, BLOCK_N):
                mask = tl.arange(0, BLOCK_N) < (last - n).to(tl.int32)
                k = _load_rows(k_ptr + group * D, n, mask, GROUPS * D, D, BLOCK_N, BLOCK_D)
                if SHARED:
                    v = k
                else:
                    v = _load_rows(v_ptr + group * E, n, mask, GROUPS * E, E, BLOCK_N, BLOCK_E)
                dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
                dv = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
                dbias = tl.zeros((BLOCK_N, BLOCK_H), tl.float32)
                for inner in range(0, 1 if QUERY else tl.cdiv(queries, BLOCK_M)):
                    if not QUERY:
                        at = inner * BLOCK_M + tl.arange(0, BLOCK_M)
                        q_mask = at < queries
                        q_rows = _query_rows(sample, at, group, queries, GROUPS, HEADS)
                        q, grad, lse, delta = _load_queries(
                            q_ptr, grad_ptr, out_ptr, lse_ptr, q_rows, q_mask, cols_d, cols_e, D, E
                        )
                    bias = 0.0
                    if HAS_BIAS:
                        bias = _load_bias(bias_ptr, n, mask, at, group, GROUPS, HEADS, BLOCK_N)
                    p, ds = _weights(q, grad, lse, delta, k, v, bias, mask, scale, PRECISION)
                    scaled = (ds * scale).to(k.dtype)
                    if HISTORY:
                        dk = tl.dot(scaled, q, dk, input_precision=PRECISION)
                        if SHARED:
                            dk = tl.dot(p.to(grad.dtype), grad, dk, input_precision=PRECISION)
                        else:
                            dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
                        if HAS_BIAS:
                            own = ((at % HEADS)[:, None] == cols_h[None, :]) & q_mask[:, None]
                            dbias = tl.dot(ds, own.to(tl.float32), dbias, input_precision="ieee")
                    if QUERY:
                        dq = tl.dot(tl.trans(k), scaled, dq, input_precision=PRECISION)
                if HISTORY:
                    _store_rows(dk_ptr + group * D, dk, n, mask, GROUPS * D, D, BLOCK_N, BLOCK_D)
                    if not SHARED:
                        _store_rows(dv_ptr + group * E, dv, n, mask, GROUPS * E, E, BLOCK_N, BLOCK_E)
                    if HAS_BIAS:
                        _store_rows(dbias_ptr + group * HEADS, dbias, n, mask, GROUPS * HEADS, HEADS, BLOCK_N, BLOCK_H)
            if QUERY:
                if (first == low) & (last == high):
                    store_tile(dq_ptr, tl.trans(dq), q_rows, q_mask, D, cols_d, D)
                else:
                    slot = 2 * program + (first == low).to(tl.int32)
                    slot_rows = _query_rows(slot, at, group, queries, GROUPS, HEADS)
                    store_tile(part_ptr, tl.trans(dq), slot_rows, q_mask, D, cols_d, D)
                    split = tl.where(first == low, sample, split)
        sample += 1
        low = high
        high = next_high
    if QUERY:
        tl.store(split_ptr + program, split)


@triton.jit(do_not_specialize=["queries", "chunk"])
def _bwd_merge_kernel(
    offsets_ptr,
    split_ptr,
    part_ptr,
    dq_ptr,
    queries,
    chunk,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    program, tile, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sample, last = _split_sample(offsets_ptr, split_ptr, chunk)
    if sample < 0:
        return
    at = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_mask = at < queries
    cols = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for share in range(program, last + 1):
        rows = _query_rows(2 * share + (share == program).to(tl.int32), at, group, queries, GROUPS, HEADS)
        acc += load_tile(part_ptr, rows, q_mask, D, cols, D)
    store_tile(dq_ptr, acc, _query_rows(sample, at, group, queries, GROUPS, HEADS), q_mask, D, cols, D)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class _Plan:
    """How a call is cut up: from shapes alone, so that the same inputs give the same bits."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor | None, bias: Tensor | None, backward: bool):
        self.batch, times, heads, width = query.shape
        rows, groups, _ = key.shape
        heads //= groups
        out_width = width if value is None else value.shape[2]
        self.queries = times * heads
        block_m = block(self.queries, most=64)
        block_n, warps, stages, shares, registers = self._config(
            key.element_size(), width, 0 if value is None else out_width
        )
        line = rows + self.batch * WEIGHT.value
        self.chunk = max(LEAST_CHUNK, triton.cdiv(line, _multiprocessors(query.device) * shares))
        self.shares = triton.cdiv(line, self.chunk)
        self.tiles = triton.cdiv(self.queries, block_m)
        self.groups = groups
        self.slots = (2 * self.shares, self.queries, groups)
        self.sizes = {"GROUPS": groups, "HEADS": heads, "D": width, "E": out_width}
        self.flags = {"SHARED": value is None, "HAS_BIAS": bias is not None, "PRECISION": precision(query)}
        self.blocks = {"BLOCK_M": block_m, "BLOCK_D": block(width), "BLOCK_E": block(out_width)}
        self.options = {"BLOCK_N": block_n, "num_warps": warps, "num_stages": stages, "maxnreg": registers}

    def _config(self, itemsize: int, width: int, value_width: int) -> tuple[int, int, int, int]:
        """(rows a step, warps, stages, shares a multiprocessor)."""
        row_bytes = itemsize * (block(width) + (block(value_width) if value_width else 0))
        if row_bytes <= 1024:
            return 64, 4, 3, 4, None
        return (32, 4, 3, 2, None) if row_bytes <= 2048 else (16, 4, 2, 1, None)


def forward(
    query: Tensor, key: Tensor, value: Tensor | None, offsets: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns the output [B, T, H, E] and the log-sum-exp of the scores [B, T, H], -inf for an empty history."""
    plan = _Plan(query, key, value, bias, backward=False)
    width = plan.sizes["E"]
    out = query.new_empty(*query.shape[:3], width)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    if plan.batch == 0:
        return out, lse
    part = torch.empty(*plan.slots, width, dtype=torch.float32, device=query.device)
    part_lse = torch.empty(plan.slots, dtype=torch.float32, device=query.device)
    split = torch.empty(plan.shares, dtype=torch.int64, device=query.device)
    _fwd_kernel[(plan.tiles, plan.shares, plan.groups)](
        query,
        key,
        key if value is None else value,
        bias,
        offsets,
        out,
        lse,
        part,
        part_lse,
        split,
        plan.batch,
        plan.queries,
        plan.chunk,
        scale,
        **plan.sizes,
        **plan.flags,
        **plan.blocks,
        **plan.options,
    )
    _fwd_merge_kernel[(plan.shares, plan.tiles, plan.groups)](
        offsets,
        split,
        part,
        part_lse,
        out,
        lse,
        plan.queries,
        plan.chunk,
        GROUPS=plan.groups,
        HEADS=plan.sizes["HEADS"],
        E=width,
        BLOCK_M=plan.blocks["BLOCK_M"],
        BLOCK_E=plan.blocks["BLOCK_E"],
        num_warps=1,
    )
    return out, lse


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    offsets: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of query, key (key + value where they are shared), value and bias."""
    plan = _Plan(query, key, value, bias, backward=True)
    dquery, dkey = torch.empty_like(query), torch.empty_like(key)
    dvalue = None if value is None else torch.empty_like(value)
    dbias = None if bias is None else torch.empty_like(bias)
    if plan.batch == 0:
        return dquery, dkey, dvalue, dbias
    part = torch.empty(*plan.slots, plan.sizes["D"], dtype=torch.float32, device=query.device)
    split = torch.empty(plan.shares, dtype=torch.int64, device=query.device)

    def sweep(query_tiles: int, wants_query: bool, wants_history: bool) -> None:
        _bwd_kernel[(query_tiles, plan.shares, plan.groups)](
            query,
            key,
            key if value is None else value,
            bias,
            offsets,
            grad,
            out,
            lse,
            dquery,
            dkey,
            dvalue,
            dbias,
            part,
            split,
            plan.batch,
            plan.queries,
            plan.chunk,
            scale,
            QUERY=wants_query,
            HISTORY=wants_history,
            BLOCK_H=block(plan.sizes["HEADS"]),
            **plan.sizes,
            **plan.flags,
            **plan.blocks,
            **plan.options,
        )

    if plan.tiles == 1:
        sweep(1, wants_query=True, wants_history=True)
    else:
        sweep(1, wants_query=False, wants_history=True)
        sweep(plan.tiles, wants_query=True, wants_history=False)
    _bwd_merge_kernel[(plan.shares, plan.tiles, plan.groups)](
        offsets,
        split,
        part,
        dquery,
        plan.queries,
        plan.chunk,
        GROUPS=plan.groups,
        HEADS=plan.sizes["HEADS"],
        D=plan.sizes["D"],
        BLOCK_M=plan.blocks["BLOCK_M"],
        BLOCK_D=plan.blocks["BLOCK_D"],
        num_warps=1,
    )
    return dquery, dkey, dvalue, dbias
