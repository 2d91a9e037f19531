"""Platt scaling: the calibrated probability of a binary label is sigmoid(a * logit + b).

a and b have the maximum likelihood on the validation split (Platt, "Probabilistic Outputs for Support Vector Machines",
1999, without the smoothed targets), by scikit-learn's logistic regression of the standardized logits.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import TypedDict

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from jfi.data.schema.schema import LabelSpec
from jfi.training.metrics.label_metrics import Predictions, normalized_entropy


class Scaling(TypedDict):
    """The calibration of a label; `identity` says why `a` and `b` are 1 and 0, or is "" where they were fitted."""

    a: float
    b: float
    identity: str


#: By the name of a binary label.
Calibration = dict[str, Scaling]
#: Fewer samples are not fitted.
MIN_SAMPLES = 100


def fit_platt(logits: Tensor, labels: Tensor) -> tuple[float, float] | str:
    """a and b, or why there are none.

    Args:
        logits: [N].
        labels: [N], 0 or 1.

    Example:
        >>> fit_platt(torch.zeros(5), torch.ones(5))
        '5 samples, fewer than 100'
    """
    from sklearn.exceptions import ConvergenceWarning  # takes a second to import
    from sklearn.linear_model import LogisticRegression

    logits, labels = logits.double().cpu(), labels.double().cpu()
    if len(logits) < MIN_SAMPLES:
        return f"{len(logits)} samples, fewer than {MIN_SAMPLES}"
    if not 0 < labels.sum() < len(labels):
        return "all labels are equal"
    deviation, mean = logits.std(correction=0), logits.mean()
    if not deviation > 0:
        return "all logits are equal"
    positive, negative = logits[labels == 1], logits[labels == 0]
    if positive.min() >= negative.max() or positive.max() <= negative.min():
        return "the logits separate the labels"
    model = LogisticRegression(C=float("inf"), solver="newton-cholesky", tol=1e-10)
    with warnings.catch_warnings(action="error", category=ConvergenceWarning):
        try:
            model.fit(((logits - mean) / deviation).unsqueeze(1).numpy(), labels.numpy())
        except ConvergenceWarning as error:
            return f"no convergence: {error}"
    a = model.coef_.item() / deviation.item()
    if a <= 0:
        return "a higher logit does not mean a more likely label"
    return a, model.intercept_.item() - a * mean.item()


def fit_calibration(predictions: Predictions, labels: Sequence[LabelSpec]) -> Calibration:
    """The calibration of each binary label, of the samples that have the label."""
    found: Calibration = {}
    for label, logits, targets in _columns(predictions, labels):
        fitted = fit_platt(logits, targets)
        a, b, why = (1.0, 0.0, fitted) if isinstance(fitted, str) else (*fitted, "")
        found[label.name] = {"a": a, "b": b, "identity": why}
    return found


def calibrate(logits: Tensor, labels: Sequence[LabelSpec], calibration: Mapping[str, Mapping]) -> Tensor:
    """a * logit + b of [N] logits, or [N, L] of L labels; predictions of a regression stay as they are."""
    own = [calibration.get(label.name, {"a": 1.0, "b": 0.0}) for label in labels]
    a, b = (torch.tensor([one[name] for one in own], dtype=logits.dtype) for name in ("a", "b"))
    return logits * a + b


def describe(predictions: Predictions, labels: Sequence[LabelSpec], calibration: Calibration) -> list[str]:
    """A line for each label with its NE and its mean prediction over its mean label, before and after."""
    lines = []
    for label, logits, targets in _columns(predictions, labels):
        if label.name not in calibration or not len(logits):
            continue
        own, mean = calibration[label.name], targets.mean().item()
        shown = []
        for z in (logits, own["a"] * logits + own["b"]):
            ne = normalized_entropy(binary_cross_entropy_with_logits(z, targets).item(), mean)
            shown.append((ne, z.sigmoid().mean().item() / mean if mean > 0 else float("nan")))
        (ne, ratio), (ne_after, ratio_after) = shown
        name = f" of {label.name}" if len(labels) > 1 else ""
        fitted = f"a {own['a']:.4f}, b {own['b']:.4f}"
        why = f"none, {own['identity']}" if own["identity"] else fitted
        effect = f"test ne {ne:.4f} -> {ne_after:.4f}, mean prediction / mean label {ratio:.4f} -> {ratio_after:.4f}"
        lines.append(f"calibration{name}: {why}; {effect}")
    return lines


def _columns(predictions: Predictions, labels: Sequence[LabelSpec]) -> list[tuple[LabelSpec, Tensor, Tensor]]:
    """Logits and labels [N] in float64 of each binary label, of the samples that have it."""
    outputs, targets = torch.cat(predictions.logits).double().cpu(), torch.cat(predictions.labels).double().cpu()
    outputs, targets = outputs.reshape(len(outputs), -1), targets.reshape(len(targets), -1)
    found = []
    for index, label in enumerate(labels):
        if label.task == "binary":
            present = ~targets[:, index].isnan()
            found.append((label, outputs[present, index], targets[present, index]))
    return found
