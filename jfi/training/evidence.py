"""Decides whether columns tell more than the scores of a model: `training.preset: auto` decides by it.

The difference between the AUC of two scores of the same rows has a standard error (DeLong et al., "Comparing the areas
under two or more correlated receiver operating characteristic curves", 1988): with n rows of a label, the share of
pairs with the other label that a row wins, v, is the row's part of the AUC, so that a row adds (dv - mean dv) / n to
the error. It takes rows as independent.
"""

from dataclasses import dataclass

import numpy as np

from jfi.training.config import ConfigError

#: Standard errors above which a gain counts.
ERRORS = 2.0
#: Parts of the rows; each is scored by trees that were fitted to the others.
_FOLDS = 5
#: Small trees with many rows a leaf: they see about as much as is there, and on noise they lose to the scores alone.
_TREES = {"max_iter": 40, "max_leaf_nodes": 7, "min_samples_leaf": 200, "learning_rate": 0.1}


@dataclass(frozen=True)
class Gain:
    """The AUC of two scores of the same rows, and the standard error of the difference.

    >>> print(Gain(0.75, 0.76, 0.004))
    validation AUC 0.7500 to 0.7600, 2.5 standard errors
    """

    before: float
    after: float
    error: float

    @property
    def counts(self) -> bool:
        """Returns whether the second score is better by more than `ERRORS` standard errors."""
        return self.after - self.before > ERRORS * self.error

    def __str__(self) -> str:
        errors = (self.after - self.before) / self.error if self.error > 0 else 0.0
        return f"validation AUC {self.before:.4f} to {self.after:.4f}, {errors:.1f} standard errors"


def auc_gain(before: np.ndarray, after: np.ndarray, labels: np.ndarray) -> Gain:
    """Compares two scores `[N]` of rows with the labels `[N]`, which have both values.

    >>> labels = np.array([0, 1, 0, 1])
    >>> auc_gain(np.array([1, 2, 3, 4]), np.array([1, 3, 2, 4]), labels)
    Gain(before=0.75, after=1.0, error=0.25)
    """
    positive = labels > 0.5
    shares = [_won(scores, positive) for scores in (before, after)]
    first, second = (float(one[positive].mean()) for one in shares)
    moved, variance = shares[1] - shares[0], 0.0
    for rows in (positive, ~positive):
        variance += moved[rows].var() / rows.sum()
    return Gain(first, second, float(np.sqrt(variance)))


def gain_of_columns(scores: np.ndarray, columns: np.ndarray, labels: np.ndarray, users: np.ndarray) -> Gain | None:
    """Returns what boosted trees of scores and columns gain over the scores, on users that they were not fitted to.

    Args:
        scores: `[N]` logits of a model that has not been fitted to these rows.
        columns: `[N, F]`.
        labels: `[N]`, 0 or 1.
        users: `[N]` integers.

    Returns:
        None if the rows are too few for such trees.
    """
    user = np.unique(users, return_inverse=True)[1]
    fold = np.random.default_rng(0).permutation(user.max(initial=0) + 1)[user] % _FOLDS
    for part in range(_FOLDS):
        fitted = fold != part
        if fitted.all() or fitted.sum() < 4 * _TREES["min_samples_leaf"] or len(np.unique(labels[fitted])) < 2:
            return None
    features, together = np.column_stack([scores, columns]), np.empty(len(scores))
    _, boosting = estimators()
    for part in range(_FOLDS):
        model = boosting(**_TREES, early_stopping=False, random_state=0)
        model.fit(features[fold != part], labels[fold != part])
        together[fold == part] = model.decision_function(features[fold == part])
    return auc_gain(scores, together, labels)


def estimators() -> tuple[type, type]:
    """The classes of the logistic regression and of the boosting; imported here, so that other commands do without.

    Raises:
        ConfigError: scikit-learn is missing.
    """
    try:
        from sklearn.ensemble import HistGradientBoostingClassifier
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        what = "baselines and training.preset need scikit-learn 1.7 or later"
        raise ConfigError(f"{what}: pip install 'scikit-learn>=1.7'") from None
    return LogisticRegression, HistGradientBoostingClassifier


def _won(scores: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """`[N]`, of the pairs of each row and a row of the other label the share that is in order, a tie as half."""
    won = np.empty(len(scores))
    for rows, sign in ((positive, 1), (~positive, -1)):
        own, others = sign * scores[rows], np.sort(sign * scores[~rows])
        won[rows] = (np.searchsorted(others, own, "left") + np.searchsorted(others, own, "right")) / 2 / len(others)
    return won
