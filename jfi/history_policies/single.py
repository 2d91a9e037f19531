"""A policy on one history at a time, as a request has it, in the time of a few dozen NumPy calls.

Dwell is cut once, at all edges that anything reads: those of the policy's surfaces and those of the statistics of
users. Within such a fine bin an event's cell, its bin of the statistics and whether it is short are known, so that one
count of the events by surface and fine bin gives the segment, and one look at a table what stays.
"""

import numpy as np

from jfi.history_policies.log import SESSION_GAP
from jfi.history_policies.policy import Policy
from jfi.history_policies.segments import EDGES, SHORT, statistics_of_one
from jfi.utils.encoding import LARGEST_NUMBER


class SingleHistory:
    """Chooses among the events of one history; the same as `Policy.segments_of` and `Policy.select`.

    Args:
        policy: what stays.

    Example:
        >>> import numpy as np
        >>> from jfi.history_policies import EventLog, fit
        >>> from jfi.history_policies.single import SingleHistory
        >>> dwell = np.tile([1.0, 2.0, 40.0, 80.0], 50)
        >>> user, time, surface = np.repeat(np.arange(20), 10), np.arange(200.0), np.zeros(200, np.int64)
        >>> log = EventLog(user, time, surface, dwell, surfaces=["feed"])
        >>> policy = fit(log, dwell > 30, num_segments=1, remove=0.5, newest=1, num_bins=4)
        >>> choose = SingleHistory(policy)
        >>> choose(np.array([90.0, 60.0, 30.0]), np.array([80.0, 40.0, 2.0]), np.zeros(3, np.int64))
        (array([0, 1, 2]), None)
    """

    def __init__(self, policy: Policy) -> None:
        self._policy, tables = policy, policy.tables
        edges = np.concatenate([EDGES, [SHORT], *policy.edges]).astype(np.float32)
        #: Ascending. NaN comes behind infinity, in a bin of its own.
        self._edges = np.append(np.unique(edges), np.float32(np.inf))
        surfaces, self._bins = len(policy.surfaces) + 1, len(self._edges) + 1
        # A dwell of each bin: the smallest one.
        least = np.concatenate([[np.nextafter(self._edges[0], -np.inf)], self._edges[:-1], [np.nan]])
        place = np.arange(surfaces).repeat(self._bins)
        cells = policy.cells(np.where(place < surfaces - 1, place, -1), np.tile(least, surfaces).astype(np.float32))
        #: `[K, surfaces * bins]`; the last surface is one that the policy does not know.
        self._keep = tables.keep.numpy()[:, cells]
        self._weight = None if tables.weight is None else tables.weight.numpy()[:, cells]
        self._caps = None if tables.cap is None else tables.cap.tolist()
        #: The last of each bin of the statistics, and the first where dwell is no longer short.
        self._ends = np.append(np.searchsorted(self._edges, EDGES), self._bins - 2)
        self._long = int(np.searchsorted(self._edges, np.float32(SHORT))) + 1
        self._several = len(policy.segments.names) > 1

    def __call__(
        self, ages: np.ndarray, dwell: np.ndarray, surface: np.ndarray, session: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """The places of the events that stay, ascending, and their weights `[M]` float32, or None where all are 1.

        Args:
            ages: `[S]` float64 seconds, of the oldest event first; S is at least 1.
            dwell: `[S]` seconds, NaN where missing.
            surface: `[S]` integers, indices of the policy's surfaces, -1 for another one.
            session: `[S]` integers or bytes, equal for the events of a session, or None: a gap ends a session.
        """
        seconds = np.minimum(np.maximum(dwell, -LARGEST_NUMBER), LARGEST_NUMBER).astype(np.float32, copy=False)
        entry = np.where(surface < 0, len(self._policy.surfaces), surface) * self._bins
        entry += self._edges.searchsorted(seconds, side="right")
        segment = self._segment(ages, entry, session) if self._several else 0
        keep, newest = self._keep[segment].take(entry), self._policy.newest
        if newest:
            keep[-newest:] = True
        (rows,) = keep.nonzero()
        if self._caps is not None:
            rows = rows[-self._caps[segment] :]
        return rows, None if self._weight is None else self._weight[segment].take(entry.take(rows))

    def _segment(self, ages: np.ndarray, entry: np.ndarray, session: np.ndarray | None) -> int:
        if (ages[1:] > ages[:-1]).any():  # not in the order of time
            order = (-ages).argsort(kind="stable")
            ages, session = ages[order], None if session is None else session[order]
        changes = ages[:-1] - ages[1:] > SESSION_GAP if session is None else session[1:] != session[:-1]
        counted = np.bincount(entry, minlength=self._keep.shape[1]).reshape(-1, self._bins)
        below = counted.sum(0).cumsum()
        statistics = statistics_of_one(
            events=len(ages),
            seconds=float(ages[0] - ages[-1]),
            sessions=1 + np.count_nonzero(changes),
            below=below.take(self._ends),
            short=int(below[self._long - 1]),
            surfaces=counted[:-1].sum(1),
        )
        return int(self._policy.segments.assign(statistics)[0])
