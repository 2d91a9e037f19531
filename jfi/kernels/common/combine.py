"""Combining the partial results of samples that several programs worked on, in the order of the rows: same bits always.

    weighted:  out = Σ_i exp(lse_i - lse) out_i,  lse = log Σ_i exp(lse_i)        else:  out = Σ_i out_i

Three ways of splitting leave them:

* stream-K ranges (`jfi.kernels.common.stream_k`): program p leaves that of the sample which began in an earlier range
  in slot 2p, and that of the sample which goes on into a later range at 2p + 1;
* chunks of a sample's rows: the sample that holds row i · chunk - 1 and goes on from there leaves that of its next
  chunk in slot 2i, and that of a first chunk which begins after row i · chunk at 2i + 1;
* splits of the rows that each tile of queries sees, as many of every tile.
"""

import operator
from collections.abc import Callable
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.launch import Launcher
from jfi.kernels.common.online_softmax import combine_weights, finish, no_sums, nonzero
from jfi.kernels.common.primitives import LN2, LOG2E
from jfi.kernels.common.stream_k import WEIGHT
from jfi.kernels.common.tiles import load_rows, store_rows
from jfi.utils.operands import ceil_div, power_of_two

#: A chunk longer than any sample: nothing is split.
UNSPLIT = 2**30
#: Query rows of a tile.
_COMBINED_ROWS = 16


@triton.jit
def add_partial(partial, lse, maximum, total, acc):
    """Returns (maximum, total, acc) of tiles of query rows after a partial result [M, D] with the log-sum-exps [M]."""
    new_maximum = tl.maximum(maximum, lse)
    weight, factor = combine_weights(lse, maximum, new_maximum)
    return new_maximum, total * factor + weight, acc * factor[:, None] + partial * weight[:, None]


@triton.jit
def weighted_sum(maximum, total, acc):
    """Returns (the combined rows, their log-sum-exp) of what `add_partial` gave."""
    lse = tl.where(total == 0.0, -float("inf"), maximum + tl.log2(nonzero(total)) * LN2)
    return acc / nonzero(total)[:, None], lse


# --- Stream-K ranges and chunks ---------------------------------------------------------------------------------------
@triton.jit
def partials_layout(partial_ptr, programs, sample_rows, WIDTH: tl.constexpr):
    """Returns the pointers behind the partial outputs [2 · programs, rows, WIDTH] of stream-K ranges.

    They are to log-sum-exps [2 · programs, rows] and to the split sample of each program whose range holds its first
    rows, -1 of others.
    """
    partial_lse_ptr = partial_ptr + (2 * programs * sample_rows).to(tl.int64) * WIDTH
    return partial_lse_ptr, (partial_lse_ptr + 2 * programs * sample_rows).to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit(do_not_specialize=["chunk", "sample_rows"])
