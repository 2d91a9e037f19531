"""Reports of what was seen of each segment of users, and of its events on each surface."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SegmentReport:
    """A segment of users and what was seen of it.

    Args:
        name: of the segment.
        users: in the log that the policy was fitted to.
        events: of these users.
        conversions: of these events.
        removed: share of the segment's events whose cells are not kept; the newest of a history stay all the same.
        cap: the longest history, or None for no limit.
        boosted: whether its events have weights.
        is_global: whether the relevance is that of all users, since none or all of the segment's events have a
            conversion.
    """

    name: str
    users: int
    events: int
    conversions: int
    removed: float
    cap: int | None
    boosted: bool
    is_global: bool


@dataclass(frozen=True)
class SurfaceReport:
    """The events of one segment on one surface: what dwell says of conversions, and what stays.

    Lists are by bin of dwell; the last entry is that of events whose dwell is not known.

    Args:
        segment: its name.
        surface: its name.
        events: counts by bin.
        conversions: those of them with a conversion.
        log_odds: relevance of each bin: its log-odds of a conversion less the segment's, shrunk towards 0.
        keep: whether events stay.
        weight: as how many events an event counts.
        information: corrected mutual information of an event's bin and its conversion, in nats.
        entropy: of an event's conversion, in nats.
        session_information: the same as `information` for the sessions: their dwell on this surface, 0 where they were
            not there, and whether any of their events has a conversion.
        session_entropy: of that.
        intercept: of logit P(conversion) = intercept + slope · log(1 + dwell); None where nothing could be fitted.
        slope: of that.
    """

    segment: str
    surface: str
    events: tuple[int, ...]
    conversions: tuple[int, ...]
    log_odds: tuple[float, ...]
    keep: tuple[bool, ...]
    weight: tuple[float, ...]
    information: float
    entropy: float
    session_information: float
    session_entropy: float
    intercept: float | None
    slope: float | None
