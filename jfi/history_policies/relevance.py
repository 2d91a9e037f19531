"""Relevance of dwell for conversions: bins, information, log-odds, and the logistic model between them.

By Bayes, log-odds(conversion | dwell t) = log of the prior odds + log p(t | conversion) / p(t | none). It is linear in
log t where dwell is log-normal with one spread, so logit P = intercept + slope · log(1 + t) is fitted.
"""

import numpy as np

#: Cells of log(1 + dwell) that the logistic model is fitted to; each stands for the mean of its events.
_GRID = 2048
_ITERATIONS = 50


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
    dwell = dwell.astype(np.float32, copy=False)
    return np.where(np.isnan(dwell), len(edges) + 1, np.searchsorted(edges, dwell, side="right"))


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


def fit_logistic(
    group: np.ndarray, dwell: np.ndarray, conversion: np.ndarray, num_groups: int
) -> tuple[np.ndarray, np.ndarray]:
    """Intercept and slope `[num_groups]` of logit P(conversion) = intercept + slope · log(1 + dwell); NaN for none.

    A group has none without events of known dwell, and where all of them have a conversion or none has. The slope has
    a normal prior of variance 1, which matters for small groups alone.

    Args:
        group: `[N]` integers from 0.
        dwell: `[N]` seconds, NaN where missing.
        conversion: `[N]` bool.
        num_groups: G.
    """
    known = ~np.isnan(dwell)
    x, cell = np.log1p(dwell[known].astype(np.float64)), group[known].astype(np.int64)
    width = max(float(x.max(initial=0.0)), 1e-9) / (_GRID - 1)
    cell = cell * _GRID + (x / width).astype(np.int64)
    shape = num_groups, _GRID
    n = np.bincount(cell, minlength=num_groups * _GRID).reshape(shape).astype(np.float64)
    x = np.bincount(cell, weights=x, minlength=num_groups * _GRID).reshape(shape) / np.maximum(n, 1)
    y = np.bincount(cell[conversion[known]], minlength=num_groups * _GRID).reshape(shape)
    total, ones = n.sum(1), y.sum(1)
    fits = (ones > 0) & (ones < total)
    rate = np.where(fits, ones / np.maximum(total, 1), 0.5)
    intercept, slope = np.log(rate / (1 - rate)), np.zeros(num_groups)

    def loss(a: np.ndarray, w: np.ndarray) -> np.ndarray:
        score = a[:, None] + w[:, None] * x
        return (n * np.logaddexp(0, score) - y * score).sum(1) + w * w / 2

    for _ in range(_ITERATIONS):  # Newton's method for all groups at once
        p = 1 / (1 + np.exp(-(intercept[:, None] + slope[:, None] * x)))
        rest, spread = y - n * p, n * p * (1 - p)
        da, dw = rest.sum(1), (rest * x).sum(1) - slope
        aa, aw, ww = spread.sum(1) + 1e-9, (spread * x).sum(1), (spread * x * x).sum(1) + 1
        size = aa * ww - aw * aw
        step_a, step_w = (ww * da - aw * dw) / size, (aa * dw - aw * da) / size
        scale, before = np.ones(num_groups), loss(intercept, slope)
        for _ in range(20):  # halved where it would overshoot
            worse = loss(intercept + scale * step_a, slope + scale * step_w) > before + 1e-9 * np.abs(before)
            if not worse[fits].any():
                break
            scale = np.where(worse, scale / 2, scale)
        intercept, slope = intercept + scale * step_a, slope + scale * step_w
        if np.abs(np.stack([step_a, step_w])[:, fits]).max(initial=0.0) < 1e-10:
            break
    return np.where(fits, intercept, np.nan), np.where(fits, slope, np.nan)
