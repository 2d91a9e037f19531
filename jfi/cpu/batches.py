"""Batches of samples of similar lengths, padded where that is cheaper than another batch."""

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from jfi.reference import widen

#: Sums of exp(x) between these are as exact as sums of exp(x - max), which take two more passes.
MIN_TOTAL, MAX_TOTAL = 1e-20, 1e20


def is_exact(total: Tensor) -> Tensor:
    """Returns whether sums of exp(x) are as exact as those of exp(x - max).

    Such a sum stays what it is where others are not exact, so that no sample changes the bits of another.
    """
    return (total > MIN_TOTAL) & (total < MAX_TOTAL)


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
        """Sorts samples by the second lengths [B], then by the first."""
        if first.numel() == 0:
            return cls(first.new_empty(0, dtype=torch.int64), [], [])
        stride = int(first.max()) + 1
        key = second.long() * stride + first
        keys, order = key.masked_fill_(first * second == 0, -1).sort(stable=True)
        first_used = int(torch.searchsorted(keys, 0))
        keys, counts = keys[first_used:].unique_consecutive(return_counts=True)
        return cls(order[first_used:], counts.tolist(), [divmod(key, stride)[::-1] for key in keys.tolist()])

    def equal(self) -> Iterator[tuple[Tensor, tuple[int, int]]]:
        """Yields all samples of the same lengths together."""
        return zip(self.order.split(self.counts), self.lengths, strict=True) if self.counts else iter(())

    def padded(self, max_padding: int) -> Iterator[tuple[Tensor, tuple[int, int], bool]]:
        """Joins neighbours while padding their L x M pairs to the longest L and M adds at most so many pairs.

        Yields the samples, the longest L and M, and whether all have those lengths.
        """
        start = count = area = longest_first = longest_second = 0
        is_full = True
        for more, (first, second) in zip(self.counts, self.lengths, strict=True):
            padded = (count + more) * max(longest_first, first) * max(longest_second, second)
            if count and padded - area - more * first * second > max_padding:
                yield self.order[start : start + count], (longest_first, longest_second), is_full
                start, count, area, longest_first, longest_second, is_full = start + count, 0, 0, 0, 0, True
            is_full = count == 0
            count, area = count + more, area + more * first * second
            longest_first, longest_second = max(longest_first, first), max(longest_second, second)
        if count:
            yield self.order[start : start + count], (longest_first, longest_second), is_full


class Rows:
    """The packed rows of K samples, or of chunks of them, padded to N each.

    Args:
        starts: [K] int64: the first row of each.
        size: N.
        lengths: [K] int64; None where all are N.
        is_run: the rows of the samples follow one another, so that they are read in place, as those of one sample are.
    """

    def __init__(self, starts: Tensor, size: int, lengths: Tensor | None = None, is_run: bool = False):
        self.starts, self.count, self.size, self.lengths = starts, starts.shape[0], size, lengths
        self.first = int(starts[0]) if is_run and self.count > 1 else None
        if self.count == 1:
            self.first, self.size, self.lengths = int(starts), size if lengths is None else int(lengths), None

    @cached_property
    def index(self) -> Tensor:
        """[K, N] int64: the packed row at each position; padding repeats the sample's last row."""
        positions = torch.arange(self.size)
        if self.lengths is not None:
            positions = torch.minimum(positions, self.lengths[:, None] - 1)
        return self.starts[:, None] + positions

    @cached_property
    def padding(self) -> Tensor | None:
        """[K, N], or None where no position is padding."""
        return None if self.lengths is None else torch.arange(self.size) >= self.lengths[:, None]

    @cached_property
    def real(self) -> Tensor:
        """The positions in [K · N] that are not padding."""
        return (~self.padding).flatten().nonzero()[:, 0]

    def view(self, x: Tensor, *shape: int) -> Tensor:
        """[S, ...] -> [K, N, ...], or [K, *shape], in place, where there is a `first` row."""
        rows = x.narrow(0, self.first, self.count * self.size)
        return rows.view(self.count, *(shape or (self.size, *x.shape[1:])))

    def take(self, x: Tensor, *shape: int) -> Tensor:
        """[S, ...] -> [K, N, ...], or [K, *shape], at least float32; not to be written to: it may be memory of x."""
        if self.first is not None:
            return widen(self.view(x, *shape))
        rows = x.index_select(0, self.index.flatten())
        return widen(rows).view(self.count, *(shape or (self.size, *x.shape[1:])))

    def put(self, out: Tensor, x: Tensor) -> None:
        """Writes x [K, N, ...] to the rows of out, padding excepted."""
        if self.first is not None:
            self.view(out).copy_(x)
            return
        x, rows = x.flatten(0, 1), self.index.flatten()
        if self.padding is not None:
            x, rows = x.index_select(0, self.real), rows.index_select(0, self.real)
        out.index_copy_(0, rows, x.to(out.dtype))

    def add(self, out: Tensor, x: Tensor, factor: float = 1.0) -> None:
        """Adds factor · x [K, N, ...], which is 0 for padding, to the rows of out."""
        if self.first is not None:
            self.view(out).add_(x, alpha=factor)
        else:
            out.index_add_(0, self.index.flatten(), x.flatten(0, 1), alpha=factor)
