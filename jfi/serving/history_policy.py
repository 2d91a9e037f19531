"""Which events of a request's history are scored, by the policy of the run that the artifact was exported from.

The policy reads the events of the request as training reads those of a sample: the newest `max_history` ones decide the
segment of the user and are chosen among.
"""

from collections.abc import Sequence
from itertools import repeat

import numpy as np

from jfi.history_policies.log import OrderedEvents
from jfi.history_policies.policy import Policy
from jfi.history_policies.segments import statistics_of
from jfi.history_policies.select import select_events
from jfi.serving.schema import PolicyFields

#: The surface of a policy without surfaces, and of events without one.
_ONLY, _UNKNOWN = "all", "unknown"


class RequestPolicy:
    """Chooses among the events of a request.

    Raises:
        ValueError: a policy that may keep no event.
    """

    def __init__(self, policy: Policy, fields: PolicyFields) -> None:
        if policy.newest < 1:
            raise ValueError("data.policy has newest 0, so that a request could lose all events; fit it with 1 or more")
        self.policy, self.fields = policy, fields
        self._surfaces = {name: number for number, name in enumerate(policy.surfaces)}
        self._surfaces[None] = self._surfaces.get(_UNKNOWN, -1)
        self._keeps_all, self._has_segments = policy.keeps_all, len(policy.segments.names) > 1

    def __call__(
        self,
        ages: np.ndarray,
        dwell: np.ndarray | None,
        surface: Sequence[str | None] | None,
        session: Sequence[str | int | None] | None,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """The positions of the events that stay, ascending, and their weights `[M]` float32, or None where all are 1.

        Args:
            ages: `[S]` seconds, of the oldest event first.
            dwell: `[S]` in the unit of the fields, NaN where missing; None without the field.
            surface: `[S]`, None where missing; None without the field.
            session: `[S]`, None where missing; None without the field.
        """
        count = len(ages)
        if self._keeps_all:
            return np.arange(count), None
        seconds = np.full(count, np.nan, np.float32) if dwell is None else dwell / self.fields.dwell_per_second
        if surface is None:
            surface = np.full(count, self._surfaces.get(_ONLY, -1))
        else:
            surface = np.fromiter(map(self._surfaces.get, surface, repeat(-1)), np.int64, count)
        session = None if session is None else _codes(session)
        cells = self.policy.cells(surface, seconds)
        segment = self._segment(ages, seconds, surface, session) if self._has_segments else 0
        found = select_events(self.policy.tables, cells, np.array([segment]), np.array([len(cells)]))
        return found.rows, found.weights

    def _segment(self, ages: np.ndarray, dwell: np.ndarray, surface: np.ndarray, session: np.ndarray | None) -> int:
        order = (-ages).argsort(kind="stable")
        parts = (None if of is None else of[order] for of in (-ages, surface, dwell, session))
        whole = np.array([0]), np.array([len(ages)])
        statistics = statistics_of(OrderedEvents.of(*parts), len(self.policy.surfaces), *whole)
        return int(self.policy.segments.assign(statistics)[0])


def _codes(values: Sequence[str | int | None]) -> np.ndarray:
    """`[S]` int64, equal for equal values; an event without a session is one of its own."""
    code = dict(zip(values, range(len(values)), strict=True))
    found = np.fromiter(map(code.__getitem__, values), np.int64, len(values))
    if None in code:
        (alone,) = (found == code[None]).nonzero()
        found[alone] = -1 - alone
    return found
