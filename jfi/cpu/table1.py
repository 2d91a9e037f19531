"""The six operators of Table 1 on a CPU: batched products of samples of equal lengths, softmax by segments.

Each sample's part of a jagged operand is one contiguous block of memory, and samples of equal lengths form a batch for
torch.bmm.  Blocks that are adjacent in memory are viewed in place, large ones are viewed one by one, and only small
scattered ones are copied, a bounded number at a time: one small batched product per distinct length, not one per
sample, and no sample's values can reach another sample.  Nothing larger than the operands and a few MB of copies is in
memory; the plain formulas of jfi/reference.py hold [S, D, T] or [Σ L·M, D].  Each function computes in float32 at least
and rounds once, whatever autocast says.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from jfi.cpu.batches import MAX_TOTAL, MIN_TOTAL, Shapes, is_exact, widen
from jfi.utils.compat import softmax_backward

#: A group of at most this many samples, or of samples with more elements than this, is processed sample by sample:
#: a view costs about 1 µs, a copy about 10 µs and the time of its bytes.
FEW_SAMPLES, LARGE_SAMPLE = 4, 8192
#: The most elements of samples that are copied together (1 MB of float32, so that they stay in the L2 cache).
COPIED_ELEMENTS = 2**18
#: Elements that are computed together where a value per sample is expanded to its rows.
EXPANDED_ELEMENTS = 2**14

_exact = torch.autocast("cpu", enabled=False)


class Group(NamedTuple):
    """Samples whose lengths are equal.

    Attributes:
        samples: [K] int64, ascending.
        is_run: the samples follow one another without a gap, so that their blocks do too.
        lengths: of each of the samples, (L, M).
    """

    samples: Tensor
    is_run: bool
    lengths: tuple[int, int]


def groups(first: Tensor, second: Tensor, elements: Callable[[int, int], int]) -> Iterator[Group]:
    """Partitions the samples that have no length of 0 into groups of equal lengths.

    Args:
        first, second: the samples' L and M, [B] each.
        elements: (L, M) -> the size of a sample's operands.
    """
    for samples, lengths in Shapes.of(first, second).equal():
        count = len(samples)
        if count == 1 or int(samples[-1] - samples[0]) == count - 1:
            yield Group(samples, True, lengths)
            continue
        size = elements(*lengths)
        single = count <= FEW_SAMPLES or size > LARGE_SAMPLE
        for part in samples.split(1 if single else max(1, COPIED_ELEMENTS // size)):
            yield Group(part, single, lengths)


class Blocks:
    """The blocks of a tensor's samples.

    Args:
        x: contiguous; a row is what one entry of its first dimension holds.
        starts: [B] int64 or int32: the row at which each sample's block begins.
    """

    def __init__(self, x: Tensor, starts: Tensor):
        self.x = x
        self.width = x[:1].numel() if x.shape[0] else 1
        self.starts = starts

    def view(self, group: Group, rows: int, columns: int) -> Tensor:
        """[K, rows, columns]: the blocks of a run, in place."""
        start = int(self.starts[group.samples[0]]) * self.width + self.x.storage_offset()
        return self.x.as_strided((len(group.samples), rows, columns), (rows * columns, columns, 1), start)

    def index(self, group: Group, rows: int, columns: int) -> Tensor:
        """[K · n]: the rows of the tensor that the blocks take up, n a block."""
        starts = self.starts.index_select(0, group.samples).long()
        return (starts[:, None] + torch.arange(rows * columns // self.width)).flatten()

    def take(self, group: Group, rows: int, columns: int) -> Tensor:
        """[K, rows, columns], in float32 where the tensor is in half precision."""
        if group.is_run:
            return widen(self.view(group, rows, columns))
        index = self.index(group, rows, columns)
        return widen(self.x.index_select(0, index)).view(-1, rows, columns)

    def put(self, group: Group, block: Tensor) -> None:
        """Writes [K, rows, columns]."""
        rows, columns = block.shape[1:]
        if group.is_run:
            self.view(group, rows, columns).copy_(block)
            return
        index = self.index(group, rows, columns)
        self.x.index_copy_(0, index, block.to(self.x.dtype).reshape(len(index), *self.x.shape[1:]))

    def put_product(self, group: Group, left: Tensor, right: Tensor) -> None:
        """Writes left @ right."""
        self.put_result(group, (left.shape[1], right.shape[2]), torch.bmm, left, right)

    def put_result(self, group: Group, shape: tuple[int, int], operator: Callable[..., Tensor], *args) -> Tensor:
        """Writes and returns operator(*args), [K, *shape] in the first's dtype, with out= where it fits in place."""
        if group.is_run and self.x.dtype == args[0].dtype:
            return operator(*args, out=self.view(group, *shape))
        block = operator(*args)
        self.put(group, block)
        return block


