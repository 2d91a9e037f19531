"""Jagged rows: ranges of them, flattened, and timelines, which rows of a batch share.

`np.repeat` and `np.cumsum` keep Python's lock while they compute, so that a training step would wait for the thread
that assembles the next batch. `ranges` and `repeat` give the lock up: their sums are torch's.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

#: Rows that are in memory together.
BLOCK = 1 << 20


@dataclass(frozen=True)
class Timelines:
    """U timelines, each the events of a user that R rows share: a row sees those that are strictly older than itself.

    Args:
        row_offsets: `[U + 1]` int64, from 0 to R: the rows of timeline u are `row_offsets[u]:row_offsets[u + 1]`.
        target_times: `[R]`, not decreasing within a timeline.
        event_times: `[S]` of the same dtype, the times of the packed events, not decreasing within a timeline.
        max_events: a row sees at most this many of the newest events; None for all.
    """

    row_offsets: Tensor
    target_times: Tensor
    event_times: Tensor
    max_events: int | None = None

    @property
    def count(self) -> int:
        """Returns U."""
        return self.row_offsets.size(0) - 1


def blocks(count: int, size: int = BLOCK) -> Iterator[tuple[int, int]]:
    """The ranges of `count` rows, `size` each and the rest.

    >>> list(blocks(5, 2))
    [(0, 2), (2, 4), (4, 5)]
    """
    return ((begin, min(begin + size, count)) for begin in range(0, count, size))


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the integers of each range `[start, start + length)`, concatenated, int64.

    >>> ranges(np.array([7, 3]), np.array([2, 3]))
    array([7, 8, 3, 4, 5])
    """
    filled = lengths > 0
    starts, lengths = starts[filled], lengths[filled]
    return _sums(1, starts[:1], starts[1:] - (starts[:-1] + lengths[:-1] - 1), lengths)


def nth_values(values: np.ndarray, offsets: np.ndarray, number: int, missing: object) -> np.ndarray:
    """`[N]` the value of that number of each of N rows, `missing` where a row has fewer.

    >>> nth_values(np.array([4, 5, 6]), np.array([0, 2, 2, 3]), 1, missing=-1)
    array([ 5, -1, -1])
    """
    positions = offsets[:-1] + number
    found = positions < offsets[1:]
    result = np.full(len(positions), missing, values.dtype)
    result[found] = values[positions[found]]
    return result


def first_values(values: np.ndarray, offsets: np.ndarray | None, size: int, missing: object) -> np.ndarray:
    """Returns the first values `[N, size]` of rows, `missing` where one has fewer; without offsets each has one."""
    if offsets is None:
        offsets = np.arange(len(values) + 1)
    return np.stack([nth_values(values, offsets, number, missing) for number in range(size)], axis=1)


def repeat(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns each value as many times as its count says, like `np.repeat`.

    >>> repeat(np.array([0.5, 2.0, 4.0]), np.array([2, 0, 1]))
    array([0.5, 0.5, 4. ])
    """
    filled = counts > 0
    return values[filled].take(_sums(0, 0, 1, counts[filled]))


def _sums(step: int, first: np.ndarray | int, others: np.ndarray | int, lengths: np.ndarray) -> np.ndarray:
    """The running sums of ranges whose elements add `step`, but for the first ones of the first and other ranges."""
    ends = lengths.cumsum()
    sums = np.empty(ends[-1] if len(ends) else 0, np.int64)
    sums.fill(step)
    sums[:1] = first
    sums[ends[:-1]] = others
    return torch.cumsum(torch.from_numpy(sums), 0, out=torch.from_numpy(sums)).numpy()
