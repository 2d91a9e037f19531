"""Metrics by window against those of all rows of the window at once."""

import numpy as np
import pytest
import torch

from jfi.data.schema.schema import LabelSpec
from jfi.follow.windows import Windows
from jfi.training.metrics.label_metrics import metrics_of_label

LABELS = [LabelSpec("like"), LabelSpec("seconds", "regression", 2.0, 3.0)]


def exact(label: LabelSpec, logits: torch.Tensor, labels: torch.Tensor) -> dict:
    present = ~labels.isnan()
    users = torch.zeros(int(present.sum()), dtype=torch.int64)
    return metrics_of_label(label, logits[present].double(), labels[present].double(), users)


def test_windows_have_the_metrics_of_their_rows():
    rng = np.random.default_rng(0)
    time = np.sort(rng.uniform(0, 3 * 86400, 3000))
    logits = torch.from_numpy(rng.normal(size=(3000, 2)) * 3).float()
    labels = torch.from_numpy(np.stack([rng.random(3000) < 0.3, rng.normal(size=3000)], axis=1)).float()
    labels[::7, 1] = torch.nan
    windows, closed = Windows(LABELS), []
    for part in np.array_split(np.arange(3000), 17):
        closed += windows.add(time[part], logits[part], labels[part])
    found = [*closed, *(windows.metrics(kind) for kind in ("hour", "day", "all"))]
    assert [sum(line["window"] == kind for line in found) for kind in ("hour", "day", "all")] == [72, 3, 1]
    for line in found:
        length = {"hour": 3600.0, "day": 86400.0, "all": np.inf}[line["window"]]
        begin = line.get("time", 0.0)
        rows = torch.from_numpy((time >= begin) & (time < begin + length))
        assert line["rows"] == int(rows.sum())
        like = exact(LABELS[0], logits[rows, 0], labels[rows, 0])
        assert line["ne_like"] == pytest.approx(like["ne"], rel=1e-9)
        assert line["auc_like"] == pytest.approx(like["auc"], abs=1e-2 if line["window"] == "hour" else 5e-4)
        assert line["rmse_seconds"] == pytest.approx(exact(LABELS[1], logits[rows, 1], labels[rows, 1])["rmse"])


def test_a_late_row_counts_in_the_open_window():
    windows, one = Windows([LabelSpec()]), torch.ones(2, 1)
    assert windows.add(np.array([10_000.0, 10_001.0]), one, one) == []
    assert windows.add(np.array([50.0, 10_900.0]), one, one * 0)[0]["rows"] == 3
    assert windows.metrics("hour")["rows"] == 1


def test_metrics_that_are_not_defined_are_none():
    windows = Windows([LabelSpec()])
    windows.add(np.array([1.0]), torch.ones(1, 1), torch.ones(1, 1))
    assert windows.metrics("all") == {"window": "all", "rows": 1, "ne": None, "auc": None}
