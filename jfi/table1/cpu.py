"""The six operators of Table 1 on a CPU: batched products of samples of equal lengths, softmax by segments.

Each sample's part of a jagged operand is one contiguous block of memory, and samples of equal lengths form a batch for
torch.bmm.  Blocks that are adjacent in memory are viewed in place, large ones are viewed one by one, and only small
scattered ones are copied, a bounded number at a time: one small batched product per distinct length, not one per
sample, and no sample's values can reach another sample.  Nothing larger than the operands and a few MB of copies is in
memory; the plain formulas of jfi/reference.py hold [S, D, T] or [Σ L·M, D].  Each function computes in float32 at least
and rounds once, whatever autocast says.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from jfi.cpu.batches import MAX_TOTAL, MIN_TOTAL, Rows, Shapes, is_exact
from jfi.reference import segment_reduce, widen
from jfi.utils.compat import softmax_backward

#: A group of at most this many samples, or of samples with more elements than this, is processed sample by sample:
#: a view costs about 1 µs, a copy about 10 µs and the time of its bytes.
FEW_SAMPLES, LARGE_SAMPLE = 4, 8192
#: The most elements of samples that are copied together (1 MB of float32, so that they stay in the L2 cache).
COPIED_ELEMENTS = 2**18
#: Elements that are computed together where a value per sample is expanded to its rows.
EXPANDED_ELEMENTS = 2**14

_exact = torch.autocast("cpu", enabled=False)


def _groups(
    first: Tensor, second: Tensor, elements: Callable[[int, int], int]
) -> Iterator[tuple[Tensor, bool, tuple[int, int]]]:
    """Yields samples of equal lengths, whether they are adjacent, and the lengths; no samples that have a length of 0.

    Args:
        first, second: the samples' L and M, [B] each.
        elements: (L, M) -> the size of a sample's operands.
    """
    for samples, lengths in Shapes.of(first, second).equal():
        count, size = len(samples), elements(*lengths)
        if count == 1 or int(samples[-1] - samples[0]) == count - 1:  # adjacent ones are read in place
            yield samples, True, lengths
            continue
        single = count <= FEW_SAMPLES or size > LARGE_SAMPLE
        for part in samples.split(1 if single else max(1, COPIED_ELEMENTS // size)):
            yield part, single, lengths


def _row_groups(offsets: Tensor, width: int, fixed: int = 0) -> Iterator[tuple[Rows, Rows]]:
    """Yields samples of equal lengths and their rows, of that total width; a sample has ``fixed`` more elements."""
    lengths, starts = offsets.diff(), offsets.long()
    for samples, is_run, (length, _) in _groups(lengths, lengths, lambda rows, _: rows * width + fixed):
        yield Rows(samples, 1, None, is_run), Rows(starts.index_select(0, samples), length, None, is_run)


def _pair_groups(
    x_offsets: Tensor, y_offsets: Tensor, width: int = 0
) -> Iterator[tuple[Rows, Rows, Rows, tuple[int, int]]]:
    """Yields for samples of equal L and M their x rows and y rows, of that width, their pairs, and (L, M)."""
    counts = x_offsets.diff().long() * y_offsets.diff()
    starts = x_offsets.long(), y_offsets.long(), counts.cumsum(0) - counts
    sizes = x_offsets.diff(), y_offsets.diff(), lambda rows, columns: (rows + columns) * width + rows * columns
    for samples, is_run, (rows, columns) in _groups(*sizes):
        parts = zip(starts, (rows, columns, rows * columns), strict=True)
        yield *(Rows(start.index_select(0, samples), size, None, is_run) for start, size in parts), (rows, columns)


def _put(rows: Rows, out: Tensor, shape: tuple[int, int], operator: Callable[..., Tensor], *args) -> Tensor:
    """Writes and returns operator(*args), [K, *shape] in the first's dtype, with out= where it fits in place."""
    if rows.first is not None and out.dtype == args[0].dtype:
        return operator(*args, out=rows.view(out, *shape))
    block = operator(*args)
    rows.put(out, block.reshape(-1, rows.size, *out.shape[1:]))
    return block


@_exact
def jagged_dense_bmm(x: Tensor, offsets: Tensor, dense: Tensor, transposed: bool) -> Tensor:
    """[S, D], [B, D, T] -> [S, T]; transposed: dense is [B, T, D]."""
    out = x.new_empty(x.shape[0], dense.shape[1 if transposed else 2])
    for samples, rows in _row_groups(offsets, x.shape[1] + out.shape[1], dense.shape[1:].numel()):
        matrices = samples.take(dense, *dense.shape[1:])
        matrices = matrices.mT if transposed else matrices
        _put(rows, out, (rows.size, out.shape[1]), torch.bmm, rows.take(x), matrices)
    return out


