"""Models of columns: logistic regression and gradient boosting, chosen on the validation split."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from jfi.baselines.samples import Samples
from jfi.training import ConfigError
from jfi.training.metrics.label_metrics import Predictions

#: Inverse strengths of the L2 penalty on standardized features.
PENALTIES = (0.001, 0.03, 1.0)
#: The most leaves of a tree, the fewest training rows of a leaf, and the most trees.
LEAVES, LEAST_ROWS, ROUNDS = (7, 31), (20, 100), 500
_LEARNING_RATE, _PATIENCE = 0.1, 20
#: Of the deviation of equal values.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class BaselineResult:
    """The metrics of a baseline on both held-out splits.

    Args:
        settings: what was chosen on the validation split.
        validation, test: the metrics of `jfi.training.metrics.label_metrics`.
        train_seconds: of choosing and fitting; the first baseline's includes the columns of all.
    """

    settings: dict[str, float]
    validation: dict[str, float]
    test: dict[str, float]
    train_seconds: float = 0.0

    def value(self, monitor: str) -> float:
        """The validation metric that fits are compared by; larger is better."""
        return -self.validation["ne"] if monitor == "ne" else self.validation["auc"]


def best(fits: Iterable[BaselineResult], monitor: str) -> BaselineResult:
    """The fit with the best validation metric, of those that tie the first.

    Args:
        fits: at least one.
        monitor: "ne" for normalized entropy; AUC otherwise.
    """
    return max(fits, key=lambda fit: fit.value(monitor))


def logistic_regression(columns: dict[str, np.ndarray], samples: Samples, penalty: float = 1.0) -> BaselineResult:
    """Fits the training split with features that are standardized there; a missing value becomes the mean, 0.

    Args:
        columns: features, `[B]` each.
        samples: B samples.
        penalty: scikit-learn's `C`.
    """
    features, train = _matrix(columns, samples), samples.splits["train"]
    mean, deviation = np.nanmean(features[train], axis=0), np.nanstd(features[train], axis=0)
    constant = deviation <= _ROUNDING * (1 + np.abs(mean))
    features = np.nan_to_num((features - mean) / np.where(constant, np.inf, deviation))
    model = _estimators()[0](C=penalty, solver="newton-cholesky")
    model.fit(features[train], samples.label[train])
    logits = {name: model.decision_function(features[samples.splits[name]]) for name in ("validation", "test")}
    return _evaluated({"C": penalty}, logits, samples)


def gradient_boosting(
    columns: dict[str, np.ndarray],
    samples: Samples,
    leaves: int,
    least_rows: int,
    categories: dict[str, np.ndarray] | None = None,
) -> BaselineResult:
    """Fits trees to the training split, as many as give the lowest loss on the validation split.

    Args:
        columns: features, `[B]` each; NaN is a missing value.
        samples: B samples.
        leaves: the most leaves of a tree.
        least_rows: the fewest training rows of a leaf.
        categories: further features, ids below 255; None for none.
    """
    numbers, others = _matrix(columns, samples), _matrix(categories or {}, samples)
    features = np.concatenate([numbers, others], axis=1)
    of = {name: features[part] for name, part in samples.splits.items()}
    labels = {name: samples.label[part] for name, part in samples.splits.items()}
    model = _estimators()[1](
        max_iter=ROUNDS,
        learning_rate=_LEARNING_RATE,
        max_leaf_nodes=leaves,
        categorical_features=np.arange(features.shape[1]) >= numbers.shape[1],
        min_samples_leaf=least_rows,
        early_stopping=True,
        scoring="loss",
        n_iter_no_change=_PATIENCE,
        random_state=0,
    )
    model.fit(of["train"], labels["train"], X_val=of["validation"], y_val=labels["validation"])
    rounds = max(1, int(np.argmax(model.validation_score_)))  # the first score is that of no tree
    logits = {
        name: next(itertools.islice(model.staged_decision_function(of[name]), rounds - 1, None)).ravel()
        for name in ("validation", "test")
    }
    return _evaluated({"leaves": leaves, "least_rows": least_rows, "rounds": rounds}, logits, samples)


def _matrix(columns: dict[str, np.ndarray], samples: Samples) -> np.ndarray:
    """`[B, F]` float64, the columns with any value in the training split."""
    train = samples.splits["train"]
    known = [values for values in columns.values() if not np.isnan(values[train]).all()]
    return np.array(known, np.float64).reshape(len(known), len(samples.item)).T


def _evaluated(settings: dict[str, float], logits: dict[str, np.ndarray], samples: Samples) -> BaselineResult:
    metrics = {}
    for name, values in logits.items():
        part = samples.splits[name]
        predictions = Predictions()
        predictions.add(*map(torch.from_numpy, (values, samples.label[part], samples.user[part])))
        metrics[name] = predictions.metrics()
    return BaselineResult(settings, **metrics)


def _estimators() -> tuple[type, type]:
    """The classes of the logistic regression and of the boosting; imported here, so that other commands do without.

    Raises:
        ConfigError: scikit-learn is missing.
    """
    try:
        from sklearn.ensemble import HistGradientBoostingClassifier
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        raise ConfigError("baselines need scikit-learn 1.7 or later: pip install 'scikit-learn>=1.7'") from None
    return LogisticRegression, HistGradientBoostingClassifier