def _row_groups(offsets: Tensor, width: int, fixed: int = 0) -> Iterator[Group]:
    """Groups samples of equal lengths, for rows of that total width and a fixed number of elements per sample."""
    lengths = offsets.diff()
    return groups(lengths, lengths, lambda rows, _: rows * width + fixed)


def _pair_groups(x_offsets: Tensor, y_offsets: Tensor, width: int = 0) -> Iterator[Group]:
    """Groups samples of equal L and M, for x and y rows of that width and their pairs."""
    return groups(x_offsets.diff(), y_offsets.diff(), lambda rows, columns: (rows + columns) * width + rows * columns)


@_exact
def jagged_dense_bmm(x: Tensor, offsets: Tensor, dense: Tensor, transposed: bool) -> Tensor:
    """[S, D], [B, D, T] -> [S, T]; transposed: dense is [B, T, D]."""
    out = x.new_empty(x.shape[0], dense.shape[1 if transposed else 2])
    x_blocks, out_blocks = Blocks(x, offsets), Blocks(out, offsets)
    dense_blocks = Blocks(dense, torch.arange(dense.shape[0]))
    for group in _row_groups(offsets, x.shape[1] + out.shape[1], dense.shape[1:].numel()):
        length, _ = group.lengths
        matrices = dense_blocks.take(group, *dense.shape[1:])
        rows = x_blocks.take(group, length, x.shape[1])
        out_blocks.put_product(group, rows, matrices.mT if transposed else matrices)
    return out


