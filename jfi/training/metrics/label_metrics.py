"""Metrics of click models, computed over all predictions of a split, in float64 on the CPU.

loss      mean of -[y log p + (1 - y) log(1 - p)], in nats
ne        normalized entropy: the loss over that of always predicting the split's mean label, so that 1 is no better
          than a constant (He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook", 2014)
auc       probability that a positive is scored above a negative, where a tie counts one half
user_auc  AUC of each user's samples, averaged over the users with both labels, weighted by their number of samples
          (GAUC of Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", 2018)

Of a regression:
loss      mean squared error over the variance of training's labels
rmse, mae root of the mean squared error, mean absolute error, on the label's scale
r2        1 - squared error over that of always predicting the split's mean label, so that a constant reaches 0 at most

Of several labels each metric ends in the label's name, such as auc_like, and is of the samples that have the label.
Without a name, loss is the sum over the labels by their weights, and auc, ne, user_auc and r2 are means over the labels
that have them. No metric reads the weights of samples or of positives.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics.functional.classification import binary_auroc

from jfi.data.schema.schema import LabelSpec

#: Metrics of which less is better.
LESS_IS_BETTER = ("loss", "ne", "rmse", "mae")
#: Metrics of several labels that are averaged over them.
_AVERAGED = ("ne", "auc", "user_auc", "r2")


def normalized_entropy(loss: float, mean_label: float) -> float:
    """`loss` over the entropy of the mean label, both in nats; NaN if all labels are equal.

    >>> round(normalized_entropy(math.log(2) / 2, 0.5), 6)
    0.5
    """
    base = -sum(p * math.log(p) for p in (mean_label, 1 - mean_label) if p > 0)
    return loss / base if base > 0 else math.nan


def auc(logits: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve; NaN if all labels are equal."""
    positives = int(labels.sum())
    if positives in (0, labels.numel()):
        return math.nan
    # Ranks, since the sigmoid of binary_auroc would round large logits to ties. Equal logits have equal ranks.
    ranks = torch.unique(logits, return_inverse=True)[1]
    return binary_auroc(ranks.double() / labels.numel(), labels.long()).item()


def user_auc(logits: Tensor, labels: Tensor, users: Tensor) -> float:
    """AUC of each user's samples, weighted by their number; NaN if no user has both labels.

    Mann-Whitney: AUC = (sum of the positives' ranks - P (P + 1) / 2) / (P N), where tied scores have their mean rank.

    Args:
        logits: [N] scores.
        labels: [N], 0 or 1.
        users: [N] integer ids.

    >>> user_auc(torch.tensor([0.1, 0.9, 0.3, 0.3]), torch.tensor([0.0, 1, 0, 1]), torch.tensor([7, 7, 8, 8]))
    0.75
    """
    labels = labels.double()
    _, user, samples = torch.unique(users, return_inverse=True, return_counts=True)
    order = torch.argsort(logits, stable=True)
    order = order[torch.argsort(user[order], stable=True)]
    user, logits, labels = user[order], logits[order], labels[order]

    first = torch.ones_like(user, dtype=torch.bool)
    first[1:] = (user[1:] != user[:-1]) | (logits[1:] != logits[:-1])
    tie = first.long().cumsum(0) - 1
    ties = torch.bincount(tie)
    last_rank = ties.cumsum(0)
    user_start = samples.cumsum(0) - samples
    rank = (last_rank - (ties - 1) / 2)[tie] - user_start[user]

    positives = torch.zeros(len(samples), dtype=torch.double).index_add_(0, user, labels)
    rank_sum = torch.zeros_like(positives).index_add_(0, user, labels * rank)
    pairs = positives * (samples - positives)
    both = pairs > 0
    area = (rank_sum - positives * (positives + 1) / 2)[both] / pairs[both]
    weight = samples[both]
    return (area * weight).sum().item() / weight.sum().item() if both.any() else math.nan


