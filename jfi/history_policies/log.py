"""Events with their dwell: what a policy is fitted to and applied to. Conversions are no part of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

#: Seconds without an event after which a user's next event begins a session.
SESSION_GAP = 1800.0
#: Seconds; a longer dwell counts as this long.
LONGEST_DWELL = 86400.0
#: The most surfaces, so that the cell of an event fits an int16.
MOST_SURFACES = 256


@dataclass(frozen=True, eq=False)
class EventLog:
    """N events in any order.

    Args:
        user: `[N]` integers.
        time: `[N]`, seconds.
        surface: `[N]` integers, where each happened, as an index of `surfaces`; -1 for a surface that is not among
            them. Events of that surface are always kept, with weight 1.
        dwell: `[N]`, seconds that the user stayed, NaN where nobody knows. A negative dwell counts as 0 and one of more
            than a day as a day; `num_negative` and `num_too_long` count them.
        surfaces: names of the surfaces, at most 256.
        session: `[N]` integers, equal for the events of a user's session, or None: a session ends where 30 minutes pass
            without an event of the user.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:
        >>> import numpy as np
        >>> from jfi.history_policies import EventLog
        >>> log = EventLog(
        ...     user=np.array([7, 7, 3]),
        ...     time=np.array([60.0, 9000.0, 30.0]),
        ...     surface=np.array([0, 1, 0]),
        ...     dwell=np.array([12.5, np.nan, -1.0]),
        ...     surfaces=["feed", "search"],
        ... )
        >>> len(log), log.num_negative
        (3, 1)
    """

    user: np.ndarray
    time: np.ndarray
    surface: np.ndarray
    dwell: np.ndarray
    surfaces: Sequence[str]
    session: np.ndarray | None = None

    def __post_init__(self) -> None:
        check_surfaces(self.surfaces)
        arrays = {"user": self.user, "time": self.time, "surface": self.surface, "dwell": self.dwell}
        if self.session is not None:
            arrays["session"] = self.session
        for name, array in arrays.items():
            whole = name in ("user", "surface", "session")
            kinds = "iu" if whole else "iuf"
            if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in kinds:
                got = f"{array.dtype} of shape {list(array.shape)}" if isinstance(array, np.ndarray) else type(array)
                raise TypeError(f"{name} must be an array [N] of {'integers' if whole else 'numbers'}, got {got}")
            if len(array) != len(self.user):
                raise ValueError(f"{name} must have {len(self.user)} events like user, got {len(array)}")
        if not np.isfinite(self.time).all():
            raise ValueError(f"time must be finite, got {self.time[~np.isfinite(self.time)][0]}")
        check_range("surface", self.surface, -1, len(self.surfaces) - 1)

    def __len__(self) -> int:
        return len(self.user)

    @property
    def num_negative(self) -> int:
        """Events whose dwell is below 0."""
        return int((self.dwell < 0).sum())

    @property
    def num_too_long(self) -> int:
        """Events whose dwell is longer than a day."""
        return int((self.dwell > LONGEST_DWELL).sum())

    @cached_property
    def ordered(self) -> "OrderedLog":
        """The events sorted by user and time."""
        return OrderedLog.of_log(self)


@dataclass(frozen=True, eq=False)
class OrderedEvents:
    """N events of one or several users, each user's one after another in the order of time.

    Args:
        time: `[N]` float64.
        surface: `[N]` integers.
        dwell: `[N]` float32, clipped, NaN where missing.
        session: `[N]`, a number that changes where a user's next event is of another session. A session that another
            one interrupts begins again, so that the changes within any range of events tell its sessions.
    """

    time: np.ndarray
    surface: np.ndarray
    dwell: np.ndarray
    session: np.ndarray

    @staticmethod
    def of(time: np.ndarray, surface: np.ndarray, dwell: np.ndarray, session: np.ndarray | None) -> "OrderedEvents":
        """Returns the events of a log that is in order; without sessions they are those of `SESSION_GAP`."""
        if session is None:
            session = np.cumsum(np.append(False, time[1:] - time[:-1] > SESSION_GAP)[: len(time)])
        return OrderedEvents(time, surface, np.clip(dwell, 0, LONGEST_DWELL).astype(np.float32), session)  # NaN stays

    def part(self, first: int, end: int) -> "OrderedEvents":
        """Returns the events `first:end`."""
        return OrderedEvents(*(one[first:end] for one in (self.time, self.surface, self.dwell, self.session)))


@dataclass(frozen=True, eq=False)
class OrderedLog(OrderedEvents):
    """The N events of a log, sorted by (user, time).

    Args:
        order: `[N]`, the row of the log of each event.
        first: `[U + 1]`: the events of user u are `first[u]:first[u + 1]`.
        owner: `[N]`, the index of each event's user.
    """

    order: np.ndarray
    first: np.ndarray
    owner: np.ndarray

    @staticmethod
    def of_log(log: EventLog) -> "OrderedLog":
        user, time = log.user, log.time.astype(np.float64, copy=False)
        order = np.lexsort((time, user))
        user, time = user[order], time[order]
        other = np.append(True, user[1:] != user[:-1])[: len(user)]
        owner, first = np.cumsum(other) - 1, np.append(np.flatnonzero(other), len(user))
        if log.session is None:
            other[1:] |= np.diff(time) > SESSION_GAP
            session = np.cumsum(other) - 1
        else:
            names, codes = np.unique(log.session[order], return_inverse=True)
            session = np.unique(owner * np.int64(len(names)) + codes, return_inverse=True)[1]
        events = OrderedEvents.of(time, log.surface[order], log.dwell[order], session)
        return OrderedLog(time, events.surface, events.dwell, session, order, first, owner)

    def moments(self) -> np.ndarray:
        """`[N]`, the first event of the same user and time as each event: what lies before it is strictly older."""
        begins = np.ones(len(self.owner), bool)
        begins[1:] = (self.owner[1:] != self.owner[:-1]) | (self.time[1:] != self.time[:-1])
        return np.flatnonzero(begins)[np.cumsum(begins) - 1]


def check_surfaces(surfaces: Sequence[str]) -> None:
    """Raises an error unless these are names of surfaces."""
    if isinstance(surfaces, str) or not all(isinstance(name, str) for name in surfaces):
        raise TypeError(f"surfaces must be names, got {surfaces!r}")
    if not 1 <= len(surfaces) <= MOST_SURFACES:
        raise ValueError(f"surfaces must be 1 to {MOST_SURFACES} names (put rare ones together), got {len(surfaces)}")
    if len({*surfaces}) < len(surfaces):
        twice = next(name for name in surfaces if list(surfaces).count(name) > 1)
        raise ValueError(f"surfaces must not repeat a name, got '{twice}' twice")


def check_range(name: str, values: np.ndarray, low: int, high: int) -> None:
    """Raises ValueError unless all values lie in [low, high]."""
    if len(values) and (values.min() < low or values.max() > high):
        wrong = values[(values < low) | (values > high)][0]
        raise ValueError(f"{name} must be from {low} to {high}, got {wrong}")
