"""Segments of users by what they do, without labels: k-means on six statistics of a range of a user's events.

Every statistic follows from counts, so the same function gives those of all of a user's events, for fitting, and of the
events before a moment, for applying: of a log, of a dataset and of a request.
"""

from functools import cached_property
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from jfi.history_policies.log import OrderedEvents
from jfi.history_policies.relevance import bins_of

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
#: Fewer days count as a week: who came once, for an hour, has no more events a day than who comes daily.
_MIN_DAYS = 7.0
#: Quantiles of dwell come from counts between these edges, in seconds, a factor of 1.33 apart.
EDGES = np.geomspace(0.5, 7200.0, 34).astype(np.float32)
#: The log dwell that stands for each of these bins.
_MIDDLES = np.concatenate([np.log(EDGES[:1]), np.log(EDGES[:-1] * EDGES[1:]) / 2, np.log(EDGES[-1:])])
#: Dwell is cut at these edges and where it is no longer short: of each bin between EDGES the last part, and of short.
_BORDERS = np.sort(np.append(EDGES, np.float32(SHORT)))
_ENDS = np.append(np.searchsorted(_BORDERS, EDGES), len(_BORDERS))
_SHORT = int(np.searchsorted(_BORDERS, np.float32(SHORT)))
#: Users that centres are fitted to, and that silhouettes are computed of; more are sampled.
_FITTED, _COMPARED = 50_000, 2_000
_RESTARTS = 5
#: Ranges whose statistics are computed together, and the most flags that are counted together.
_RANGES, _FLAGS = 1 << 18, 1 << 22


def statistics_of(log: OrderedEvents, num_surfaces: int, first: np.ndarray, end: np.ndarray) -> np.ndarray:
    """`[6, R]` float32: the statistics of R ranges of events, each of one user; NaN where a range has no such value.

    Args:
        log: the events.
        num_surfaces: of the log.
        first, end: `[R]`, ranges `first:end` of the ordered events, ascending.
    """
    result = np.full((len(STATISTICS), len(first)), np.nan, np.float32)
    for begin in range(0, len(first), _RANGES):
        part = slice(begin, begin + _RANGES)
        (some,) = (end[part] > first[part]).nonzero()
        if len(some):
            low, high = first[part][some], end[part][some]
            events = log.part(int(low.min()), int(high.max()))
            result[:, begin + some] = _statistics(events, num_surfaces, low - low.min(), high - low.min())
    return result


def _statistics(log: OrderedEvents, num_surfaces: int, first: np.ndarray, end: np.ndarray) -> np.ndarray:
    """`[6, R]`, the same of ranges that have an event."""
    below = _counts(bins_of(log.dwell, _BORDERS), len(_BORDERS) + 1, first, end).cumsum(0)
    by_surface = _counts(log.surface + 1, num_surfaces + 1, first, end)[1:]
    begins = np.ones(len(log.time), np.int8)
    begins[1:] = log.session[1:] != log.session[:-1]
    sessions = _counts(begins, 2, first, end)[1] + (1 - begins[first])  # a range may begin within a session
    events, seconds, known = end - first, log.time[end - 1] - log.time[first], below[-1]
    result = np.empty((len(STATISTICS), len(first)), np.float32)
    result[0] = np.log1p(events / np.maximum(seconds / _DAY, _MIN_DAYS))
    result[1] = np.log1p(events / sessions)
    for row, share in ((2, 0.5), (3, 0.9)):
        result[row] = _MIDDLES[(below[_ENDS] < share * known).sum(0)]
    result[4] = below[_SHORT] / np.maximum(known, 1)
    result[2:5, known == 0] = np.nan
    # cumsum adds in the same order however many ranges there are, so that one range has the bits of many.
    information = (by_surface * np.log(np.maximum(by_surface, 1))).cumsum(0)[-1]
    total = np.maximum(by_surface.sum(0), 1)
    result[5] = np.maximum(np.log(total) - information / total, 0)
    return result


