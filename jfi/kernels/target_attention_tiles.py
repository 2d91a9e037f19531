"""Tiles of target attention: history rows from a 64-bit base, and the query rows that meet a key head."""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.tiles import LOG2E, block, precision, widen


@dataclass(frozen=True)
class Tile:
    """What the tiles of a call are, from its shapes: query rows by widths, and how products are rounded."""

    queries: int  # rows that meet a key head, T · H / G
    block_m: int
    block_d: int
    block_e: int
    width_bytes: int  # of the wider of a key and a value row
    precision: str

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor | None) -> "Tile":
        queries = query.shape[1] * query.shape[2] // key.shape[1]
        widths = key.shape[2], (key if value is None else value).shape[2]
        width_bytes = key.element_size() * block(max(widths))
        if width_bytes > 2048:
            raise ValueError(
                f"key and value must be at most {2048 // key.element_size()} wide for impl='triton' and {key.dtype}, "
                f"got {max(widths)}: use impl='torch'"
            )
        # Very wide rows leave shared memory for one small tile of queries, and for products without tf32 parts.
        wide = width_bytes > 1024
        most = 16 if width_bytes > 512 else 64
        return cls(
            queries, block(queries, most=most), *map(block, widths), width_bytes, "ieee" if wide else precision()
        )


@triton.jit
def query_rows(at, group, GROUPS: tl.constexpr, HEADS: tl.constexpr):
    """Where the queries ``at`` that meet a key head lie among a sample's [T · H] rows."""
    return at // HEADS * (GROUPS * HEADS) + group * HEADS + at % HEADS


@triton.jit
def _keep(mask, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    keep = mask[:, None]
    if BLOCK_D != WIDTH:
        keep = keep & (tl.arange(0, BLOCK_D) < WIDTH)[None, :]
    return keep


@triton.jit
def load_rows(base, at, mask, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """[rows, D] at 32-bit offsets ``at`` from a base pointer, so that a loop moves the base alone."""
    cols = tl.arange(0, BLOCK_D)[None, :]
    return widen(tl.load(base + at[:, None] * STRIDE + cols, mask=_keep(mask, WIDTH, BLOCK_D), other=0.0))


@triton.jit
def store_rows(base, x, at, mask, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    cols = tl.arange(0, BLOCK_D)[None, :]
    tl.store(base + at[:, None] * STRIDE + cols, x.to(base.dtype.element_ty), mask=_keep(mask, WIDTH, BLOCK_D))


@triton.jit
def load_bias(bias_ptr, first, mask, at, group, GROUPS: tl.constexpr, HEADS: tl.constexpr, BLOCK_N: tl.constexpr):
    """[N, M]: each row's bias for each query's head."""
    where = tl.arange(0, BLOCK_N)[:, None] * (GROUPS * HEADS) + (group * HEADS + at % HEADS)[None, :]
    return tl.load(bias_ptr + first * (GROUPS * HEADS) + where, mask=mask[:, None], other=0.0).to(tl.float32)


@triton.jit
def load_stats(grad, out_ptr, lse_ptr, at, mask, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """The log-sum-exp (inf where there is nothing to weigh), and Δ = Σ dO · O, by query row."""
    out = load_rows(out_ptr, at, mask, E, E, BLOCK_E)
    lse = tl.load(lse_ptr + at, mask=mask, other=float("inf"))
    return tl.where(lse == -float("inf"), float("inf"), lse), tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)


@triton.jit
def weigh(q, grad, lse, delta, k, v, bias, mask, scale, PRECISION: tl.constexpr):
    """The weights P [N, M] of a tile, and dS, the gradient of the scores."""
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale + bias
    p = tl.where(mask[:, None], tl.exp2((s - lse[None, :]) * LOG2E), 0.0)
    dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
    return p, p * (dp - delta[None, :])


@triton.jit
def add_history_gradients(
    dk,
    dv,
    dbias,
    p,
    ds,
    q,
    grad,
    at,
    q_mask,
    scale,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """dk += scale dS q and dv += P dO, both into dk where they are shared; dbias [N, H] += dS summed over queries."""
    dk = tl.dot((ds * scale).to(q.dtype), q, dk, input_precision=PRECISION)
    if SHARED:
        dk = tl.dot(p.to(grad.dtype), grad, dk, input_precision=PRECISION)
    else:
        dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision=PRECISION)
    if HAS_BIAS:
        own = ((at % HEADS)[:, None] == tl.arange(0, BLOCK_H)[None, :]) & q_mask[:, None]
        dbias = tl.dot(ds, own.to(tl.float32), dbias, input_precision="tf32x3")
    return dk, dv, dbias


@triton.jit
def store_history_gradients(
    dk_ptr,
    dv_ptr,
    dbias_ptr,
    dk,
    dv,
    dbias,
    n,
    k_at,
    mask,
    group,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    store_rows(dk_ptr + n * (GROUPS * D) + group * D, dk, k_at, mask, GROUPS * D, D, BLOCK_D)
    if not SHARED:
        store_rows(dv_ptr + n * (GROUPS * E) + group * E, dv, k_at, mask, GROUPS * E, E, BLOCK_E)
    if HAS_BIAS:
        to = dbias_ptr + n * (GROUPS * HEADS) + group * HEADS
        store_rows(to, dbias, k_at, mask, GROUPS * HEADS, HEADS, BLOCK_H)
