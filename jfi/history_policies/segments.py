"""Segments of users by what they do, without labels: k-means on six statistics of a range of a user's events.

Every statistic follows from counts, so the same function gives those of all of a user's events, for fitting, and of the
events before a moment, for applying.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jfi.history_policies.log import OrderedLog

#: What a segment's centre consists of, in this order.
STATISTICS = (
    "log_events_per_day",
    "log_events_per_session",
    "median_log_dwell",
    "p90_log_dwell",
    "short_share",
    "surface_entropy",
)
#: Seconds; a shorter dwell is short.
SHORT = 3.0
_DAY = 86400.0
#: Quantiles of dwell come from counts between these edges, in seconds, a factor of 1.33 apart.
EDGES = np.geomspace(0.5, 7200.0, 34).astype(np.float32)
#: The log dwell that stands for each of these bins.
_MIDDLES = np.concatenate([np.log(EDGES[:1]), np.log(EDGES[:-1] * EDGES[1:]) / 2, np.log(EDGES[-1:])])
#: Users that centres are fitted to, and that silhouettes are computed of; more are sampled.
_FITTED, _COMPARED = 50_000, 2_000
_RESTARTS, _ITERATIONS = 5, 100


class Counts(NamedTuple):
    """Counts of R ranges of events, each of one user: the statistics follow from it.

    Args:
        events: `[R]`.
        seconds: `[R]`, from the first event to the last.
        sessions: `[R]`.
        known: `[R]`, events whose dwell is known.
        short: `[R]`, those of them that are short.
        bins: by bin of `EDGES`, in their order, the events in it, in parts `[any, R]`.
        surfaces: the same by surface.
    """

    events: np.ndarray
    seconds: np.ndarray
    sessions: np.ndarray
    known: np.ndarray
    short: np.ndarray
    bins: Iterable[np.ndarray]
    surfaces: Iterable[np.ndarray]


def statistics_of(log: OrderedLog, num_surfaces: int, first: np.ndarray, end: np.ndarray) -> np.ndarray:
    """`[6, R]` float32: the statistics of R ranges of events, each of one user; NaN where a range has no such value.

    Args:
        log: the events.
        num_surfaces: of the log.
        first, end: `[R]`, ranges `first:end` of the ordered events.
    """

    def counted(chosen: np.ndarray) -> np.ndarray:
        sums = np.zeros(len(chosen) + 1, np.int32 if len(chosen) < 2**31 else np.int64)
        np.cumsum(chosen, out=sums[1:])
        return sums[end] - sums[first]

    some = end > first
    if not some.any():
        return np.full((len(STATISTICS), len(first)), np.nan, np.float32)
    begin, last = np.where(some, first, 0), np.where(some, end - 1, 0)
    missing = np.isnan(log.dwell)
    bins = np.searchsorted(EDGES, log.dwell, side="right").astype(np.int8)
    bins[missing] = len(EDGES) + 1
    counts = Counts(
        events=end - first,
        seconds=log.time[last] - log.time[begin],
        sessions=counted(log.starts) + ~log.starts[begin],  # a range may begin within a session
        known=end - first - counted(missing),
        short=counted(log.dwell < SHORT),
        bins=(counted(bins == one)[None] for one in range(len(EDGES))),
        surfaces=(counted(log.surface == one)[None] for one in range(num_surfaces)),
    )
    result = statistics_from(counts)
    result[:, ~some] = np.nan
    return result


def statistics_from(counts: Counts) -> np.ndarray:
    """`[6, R]` float32, the statistics of ranges that have an event."""
    known, result = counts.known, np.empty((len(STATISTICS), len(counts.events)), np.float32)
    result[0] = np.log1p(counts.events / np.maximum(counts.seconds / _DAY, 1.0))
    result[1] = np.log1p(counts.events / np.maximum(counts.sessions, 1))
    places, below = np.zeros((2, len(known)), np.int8), np.zeros_like(known)[None]
    for of in counts.bins:
        below = below[-1:] + of.cumsum(axis=0)
        for row, share in enumerate((0.5, 0.9)):
            places[row] += (below < share * known).sum(axis=0, dtype=np.int8)
    nothing = known == 0
    result[2:4] = _MIDDLES[places]
    result[4] = counts.short / np.maximum(known, 1)
    result[2:5, nothing] = np.nan
    total, information = np.zeros(len(known), np.int64), np.zeros(len(known))
    for of in counts.surfaces:
        total += of.sum(axis=0)
        information += (of * np.log(np.maximum(of, 1))).sum(axis=0)
    total = np.maximum(total, 1)
    result[5] = np.maximum(np.log(total) - information / total, 0)
    return result


def statistics_of_one(
    events: int, seconds: float, sessions: int, below: np.ndarray, short: int, surfaces: np.ndarray
) -> np.ndarray:
    """`[6, 1]` float32, bit for bit what `statistics_from` gives for one range that has an event, in fewer NumPy calls.

    Args:
        events, seconds, sessions, short: as in `Counts`.
        below: by bin of `EDGES` the events in it and in those before; the last is the number of known ones.
        surfaces: by surface the events.
    """
    known, result = int(below[-1]), np.empty((len(STATISTICS), 1), np.float32)
    result[:2, 0] = np.log1p([events / max(seconds / _DAY, 1.0), events / max(sessions, 1)])
    if known:
        result[2:4, 0] = _MIDDLES.take(below.searchsorted((0.5 * known, 0.9 * known)))
        result[4] = short / known
    else:
        result[2:5] = np.nan
    # The last one is their total.
    counted = np.maximum(np.append(surfaces, surfaces.sum()), 1)
    logs = np.log(counted)
    information = (surfaces * logs[:-1]).cumsum()[-1]
    result[5] = max(logs[-1] - information / counted[-1], 0)
    return result


@dataclass(frozen=True)
class Segments:
    """K segments of users; the first is the least active one, by events a day.

    Args:
        names: "all" of one segment, "passive" and "active" of two, else by activity.
        mean: of each of the 6 statistics; a missing one counts as the mean.
        scale: their standard deviations, 1 where all users are alike.
        centers: `[K][6]`, of standardized statistics.
    """

    names: tuple[str, ...]
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    centers: tuple[tuple[float, ...], ...]

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Means and scales `[6, 1]` and centers `[K, 6]`."""
        mean, scale, centers = (np.array(of, np.float32) for of in (self.mean, self.scale, self.centers))
        return mean[:, None], scale[:, None], centers

    def standardize(self, statistics: np.ndarray) -> np.ndarray:
        """`[6, R]` of statistics `[6, R]`."""
        mean, scale, _ = self._arrays
        z = (statistics - mean) / scale
        z[np.isnan(z)] = 0
        return z

    def assign(self, statistics: np.ndarray) -> np.ndarray:
        """`[R]` int8, the segment of each column of statistics `[6, R]`; 0 where there was no event."""
        nobody = np.isnan(statistics[0])
        found = _nearest(self.standardize(statistics), self._arrays[2]).astype(np.int8)
        found[nobody] = 0
        return found