@_exact
def jagged_jagged_bmm(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """[S, D], [S, T] -> [B, D, T]."""
    out = x.new_empty(offsets.shape[0] - 1, x.shape[1], y.shape[1])
    out[offsets.diff() == 0] = 0
    for samples, rows in _row_groups(offsets, x.shape[1] + y.shape[1], out.shape[1:].numel()):
        _put(samples, out, out.shape[1:], torch.bmm, rows.take(x).mT, rows.take(y))
    return out


@_exact
def jagged_jagged_bmm_jagged_out(x: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, out_size: int) -> Tensor:
    """[S, D], [R, D] -> [Σ L·M]."""
    out = x.new_empty(out_size)
    for x_rows, y_rows, pairs, lengths in _pair_groups(x_offsets, y_offsets, x.shape[1]):
        _put(pairs, out, lengths, torch.bmm, x_rows.take(x), y_rows.take(y).mT)
    return out


@_exact
def array_jagged_bmm_jagged_out(
    a: Tensor, y: Tensor, x_offsets: Tensor, y_offsets: Tensor, out_rows: int, transposed: bool
) -> Tensor:
    """[Σ L·M], [R, D] -> [S, D]; transposed: [Σ L·M], [S, D] -> [R, D]."""
    out = y.new_zeros(out_rows, y.shape[1])
    for x_rows, y_rows, pairs, lengths in _pair_groups(x_offsets, y_offsets, y.shape[1]):
        blocks = pairs.take(a, *lengths)
        if transposed:
            blocks, x_rows, y_rows = blocks.mT, y_rows, x_rows
        _put(x_rows, out, (x_rows.size, out.shape[1]), torch.bmm, blocks, y_rows.take(y))
    return out


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
    total = segment_reduce(out, offsets, "sum", 0.0).masked_fill_(offsets.diff()[:, None] == 0, 1.0)
    lowest, highest = total.aminmax()
    if not MIN_TOTAL < lowest <= highest < MAX_TOTAL:
        top = segment_reduce(wide, offsets, "max", -torch.inf)
        top.masked_fill_((top == -torch.inf) | is_exact(total), 0.0)
        for rows, part in _expanded(top, offsets):
            torch.sub(wide[rows], part, out=out[rows])
        total = segment_reduce(out.exp_(), offsets, "sum", 0.0)
        total.masked_fill_(total == 0, 1.0)
    for rows, part in _expanded(total, offsets):
        out[rows] /= part
    return out.to(x.dtype)


@_exact
def jagged_softmax_bwd(grad: Tensor, out: Tensor, offsets: Tensor) -> Tensor:
    """[S, T], [S, T] -> [S, T]."""
    weights = widen(out)
    dx = weights * widen(grad)
    for rows, part in _expanded(segment_reduce(dx, offsets, "sum", 0.0), offsets):
        dx[rows].addcmul_(weights[rows], part, value=-1)
    return dx.to(out.dtype)


@_exact
def jagged2_softmax(a: Tensor, x_offsets: Tensor, y_offsets: Tensor) -> Tensor:
    """[Σ L·M] -> [Σ L·M]."""
    out = torch.empty_like(a)
    for _, _, pairs, lengths in _pair_groups(x_offsets, y_offsets):
        scores = pairs.take(a, *lengths)
        weights = _put(pairs, out, lengths, torch.softmax, scores, -1)
        # All weights of a row of nothing but -inf are NaN.
        if weights[:, :, 0].isnan().any():
            hidden = (scores == -torch.inf).all(-1, keepdim=True)
            pairs.put(out, weights.masked_fill(hidden, 0.0).flatten(1))
    return out


@_exact
def jagged2_softmax_bwd(grad: Tensor, out: Tensor, x_offsets: Tensor, y_offsets: Tensor) -> Tensor:
    """[Σ L·M], [Σ L·M] -> [Σ L·M]."""
    da = torch.empty_like(out)
    for _, _, pairs, lengths in _pair_groups(x_offsets, y_offsets):
        dweights, weights = (pairs.take(x, *lengths) for x in (grad, out))
        pairs.put(da, softmax_backward(dweights, weights, -1, weights.dtype).flatten(1))
    return da
