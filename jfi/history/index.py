"""A policy on events that stay where they are: histories are ranges of them, and removed events are never looked at.

Of each segment, the rows that its table keeps are written down once, with how many of them come before each event. The
rows of a history that stay are then a range of these, and the newest ones: per batch the work is that of the rows that
stay, whatever was removed.
"""

import numpy as np

from jfi.history.policy import Policy
from jfi.ranges import ranges


class PolicyIndex:
    """Chooses among histories that are ranges of E events.

    Takes 4 bytes an event and segment, and for those that the segment keeps 4 more, or 8 with weights.

    Args:
        policy: what stays.
        cells: `[E]` of `Policy.cells`, of events ordered so that a history is a range, its newest event last.

    Example:
        >>> import numpy as np
        >>> from jfi.history import EventLog, PolicyIndex, fit
        >>> dwell = np.tile([1.0, 2.0, 40.0, 80.0], 50)
        >>> user, time, surface = np.repeat(np.arange(20), 10), np.arange(200.0), np.zeros(200, np.int64)
        >>> log = EventLog(user, time, surface, dwell, surfaces=["feed"])
        >>> policy = fit(log, dwell > 30, num_segments=1, remove=0.5, newest=1, num_bins=4)
        >>> index = PolicyIndex(policy, policy.cells(surface, dwell))
        >>> index.select(start=np.array([0, 4]), lengths=np.array([6, 4]), segments=np.array([0, 0]))
        (array([2, 3, 5, 6, 7]), array([3, 2]), None)
    """

    def __init__(self, policy: Policy, cells: np.ndarray) -> None:
        self.policy, self._count = policy, len(cells)
        keep, weight = policy.tables.keep.numpy(), policy.tables.weight
        segments = len(keep)
        kind = np.int32 if segments * len(cells) < 2**31 else np.int64
        # [K, E + 1]: places in the rows of all segments, one behind another.
        self._places = np.zeros((segments, len(cells) + 1), kind)
        rows, begin = [], 0
        for places, own in zip(self._places, keep, strict=True):
            kept = own[cells]
            np.cumsum(kept, out=places[1:])
            places += begin
            rows.append(np.flatnonzero(kept).astype(kind))
            begin += len(rows[-1])
        self._rows = np.concatenate(rows)
        self._weight = self._weights = None
        if weight is not None:
            self._weight, self._cells = weight.numpy(), cells
            parts = [own[cells[of]] for own, of in zip(self._weight, rows, strict=True)]
            #: Beside the rows.
            self._weights = np.concatenate(parts)
        cap = policy.tables.cap
        self._cap = None if cap is None else cap.numpy().astype(np.int64)

    def select(
        self, start: np.ndarray, lengths: np.ndarray, segments: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """The rows that stay, as `Policy.select` of the same histories.

        Args:
            start: `[B]` integers: history b has the events `start:start + length`.
            lengths: `[B]` integers.
            segments: `[B]` integers, the segment of each history.

        Returns:
            `[M]` int64 rows, history by history, `[B]` int64, how many of each, and `[M]` float32 weights, or None
            where all are 1.
        """
        start, lengths = start.astype(np.int64, copy=False), lengths.astype(np.int64, copy=False)
        newest = np.minimum(lengths, self.policy.newest)
        border = start + lengths - newest
        begin = segments * np.int64(self._count + 1)
        low, high = self._places.take(begin + start).astype(np.int64), self._places.take(begin + border)
        if self._cap is not None:
            low = np.maximum(low, high - (self._cap[segments] - newest))
        older = high - low
        stay = older + newest
        # Places among the rows, with room for the newest, whose rows are no such place but themselves.
        places = ranges(low, stay)
        rows = self._rows.take(places, mode="clip").astype(np.int64, copy=False) if len(self._rows) else places
        ends = np.cumsum(stay)
        to, new = ranges(ends - newest, newest), ranges(border, newest)
        rows[to] = new
        weights = None
        if self._weights is not None:
            weights = self._weights.take(places, mode="clip") if len(self._rows) else np.empty(len(places), np.float32)
            weights[to] = self._weight[np.repeat(segments, newest), self._cells[new]]
        return rows, stay, weights
