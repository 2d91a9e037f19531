"""Target attention in Triton: each history row is read once forward, read once and written once backward.

The packed rows are dealt out in equal shares: on a line where a sample takes its length and WEIGHT more (what a sample
costs beside its rows), program p owns positions p · chunk to (p+1) · chunk and walks over the samples it finds there.
So 64 users of 16,384 events fill the chip as well as 4,096 of 500, without reading a length on the host.  A sample
whose rows lie in several shares leaves one partial result in each, which a second kernel merges in order:

    O = Σ_i exp(L_i - L) O_i        L = log Σ_i exp(L_i)        dq = Σ_i dq_i

A share begins inside at most one sample and ends inside at most one: slot 2p holds the first, slot 2p + 1 the second.
T · H / G query rows that meet the same key head are one tile of a matrix product; more than BLOCK_M of them are several
tiles, and then dq is swept for by itself, since it no longer fits beside the gradient of the history.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.tiles import block, find_sample, load_tile, precision, store_tile

#: What a sample costs beside its rows, in rows.
WEIGHT = tl.constexpr(64)
#: Shares are this long at least, and about SHARES of them are dealt out.
LEAST_CHUNK = 256
SHARES = 1056

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _query_rows(sample, at, group, queries, GROUPS: tl.constexpr, HEADS: tl.constexpr):
    """Where the queries ``at`` that meet a key head lie in the flattened [B · T · H]."""
    return (sample * queries + at // HEADS * HEADS) * GROUPS + group * HEADS + at % HEADS


@triton.jit
def _load_bias(bias_ptr, rows, row_mask, at, group, GROUPS: tl.constexpr, HEADS: tl.constexpr):
    """[N, M]."""
    where = rows[:, None] * (GROUPS * HEADS) + (group * HEADS + at % HEADS)[None, :]
    return tl.load(bias_ptr + where, mask=row_mask[:, None], other=0.0).to(tl.float32)


@triton.jit
def _slot(program, low, first):
    """Where a partial result goes: a sample that began in an earlier share comes first."""
    return 2 * program + (first == low).to(tl.int32)


@triton.jit
def _finish(acc, total, top):
    """The output and the log-sum-exp, from sums relative to top."""
    total_or_one = tl.where(total == 0.0, 1.0, total)
    return acc / total_or_one[:, None], tl.where(total == 0.0, -float("inf"), top + tl.log2(total_or_one) * LN2)


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
    program = tl.program_id(1)
    tile = tl.program_id(0)
    group = tl.program_id(2)
    start = program.to(tl.int64) * chunk
    end = start + chunk
    at = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_mask = at < queries
    cols_d = tl.arange(0, BLOCK_D)
    cols_e = tl.arange(0, BLOCK_E)
    sample = find_sample(offsets_ptr, batch, start, 1, WEIGHT)
    low = tl.load(offsets_ptr + sample).to(tl.int64)
    while (sample < batch) & (low + sample * WEIGHT < end):
        high = tl.load(offsets_ptr + sample + 1).to(tl.int64)
        place = low + sample * WEIGHT
        first = low + tl.maximum(start - place, 0)
        last = tl.minimum(high, low + end - place)
        if (first < last) | ((first == low) & (high == low)):
            q_rows = _query_rows(sample, at, group, queries, GROUPS, HEADS)
            q = load_tile(q_ptr, q_rows, q_mask, D, cols_d, D)
            top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            acc = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
            for n in range(first, last, BLOCK_N):
                rows = n + tl.arange(0, BLOCK_N)
                mask = rows < last
                k = load_tile(k_ptr + group * D, rows, mask, GROUPS * D, cols_d, D)
                s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
                if HAS_BIAS:
                    s += tl.trans(_load_bias(bias_ptr, rows, mask, at, group, GROUPS, HEADS))
                s = tl.where(mask[None, :], s, -float("inf"))
                new_top = tl.maximum(top, tl.max(s, 1))
                base = tl.where(new_top == -float("inf"), 0.0, new_top)
                p = tl.exp2((s - base[:, None]) * LOG2E)
                shrink = tl.exp2((top - base) * LOG2E)
                total = total * shrink + tl.sum(p, 1)
                acc = acc * shrink[:, None]
                if SHARED:
                    v = k
                else:
                    v = load_tile(v_ptr + group * E, rows, mask, GROUPS * E, cols_e, E)
                acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
                top = new_top
            acc, lse = _finish(acc, total, top)
            if (first == low) & (last == high):
                store_tile(out_ptr, acc, q_rows, q_mask, E, cols_e, E)
                tl.store(lse_ptr + q_rows, lse, mask=q_mask)
            else:
                slot_rows = _query_rows(_slot(program, low, first), at, group, queries, GROUPS, HEADS)
                store_tile(part_ptr, acc, slot_rows, q_mask, E, cols_e, E)
                tl.store(part_lse_ptr + slot_rows, lse, mask=q_mask)
        sample += 1
        low = high


@triton.jit(do_not_specialize=["queries", "chunk"])
def _fwd_merge_kernel(
    offsets_ptr,
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
    sample = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    group = tl.program_id(2)
    low = tl.load(offsets_ptr + sample).to(tl.int64)
    length = tl.load(offsets_ptr + sample + 1).to(tl.int64) - low
    first = (low + sample * WEIGHT) // chunk
    last = (low + sample * WEIGHT + length - 1) // chunk
    if (length == 0) | (first == last):
        return
    at = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_mask = at < queries
    cols = tl.arange(0, BLOCK_E)
    q_rows = _query_rows(sample, at, group, queries, GROUPS, HEADS)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    for share in range(first, last + 1):
        slot = 2 * share + tl.where(share == first, 1, 0)
        rows = _query_rows(slot, at, group, queries, GROUPS, HEADS)
        lse = tl.load(part_lse_ptr + rows, mask=q_mask, other=-float("inf"))
        part = load_tile(part_ptr, rows, q_mask, E, cols, E)
        new_top = tl.maximum(top, lse)
        base = tl.where(new_top == -float("inf"), 0.0, new_top)
        shrink = tl.exp2((top - base) * LOG2E)
        weight = tl.exp2((lse - base) * LOG2E)
        acc = acc * shrink[:, None] + part * weight[:, None]
        total = total * shrink + weight
        top = new_top
    acc, lse = _finish(acc, total, top)
    store_tile(out_ptr, acc, q_rows, q_mask, E, cols, E)
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
    ONE_TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """dk, dv and dbias; with all query rows in one tile dq too."""
    program = tl.program_id(0)
    group = tl.program_id(1)
    start = program.to(tl.int64) * chunk
    end = start + chunk
    at = tl.arange(0, BLOCK_M)
    q_mask = at < queries
    cols_d = tl.arange(0, BLOCK_D)
    cols_e = tl.arange(0, BLOCK_E)
    cols_h = tl.arange(0, BLOCK_H)
    sample = find_sample(offsets_ptr, batch, start, 1, WEIGHT)
    low = tl.load(offsets_ptr + sample).to(tl.int64)
    while (sample < batch) & (low + sample * WEIGHT < end):
        high = tl.load(offsets_ptr + sample + 1).to(tl.int64)
        place = low + sample * WEIGHT
        first = low + tl.maximum(start - place, 0)
        last = tl.minimum(high, low + end - place)
        if (first < last) | ((first == low) & (high == low)):
            q_rows = _query_rows(sample, at, group, queries, GROUPS, HEADS)
            q, grad, lse, delta = _load_queries(q_ptr, grad_ptr, out_ptr, lse_ptr, q_rows, q_mask, cols_d, cols_e, D, E)
            dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            for n in range(first, last, BLOCK_N):
                rows = n + tl.arange(0, BLOCK_N)
                mask = rows < last
                k = load_tile(k_ptr + group * D, rows, mask, GROUPS * D, cols_d, D)
                if SHARED:
                    v = k
                else:
                    v = load_tile(v_ptr + group * E, rows, mask, GROUPS * E, cols_e, E)
                dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
                dv = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
                dbias = tl.zeros((BLOCK_N, BLOCK_H), tl.float32)
                for tile in range(0, 1 if ONE_TILE else tl.cdiv(queries, BLOCK_M)):
                    if not ONE_TILE:
                        at = tile * BLOCK_M + tl.arange(0, BLOCK_M)
                        q_mask = at < queries
                        q_rows = _query_rows(sample, at, group, queries, GROUPS, HEADS)
                        q, grad, lse, delta = _load_queries(
                            q_ptr, grad_ptr, out_ptr, lse_ptr, q_rows, q_mask, cols_d, cols_e, D, E
                        )
                    bias = 0.0
                    if HAS_BIAS:
                        bias = _load_bias(bias_ptr, rows, mask, at, group, GROUPS, HEADS)
                    p, ds = _weights(q, grad, lse, delta, k, v, bias, mask, scale, PRECISION)
                    dk = tl.dot((ds * scale).to(q.dtype), q, dk, input_precision=PRECISION)
                    if SHARED:
                        dk = tl.dot(p.to(grad.dtype), grad, dk, input_precision=PRECISION)
                    else:
                        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
                    if HAS_BIAS:
                        own = ((at % HEADS)[:, None] == cols_h[None, :]) & q_mask[:, None]
                        dbias = tl.dot(ds, own.to(tl.float32), dbias, input_precision="ieee")
                    if ONE_TILE:
                        dq = tl.dot(tl.trans(ds * scale).to(k.dtype), k, dq, input_precision=PRECISION)
                store_tile(dk_ptr + group * D, dk, rows, mask, GROUPS * D, cols_d, D)
                if not SHARED:
                    store_tile(dv_ptr + group * E, dv, rows, mask, GROUPS * E, cols_e, E)
                if HAS_BIAS:
                    store_tile(dbias_ptr + group * HEADS, dbias, rows, mask, GROUPS * HEADS, cols_h, HEADS)
            if ONE_TILE:
                if (first == low) & (last == high):
                    store_tile(dq_ptr, dq, q_rows, q_mask, D, cols_d, D)
                else:
                    slot = _slot(program, low, first)
                    slot_rows = _query_rows(slot, at, group, queries, GROUPS, HEADS)
                    store_tile(part_ptr, dq, slot_rows, q_mask, D, cols_d, D)
        sample += 1
        low = high


@triton.jit(do_not_specialize=["batch", "queries", "chunk"])
def _dquery_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    offsets_ptr,
    grad_ptr,
    out_ptr,
    lse_ptr,
    dq_ptr,
    part_ptr,
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
    """dq where the query rows are several tiles."""
    program = tl.program_id(1)
    tile = tl.program_id(0)
    group = tl.program_id(2)
    start = program.to(tl.int64) * chunk
    end = start + chunk
    at = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_mask = at < queries
    cols_d = tl.arange(0, BLOCK_D)
    cols_e = tl.arange(0, BLOCK_E)
    sample = find_sample(offsets_ptr, batch, start, 1, WEIGHT)
    low = tl.load(offsets_ptr + sample).to(tl.int64)
    while (sample < batch) & (low + sample * WEIGHT < end):
        high = tl.load(offsets_ptr + sample + 1).to(tl.int64)
        place = low + sample * WEIGHT
        first = low + tl.maximum(start - place, 0)
        last = tl.minimum(high, low + end - place)
        if (first < last) | ((first == low) & (high == low)):
            q_rows = _query_rows(sample, at, group, queries, GROUPS, HEADS)
            q, grad, lse, delta = _load_queries(q_ptr, grad_ptr, out_ptr, lse_ptr, q_rows, q_mask, cols_d, cols_e, D, E)
            dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            for n in range(first, last, BLOCK_N):
                rows = n + tl.arange(0, BLOCK_N)
                mask = rows < last
                k = load_tile(k_ptr + group * D, rows, mask, GROUPS * D, cols_d, D)
                if SHARED:
                    v = k
                else:
                    v = load_tile(v_ptr + group * E, rows, mask, GROUPS * E, cols_e, E)
                bias = 0.0
                if HAS_BIAS:
                    bias = _load_bias(bias_ptr, rows, mask, at, group, GROUPS, HEADS)
                _, ds = _weights(q, grad, lse, delta, k, v, bias, mask, scale, PRECISION)
                dq = tl.dot(tl.trans(ds * scale).to(k.dtype), k, dq, input_precision=PRECISION)
            if (first == low) & (last == high):
                store_tile(dq_ptr, dq, q_rows, q_mask, D, cols_d, D)
            else:
                slot_rows = _query_rows(_slot(program, low, first), at, group, queries, GROUPS, HEADS)
                store_tile(part_ptr, dq, slot_rows, q_mask, D, cols_d, D)
        sample += 1
        low = high


@triton.jit(do_not_specialize=["queries", "chunk"])
def _dquery_merge_kernel(
    offsets_ptr,
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
    sample = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    group = tl.program_id(2)
    low = tl.load(offsets_ptr + sample).to(tl.int64)
    length = tl.load(offsets_ptr + sample + 1).to(tl.int64) - low
    first = (low + sample * WEIGHT) // chunk
    last = (low + sample * WEIGHT + length - 1) // chunk
    if (length == 0) | (first == last):
        return
    at = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q_mask = at < queries
    cols = tl.arange(0, BLOCK_D)
    q_rows = _query_rows(sample, at, group, queries, GROUPS, HEADS)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for share in range(first, last + 1):
        slot = 2 * share + tl.where(share == first, 1, 0)
        rows = _query_rows(slot, at, group, queries, GROUPS, HEADS)
        acc += load_tile(part_ptr, rows, q_mask, D, cols, D)
    store_tile(dq_ptr, acc, q_rows, q_mask, D, cols, D)


class _Plan:
    """How a call is cut up: from shapes alone, so that the same inputs give the same bits."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor | None, bias: Tensor | None):
        self.batch, times, heads, width = query.shape
        rows, self.groups, _ = key.shape
        heads //= self.groups
        self.queries = times * heads
        out_width = width if value is None else value.shape[2]
        line = rows + self.batch * WEIGHT.value
        self.chunk = max(LEAST_CHUNK, triton.cdiv(triton.cdiv(line, SHARES), 64) * 64)
        self.shares = triton.cdiv(line, self.chunk)
        self.block_m = block(self.queries, most=64)
        self.tiles = triton.cdiv(self.queries, self.block_m)
        widest = max(block(width), block(out_width))
        self.constants = {"GROUPS": self.groups, "HEADS": heads, "D": width, "E": out_width}
        self.flags = {"SHARED": value is None, "HAS_BIAS": bias is not None, "PRECISION": precision(query)}
        self.blocks = {"BLOCK_M": self.block_m, "BLOCK_D": block(width), "BLOCK_E": block(out_width)}
        self.options = {"BLOCK_N": 64 if widest <= 128 else 32, "num_warps": 4 if widest <= 256 else 8, "num_stages": 3}

    def partials(self, like: Tensor, *width: int) -> Tensor:
        shape = (2 * self.shares, self.queries, self.groups, *width)
        return torch.empty(shape, dtype=torch.float32, device=like.device)


