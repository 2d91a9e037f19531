"""Tiles of target attention: history rows from a 64-bit base, and the query rows that meet a key head."""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.primitives import LOG2E, block, precision, widen

#: Query rows to a key head up to which they are one tile of the least size that the matrix units take.
FEW = 16
#: Parameters with a number an event, which may begin anywhere in a batch's.
EVENTS = ["buckets_ptr", "value_scale_ptr"]


@dataclass(frozen=True, eq=False)
class Tile:
    """What the tiles of a call are, from its shapes: query rows by widths, and how products are rounded.

    One object for one set of shapes and dtypes, so that what follows from it is cached by identity.
    """

    rows: int  # the power of two that covers the query rows that meet a key head, T · H / G; 0 where T varies
    groups: int
    heads: int  # that share a key head
    width: int
    out_width: int
    shared: bool  # value = key
    has_bias: bool
    by_bucket: bool  # the bias is a table, of which each event names a row
    scaled: bool  # values are multiplied by a number an event
    fields: int  # tensors in which a history row lies, one half in each if 2
    width_bytes: int  # of the wider of a key and a value row
    dtype: torch.dtype
    precision: str

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        offsets: Tensor,
        bias: Tensor | None,
        buckets: Tensor | None = None,
        value_scale: Tensor | None = None,
        second: Tensor | None = None,
    ) -> "Tile":
        """query: [B, T, H, D], or [R, H, D] where every sample has a number of queries of its own."""
        *packed, heads, width = query.shape
        groups = key.shape[1]
        rows = block(packed[1] * heads // groups, least=1) if len(packed) == 2 else 0
        out_width = None if value is None else value.shape[2]
        rounding = precision() if key.dtype == torch.float32 else "tf32"
        dtypes = tuple(None if x is None else x.dtype for x in (key, offsets, bias, buckets, value_scale, second))
        return _tile(rows, groups, heads // groups, width, out_width, dtypes, rounding)

    @property
    def row_bytes(self) -> int:
        """Of a history row, padded to a tile's width."""
        return self.width_bytes * (1 if self.shared else 2)

    @property
    def events(self) -> dict[str, int | bool]:
        """The constants of a kernel that takes more of an event than one row and a bias."""
        return {"BY_BUCKET": self.by_bucket, "SCALED": self.scaled, "FIELDS": self.fields}

    def constants(self, block_m: int, block_n: int, warps: int, stages: int) -> dict[str, int | bool | str]:
        """The constants of a kernel on tiles of query rows by history rows, and Triton's options."""
        return {
            "GROUPS": self.groups,
            "HEADS": self.heads,
            "D": self.width,
            "E": self.out_width,
            "SHARED": self.shared,
            "HAS_BIAS": self.has_bias,
            "PRECISION": self.precision,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_D": block(self.width),
            "BLOCK_E": block(self.out_width),
            "num_warps": warps,
            "num_stages": stages,
        }


@cache
def _tile(
    rows: int,
    groups: int,
    heads: int,
    width: int,
    out_width: int | None,
    dtypes: tuple[torch.dtype | None, ...],  # those of inputs; with another, another tile with kernels of its own
    rounding: str,
) -> Tile:
    dtype, _, bias, buckets, value_scale, second = dtypes
    given = tuple(x is not None for x in (bias, buckets, value_scale))
    fields = 1 if second is None else 2
    shared = out_width is None
    out_width = width if shared else out_width
    widest = max(width, out_width)
    width_bytes = dtype.itemsize * block(widest)
    if width_bytes > 2048:
        raise ValueError(
            f"key and value must be at most {2048 // dtype.itemsize} wide for impl='triton' and {dtype}, got {widest}: "
            "use impl='torch'"
        )
    # Very wide rows leave no shared memory for products of tf32 parts.
    rounding = "ieee" if width_bytes > 1024 else rounding
    return Tile(rows, groups, heads, width, out_width, shared, *given, fields, width_bytes, dtype, rounding)


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
    """[rows, D] at places ``at`` from a base pointer: of 32 bits in a loop, which then moves the base alone."""
    return load_columns(base, at, tl.arange(0, BLOCK_D), mask, STRIDE, WIDTH, BLOCK_D)


@triton.jit
def load_columns(base, at, cols, mask, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    """``load_rows`` whose columns lie where ``field_columns`` says."""
    return widen(tl.load(base + at[:, None] * STRIDE + cols[None, :], mask=_keep(mask, WIDTH, BLOCK_D), other=0.0))


@triton.jit
def store_rows(base, x, at, mask, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    store_columns(base, x, at, tl.arange(0, BLOCK_D), mask, STRIDE, WIDTH, BLOCK_D)


@triton.jit
def store_columns(base, x, at, cols, mask, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr):
    to = base + at[:, None] * STRIDE + cols[None, :]
    tl.store(to, x.to(base.dtype.element_ty), mask=_keep(mask, WIDTH, BLOCK_D))


@triton.jit
def field_columns(ptr, second_ptr, WIDTH: tl.constexpr, FIELDS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Where the columns of a row lie from its first: in two tensors, if FIELDS is 2, of WIDTH / 2 columns each."""
    cols = tl.arange(0, BLOCK_D)
    if FIELDS == 2:
        BYTES: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
        distance = (second_ptr.to(tl.int64) - ptr.to(tl.int64)) // BYTES
        # Both begin at a multiple of 16 bytes.
        distance = tl.multiple_of(distance, 16 // BYTES)
        cols = cols % (WIDTH // 2) + tl.where(cols < WIDTH // 2, 0, distance)
    return cols


@triton.jit
def load_events(x_ptr, first, mask, BLOCK_N: tl.constexpr):
    """[N]: a number of each row, 0 outside the mask."""
    return tl.load(x_ptr + first + tl.arange(0, BLOCK_N), mask=mask, other=0)


@triton.jit
def load_bias(
    bias_ptr, buckets, first, mask, at, group, GROUPS: tl.constexpr, HEADS: tl.constexpr, BY_BUCKET: tl.constexpr
):
    """[N, M]: each row's bias for each query's head, -inf outside the mask; of its bucket if BY_BUCKET."""
    rows = buckets.to(tl.int32)
    if not BY_BUCKET:
        rows = tl.arange(0, mask.shape[0])
        bias_ptr += first * (GROUPS * HEADS)
    where = rows[:, None] * (GROUPS * HEADS) + (group * HEADS + at % HEADS)[None, :]
    if BY_BUCKET:
        # Copies of 16 bytes would go past the first cache, and all programs ask for the same few lines.
        where = tl.max_contiguous(where, [1, 1])
    return tl.load(bias_ptr + where, mask=mask[:, None], other=-float("inf")).to(tl.float32)


@triton.jit
def row_products(x, y):
    """Σ x · y along each row, in float32.

    Threads that hold the same row must agree on its sum to the bit.  A product that the compiler fused with the first
    sum across threads would be rounded by one of two partners and not by the other, so it is fused with 0 before.
    """
    return tl.sum(tl.fma(x.to(tl.float32), y.to(tl.float32), tl.zeros(x.shape, tl.float32)), 1)


@triton.jit
def load_stats(grad, out_ptr, lse_ptr, at, mask, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """The log-sum-exp (inf where there is nothing to weigh), and Δ = Σ dO · O, by query row."""
    out = load_rows(out_ptr, at, mask, E, E, BLOCK_E)
    lse = tl.load(lse_ptr + at, mask=mask, other=float("inf"))
    return tl.where(lse == -float("inf"), float("inf"), lse), row_products(grad, out)


@triton.jit
def weigh(q, grad, lse, delta, k, v, value_scale, bias, mask, scale, SCALED: tl.constexpr, PRECISION: tl.constexpr):
    """P times the scale of values [N, M], which is what they are multiplied by, and dS, the gradient of the scores."""
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale * LOG2E) + (bias - lse[None, :]) * LOG2E
    p = tl.where(mask[:, None], tl.exp2(s), 0.0)
    dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
    weights = p
    if SCALED:
        dp = dp * value_scale[:, None]
        weights = p * value_scale[:, None]
    return weights, p * (dp - delta[None, :])
