"""Logs -> a policy: segments of users, relevance by surface and dwell, and what a budget leaves of it."""

from collections.abc import Mapping, Sequence
from math import log
from typing import NamedTuple

import numpy as np

from jfi.history_policies.fit_options import budgets_of, caps_of, check, check_names
from jfi.history_policies.log import EventLog, OrderedLog
from jfi.history_policies.policy import Policy
from jfi.history_policies.relevance import bins_of, fit_logistic, information, learn_edges, log_odds
from jfi.history_policies.reports import SegmentReport, SurfaceReport
from jfi.history_policies.segments import Segments, learn_segments, statistics_of


def fit(
    events: EventLog,
    conversion: np.ndarray,
    *,
    num_segments: int | None = 2,
    remove: float | Mapping[str, float] = 0.0,
    threshold: float | None = None,
    boost: Sequence[str] = (),
    max_weight: float = 4.0,
    caps: int | Mapping[str, int] | None = None,
    newest: int = 10,
    num_bins: int = 10,
    pseudo_count: float = 50.0,
    seed: int = 0,
) -> Policy:
    """Learns which events are worth computing; give it the training span alone.

    Dwell is cut into bins at its quantiles on each surface. In each segment of users, the cells (surface, bin) of
    lowest relevance are removed until the next one would exceed the budget.

    Args:
        events: N events.
        conversion: `[N]` bool, or 0 and 1: whether the event has what the model is to predict, or leads to it. It is
            needed here alone.
        num_segments: 1 to 8, or None for the number of 2 to 8 with the largest silhouette.
        remove: the largest share of events to remove, in [0, 1), for all segments or by name of segment ("passive" and
            "active" of two). A segment that is not named loses none.
        threshold: in place of `remove`: cells whose shrunk log-odds lie below it are removed.
        boost: names of the segments whose events count as exp(log-odds), the others' as 1.
        max_weight: weights lie in [1 / max_weight, max_weight].
        caps: the longest history, for all segments or by name of segment; at least `newest`.
        newest: how many of a history's newest events stay, whatever their cell.
        num_bins: of dwell on each surface, 1 to 64; events without dwell have a bin of their own.
        pseudo_count: events at the segment's rate that are added to each cell.
        seed: of k-means.

    Raises:
        ValueError, TypeError: an argument of a wrong value or type; the message names it.

    Example:
        >>> import numpy as np
        >>> from jfi.history_policies import EventLog, fit
        >>> rng = np.random.default_rng(0)
        >>> user, dwell = np.repeat(np.arange(100), 50), rng.lognormal(3.0, 1.0, 5000)
        >>> time, surface = np.tile(np.arange(50) * 600.0, 100), np.zeros(5000, np.int64)
        >>> events = EventLog(user, time, surface, dwell, surfaces=["feed"])
        >>> policy = fit(events, dwell > 60, num_segments=1, remove=0.3)
        >>> policy.surface_reports[0].keep
        (False, False, False, True, True, True, True, True, True, True, True)
    """
    conversion = check(events, conversion, num_segments, threshold, max_weight, newest, num_bins, pseudo_count)
    ordered, surfaces = events.ordered, tuple(events.surfaces)
    first = ordered.first
    statistics = statistics_of(ordered, len(surfaces), first[:-1], first[1:])
    segments, silhouettes = learn_segments(statistics, num_segments, seed)
    names = segments.names
    budgets, most = budgets_of(remove, threshold, names), caps_of(caps, newest, names)
    check_names("boost", boost, names)

    of_user = segments.assign(statistics)
    counted = _count(ordered, conversion[ordered.order], of_user, len(names), len(surfaces), num_bins)
    segment_reports, surface_reports, notes = [], [], _notes(events)
    for i, (name, users) in enumerate(zip(names, np.bincount(of_user, minlength=len(names)), strict=True)):
        own, source = counted.of(i), counted.of(i)
        is_global = not 0 < own.conversions.sum() < own.events.sum()
        if is_global:
            source = counted.of(len(names))
            which = "no event of it has" if not own.conversions.sum() else "all of its events have"
            notes.append(f"segment '{name}' has the relevance of all users: {which} a conversion")
        odds = log_odds(source.events, source.conversions, source.rate, pseudo_count)
        removed = odds < threshold if threshold is not None else _cheapest(odds, own.events, budgets[name])
        removed &= source.events > 0
        weight = _weights(odds, max_weight) if name in boost else np.ones_like(odds)
        share = float(own.events[removed].sum() / max(1, int(own.events.sum())))
        numbers = int(users), int(own.events.sum()), int(own.conversions.sum())
        segment_reports.append(SegmentReport(name, *numbers, share, most[name], name in boost, is_global))
        for g, surface in enumerate(surfaces):
            # A surface may have fewer bins than others; that of unknown dwell comes last.
            bins = [*range(len(counted.edges[g]) + 1), num_bins]
            columns = (own.events, own.conversions, odds, ~removed, weight)
            columns = (tuple(column[g, bins].tolist()) for column in columns)
            surface_reports.append(SurfaceReport(name, surface, *columns, *source.relevance(g)))
    return Policy(
        surfaces,
        tuple(tuple(edges.tolist()) for edges in counted.edges),
        newest,
        segments,
        tuple(segment_reports),
        tuple(surface_reports),
        silhouettes,
        *_agreement(ordered, segments, len(surfaces)),
        tuple(notes),
    )


