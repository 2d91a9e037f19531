"""Logs -> a policy: segments of users, relevance by surface and dwell, and what a budget leaves of it."""

from collections.abc import Mapping, Sequence
from math import isfinite, log
from typing import Any

import numpy as np

from jfi.history_policies.log import EventLog, OrderedLog
from jfi.history_policies.policy import Policy, SegmentReport, SurfaceReport
from jfi.history_policies.relevance import Cells, fit_logistic, information, learn_edges, log_odds
from jfi.history_policies.segments import learn_segments, statistics_of
from jfi.utils.errors import suggest


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
    segments = learn_segments(statistics, num_segments, seed)
    names = segments.names
    budgets, most = budgets_of(remove, threshold, names), caps_of(caps, newest, names)
    check_names("boost", boost, names)

    of_user = segments.assign(statistics)
    counts = _Counts(ordered, conversion[ordered.order], of_user, len(names), len(surfaces), num_bins)
    segment_reports, surface_reports, notes = [], [], _notes(events)
    for i, (name, users) in enumerate(zip(names, np.bincount(of_user, minlength=len(names)), strict=True)):
        own, ones, members = counts.events[i], counts.conversions[i], [i]
        is_global = not 0 < ones.sum() < own.sum()
        if is_global:
            members = [*range(len(names))]
            which = "no event of it has" if not ones.sum() else "all of its events have"
            notes.append(f"segment '{name}' has the relevance of all users: {which} a conversion")
        seen, hits = counts.events[members].sum(0), counts.conversions[members].sum(0)
        odds = log_odds(seen, hits, hits.sum() / seen.sum(), pseudo_count)
        removed = odds < threshold if threshold is not None else _cheapest(odds, own, budgets[name])
        removed &= seen > 0
        weight = _weights(odds, max_weight) if name in boost else np.ones_like(odds)
        share = float(own[removed].sum() / max(1, int(own.sum())))
        numbers = int(users), int(own.sum()), int(ones.sum())
        segment_reports.append(SegmentReport(name, *numbers, share, most[name], name in boost, is_global))
        for g, surface in enumerate(surfaces):
            # A surface may have fewer bins than others; that of unknown dwell comes last.
            bins = [*range(len(counts.edges[g]) + 1), -1]
            columns: list[Any] = [tuple(column[g, bins].tolist()) for column in (own, ones, odds, ~removed, weight)]
            columns += [*information(seen[g], hits[g]), *counts.model(members, g)]
            surface_reports.append(SurfaceReport(name, surface, *columns))
    return Policy(
        surfaces,
        tuple(tuple(edges.tolist()) for edges in counts.edges),
        newest,
        segments,
        tuple(segment_reports),
        tuple(surface_reports),
        tuple(notes),
    )


class _Counts:
    """Counts of events by segment, surface and bin of dwell, the bin of unknown dwell last.

    Attributes:
        edges: by surface, the borders of its bins.
        events, conversions: `[K, G, bins]`.
    """

    def __init__(
        self,
        log: OrderedLog,
        conversion: np.ndarray,
        of_user: np.ndarray,
        num_segments: int,
        num_surfaces: int,
        num_bins: int,
    ) -> None:
        self._log, self._conversion, self._segment = log, conversion, of_user[log.owner]
        self.edges = [learn_edges(log.dwell[log.surface == g], num_bins) for g in range(num_surfaces)]
        cells = Cells(self.edges)(log.surface, log.dwell)
        shape = num_segments, num_surfaces, max(map(len, self.edges)) + 2
        known = log.surface >= 0
        self.events, self.conversions = (
            _table(self._segment[rows], cells[rows], num_segments, shape[1] * shape[2]).reshape(shape)
            for rows in (known, known & conversion)
        )

    def model(self, segments: list[int], surface: int) -> tuple[float | None, float | None]:
        """Returns intercept and slope of the logistic model of some segments on a surface, None for none."""
        rows = (self._log.surface == surface) & np.isin(self._segment, segments)
        return fit_logistic(self._log.dwell[rows], self._conversion[rows])


