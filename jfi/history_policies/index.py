"""A policy on events that stay where they are: histories are ranges of them, and removed events are never looked at.

Of each segment, the rows that its table keeps are written down once, with how many of them come before each event. The
rows of a history that stay are then a range of these, and the newest ones: per batch the work is that of the rows that
stay, whatever was removed.
"""

import numpy as np

from jfi.history_policies.policy import Policy
from jfi.utils.ranges import ranges


class PolicyIndex:
    """Chooses among histories that are ranges of E events.

    Takes 4 bytes an event, 4 an event and segment, and for those that the segment keeps 4 more. With weights it takes
    12 an event and segment, and for those that the segment keeps 8 more.

    Args:
        policy: what stays.
        cells: `[E]` of `Policy.cells`, of events ordered so that a history is a range, its newest event last.

    Example:
        >>> import numpy as np
        >>> from jfi.history_policies import EventLog, PolicyIndex, fit
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
        # Behind them all events, with weights once for each segment, so that the newest of a history are a range too.
        every, self._is_weighted = np.arange(len(cells), dtype=kind), weight is not None
        self._all = np.full(segments, begin, np.int64)
        if weight is None:
            self._rows = np.concatenate([*rows, every])
        else:
            if len(cells) >= 2**32:
                raise ValueError(f"a policy with weights must have fewer than 2^32 cells, got {len(cells):,}")
            self._all += np.arange(segments) * len(cells)
            # One look at memory for both: the row in the lower half, the weight in the upper one.
            self._rows = np.empty(begin + segments * len(cells), np.int64)
            halves, place = self._rows.view(np.uint32).reshape(-1, 2), 0
            for own, of in zip([*weight.numpy(), *weight.numpy()], [*rows, *[every] * segments], strict=True):
                part = halves[place : place + len(of)]
                part[:, 0], part[:, 1] = of, own[cells[of]].view(np.uint32)
                place += len(of)
        cap = policy.tables.cap
        self._cap = None if cap is None else cap.numpy().astype(np.int64)

    def select(
        self, start: np.ndarray, lengths: np.ndarray, segments: np.ndarray, more: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """The rows that stay, as `Policy.select` of the same histories.

        Args:
            start: `[B]` integers: history b has the events `start:start + length`.
            lengths: `[B]` integers.
            segments: `[B]` integers, the segment of each history.
            more: `[B]` integers, how many events behind each history stay too, whatever they are; None for none.

        Returns:
            `[M]` int64 rows, history by history, `[B]` int64, how many of each, and `[M]` float32 weights, or None
            where all are 1.
        """
        start, lengths = start.astype(np.int64, copy=False), lengths.astype(np.int64, copy=False)
        newest = np.minimum(lengths, self.policy.newest)
        border = start + lengths
        border -= newest
        begin = segments * np.int64(self._count + 1)
        low, high = self._places.take(begin + start), self._places.take(begin + border)
        if self._cap is not None:
            low = np.maximum(low, high - (self._cap[segments] - newest))
        if more is not None:
            newest = newest + more
        # Of each history, what stays of its older events, and then the newest ones.
        parts, sizes = np.empty((2, len(start), 2), np.int64)
        parts[:, 0], parts[:, 1] = low, border + self._all.take(segments)
        sizes[:, 0], sizes[:, 1] = high - low, newest
        places, stay = ranges(parts.ravel(), sizes.ravel()), sizes[:, 0] + newest
        rows = self._rows.take(places)
        if not self._is_weighted:
            return rows.astype(np.int64, copy=False), stay, None
        return rows & 0xFFFFFFFF, stay, rows.view(np.float32)[1::2]
