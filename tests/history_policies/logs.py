"""Logs for the tests: random ones, and one with planted truth."""

import numpy as np
from hypothesis import strategies as st

from jfi.history_policies import EventLog, Policy
from jfi.history_policies.segments import statistics_of

SURFACES = ["feed", "search", "live"]
EVENT = st.tuples(
    st.integers(0, 3),  # user
    st.integers(0, 40),  # time in units of 10 minutes: ties, and gaps around 30 minutes
    st.integers(-1, 2),  # surface
    st.sampled_from([np.nan, -3.0, 0.0, 0.7, 2.9, 3.0, 8.0, 60.0, 61.0, 900.0, 1e9]),  # dwell
    st.booleans(),  # conversion
)
EVENTS = st.lists(EVENT, min_size=1, max_size=40)


def make_log(rows: list[tuple], session: list[int] | None = None) -> EventLog:
    """The events of rows of EVENT."""
    user, time, surface, dwell, _ = zip(*rows, strict=True)
    return EventLog(
        user=np.array(user),
        time=np.array(time) * 600.0,
        surface=np.array(surface),
        dwell=np.array(dwell),
        surfaces=SURFACES,
        session=None if session is None else np.array(session),
    )


def planted(num_users: int = 300, seed: int = 0) -> tuple[EventLog, np.ndarray, np.ndarray]:
    """A log, its conversions, and `[U]` bool, which users are active; dwell tells of conversions on one surface.

    Active users have 60 events in 6 days and passive ones 12. In the feed P(conversion) is
    sigmoid(-4 + 0.8 log(1 + dwell)) for the active, and on both other surfaces and for all passive users 0.1.
    """
    rng = np.random.default_rng(seed)
    active = np.arange(num_users) % 3 == 0
    user = np.repeat(np.arange(num_users), np.where(active, 60, 12))
    time = rng.uniform(0, 6 * 86400.0, len(user))
    surface = rng.integers(0, 3, len(user))
    dwell = rng.lognormal(3.0, 1.2, len(user))
    odds = np.where(active[user] & (surface == 0), -4 + 0.8 * np.log1p(dwell), np.log(0.1 / 0.9))
    conversion = rng.random(len(user)) < 1 / (1 + np.exp(-odds))
    return EventLog(user, time, surface, dwell, SURFACES), conversion, active


def segments_of(policy: Policy, log: EventLog) -> tuple[np.ndarray, np.ndarray]:
    """Users, `[U]`, and the segment of each, `[U]`, by all of their events in the log, as for a request."""
    policy.check_log(log)
    ordered = log.ordered
    statistics = statistics_of(ordered, len(policy.surfaces), ordered.first[:-1], ordered.first[1:])
    return log.user[ordered.order[ordered.first[:-1]]], policy.segments.assign(statistics)
