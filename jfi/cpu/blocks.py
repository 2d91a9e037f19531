"""Batched matrix products over samples of different lengths, without padding.

Each sample's part of a jagged operand is one contiguous block of memory.  ``groups`` sorts the samples by length;
samples of equal lengths have blocks of equal shape and form a batch for torch.bmm.  Blocks that are adjacent in
memory are viewed in place, large ones are viewed one by one, and only small scattered ones are copied, a bounded number
at a time.  So the cost is that of one small batched product per distinct length, not of one per sample, and no sample's
values can reach another sample.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

#: A group of at most this many samples, or of samples with more elements than this, is processed sample by sample:
#: a view costs about 1 µs, a copy about 10 µs and the time of its bytes.
FEW_SAMPLES, LARGE_SAMPLE = 4, 8192
#: The most elements of samples that are copied together (1 MB of float32, so that they stay in the L2 cache).
COPIED_ELEMENTS = 2**18
#: Sums of exp(x) between these are as exact as sums of exp(x - max), which take two more passes.
LEAST_TOTAL, MOST_TOTAL = 1e-20, 1e20


def is_exact(total: Tensor) -> Tensor:
    """Whether sums of exp(x) are as exact as those of exp(x - max).

    Such a sum stays what it is where others are not exact, so that no sample changes the bits of another.
    """
    return (total > LEAST_TOTAL) & (total < MOST_TOTAL)


def widen(x: Tensor) -> Tensor:
    """Half precision as float32, the type it is computed in; other types unchanged."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class Shapes(NamedTuple):
    """The samples without a length of 0, sorted by their lengths.

    Attributes:
        order: [N] int64: the samples.
        counts: of samples with the same lengths, in that order.
        lengths: of each such run of samples, (L, M).
    """

    order: Tensor
    counts: list[int]
    lengths: list[tuple[int, int]]

    @classmethod
    def of(cls, first: Tensor, second: Tensor) -> "Shapes":
        """Sort by the second lengths [B], then by the first."""
        if first.numel() == 0:
            return cls(first.new_empty(0, dtype=torch.int64), [], [])
        stride = int(first.max()) + 1
        key = second.long() * stride + first
        keys, order = key.masked_fill_(first * second == 0, -1).sort(stable=True)
        first_used = int(torch.searchsorted(keys, 0))
        keys, counts = keys[first_used:].unique_consecutive(return_counts=True)
        return cls(order[first_used:], counts.tolist(), [divmod(key, stride)[::-1] for key in keys.tolist()])

    def equal(self) -> Iterator[tuple[Tensor, tuple[int, int]]]:
        """All samples of the same lengths together."""
        return zip(self.order.split(self.counts), self.lengths, strict=True) if self.counts else iter(())

    def padded(self, most_padding: int) -> Iterator[tuple[Tensor, tuple[int, int], bool]]:
        """Neighbours together while padding their L x M pairs to the longest L and M adds at most so many pairs.

        Yields the samples, the longest L and M, and whether all have those lengths.
        """
        start = count = area = longest_first = longest_second = 0
        is_full = True
        for more, (first, second) in zip(self.counts, self.lengths, strict=True):
            padded = (count + more) * max(longest_first, first) * max(longest_second, second)
            if count and padded - area - more * first * second > most_padding:
                yield self.order[start : start + count], (longest_first, longest_second), is_full
                start, count, area, longest_first, longest_second, is_full = start + count, 0, 0, 0, 0, True
            is_full = count == 0
            count, area = count + more, area + more * first * second
            longest_first, longest_second = max(longest_first, first), max(longest_second, second)
        if count:
            yield self.order[start : start + count], (longest_first, longest_second), is_full


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
    """Partition the samples that have no length of 0 into groups of equal lengths.

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
    """A tensor as the blocks of its samples.

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
        """Write [K, rows, columns]."""
        rows, columns = block.shape[1:]
        if group.is_run:
            self.view(group, rows, columns).copy_(block)
            return
        index = self.index(group, rows, columns)
        self.x.index_copy_(0, index, block.to(self.x.dtype).reshape(len(index), *self.x.shape[1:]))

    def put_product(self, group: Group, left: Tensor, right: Tensor) -> None:
        """Write left @ right."""
        self.put_result(group, (left.shape[1], right.shape[2]), torch.bmm, left, right)

    def put_result(self, group: Group, shape: tuple[int, int], operator: Callable[..., Tensor], *args) -> Tensor:
        """Write and return operator(*args), [K, *shape] in the dtype of the first, with out= where it fits in place."""
        if group.is_run and self.x.dtype == args[0].dtype:
            return operator(*args, out=self.view(group, *shape))
        block = operator(*args)
        self.put(group, block)
        return block