def names_of(count: int) -> tuple[str, ...]:
    """The names of so many segments, the least active first."""
    known = {1: ("all",), 2: ("passive", "active")}
    return known.get(count) or tuple(f"activity {i + 1} of {count}" for i in range(count))


def learn_segments(
    statistics: np.ndarray, num_segments: int | None, seed: int
) -> tuple[Segments, dict[int, float | None]]:
    """Segments by k-means on standardized statistics `[6, U]`, and the silhouette of each number that was tried.

    Args:
        statistics: one column a user, without NaN in the first row.
        num_segments: K, or None for the one of 2 to 8 with the largest silhouette.
        seed: of what is random.

    Raises:
        ValueError: there are fewer different users than segments.
    """
    rng = np.random.default_rng(seed)
    with np.errstate(invalid="ignore"):
        known = ~np.isnan(statistics)
        count = np.maximum(known.sum(1), 1)
        mean = np.where(known, statistics, 0).sum(1, dtype=np.float64) / count
        spread = np.sqrt((np.where(known, statistics - mean[:, None], 0) ** 2).sum(1, dtype=np.float64) / count)
    scale = np.where(spread > 1e-6, spread, 1.0)
    base = Segments(names_of(1), tuple(mean.tolist()), tuple(scale.tolist()), ((0.0,) * len(STATISTICS),))
    points = _sample(base.standardize(statistics), _FITTED, rng)
    distinct = len(np.unique(points, axis=1).T)
    if num_segments is None:
        tried = [k for k in range(2, 9) if k <= distinct] or [1]
    elif num_segments > distinct:
        raise ValueError(f"num_segments is {num_segments}, but there are only {distinct} users with different habits")
    else:
        tried = [num_segments]
    compared = _sample(points, _COMPARED, rng)
    centers = {k: _k_means(points, k, rng) for k in tried}
    silhouettes = {k: silhouette(compared, _nearest(compared, centers[k])) for k in tried}
    best = max(tried, key=lambda k: (silhouettes[k] if silhouettes[k] is not None else -2.0, -k))
    found = tuple(tuple(row.tolist()) for row in centers[best])
    return Segments(names_of(best), base.mean, base.scale, found), silhouettes