def _counts(codes: np.ndarray, count: int, first: np.ndarray, end: np.ndarray) -> np.ndarray:
    """`[count, R]`, how many events of each range have the codes 0 to count - 1."""
    if len(first) == 1:  # of a request
        return np.bincount(codes[first[0] : end[0]], minlength=count)[:count, None]
    found = np.empty((count, len(first)), np.int64)
    step = max(1, _FLAGS // (len(codes) + 1))
    for begin in range(0, count, step):
        own = np.arange(begin, min(begin + step, count))
        sums = np.zeros((len(own), len(codes) + 1), np.int32 if len(codes) < 2**31 else np.int64)
        np.cumsum(codes == own[:, None], axis=1, out=sums[:, 1:])
        found[own] = sums[:, end] - sums[:, first]
    return found


Six = tuple[float, float, float, float, float, float]
_Scale = Annotated[float, Meta(gt=0)]


class Segments(Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """K segments of users; the first is the least active one, by events a day.

    Attributes:
        names: "all" of one segment, "passive" and "active" of two, else by activity.
        mean: of each of the 6 statistics; a missing one counts as the mean.
        scale: their standard deviations, 1 where all users are alike.
        centers: `[K][6]`, of standardized statistics.
    """

    names: tuple[str, ...]
    mean: Six
    scale: tuple[_Scale, _Scale, _Scale, _Scale, _Scale, _Scale]
    centers: tuple[Six, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.names) == len(self.centers):
            raise ValueError("segments must have a center for each name")

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Means and scales `[6, 1]` and centers `[6, K, 1]`."""
        mean, scale, centers = (np.array(of, np.float32) for of in (self.mean, self.scale, self.centers))
        return mean[:, None], scale[:, None], centers.T[:, :, None]

    def standardize(self, statistics: np.ndarray) -> np.ndarray:
        """`[6, R]` of statistics `[6, R]`."""
        mean, scale, _ = self._arrays
        z = (statistics - mean) / scale
        z[np.isnan(z)] = 0
        return z

    def assign(self, statistics: np.ndarray) -> np.ndarray:
        """`[R]` int8, the nearest segment to each column of statistics `[6, R]`; 0 where there was no event."""
        distances = np.zeros((len(self.names), statistics.shape[1]), np.float32)
        for row, centers in zip(self.standardize(statistics), self._arrays[2], strict=True):
            distances += (row - centers) ** 2
        found = distances.argmin(0).astype(np.int8)
        found[np.isnan(statistics[0])] = 0
        return found


def names_of(count: int) -> tuple[str, ...]:
    """Returns the names of so many segments, the least active first."""
    known = {1: ("all",), 2: ("passive", "active")}
    return known.get(count) or tuple(f"activity {i + 1} of {count}" for i in range(count))


def learn_segments(statistics: np.ndarray, num_segments: int | None, seed: int) -> Segments:
    """Segments by k-means on standardized statistics `[6, U]`.

    Args:
        statistics: one column a user, without NaN in the first row.
        num_segments: K, or None for the one of 2 to 8 with the largest silhouette.

    Raises:
        ValueError: there are fewer different users than segments.
    """
    from sklearn.cluster import KMeans
    from sklearn.metrics import silhouette_score
    from threadpoolctl import threadpool_limits  # of scikit-learn

    rng = np.random.default_rng(seed)
    known = ~np.isnan(statistics)
    count = np.maximum(known.sum(1), 1)
    mean = np.where(known, statistics, 0).sum(1, dtype=np.float64) / count
    spread = np.sqrt((np.where(known, statistics - mean[:, None], 0) ** 2).sum(1, dtype=np.float64) / count)
    scale = tuple(np.where(spread > 1e-6, spread, 1.0).tolist())
    mean = tuple(mean.tolist())
    points = Segments(names_of(1), mean, scale, (mean,)).standardize(statistics).T
    points = _sample(points, _FITTED, rng).astype(np.float64)
    distinct = len(np.unique(points, axis=0))
    if num_segments is not None and num_segments > distinct:
        raise ValueError(f"num_segments is {num_segments}, but there are only {distinct} users with different habits")
    compared = _sample(points, _COMPARED, rng)

    def cluster(k: int) -> KMeans:
        with threadpool_limits(1):  # threads add in another order each time
            return KMeans(k, n_init=_RESTARTS, random_state=seed).fit(points)

    def silhouette(model: KMeans) -> float:
        with threadpool_limits(1):
            labels = model.predict(compared)
        several = 1 < len(np.unique(labels)) < len(labels)
        return float(silhouette_score(compared, labels)) if several else -2.0

    if num_segments is None and distinct > 1:
        model = max(map(cluster, range(2, min(8, distinct) + 1)), key=silhouette)
    else:
        model = cluster(num_segments or 1)
    centers = model.cluster_centers_
    centers = centers[np.lexsort(centers.T[::-1])].astype(np.float32).tolist()
    return Segments(names_of(len(centers)), mean, scale, tuple(map(tuple, centers)))


def _sample(points: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    return points if len(points) <= count else points[np.sort(rng.choice(len(points), count, replace=False))]