class _Counts(NamedTuple):
    """Counts that determine one segment's relevance, for G surfaces and as many bins as any has, unknown dwell last.

    Args:
        events, conversions: `[G, bins]`.
        sessions: `[2, G, bins]`, sessions and those with a conversion, by their dwell on the surface.
        models: intercepts and slopes, `[G]` each, NaN for none.
    """

    events: np.ndarray
    conversions: np.ndarray
    sessions: np.ndarray
    models: tuple[np.ndarray, np.ndarray]

    @property
    def rate(self) -> float:
        """The share of events with a conversion."""
        return self.conversions.sum() / self.events.sum()

    def relevance(self, g: int) -> tuple[float | None, ...]:
        """Returns for a surface: information and entropy by events, the same by sessions, the model, None for none."""
        model = (None if np.isnan(of[g]) else float(of[g]) for of in self.models)
        return *information(self.events[g], self.conversions[g]), *information(*self.sessions[:, g]), *model


class _AllCounts(NamedTuple):
    """`_Counts` with a first axis of K segments and all users; and the edges by surface."""

    edges: list[np.ndarray]
    events: np.ndarray
    conversions: np.ndarray
    sessions: np.ndarray
    intercepts: np.ndarray
    slopes: np.ndarray

    def of(self, segment: int) -> _Counts:
        """Returns the counts of a segment; K is all users."""
        models = self.intercepts[segment], self.slopes[segment]
        return _Counts(self.events[segment], self.conversions[segment], self.sessions[segment], models)


def _count(
    log: OrderedLog, conversion: np.ndarray, of_user: np.ndarray, num_segments: int, num_surfaces: int, num_bins: int
) -> _AllCounts:
    shape = num_segments, num_surfaces, num_bins + 1
    segment = of_user[log.owner]
    events, ones = np.zeros((2, *shape), np.int64)
    sessions = np.zeros((num_segments, 2, num_surfaces, num_bins + 1), np.int64)
    # Of each session: its user's segment, and whether any of its events has a conversion.
    of_session = np.zeros(log.num_sessions, np.int64)
    of_session[log.session] = segment
    converts = np.bincount(log.session[conversion], minlength=log.num_sessions) > 0
    edges = []
    for g in range(num_surfaces):
        rows = np.flatnonzero(log.surface == g)
        dwell, one, of = log.dwell[rows], conversion[rows], segment[rows]
        edges.append(learn_edges(dwell, num_bins))
        for table, chosen in ((events, slice(None)), (ones, one)):
            table[:, g] = _table(of[chosen], dwell[chosen], edges[g], num_segments, num_bins)
        total = _session_dwell(log.session[rows], dwell, log.num_sessions)
        borders = learn_edges(total, num_bins)
        for k, chosen in enumerate((slice(None), converts)):
            sessions[:, k, g] = _table(of_session[chosen], total[chosen], borders, num_segments, num_bins)
    # Groups (segment, surface), then those of all users.
    known = log.surface >= 0
    surface, dwell, one = log.surface[known].astype(np.int64), log.dwell[known], conversion[known]
    by_segment = fit_logistic(segment[known] * num_surfaces + surface, dwell, one, num_segments * num_surfaces)
    overall = fit_logistic(surface, dwell, one, num_surfaces)
    models = [
        np.append(own.reshape(num_segments, num_surfaces), of_all[None], axis=0)
        for own, of_all in zip(by_segment, overall, strict=True)
    ]
    with_all = [np.append(x, x.sum(0, keepdims=True), axis=0) for x in (events, ones, sessions)]
    return _AllCounts(edges, *with_all, *models)


