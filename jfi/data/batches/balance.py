"""Which rank gets which samples or timelines of a batch, so that all ranks have about as much work."""

import numpy as np

#: Work of the busiest rank over that of the mean rank that is balanced enough.
_BALANCED = 1.01
#: Most swaps of samples in a batch: a few dozen microseconds each.
_MOST_SWAPS = 64


def assign_samples(work: np.ndarray, world_size: int) -> np.ndarray:
    """`[B]` int64, the rank of each sample: their numbers differ by at most one, and their work by little.

    In descending order of their work, to rank after rank, forwards and then backwards; swaps even out what is left.

    Args:
        work: `[B]` numbers, not negative.
        world_size: number of ranks.

    Example:
        >>> assign_samples(np.array([9, 1, 5, 5]), 2)
        array([0, 0, 1, 1])
    """
    turn, rank = np.divmod(np.arange(len(work)), world_size)
    assigned = np.empty(len(work), np.int64)
    assigned[np.argsort(-work, kind="stable")] = np.where(turn % 2, world_size - 1 - rank, rank)
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
