"""Which rank gets which samples or timelines of a batch, so that all ranks have about as much work."""

from collections.abc import Callable, Iterable

import numpy as np

#: Work of the busiest rank over that of the mean rank that is balanced enough.
_BALANCED = 1.01
#: Most swaps of samples in a batch: a few dozen microseconds each.
_MOST_SWAPS = 64


def assign_samples(work: np.ndarray, world_size: int) -> np.ndarray:
    """`[B]` int64, the rank of each sample: their numbers differ by at most one, and their work by as little as it may.

    The differencing method of Karmarkar and Karp, "The differencing method of set partitioning" (1982), in its balanced
    form: samples of about the same work are a group, one for each rank; two groups are joined, the largest sum of one
    with the smallest of the other, until one is left. Groups of about the same spread are joined, all at once.

    Args:
        work: `[B]` numbers, not negative.
        world_size: number of ranks.

    Example:
        >>> assign_samples(np.array([9, 1, 5, 5]), 2)
        array([0, 0, 1, 1])
    """
    order = np.argsort(-work, kind="stable")
    # Samples without work fill up: the last group, and with whole groups a power of two.
    groups = 1 << max(0, -(-len(work) // world_size) - 1).bit_length()
    sums = np.zeros(groups * world_size, np.int64)
    sums[: len(work)] = work[order]
    sums, joins = sums.reshape(groups, world_size), []
    while len(sums) > 1:
        by_spread = np.argsort(sums[:, -1] - sums[:, 0], kind="stable")
        sums = sums[by_spread]
        joined = sums[0::2] + sums[1::2, ::-1]
        descending = np.argsort(-joined, axis=1, kind="stable")
        sums = np.take_along_axis(joined, descending, axis=1)
        joins.append((by_spread, descending))
    rank = np.arange(world_size)[None]  # by place in the groups, from the last join back to the first
    for by_spread, descending in reversed(joins):
        both = np.empty_like(descending)
        np.put_along_axis(both, descending, rank, axis=1)
        rank = np.empty((2 * len(both), world_size), np.int64)
        rank[by_spread] = np.stack([both, both[:, ::-1]], axis=1).reshape(-1, world_size)
    assigned = np.empty(len(work), np.int64)
    assigned[order] = rank.ravel()[: len(work)]
    _swap(work, assigned, world_size)
    return assigned


def _swap(work: np.ndarray, rank: np.ndarray, world_size: int) -> None:
    """Swaps samples of the busiest and the idlest rank, in place, while it helps: few samples may have most work."""
    load = np.bincount(rank, weights=work, minlength=world_size)
    for _ in range(_MOST_SWAPS):
        busiest, idlest = int(load.argmax()), int(load.argmin())
        if load[busiest] <= _BALANCED * load.mean():
            return
        give, take = (np.flatnonzero(rank == one) for one in (busiest, idlest))
        take = take[np.argsort(work[take], kind="stable")]
        if not len(take):
            return
        # Of each sample the one to swap it with that comes closest to evening the two out, but not beyond.
        half = (load[busiest] - load[idlest]) / 2
        place = np.minimum(np.searchsorted(work[take], work[give] - half), len(take) - 1)
        moved = work[give] - work[take[place]]
        moved = np.where(moved <= half, moved, 0)
        best = int(moved.argmax())
        if moved[best] <= 0:
            return
        rank[give[best]], rank[take[place[best]]] = idlest, busiest
        load[busiest] -= moved[best]
        load[idlest] += moved[best]


def assign_timelines(work: np.ndarray, world_size: int) -> np.ndarray:
    """`[C]` int64, the rank of each timeline, so that the ranks have about as much of each kind of work.

    The timeline with the largest part of any kind first, each to the rank whose largest part is the smallest with it:
    the greedy schedule of Graham, "Bounds on Multiprocessing Timing Anomalies" (1969), for several kinds of work.

    Args:
        work: `[C, K]` numbers, not negative: of each timeline its work of K kinds.
        world_size: number of ranks.

    Example:
        >>> assign_timelines(np.array([[2], [5], [3], [3]]), 2)
        array([0, 0, 1, 1])
    """
    parts = work / np.maximum(work.sum(0), 1)
    rank, load = np.empty(len(work), np.int64), np.zeros((world_size, work.shape[1]))
    for timeline in np.argsort(-parts.max(1), kind="stable"):
        least = (load + parts[timeline]).max(1).argmin()
        rank[timeline] = least
        load[least] += parts[timeline]
    return rank


def imbalance(batches: Iterable[np.ndarray], assign: Callable[[np.ndarray, int], np.ndarray], world_size: int) -> float:
    """The work of all batches' busiest ranks over that of their mean ranks; 1 if there is none.

    Args:
        batches: of each `[B]` or `[B, K]`, the work of its samples or timelines; the first kind counts.
        assign: gives the rank `[B]` of each.
        world_size: number of ranks.

    Example:
        >>> batches = [np.array([3, 1, 2]), np.array([4])]
        >>> imbalance(batches, contiguous, 2), imbalance(batches, assign_samples, 2)
        (1.4, 1.4)
    """
    busiest = total = 0.0
    for work in batches:
        load = np.bincount(assign(work, world_size), work if work.ndim == 1 else work[:, 0], world_size)
        busiest, total = busiest + load.max(), total + load.sum()
    return float(busiest * world_size / total) if total else 1.0


def contiguous(work: np.ndarray, world_size: int) -> np.ndarray:
    """`[B]` int64, the ranks of contiguous parts whose sizes differ by at most one, whatever their work."""
    return np.repeat(np.arange(world_size), np.diff(np.arange(world_size + 1) * len(work) // world_size))
