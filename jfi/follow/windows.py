"""Metrics of hours and days of log time, and of the whole log so far, in memory that does not grow with the rows.

A window counts the positives and the negatives by bin of the logit, of 1/128 each, from which follows the AUC, where
rows of a bin count as ties; the losses are exact sums.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from jfi.data.schema.schema import LabelSpec
from jfi.training.metrics.label_metrics import normalized_entropy

#: By name the seconds of a window; the last one never ends.
WINDOWS = {"hour": 3600.0, "day": 86400.0, "all": math.inf}
_BINS, _PER_LOGIT = 4096, 128.0
_NONE = -(2**62)


class Windows:
    """The open windows of each kind.

    Example:
        >>> windows = Windows([LabelSpec()])
        >>> time, labels = np.array([10.0, 20.0, 3700.0]), torch.tensor([[1.0], [0.0], [1.0]])
        >>> (closed,) = windows.add(time, torch.tensor([[2.0], [-2.0], [0.0]]), labels)
        >>> closed["window"], closed["time"], closed["rows"], closed["auc"]
        ('hour', 0.0, 2, 1.0)
    """

    def __init__(self, labels: Sequence[LabelSpec]) -> None:
        self._labels = labels
        count = len(WINDOWS), len(labels)
        #: What a checkpoint has: by kind and label the negatives and the positives by bin, the sums of losses, labels
        #: and rows, and by kind the number of the open window.
        self.state = {
            "bins": torch.zeros(*count, 2, _BINS, dtype=torch.int64),
            "sums": torch.zeros(*count, 3, dtype=torch.float64),
            "number": torch.full((len(WINDOWS),), _NONE, dtype=torch.int64),
        }

    def add(self, time: np.ndarray, logits: Tensor, labels: Tensor) -> list[dict]:
        """Adds rows, and returns the metrics of the windows that have ended.

        A row that is older than the open window counts in that one.

        Args:
            time: `[N]` float64, ascending.
            logits, labels: `[N, L]`; NaN for a label that is missing.
        """
        closed = []
        for place, (kind, seconds) in enumerate(WINDOWS.items()):
            number = np.zeros(len(time), np.int64) if math.isinf(seconds) else (time // seconds).astype(np.int64)
            number = np.maximum(number, int(self.state["number"][place]))
            for own in np.unique(number).tolist():
                if int(self.state["number"][place]) not in (own, _NONE):
                    closed.append(self.metrics(kind))
                    self.state["bins"][place].zero_()
                    self.state["sums"][place].zero_()
                self.state["number"][place] = own
                rows = torch.from_numpy(number == own)
                self._count(place, logits[rows].double(), labels[rows].double())
        return closed

    def metrics(self, kind: str) -> dict:
        """Returns the metrics of the open window of a kind, with its begin in seconds."""
        place, seconds = list(WINDOWS).index(kind), WINDOWS[kind]
        found: dict = {"window": kind}
        if not math.isinf(seconds):
            found["time"] = int(self.state["number"][place]) * seconds
        found["rows"] = int(self.state["sums"][place, 0, 2])
        for name, value in self._of_labels(place):
            found[name] = value if math.isfinite(value) else None
        return found

    def _of_labels(self, place: int) -> Iterator[tuple[str, float]]:
        for number, label in enumerate(self._labels):
            ending = f"_{label.name}" if len(self._labels) > 1 else ""
            loss, total, rows = self.state["sums"][place, number].tolist()
            loss, total = (loss / rows, total / rows) if rows else (math.nan, math.nan)
            if label.task == "regression":
                yield f"rmse{ending}", math.sqrt(loss)
                continue
            yield f"ne{ending}", normalized_entropy(loss, total)
            yield f"auc{ending}", _auc(*self.state["bins"][place, number].double())

    def _count(self, place: int, logits: Tensor, labels: Tensor) -> None:
        for number, label in enumerate(self._labels):
            present = ~labels[:, number].isnan()
            output, target = logits[present, number], labels[present, number]
            if label.task == "regression":
                loss = (output - target).square().sum()
            else:
                loss = binary_cross_entropy_with_logits(output, target, reduction="sum")
                bins = (output * _PER_LOGIT).floor().long().add(_BINS // 2).clamp(0, _BINS - 1)
                for value in (0, 1):
                    counts = torch.bincount(bins[target == value], minlength=_BINS)
                    self.state["bins"][place, number, value] += counts
            self.state["sums"][place, number] += torch.stack([loss, target.sum(), torch.tensor(float(len(target)))])


def _auc(negatives: Tensor, positives: Tensor) -> float:
    """AUC of rows by bin; NaN if all labels are equal."""
    pairs = float(negatives.sum() * positives.sum())
    below = negatives.cumsum(0) - negatives
    return float((positives * (below + negatives / 2)).sum()) / pairs if pairs else math.nan