def _table(segment: np.ndarray, code: np.ndarray, num_segments: int, num_codes: int) -> np.ndarray:
    """`[num_segments, num_codes]`, how many there are of each segment and code."""
    index = segment.astype(np.int64) * num_codes + code
    return np.bincount(index, minlength=num_segments * num_codes).reshape(num_segments, num_codes)


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


_MOST_SEGMENTS, _MOST_BINS = 8, 64


def budgets_of(remove: float | Mapping[str, float], threshold: float | None, names: Sequence[str]) -> dict[str, float]:
    budgets = _by_segment("remove", remove, names, 0.0)
    for name, share in budgets.items():
        if not 0 <= share < 1:
            raise ValueError(f"remove must be in [0, 1), got {share} for segment '{name}'")
    if threshold is not None and any(budgets.values()):
        raise ValueError(f"threshold and remove both say what to remove, got {threshold} and {remove}")
    return budgets


def caps_of(caps: int | Mapping[str, int] | None, newest: int, names: Sequence[str]) -> dict[str, int | None]:
    """The longest history of each segment, None for no limit."""
    most = _by_segment("caps", caps, names, None)
    for name, cap in most.items():
        if cap is not None and (isinstance(cap, bool) or not isinstance(cap, int) or cap < max(1, newest)):
            raise ValueError(f"caps must be whole numbers of at least newest = {newest}, got {cap!r} for '{name}'")
    return most


def _by_segment(argument: str, value: object, names: Sequence[str], default: object) -> dict:
    """The value of each segment, given for all or by name."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, default if value is None else value)
    check_names(argument, value, names)
    return {name: value.get(name, default) for name in names}


def check_names(argument: str, given: Sequence[str] | Mapping[str, object], names: Sequence[str]) -> None:
    """Checks that these are names of segments."""
    if isinstance(given, str):
        raise TypeError(f"{argument} must be a list of segments, got '{given}'")
    for name in given:
        if name not in names:
            raise ValueError(f"{argument} names segment '{name}'; {suggest(str(name), names)}")


def check(
    events: EventLog,
    conversion: np.ndarray,
    num_segments: int | None,
    threshold: float | None,
    max_weight: float,
    newest: int,
    num_bins: int,
    pseudo_count: float,
) -> np.ndarray:
    """Checks what can be checked before the long work; returns the conversions as bool."""
    if not isinstance(events, EventLog):
        raise TypeError(f"events must be an EventLog, got {type(events).__name__}")
    if not isinstance(conversion, np.ndarray) or conversion.shape != (len(events),):
        got = list(conversion.shape) if isinstance(conversion, np.ndarray) else type(conversion).__name__
        raise ValueError(f"conversion must be an array [{len(events)}] like the events, got {got}")
    ones = conversion == 1
    if not (ones | (conversion == 0)).all():
        raise ValueError(f"conversion must be 0 or 1, got {conversion[~(ones | (conversion == 0))][0]}")
    known = ones[events.surface >= 0]
    if not 0 < known.sum() < len(known):
        kind = "a conversion" if len(known) and known.all() else "no conversion"
        what = f"but all {len(known)} events with a surface have {kind}"
        raise ValueError(f"conversion must be 0 for some events and 1 for others, {what}")
    if num_segments is not None and not 1 <= num_segments <= _MOST_SEGMENTS:
        raise ValueError(f"num_segments must be 1 to {_MOST_SEGMENTS}, or None, got {num_segments}")
    if threshold is not None and not isfinite(threshold):
        raise ValueError(f"threshold must be finite, got {threshold}")
    if not max_weight >= 1 or not isfinite(max_weight):
        raise ValueError(f"max_weight must be at least 1, got {max_weight}")
    if newest < 0:
        raise ValueError(f"newest must be at least 0, got {newest}")
    if not 1 <= num_bins <= _MOST_BINS:
        raise ValueError(f"num_bins must be 1 to {_MOST_BINS}, got {num_bins}")
    if not pseudo_count > 0 or not isfinite(pseudo_count):
        raise ValueError(f"pseudo_count must be above 0, got {pseudo_count}")
    return ones