def forward(
    query: Tensor, key: Tensor, value: Tensor | None, offsets: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns the output [B, T, H, E] and the log-sum-exp of the scores [B, T, H], -inf for an empty history."""
    plan = _Plan(query, key, value, bias)
    out = query.new_empty(*query.shape[:3], plan.constants["E"])
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    if plan.batch == 0:
        return out, lse
    part, part_lse = plan.partials(query, plan.constants["E"]), plan.partials(query)
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
        plan.batch,
        plan.queries,
        plan.chunk,
        scale,
        **plan.constants,
        **plan.flags,
        **plan.blocks,
        **plan.options,
    )
    _fwd_merge_kernel[(plan.batch, plan.tiles, plan.groups)](
        offsets,
        part,
        part_lse,
        out,
        lse,
        plan.queries,
        plan.chunk,
        GROUPS=plan.groups,
        HEADS=plan.constants["HEADS"],
        E=plan.constants["E"],
        BLOCK_M=plan.block_m,
        BLOCK_E=plan.blocks["BLOCK_E"],
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
    plan = _Plan(query, key, value, bias)
    dquery, dkey = torch.empty_like(query), torch.empty_like(key)
    dvalue = None if value is None else torch.empty_like(value)
    dbias = None if bias is None else torch.empty_like(bias)
    if plan.batch == 0:
        return dquery, dkey, dvalue, dbias
    part = plan.partials(query, plan.constants["D"])
    inputs = (query, key, key if value is None else value, bias, offsets, grad, out, lse)
    sizes = (plan.batch, plan.queries, plan.chunk, scale)
    _bwd_kernel[(plan.shares, plan.groups)](
        *inputs,
        dquery,
        dkey,
        dvalue,
        dbias,
        part,
        *sizes,
        ONE_TILE=plan.tiles == 1,
        BLOCK_H=block(plan.constants["HEADS"]),
        **plan.constants,
        **plan.flags,
        **plan.blocks,
        **plan.options,
    )
    if plan.tiles > 1:
        _dquery_kernel[(plan.tiles, plan.shares, plan.groups)](
            *inputs, dquery, part, *sizes, **plan.constants, **plan.flags, **plan.blocks, **plan.options
        )
    _dquery_merge_kernel[(plan.batch, plan.tiles, plan.groups)](
        offsets,
        part,
        dquery,
        plan.queries,
        plan.chunk,
        GROUPS=plan.groups,
        HEADS=plan.constants["HEADS"],
        D=plan.constants["D"],
        BLOCK_M=plan.block_m,
        BLOCK_D=plan.blocks["BLOCK_D"],
    )
    return dquery, dkey, dvalue, dbias