@dataclass
class Predictions:
    """Collects the predictions of a split batch by batch.

    >>> seen = Predictions()
    >>> seen.add(torch.tensor([2.0, -2.0]), torch.tensor([1.0, 0.0]), torch.tensor([3, 3]))
    >>> seen.metrics()["auc"]
    1.0
    """

    logits: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)
    users: list[Tensor] = field(default_factory=list)

    def add(self, logits: Tensor, labels: Tensor, users: Tensor) -> None:
        """Adds a batch: outputs and labels, [B] or of L labels [B, L], and users [B]."""
        self.logits.append(logits.detach())
        self.labels.append(labels)
        self.users.append(users)

    def on_cpu(self, gather: Callable[[Tensor], Tensor] = lambda rows: rows) -> "Predictions":
        """The same predictions as one batch on the CPU, with the rows of other processes that `gather` adds."""
        return Predictions(*([gather(torch.cat(column).cpu())] for column in (self.logits, self.labels, self.users)))

    def metrics(
        self, labels: Sequence[LabelSpec] = (LabelSpec(),), weights: Sequence[float] = (1.0,)
    ) -> dict[str, float]:
        """Every metric over all predictions.

        Args:
            labels: the L labels; one binary label by default.
            weights: of their losses.
        """
        outputs, targets = torch.cat(self.logits).double().cpu(), torch.cat(self.labels).double().cpu()
        users = torch.cat(self.users).cpu()
        if len(labels) == 1:
            return metrics_of_label(labels[0], outputs, targets, users)
        found: dict[str, dict[str, float]] = {}
        for index, label in enumerate(labels):
            present = ~targets[:, index].isnan()
            own = outputs[present, index], targets[present, index], users[present]
            found[label.name] = metrics_of_label(label, *own)
        whole = {"loss": sum(w * one["loss"] for w, one in zip(weights, found.values(), strict=True))}
        for name in _AVERAGED:
            if values := [one[name] for one in found.values() if name in one]:
                whole[name] = sum(values) / len(values)
        return whole | {f"{name}_{label}": value for label, one in found.items() for name, value in one.items()}


def metrics_of_label(label: LabelSpec, outputs: Tensor, targets: Tensor, users: Tensor) -> dict[str, float]:
    """The metrics of one label.

    Args:
        label: the label.
        outputs: [N] float64, logits, or predictions of a regression.
        targets: [N] float64, the labels.
        users: [N] integer ids.

    Example:
        >>> number, users = LabelSpec("seconds", "regression", 2.0, 2.0), torch.zeros(3)
        >>> metrics_of_label(number, torch.tensor([2.0, 3, 7]), torch.tensor([1.0, 3, 8]), users)["r2"] > 0.9
        True
    """
    if label.task == "regression":
        errors = outputs - targets
        squared = errors.square().mean().item()
        variance = (targets - targets.mean()).square().mean().item()
        return {
            "loss": squared / label.deviation**2,
            "rmse": math.sqrt(squared),
            "mae": errors.abs().mean().item(),
            "r2": 1 - squared / variance if variance > 0 else math.nan,
        }
    loss = binary_cross_entropy_with_logits(outputs, targets).item()
    return {
        "loss": loss,
        "ne": normalized_entropy(loss, targets.mean().item()),
        "auc": auc(outputs, targets),
        "user_auc": user_auc(outputs, targets, users),
    }


@dataclass
class Result:
    """The result of a run; `jfi.load_run(result.run_dir)` has its model.

    Args:
        run_dir: the run folder.
        best_epoch: epochs trained at the best evaluation, such as 2, or 1.25 with `training.eval_every`.
        epochs: epochs trained in all.
        validation, test: metrics of the best parameters.
        train_seconds: time spent in training steps.
        start: by split the metrics before the first step of a run with `training.warm_start`; else {}.
    """

    run_dir: str
    best_epoch: float
    epochs: float
    validation: dict[str, float]
    test: dict[str, float]
    train_seconds: float
    start: dict[str, dict[str, float]] = field(default_factory=dict)