def silhouette(points: np.ndarray, segment: np.ndarray) -> float | None:
    """Mean silhouette of points `[D, R]` in their segments `[R]`; None with fewer than two segments.

    >>> silhouette(np.array([[0.0, 0.0, 4.0, 4.0]]), np.array([0, 0, 1, 1]))
    1.0
    """
    sizes = np.bincount(segment)
    if (sizes > 0).sum() < 2:
        return None
    squares = (points * points).sum(0)
    distance = np.sqrt(np.maximum(squares[:, None] + squares[None] - 2 * points.T @ points, 0))
    sums = np.stack([distance[:, segment == one].sum(1) for one in range(len(sizes))])
    rows = np.arange(len(segment))
    own = sums[segment, rows] / np.maximum(sizes[segment] - 1, 1)
    mean = np.where(sizes[:, None] > 0, sums / np.maximum(sizes, 1)[:, None], np.inf)
    mean[segment, rows] = np.inf
    other = mean.min(0)
    value = np.where(sizes[segment] > 1, (other - own) / np.maximum(np.maximum(own, other), 1e-12), 0.0)
    return float(value.mean())


def _sample(points: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    count = points.shape[1]
    return points if count <= most else points[:, np.sort(rng.choice(count, most, replace=False))]


def _nearest(points: np.ndarray, centers: np.ndarray) -> np.ndarray:
    """`[R]`, the nearest of the centers `[K, D]` to each of the points `[D, R]`, the first of equally near ones."""
    if points.shape[1] == 1:  # as of a request: all centers at once, added up in the same order
        return ((points[:, 0] - centers) ** 2).cumsum(1)[:, -1].argmin(keepdims=True)
    best, found = np.full(points.shape[1], np.inf, np.float32), np.zeros(points.shape[1], np.int64)
    for number, center in enumerate(centers):
        distance = np.zeros(points.shape[1], np.float32)
        for row, value in zip(points, center, strict=True):
            distance += (row - value) ** 2
        nearer = distance < best
        best[nearer], found[nearer] = distance[nearer], number
    return found


def _k_means(points: np.ndarray, k: int, rng: np.random.Generator) -> np.ndarray:
    """`[k, D]` float32, centers of the points `[D, R]`, by the first statistic: the best of a few starts."""
    best, least = None, np.inf
    for _ in range(_RESTARTS):
        centers = points[:, rng.integers(points.shape[1])][None]
        while len(centers) < k:  # k-means++
            far = np.min([((points - c[:, None]) ** 2).sum(0) for c in centers], axis=0).astype(np.float64)
            chosen = rng.choice(points.shape[1], p=far / far.sum())
            centers = np.append(centers, points[:, chosen][None], axis=0)
        segment = None
        for _ in range(_ITERATIONS):
            before, segment = segment, _nearest(points, centers)
            if before is not None and (before == segment).all():
                break
            size = np.bincount(segment, minlength=k)
            sums = np.stack([np.bincount(segment, weights=row, minlength=k) for row in points], axis=1)
            centers = np.where(size[:, None] > 0, sums / np.maximum(size, 1)[:, None], centers).astype(np.float32)
        error = float(((points - centers[segment].T) ** 2).sum())
        if error < least:
            best, least = centers, error
    return best[np.lexsort(best.T[::-1])]
