"""The loss of a run: the sum over its labels, by their weights, with those of samples."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from jfi.data import DataConfig
from jfi.data.schema.schema import LabelSpec


class Objective:
    """The loss of a batch.

    With sample i's weight w_i and label l's weight v_l the loss of B samples is

        1/B  sum_i w_i  sum_l v_l L_l(z_il, y_il)

        binary       L = cross-entropy of the logit z and y
        regression   L = (z - y)^2 / variance of y in training

    where a label that is missing adds nothing.

    Args:
        labels: in the order of the model's outputs.
        weights: of the labels.
        num_auxiliary: number of auxiliary labels, the last ones.
    """

    def __init__(self, labels: Sequence[LabelSpec], weights: Sequence[float], num_auxiliary: int = 0) -> None:
        self._labels = list(zip(labels, weights, strict=True))
        self._num_predicted = len(labels) - num_auxiliary

    @classmethod
    def of(cls, data: DataConfig, labels: Sequence[LabelSpec]) -> "Objective":
        """The loss of a run with the section `data` and the labels of its schema; auxiliary labels are binary."""
        others = [LabelSpec(one.name) for one in data.auxiliary_labels()]
        weights = [one.weight for one in data.trained_labels()]
        return cls([*labels, *others], weights, len(others))

    def __call__(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sums over samples: of the loss of the batch, and of the labels' losses with no other weights than theirs.

        Args:
            outputs: of the model, [B] or [B, L] float32.
            labels: of the same shape, NaN where one is missing.
            weights: [B], or None for 1.
        """
        weighted, plain = [], []
        for index, (label, weight) in enumerate(self._labels):
            output, target = (outputs, labels) if outputs.dim() == 1 else (outputs[:, index], labels[:, index])
            losses = self._losses(label, output, target, is_whole=index == 0)
            if index < self._num_predicted:
                plain.append(losses.detach().sum() * weight)
            weighted.append((losses if weights is None else losses * weights).sum() * weight)
        return torch.stack(weighted).sum(), torch.stack(plain).sum()

    @staticmethod
    def _losses(label: LabelSpec, output: Tensor, target: Tensor, is_whole: bool) -> Tensor:
        """Returns each sample's loss."""
        present = None if is_whole else ~target.isnan()
        target = target if present is None else target.nan_to_num()
        if label.task == "regression":
            losses = ((output - target) / label.deviation).square()
        else:
            losses = binary_cross_entropy_with_logits(output, target, reduction="none")
        return losses if present is None else losses * present
