"""What the kernels for many query rows share: whole tiles by tensor descriptor, and samples cut into chunks of rows.

A sample longer than a chunk is worked on by several programs, whose partial results are added up in the order of the
rows.  Slot b is the first chunk of sample b, found without a search.  Slots B + i - 1 are the others: the sample that
holds row i · chunk - 1 and goes on from there owns that slot, for its next chunk if it has one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from jfi.kernels.common.primitives import INTERPRET, LN2, LOG2E, block, cdiv, find_sample
from jfi.kernels.common.stream_k import deal
from jfi.kernels.target_attention.tiles import load_rows, query_rows, store_rows

#: Programs a multiprocessor that chunks are cut for.
PROGRAMS = 2
#: Chunks are a multiple of this, so that all but a sample's last consist of whole tiles.
CHUNK_MULTIPLE = 128
#: The statistics of query rows are padded to a multiple of this, so that a tile of them is loaded without a mask.
STATS = tl.constexpr(64)


def chunk_of(rows: int, batch: int, device: torch.device, programs_a_chunk: int, max_seqlen: int | None) -> int:
    """Rows of a chunk; 2³⁰ where no sample needs two."""
    chunk, _ = deal(rows * programs_a_chunk, batch, device, PROGRAMS)
    chunk = cdiv(chunk, CHUNK_MULTIPLE) * CHUNK_MULTIPLE
    longest = rows if max_seqlen is None else max_seqlen
    return chunk if chunk < longest else 2**30


def chunk_slots(rows: int, batch: int, chunk: int) -> int:
    return batch + rows // chunk


def parts_of(rows: int, chunk: int, queries: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for partial results [parts, T · H, width] and their log-sum-exps, none where nothing is split."""
    parts = 2 * (rows // chunk + 1) if chunk < 2**30 else 0
    values = torch.empty(parts, queries, width, dtype=torch.float32, device=device)
    return values, values.new_empty(parts, queries)


@triton.jit
def slot_rows(offsets_ptr, batch, slot, chunk):
    """(sample, its first row, first row of the slot, end of the sample); a spare slot begins at the end or after it."""
    sample = slot.to(tl.int64)
    later = sample - batch + 1
    if later > 0:
        sample = find_sample(offsets_ptr, batch, later * chunk - 1, 1, 0)
    low = tl.load(offsets_ptr + sample).to(tl.int64)
    high = tl.load(offsets_ptr + sample + 1).to(tl.int64)
    n = low
    if later > 0:
        n += (later - low // chunk) * chunk
    return sample, low, n, high


@triton.jit
def part_of(low, n, chunk):
    """Where the partial result of the chunk from row n on lies: a first chunk's at odd places, others' at even."""
    return 2 * (low // chunk + (n - low) // chunk) + (n == low).to(tl.int64)


@triton.jit(do_not_specialize=["queries", "chunk"])
def _merge_chunks_kernel(
    offsets_ptr,
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    queries,
    chunk,
    WIDTH: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """O = Σ_i exp(L_i - L) O_i with L = log Σ_i exp(L_i) if WEIGHTED, else O = Σ_i O_i, over a sample's chunks."""
    tiles = (queries + BLOCK_M - 1) // BLOCK_M
    sample = (tl.program_id(0) // tiles).to(tl.int64)
    low = tl.load(offsets_ptr + sample).to(tl.int64)
    high = tl.load(offsets_ptr + sample + 1).to(tl.int64)
    if high - low <= chunk:
        return
    at = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = at < queries
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for n in range(low, high, chunk):
        row = part_of(low, n, chunk) * queries
        part = load_rows(part_ptr + row * WIDTH, at, mask, WIDTH, WIDTH, BLOCK_D)
        if WEIGHTED:
            lse = tl.load(part_lse_ptr + row + at, mask=mask, other=-float("inf"))
            new_top = tl.maximum(top, lse)
            base = tl.where(new_top == -float("inf"), 0.0, new_top)
            weight = tl.exp2((lse - base) * LOG2E)
            shrink = tl.exp2((top - base) * LOG2E)
            acc = acc * shrink[:, None] + part * weight[:, None]
            total = total * shrink + weight
            top = new_top
        else:
            acc += part
    if WEIGHTED:
        total_or_one = tl.where(total == 0.0, 1.0, total)
        acc = acc / total_or_one[:, None]
        lse = tl.where(total == 0.0, -float("inf"), top + tl.log2(total_or_one) * LN2)
        tl.store(lse_ptr + sample * queries + at, lse, mask=mask)
    store_rows(out_ptr + sample * queries * WIDTH, acc, at, mask, WIDTH, WIDTH, BLOCK_D)


def merge_chunks(parts: tuple[Tensor, Tensor], offsets: Tensor, out: Tensor, lse: Tensor | None, chunk: int) -> None:
    """Fill in the results of samples of several chunks."""
    values, part_lse = parts
    _, queries, width = values.shape
    block_m = 16
    _merge_chunks_kernel[(out.shape[0] * cdiv(queries, block_m),)](
        offsets,
        values,
        part_lse,
        out,
        lse,
        queries,
        chunk,
        WIDTH=width,
        WEIGHTED=lse is not None,
        BLOCK_M=block_m,
        BLOCK_D=block(width),
        num_warps=4,
    )


def describable(*tensors: Tensor | None) -> bool:
    """Whether rows of these [rows, G, width] can be fetched by the copy engine, tiles of whole heads at a time."""

    def fits(x: Tensor) -> bool:
        width, groups = x.shape[-1], x.shape[-2]
        whole = groups == 1 or width == block(width)
        return whole and width * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0 and 0 < x.shape[0] < 2**31

    first = tensors[0]
    if INTERPRET.value or first.device.type != "cuda" or first.element_size() != 2:
        return False
    return torch.cuda.get_device_capability(first.device) >= (9, 0) and all(fits(x) for x in tensors if x is not None)


def history_tiles(x: Tensor, block_n: int) -> TensorDescriptor:
    """[rows, G, width] in tiles of [block_n, width] of a head."""
    rows, groups, width = x.shape
    return TensorDescriptor.from_tensor(x.view(rows, groups * width), [block_n, block(width)])


def query_tiles(x: Tensor, groups: int, block_m: int) -> TensorDescriptor:
    """[B, T, H, width] in tiles of [1, block_m, width] of the rows that meet a key head; where G is 1 or H."""
    batch, times, heads, width = x.shape
    rows = x.view(batch, times * heads // groups, groups * width)
    return TensorDescriptor.from_tensor(rows, [1, block_m, block(width)])


@triton.jit
def history_tile(
    desc,
    ptr,
    n,
    at,
    mask,
    group,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """[N, D] of the rows from n on.  A descriptor takes no mask: with one, all of the tile must be the sample's."""
    if DESCRIBED:
        return desc.load([n.to(tl.int32), group * WIDTH])
    else:
        return load_rows(ptr + n * (GROUPS * WIDTH) + group * WIDTH, at, mask, GROUPS * WIDTH, WIDTH, BLOCK_D)


@triton.jit
def store_history_tile(
    desc,
    ptr,
    x,
    n,
    at,
    mask,
    group,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    if DESCRIBED:
        desc.store([n.to(tl.int32), group * WIDTH], x.to(ptr.dtype.element_ty))
    else:
        store_rows(ptr + n * (GROUPS * WIDTH) + group * WIDTH, x, at, mask, GROUPS * WIDTH, WIDTH, BLOCK_D)


@triton.jit
def query_places(first, at, group, GROUPS: tl.constexpr, HEADS: tl.constexpr):
    """Where the query rows ``at``, from ``first`` on, lie among a sample's: (a row in 64 bits, places from it).

    With one key head the places take 32 bits, half the registers that are held for the output through the sweep.
    """
    start = tl.zeros((), tl.int64)
    if GROUPS == 1:
        return start + first, at - first
    else:
        return start, query_rows(at.to(tl.int64), group, GROUPS, HEADS)


@triton.jit
def bias_tile(bias_ptr, n, k_at, mask, at, group, GROUPS: tl.constexpr, HEADS: tl.constexpr):
    """[1, N] or [M, N]: the bias of the rows from n on for each query's head, in base 2, -inf outside the mask."""
    rows = k_at * (GROUPS * HEADS) + group * HEADS
    if HEADS == 1:
        where, keep = rows[None, :], mask[None, :]
    else:
        where = rows[None, :] + (at % HEADS)[:, None]
        keep = tl.broadcast_to(mask[None, :], where.shape)
    bias = tl.load(bias_ptr + n * (GROUPS * HEADS) + where, mask=keep, other=-float("inf"))
    return bias.to(tl.float32) * LOG2E


@triton.jit
def scores_gradient(p, dp, delta, scale, HAS_BIAS: tl.constexpr):
    """dS = P (dP - Δ), whose sum is dbias, and scale dS; without a bias the latter alone, Δ being scaled already."""
    if HAS_BIAS:
        ds = p * (dp - delta)
        return ds, ds * scale
    else:
        ds = p * (dp * scale - delta)
        return ds, ds


def head_columns(heads: int) -> int:
    """BLOCK_H of ``head_sums``."""
    return heads if heads & (heads - 1) == 0 else block(heads)


@triton.jit
def head_sums(ds, at, q_mask, HEADS: tl.constexpr, BLOCK_H: tl.constexpr):
    """[N, BLOCK_H]: dS [N, M], 0 outside the mask, added up by query head."""
    if HEADS == BLOCK_H and ds.shape[1] % HEADS == 0:
        return tl.sum(tl.reshape(ds, (ds.shape[0], ds.shape[1] // HEADS, HEADS)), 1)
    own = ((at % HEADS)[:, None] == tl.arange(0, BLOCK_H)[None, :]) & q_mask[:, None]
    return tl.dot(ds, own.to(tl.float32), input_precision="tf32x3")
