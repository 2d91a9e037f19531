"""Segments of users by what they do, without labels: k-means on six statistics of a range of a user's events.

Every statistic follows from counts, so the same function gives those of all of a user's events, for fitting, and of the
events before a moment, for applying.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jfi.history.log import OrderedLog

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
_EDGES = np.geomspace(0.5, 7200.0, 34).astype(np.float32)
#: The log dwell that stands for each of these bins.
_MIDDLES = np.concatenate([np.log(_EDGES[:1]), np.log(_EDGES[:-1] * _EDGES[1:]) / 2, np.log(_EDGES[-1:])])
#: Users that centres are fitted to, and that silhouettes are computed of; more are sampled.
_FITTED, _COMPARED = 50_000, 2_000
_RESTARTS, _ITERATIONS = 5, 100


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

    def counted_each(values: np.ndarray, number: int) -> Iterable[np.ndarray]:
        """`counted(values == one)` for each integer below `number`, in parts `[any, R]`."""
        if len(first) > 1:
            return (counted(values == one)[None] for one in range(number))
        own = values[first[0] : end[0]]  # one range, as of a request: all at once
        return [np.bincount(own[(own >= 0) & (own < number)], minlength=number)[:, None]]

    count, some = end - first, end > first
    begin, last = np.where(some, first, 0), np.where(some, end - 1, 0)
    result = np.full((len(STATISTICS), len(first)), np.nan, np.float32)
    if not some.any():
        return result
    days = np.maximum((log.time[last] - log.time[begin]) / _DAY, 1.0)
    sessions = counted(log.starts) + ~log.starts[begin]  # a range may begin within a session
    result[0], result[1] = np.log1p(count / days), np.log1p(count / np.maximum(sessions, 1))
    missing = np.isnan(log.dwell)
    known = count - counted(missing)
    bins = np.searchsorted(_EDGES, log.dwell, side="right").astype(np.int8)
    bins[missing] = len(_EDGES) + 1
    places = np.zeros((2, len(first)), np.int8)
    below = np.zeros_like(known)[None]
    for of in counted_each(bins, len(_EDGES)):
        below = below[-1:] + of.cumsum(axis=0)
        for row, share in enumerate((0.5, 0.9)):
            places[row] += (below < share * known).sum(axis=0, dtype=np.int8)
    for row in range(2):
        result[2 + row] = np.where(known > 0, _MIDDLES[places[row]], np.nan)
    result[4] = np.where(known > 0, counted(log.dwell < SHORT) / np.maximum(known, 1), np.nan)
    total, information = np.zeros(len(first), np.int64), np.zeros(len(first))
    for of in counted_each(log.surface, num_surfaces):
        total += of.sum(axis=0)
        information += (of * np.log(np.maximum(of, 1))).sum(axis=0)
    entropy = np.log(np.maximum(total, 1)) - information / np.maximum(total, 1)
    result[5] = np.maximum(entropy, 0)
    result[:, ~some] = np.nan
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

    def standardize(self, statistics: np.ndarray) -> np.ndarray:
        """`[6, R]` of statistics `[6, R]`."""
        z = (statistics - np.array(self.mean, np.float32)[:, None]) / np.array(self.scale, np.float32)[:, None]
        return np.nan_to_num(z, copy=False, nan=0.0)

    def assign(self, statistics: np.ndarray) -> np.ndarray:
        """`[R]` int8, the segment of each column of statistics `[6, R]`; 0 where there was no event."""
        nobody = np.isnan(statistics[0])
        found = _nearest(self.standardize(statistics), np.array(self.centers, np.float32)).astype(np.int8)
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