def _combine_ranges_kernel(
    offsets_ptr,
    partial_ptr,
    out_ptr,
    lse_ptr,
    chunk,
    sample_rows,
    WIDTH: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program per query row and range; those of ranges without the first rows of a split sample end at once."""
    program = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0)
    partial_lse_ptr, split_ptr = partials_layout(partial_ptr, tl.num_programs(1), sample_rows, WIDTH)
    sample = tl.load(split_ptr + program).to(tl.int64)
    if sample < 0:
        return
    end = tl.load(offsets_ptr + sample + 1).to(tl.int64) + sample * WEIGHT
    cols = tl.arange(0, BLOCK_D)
    maximum = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for first in range(program, (end - 1) // chunk + 1, BLOCK_P):
        member = first + tl.arange(0, BLOCK_P)
        mask = member * chunk < end
        at = (2 * member + (member == program).to(tl.int64)) * sample_rows + row
        partial = tl.load(
            partial_ptr + at[:, None] * WIDTH + cols[None, :], mask=mask[:, None] & (cols < WIDTH)[None, :], other=0.0
        )
        if WEIGHTED:
            lse = tl.load(partial_lse_ptr + at, mask=mask, other=-float("inf"))
            new_maximum = tl.maximum(maximum, tl.max(lse, 0))
            weight, factor = combine_weights(lse, maximum, new_maximum)
            acc = acc * factor + tl.sum(partial * weight[:, None], 0)
            total = total * factor + tl.sum(weight, 0)
            maximum = new_maximum
        else:
            acc += tl.sum(partial, 0)
    if WEIGHTED:
        acc = acc / nonzero(total)
        lse = tl.where(total == 0.0, -float("inf"), maximum + tl.log(nonzero(total)))
        tl.store(lse_ptr + sample * sample_rows + row, lse)
    tl.store(out_ptr + (sample * sample_rows + row) * WIDTH + cols, acc.to(out_ptr.dtype.element_ty), mask=cols < WIDTH)


@cache
def _combine_ranges(width: int, weighted: bool) -> Launcher:
    block_d = power_of_two(width, least=1)
    constants = {"WIDTH": width, "WEIGHTED": weighted, "BLOCK_P": max(2, min(16, 1024 // block_d)), "BLOCK_D": block_d}
    return Launcher(_combine_ranges_kernel, **constants, num_warps=max(1, min(8, block_d // 64)))


@triton.jit
def chunk_partial(low, n, chunk):
    """Returns the slot of the partial result of the chunk that begins at row n, of a sample that begins at row low."""
    return 2 * (low // chunk + (n - low) // chunk) + (n == low).to(tl.int64)


@triton.jit(do_not_specialize=["chunk", "sample_rows"])
def _combine_tiles_kernel(
    offsets_ptr,
    partial_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    chunk,
    sample_rows,
    BY_RANGE: tl.constexpr,
    WIDTH: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Combines a tile of a sample's query rows: results of its chunks or, BY_RANGE, of its stream-K ranges."""
    if BY_RANGE:
        tile = tl.program_id(0)
        low = tl.program_id(1).to(tl.int64)
        partial_lse_ptr, split_ptr = partials_layout(partial_ptr, tl.num_programs(1), sample_rows, WIDTH)
        sample = tl.load(split_ptr + low).to(tl.int64)
        if sample < 0:
            return
        high = (tl.load(offsets_ptr + sample + 1).to(tl.int64) + sample * WEIGHT - 1) // chunk + 1
        step = 1
    else:
        tiles = (sample_rows + BLOCK_M - 1) // BLOCK_M
        tile = (tl.program_id(0) % tiles).to(tl.int64)
        sample = (tl.program_id(0) // tiles).to(tl.int64)
        low = tl.load(offsets_ptr + sample).to(tl.int64)
        high = tl.load(offsets_ptr + sample + 1).to(tl.int64)
        if high - low <= chunk:
            return
        step = chunk
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = row < sample_rows
    maximum, total, acc = no_sums(BLOCK_M, BLOCK_D)
    for n in range(low, high, step):
        if BY_RANGE:
            at = (2 * n + (n == low).to(tl.int64)) * sample_rows
        else:
            at = chunk_partial(low, n, chunk) * sample_rows
        partial = load_rows(partial_ptr + at * WIDTH, row, mask, WIDTH, WIDTH, BLOCK_D)
        if WEIGHTED:
            lse = tl.load(partial_lse_ptr + at + row, mask=mask, other=-float("inf"))
            maximum, total, acc = add_partial(partial, lse, maximum, total, acc)
        else:
            acc += partial
    if WEIGHTED:
        acc, lse = weighted_sum(maximum, total, acc)
        tl.store(lse_ptr + sample * sample_rows + row, lse, mask=mask)
    store_rows(out_ptr + sample * sample_rows * WIDTH, acc, row, mask, WIDTH, WIDTH, BLOCK_D)


@cache
def _combine_tiles(width: int, weighted: bool, by_range: bool) -> Launcher:
    constants = {"BY_RANGE": by_range, "WIDTH": width, "WEIGHTED": weighted, "BLOCK_M": _COMBINED_ROWS}
    return Launcher(_combine_tiles_kernel, **constants, BLOCK_D=power_of_two(width), num_warps=4)


class RangePartials:
    """Memory for the partial results of stream-K ranges, one allocation: see `partials_layout`."""

    def __init__(self, programs: int, chunk: int, sample_rows: int, width: int, by_tile: bool, device: torch.device):
        """sample_rows: T · H, the query rows of a sample; by_tile: fewer programs combine tiles of them."""
        self.programs, self.chunk, self.sample_rows, self.width = programs, chunk, sample_rows, width
        self.by_tile = by_tile
        self.memory = torch.empty(programs * (2 * sample_rows * (width + 1) + 1), dtype=torch.float32, device=device)

    def combine(
        self, offsets: Tensor, out: Tensor, lse: Tensor | None, launch: Callable[..., None] = operator.call
    ) -> None:
        """Fills in the results of split samples, weighted by their log-sum-exps if lse is given."""
        numbers = (self.chunk, self.sample_rows)
        if self.by_tile:
            launcher = _combine_tiles(self.width, lse is not None, True)
            grid = (ceil_div(self.sample_rows, _COMBINED_ROWS), self.programs, 1)
            launch(launcher, grid, (offsets, self.memory, None, out, lse), numbers)
        else:
            launcher = _combine_ranges(self.width, lse is not None)
            launch(launcher, (self.sample_rows, self.programs, 1), (offsets, self.memory, out, lse), numbers)


class ChunkPartials:
    """Memory for the partial results of chunks, [.., T · H, width] and their log-sum-exps, if anything is split."""

    def __init__(self, rows: int, chunk: int, sample_rows: int, width: int, device: torch.device):
        """rows: history rows of the batch; sample_rows: T · H, the query rows of a sample."""
        self.chunk, self.splits = chunk, not isinstance(chunk, int) or chunk < UNSPLIT  # symbolic under torch.export
        slots = 2 * (rows // chunk + 1) if self.splits else 0
        self.values = torch.empty(slots, sample_rows, width, dtype=torch.float32, device=device)
        self.lse = self.values.new_empty(slots, sample_rows)

    def combine(
        self, offsets: Tensor, out: Tensor, lse: Tensor | None, launch: Callable[..., None] = operator.call
    ) -> None:
        """Fill in the results of samples of several chunks, as `RangePartials.combine`."""
        _, sample_rows, width = self.values.shape
        if self.splits:
            grid = (out.shape[0] * ceil_div(sample_rows, _COMBINED_ROWS), 1, 1)
            tensors = (offsets, self.values, self.lse, out, lse)
            launch(_combine_tiles(width, lse is not None, False), grid, tensors, (self.chunk, sample_rows))


# --- Splits -----------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["rows"])
def _combine_splits_kernel(
    partial_ptr,
    partial_lse_ptr,
    out_ptr,
    lse_ptr,
    rows,
    NUM_SPLITS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merges the partial results of one tile of query rows; a program per tile."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = row < rows
    first = row // NUM_KV_HEADS * (NUM_KV_HEADS * NUM_SPLITS) + row % NUM_KV_HEADS
    maximum, total, acc = no_sums(BLOCK_M, BLOCK_D)
    for split in tl.static_range(NUM_SPLITS):
        at = first + split * NUM_KV_HEADS
        lse = tl.load(partial_lse_ptr + at, mask=mask, other=-float("inf"))
        # The values of an empty split are not read.
        partial = load_rows(partial_ptr, at, lse > -float("inf"), WIDTH, WIDTH, BLOCK_D)
        maximum, total, acc = add_partial(partial, lse, maximum, total, acc)
    out, lse = finish(maximum * LOG2E, total, acc)
    tl.store(lse_ptr + row, lse, mask=mask)
    store_rows(out_ptr, out, row, mask, WIDTH, WIDTH, BLOCK_D)


@cache
def _combine_splits(num_splits: int, num_kv_heads: int, width: int) -> Launcher:
    constants = {"NUM_SPLITS": num_splits, "NUM_KV_HEADS": num_kv_heads, "WIDTH": width}
    sizes = {"BLOCK_M": _COMBINED_ROWS, "BLOCK_D": power_of_two(width)}
    return Launcher(_combine_splits_kernel, **constants, **sizes, num_warps=4)


class SplitPartials:
    """Memory for the partial results of splits, [R · H/G, num_splits, G, E], and their log-sum-exps."""

    def __init__(self, out: Tensor, num_kv_heads: int, num_splits: int):
        """out: [R, H, E]."""
        rows, num_heads, width = out.shape
        shape = (rows * (num_heads // num_kv_heads), num_splits, num_kv_heads, width)
        self.values = out.new_empty(shape, dtype=torch.float32)
        self.lse = self.values.new_empty(shape[:3])

    def combine(self, out: Tensor, lse: Tensor) -> None:
        """Fill in the results, [R, H, E] and [R, H]; one key head or one per query head."""
        _, num_splits, num_kv_heads, width = self.values.shape
        launch = _combine_splits(num_splits, num_kv_heads, width)
        rows = lse.numel()
        launch((ceil_div(rows, _COMBINED_ROWS), 1, 1), (self.values, self.lse, out, lse), (rows,))
