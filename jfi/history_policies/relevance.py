"""Relevance of dwell for conversions: bins, information, log-odds, and the logistic model between them.

By Bayes, log-odds(conversion | dwell t) = log of the prior odds + log p(t | conversion) / p(t | none). It is linear in
log t where dwell is log-normal with one spread, so logit P = intercept + slope · log(1 + t) is fitted.
"""

from collections.abc import Sequence

import numpy as np


def learn_edges(dwell: np.ndarray, num_bins: int) -> np.ndarray:
    """`[at most num_bins - 1]` float32, ascending: quantiles of the dwell `[N]`, without the missing ones.

    They are values of the data, so they are also those of the logarithm. Bin b has `edges[b - 1] <= dwell < edges[b]`.
    """
    known = dwell[~np.isnan(dwell)]
    if not len(known):
        return np.empty(0, np.float32)
    edges = np.unique(np.quantile(known, np.linspace(0, 1, num_bins + 1)[1:-1], method="higher"))
    return edges[edges > known.min()].astype(np.float32)


def bins_of(dwell: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """`[N]` the bin of each dwell; a missing one has the last, `len(edges) + 1`."""
    bins = edges.searchsorted(dwell.astype(np.float32, copy=False), side="right")
    bins[np.isnan(dwell)] = len(edges) + 1
    return bins


class Cells:
    """A lookup of the cell of an event, its surface and the bin of its dwell: `surface * bins + bin`.

    All G surfaces have as many bins as that with the most edges; the last one is that of unknown dwell. The cell behind
    all of them, `G * bins`, is for events without a surface.

    Args:
        edges: of each surface, ascending.
    """

    def __init__(self, edges: Sequence[Sequence[float] | np.ndarray]) -> None:
        bins = max(map(len, edges)) + 2
        # Dwell is cut once, at the edges of all surfaces, and a table has the cell of each surface and part.
        self._borders = np.unique(np.concatenate([np.array(own, np.float32) for own in edges]))
        least = np.append(np.float32(-np.inf), self._borders)  # of each part
        self._table = np.full((len(edges) + 1, len(least) + 1), len(edges) * bins, np.int16)
        for index, own in enumerate(edges):
            self._table[index, :-1] = index * bins + bins_of(least, np.array(own, np.float32))
            self._table[index, -1] = index * bins + bins - 1

    def __call__(self, surface: np.ndarray, dwell: np.ndarray) -> np.ndarray:
        """Returns `[N]` int16.

        Args:
            surface: `[N]` integers, -1 for none.
            dwell: `[N]` seconds, NaN where missing.
        """
        # From -1 on, since the last row is that of no surface.
        return self._table.ravel().take(surface * self._table.shape[1] + bins_of(dwell, self._borders))


def information(events: np.ndarray, conversions: np.ndarray) -> tuple[float, float]:
    """Mutual information of bin and conversion, in nats, and the entropy of conversion.

    The estimate is too large by about (bins - 1) / 2N on average, which is subtracted (Miller and Madow); so it can be
    negative where the bins say nothing.

    Args:
        events: `[bins]`, the events of each bin.
        conversions: `[bins]`, those with a conversion.

    >>> information(np.array([50, 50]), np.array([50, 0]))
    (0.688..., 0.693...)
    """
    total = events.sum()
    if not total:
        return 0.0, 0.0
    of_bins, entropy = _entropy(events), _entropy(np.array([conversions.sum(), total - conversions.sum()]))
    joint = _entropy(np.concatenate([conversions, events - conversions]))
    bias = ((events > 0).sum() - 1) / (2 * total) if entropy else 0.0
    return float(of_bins + entropy - joint - bias), float(entropy)


def _entropy(counts: np.ndarray) -> float:
    share = counts[counts > 0] / counts.sum()
    return float((share * -np.log(share)).sum())


def log_odds(events: np.ndarray, conversions: np.ndarray, rate: float, pseudo_count: float) -> np.ndarray:
    """Each cell's log-odds of a conversion less those at `rate`, with `pseudo_count` events at `rate` added to it.

    >>> log_odds(np.array([100, 0]), np.array([50, 0]), 0.1, 50.0)
    array([1.6..., 0.        ])
    """
    shrunk = (conversions + pseudo_count * rate) / (events + pseudo_count)
    return np.log(shrunk / (1 - shrunk)) - np.log(rate / (1 - rate))


def fit_logistic(dwell: np.ndarray, conversion: np.ndarray) -> tuple[float | None, float | None]:
    """Intercept and slope of logit P(conversion) = intercept + slope · log(1 + dwell), by maximum likelihood.

    There is none without events of known dwell, and where all of them have a conversion or none has. The slope has a
    normal prior of variance 1, which matters for few events alone.

    Args:
        dwell: `[N]` seconds, NaN where missing.
        conversion: `[N]` bool.
    """
    from sklearn.linear_model import LogisticRegression

    known = ~np.isnan(dwell)
    x, y = np.log1p(dwell[known].astype(np.float64)), conversion[known]
    if not 0 < y.sum() < len(y):
        return None, None
    middle = x.mean()  # centred, Newton's method converges
    model = LogisticRegression(C=1.0, solver="newton-cholesky", tol=1e-6).fit((x - middle)[:, None], y)
    slope = float(model.coef_[0, 0])
    return float(model.intercept_[0]) - slope * float(middle), slope