def _table(segment: np.ndarray, dwell: np.ndarray, edges: np.ndarray, num_segments: int, num_bins: int) -> np.ndarray:
    """`[num_segments, num_bins + 1]`, how many there are of each segment and bin."""
    bins = bins_of(dwell, edges)
    bins[bins == len(edges) + 1] = num_bins
    size = num_segments * (num_bins + 1)
    return np.bincount(segment.astype(np.int64) * (num_bins + 1) + bins, minlength=size).reshape(num_segments, -1)


def _session_dwell(session: np.ndarray, dwell: np.ndarray, num_sessions: int) -> np.ndarray:
    """`[num_sessions]` the sum of the known dwell of each, 0 without events, NaN where all dwell is missing."""
    missing = np.isnan(dwell)
    total = np.bincount(session, weights=np.where(missing, 0, dwell), minlength=num_sessions).astype(np.float32)
    visits = np.bincount(session, minlength=num_sessions)
    total[(visits > 0) & (visits == np.bincount(session[missing], minlength=num_sessions))] = np.nan
    return total


def _weights(odds: np.ndarray, max_weight: float) -> np.ndarray:
    """exp(log-odds), clipped; rounded to the float32 of the tables, which JSON and GPUs read alike."""
    weight = np.exp(np.clip(odds, -log(max_weight), log(max_weight)))
    return weight.astype(np.float32).astype(np.float64)


def _cheapest(odds: np.ndarray, events: np.ndarray, budget: float) -> np.ndarray:
    """`[G, bins]` bool: cells by rising log-odds, as long as all of them have at most this share of the events."""
    order = np.argsort(odds, axis=None, kind="stable")
    order = order[events.ravel()[order] > 0]
    fits = np.cumsum(events.ravel()[order]) <= budget * events.sum()
    removed = np.zeros(odds.size, bool)
    removed[order[fits]] = True
    return removed.reshape(odds.shape)


def _agreement(log: OrderedLog, segments: Segments, num_surfaces: int) -> tuple[float | None, float | None]:
    """The share of users in the same segment by both halves of the time, and by chance; None without such users."""
    middle = (log.time.min() + log.time.max()) / 2
    older = np.append(0, np.cumsum(log.time <= middle))
    first, end = log.first[:-1], log.first[1:]
    border = first + older[end] - older[first]
    both = (border > first) & (border < end)
    if not both.any():
        return None, None
    ranges = ((first[both], border[both]), (border[both], end[both]))
    halves = [segments.assign(statistics_of(log, num_surfaces, *one)) for one in ranges]
    shares = [np.bincount(half, minlength=len(segments.names)) / len(half) for half in halves]
    return float((halves[0] == halves[1]).mean()), float((shares[0] * shares[1]).sum())


def _notes(events: EventLog) -> list[str]:
    found = []
    for count, what in (
        (events.num_negative, "a dwell below 0, which counts as 0"),
        (events.num_too_long, "a dwell of more than a day, which counts as a day"),
        (int(np.isnan(events.dwell).sum()), "no dwell; they have a bin of their own"),
        (int((events.surface < 0).sum()), "no surface; they always stay"),
    ):
        if count:
            found.append(f"{count:,} of {len(events):,} events have {what}")
    return found