@_exact
def jagged_jagged_bmm(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """[S, D], [S, T] -> [B, D, T]."""
    out = x.new_empty(offsets.shape[0] - 1, x.shape[1], y.shape[1])
    out[offsets.diff() == 0] = 0
    x_blocks, y_blocks, out_blocks = Blocks(x, offsets), Blocks(y, offsets), Blocks(out, torch.arange(out.shape[0]))
    for group in _row_groups(offsets, x.shape[1] + y.shape[1], out.shape[1:].numel()):
        length, _ = group.lengths
        left, right = x_blocks.take(group, length, x.shape[1]), y_blocks.take(group, length, y.shape[1])
        out_blocks.put_product(group, left.mT, right)
    return out


def _pair_starts(x_offsets: Tensor, y_offsets: Tensor) -> Tensor:
    """[B]: where each sample's [L, M] block of pairs begins."""
    counts = x_offsets.diff().long() * y_offsets.diff()
    return counts.cumsum(0) - counts


@_exact
def jagged_jagged_bmm_jagged_out(x: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, out_size: int) -> Tensor:
    """[S, D], [R, D] -> [Σ L·M]."""
    out = x.new_empty(out_size)
    x_blocks, y_blocks = Blocks(x, x_offsets), Blocks(y, y_offsets)
    out_blocks = Blocks(out, _pair_starts(x_offsets, y_offsets))
    for group in _pair_groups(x_offsets, y_offsets, x.shape[1]):
        left, right = (
            blocks.take(group, length, x.shape[1])
            for blocks, length in zip((x_blocks, y_blocks), group.lengths, strict=True)
        )
        out_blocks.put_product(group, left, right.mT)
    return out


@_exact
def array_jagged_bmm_jagged_out(
    a: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, out_rows: int, transposed: bool
) -> Tensor:
    """[Σ L·M], [R, D] -> [S, D]; transposed: [Σ L·M], [S, D] -> [R, D]."""
    out = y.new_zeros(out_rows, y.shape[1])
    sides = [x_offsets, y_offsets]
    a_blocks = Blocks(a, _pair_starts(x_offsets, y_offsets))
    y_blocks, out_blocks = Blocks(y, sides[not transposed]), Blocks(out, sides[transposed])
    for group in _pair_groups(x_offsets, y_offsets, y.shape[1]):
        pairs = a_blocks.take(group, *group.lengths)
        rows = y_blocks.take(group, group.lengths[not transposed], y.shape[1])
        out_blocks.put_product(group, pairs.mT if transposed else pairs, rows)
    return out


def _segment_reduce(x: Tensor, offsets: Tensor, reduction: str, initial: float) -> Tensor:
    """[S, T] -> [B, T]."""
    if x.shape[0] == 0:
        return x.new_full((offsets.shape[0] - 1, x.shape[1]), initial)
    return torch.segment_reduce(x, reduction, offsets=offsets.long(), axis=0, initial=initial)


def _expanded(per_sample: Tensor, offsets: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """[B, T] -> parts of [S, T], each sample's entry repeated for each of its rows, and the rows of each part."""
    samples = torch.repeat_interleave(offsets.diff())
    step = max(1, EXPANDED_ELEMENTS // per_sample.shape[1])
    for start in range(0, len(samples), step):
        rows = slice(start, start + step)
        yield rows, per_sample.index_select(0, samples[rows])


@_exact
def jagged_softmax(x: Tensor, offsets: Tensor) -> Tensor:
    """[S, T] -> [S, T]."""
    if x.numel() == 0:
        return torch.empty_like(x)
    wide = widen(x)
    out = wide.exp()
    total = _segment_reduce(out, offsets, "sum", 0.0).masked_fill_(offsets.diff()[:, None] == 0, 1.0)
    lowest, highest = total.aminmax()
    if not MIN_TOTAL < lowest <= highest < MAX_TOTAL:
        top = _segment_reduce(wide, offsets, "max", -torch.inf)
        top.masked_fill_((top == -torch.inf) | is_exact(total), 0.0)
        for rows, part in _expanded(top, offsets):
            torch.sub(wide[rows], part, out=out[rows])
        total = _segment_reduce(out.exp_(), offsets, "sum", 0.0)
        total.masked_fill_(total == 0, 1.0)
    for rows, part in _expanded(total, offsets):
        out[rows] /= part
    return out.to(x.dtype)


@_exact
def jagged_softmax_bwd(grad: Tensor, out: Tensor, offsets: Tensor) -> Tensor:
    """[S, T], [S, T] -> [S, T]."""
    weights = widen(out)
    dx = weights * widen(grad)
    for rows, part in _expanded(_segment_reduce(dx, offsets, "sum", 0.0), offsets):
        dx[rows].addcmul_(weights[rows], part, value=-1)
    return dx.to(out.dtype)


@_exact
def jagged2_softmax(a: Tensor, x_offsets: Tensor, y_offsets: Tensor) -> Tensor:
    """[Σ L·M] -> [Σ L·M]."""
    out, starts = torch.empty_like(a), _pair_starts(x_offsets, y_offsets)
    a_blocks, out_blocks = Blocks(a, starts), Blocks(out, starts)
    for group in _pair_groups(x_offsets, y_offsets):
        scores = a_blocks.take(group, *group.lengths)
        weights = out_blocks.put_result(group, group.lengths, torch.softmax, scores, -1)
        # All weights of a row of nothing but -inf are NaN.
        if weights[:, :, 0].isnan().any():
            hidden = (scores == -torch.inf).all(-1, keepdim=True)
            out_blocks.put(group, weights.masked_fill(hidden, 0.0))
    return out


@_exact
def jagged2_softmax_bwd(grad: Tensor, out: Tensor, x_offsets: Tensor, y_offsets: Tensor) -> Tensor:
    """[Σ L·M], [Σ L·M] -> [Σ L·M]."""
    da, starts = torch.empty_like(out), _pair_starts(x_offsets, y_offsets)
    grad_blocks, out_blocks, da_blocks = Blocks(grad, starts), Blocks(out, starts), Blocks(da, starts)
    for group in _pair_groups(x_offsets, y_offsets):
        weights = out_blocks.take(group, *group.lengths)
        dweights = grad_blocks.take(group, *group.lengths)
        da_blocks.put(group, softmax_backward(dweights, weights, -1, weights.dtype))
    return da
