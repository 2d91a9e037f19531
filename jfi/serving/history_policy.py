"""Which events of a request's history are scored, by the policy of the run that the artifact was exported from.

The policy reads the events of the request as training reads those of a sample: the newest `max_history` ones decide the
segment of the user and are chosen among.
"""

import numpy as np

from jfi.history.log import EventLog
from jfi.history.policy import Policy
from jfi.serving.schema import PolicyFields

#: The surface of a policy without surfaces, and of events without one.
_ONLY, _UNKNOWN = "all", "unknown"


class RequestPolicy:
    """Chooses among the events of a request.

    Args:
        policy: of the run.
        fields: that it reads.

    Raises:
        ValueError: a policy whose events have weights, which the dense part of an artifact does not read, or one that
            may keep no event.
    """

    def __init__(self, policy: Policy, fields: PolicyFields) -> None:
        if policy.is_weighted:
            raise ValueError("data.policy has weights of events, which an artifact does not read; fit it without boost")
        if policy.newest < 1:
            raise ValueError("data.policy has newest 0, so that a request could lose all events; fit it with 1 or more")
        self.policy, self.fields = policy, fields
        self._places = {name: place for place, name in enumerate(policy.surfaces)}

    def __call__(
        self,
        ages: np.ndarray,
        dwell: np.ndarray | None,
        surface: list[str | None] | None,
        session: list[str | None] | None,
    ) -> np.ndarray:
        """The places of the events that stay, ascending.

        Args:
            ages: `[S]` seconds, of the oldest event first.
            dwell: `[S]` in the unit of the fields, NaN where missing; None without the field.
            surface, session: `[S]`, None where missing; None without the field.
        """
        if self.policy.keeps_all:
            return np.arange(len(ages))
        seconds = np.full(len(ages), np.nan, np.float32) if dwell is None else dwell * self.fields.dwell_seconds
        names = [_ONLY] * len(ages) if surface is None else [_UNKNOWN if one is None else one for one in surface]
        places = np.array([self._places.get(name, -1) for name in names], np.int64)
        user = np.zeros(len(ages), np.int64)
        log = EventLog(user, -ages, places, seconds, self.policy.surfaces, None if session is None else _codes(session))
        (segment,) = self.policy.segments_of(log)[1]
        # What `Policy.select` gives, without its checks and its packing of many histories.
        tables = self.policy.tables
        keep = tables.keep.numpy()[segment, self.policy.cells(places, seconds)]
        keep[-tables.newest :] = True
        stay = np.flatnonzero(keep)
        return stay if tables.cap is None else stay[-int(tables.cap[segment]) :]


def _codes(values: list[str | None]) -> np.ndarray:
    """`[S]` int64, equal for equal values; an event without a session is one of its own."""
    known: dict[str, int] = {}
    return np.array([-1 - i if one is None else known.setdefault(one, len(known)) for i, one in enumerate(values)])
