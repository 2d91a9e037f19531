"""Batches of samples of similar lengths, padded where that is cheaper than another batch."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

#: Sums of exp(x) between these are as exact as sums of exp(x - max), which take two more passes.
MIN_TOTAL, MAX_TOTAL = 1e-20, 1e20


def is_exact(total: Tensor) -> Tensor:
    """Returns whether sums of exp(x) are as exact as those of exp(x - max).

    Such a sum stays what it is where others are not exact, so that no sample changes the bits of another.
    """
    return (total > MIN_TOTAL) & (total < MAX_TOTAL)


def widen(x: Tensor) -> Tensor:
    """Converts half precision to float32, the type it is computed in; leaves other types unchanged."""
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


@dataclass
class Rows:
    """The packed rows of K samples, or of chunks of them, padded to N each.

    Attributes:
        index: [K, N] int64: the packed row at each position; padding repeats the sample's last row.
        padding: [K, N], or None where no position is padding.
    """

    index: Tensor
    padding: Tensor | None

    @classmethod
    def of(cls, starts: Tensor, lengths: Tensor, longest: int, is_full: bool) -> "Rows":
        if len(starts) == 1:
            longest = int(lengths)
        positions = torch.arange(longest)
        if is_full or len(starts) == 1:
            return cls(starts[:, None] + positions, None)
        index = starts[:, None] + torch.minimum(positions, lengths[:, None] - 1)
        return cls(index, positions >= lengths[:, None])

    @cached_property
    def real(self) -> Tensor:
        """The positions in [K · N] that are not padding."""
        return (~self.padding).flatten().nonzero()[:, 0]

    def view(self, x: Tensor) -> Tensor:
        """[S, ...] -> [N, ...], of one sample: its rows in place."""
        return x.narrow(0, int(self.index[0, 0]), self.index.shape[1])

    def take(self, x: Tensor) -> Tensor:
        """[S, ...] -> [K, N, ...], at least float32; not to be written to, since it may share memory with x."""
        if len(self.index) == 1:
            return widen(self.view(x))[None]
        return widen(x.index_select(0, self.index.flatten())).unflatten(0, self.index.shape)

    def put(self, out: Tensor, x: Tensor) -> None:
        """Writes x [K, N, ...] to the rows of out, padding excepted."""
        if len(self.index) == 1:
            self.view(out).copy_(x[0])
            return
        x, rows = x.flatten(0, 1), self.index.flatten()
        if self.padding is not None:
            x, rows = x.index_select(0, self.real), rows.index_select(0, self.real)
        out.index_copy_(0, rows, x.to(out.dtype))

    def add(self, out: Tensor, x: Tensor, factor: float = 1.0) -> None:
        """Adds factor · x [K, N, ...], which is 0 for padding, to the rows of out."""
        if len(self.index) == 1:
            self.view(out).add_(x[0], alpha=factor)
        else:
            out.index_add_(0, self.index.flatten(), x.flatten(0, 1), alpha=factor)
