"""The loss of a run: the sum over its labels, by their weights, with those of samples and of positives."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from jfi.data import DataConfig
from jfi.data.schema.schema import LabelSpec


class Objective:
    """The loss of a batch.

    With sample i's weight w_i, label l's weight v_l, and p_l the weight of positives (1 where y is 0, and for auxiliary
    labels), the loss of B samples is

        1/B  sum_i w_i  sum_l v_l L_l(z_il, y_il)

        binary       L = p_l cross-entropy of the logit z and y
        regression   L = (z - y)^2 / variance of y in training

    where a label that is missing adds nothing.

    Args:
        labels: in the order of the model's outputs.
        weights: of the labels.
        positive_weight: of the samples with label 1, for every binary label but auxiliary ones.
        num_auxiliary: number of auxiliary labels, the last ones.
    """

    def __init__(
        self,
        labels: Sequence[LabelSpec],
        weights: Sequence[float],
        positive_weight: float = 1.0,
        num_auxiliary: int = 0,
    ) -> None:
        self._labels = list(zip(labels, weights, strict=True))
        self._num_predicted = len(labels) - num_auxiliary
        self._positive_weights = [positive_weight] * self._num_predicted + [1.0] * num_auxiliary

    @classmethod
    def of(cls, data: DataConfig, labels: Sequence[LabelSpec], positive_weight: float) -> "Objective":
        """The loss of a run with the section `data` and the labels of its schema; auxiliary labels are binary."""
        others = [LabelSpec(one.name) for one in data.auxiliary_labels()]
        weights = [one.weight for one in data.trained_labels()]
        return cls([*labels, *others], weights, positive_weight, len(others))

    def __call__(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sums over samples: of the loss of the batch, and of the labels' losses with no other weights than theirs.

        Args:
            outputs: of the model, [B] or [B, L] float32.
            labels: of the same shape, NaN where one is missing.
            weights: [B], or None for 1.
        """
        weighted, plain = [], []
        for place, (label, weight) in enumerate(self._labels):
            output, target = (outputs, labels) if outputs.dim() == 1 else (outputs[:, place], labels[:, place])
            losses, scaled = self._losses(label, output, target, self._positive_weights[place], is_whole=place == 0)
            scaled = scaled if weights is None else scaled * weights
            if place < self._num_predicted:
                plain.append(losses.detach().sum() * weight)
            weighted.append(scaled.sum() * weight)
        return torch.stack(weighted).sum(), torch.stack(plain).sum()

    @staticmethod
    def _losses(
        label: LabelSpec, output: Tensor, target: Tensor, positive_weight: float, is_whole: bool
    ) -> tuple[Tensor, Tensor]:
        """Returns each sample's loss, and that with the weight of positives."""
        present = None if is_whole else ~target.isnan()
        target = target if present is None else target.nan_to_num()
        if label.task == "regression":
            losses = scaled = ((output - target) / label.deviation).square()
        else:
            losses = scaled = binary_cross_entropy_with_logits(output, target, reduction="none")
            if positive_weight != 1:
                scaled = losses * torch.where(target > 0, positive_weight, 1.0)
        return (losses, scaled) if present is None else (losses * present, scaled * present)
