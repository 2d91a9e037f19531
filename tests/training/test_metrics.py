import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jfi.training.metrics.label_metrics import Predictions, auc, normalized_entropy, user_auc


def slow_auc(scores, labels):
    """Counts the ordered pairs one by one."""
    pairs = [(a, b) for a, x in zip(scores, labels, strict=True) for b, y in zip(scores, labels, strict=True) if x > y]
    return sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs) if pairs else math.nan


def slow_user_auc(scores, labels, users):
    total = weight = 0.0
    for user in set(users):
        rows = [i for i, u in enumerate(users) if u == user]
        area = slow_auc([scores[i] for i in rows], [labels[i] for i in rows])
        if not math.isnan(area):
            total, weight = total + area * len(rows), weight + len(rows)
    return total / weight if weight else math.nan


SAMPLES = st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 1), st.integers(0, 4)), min_size=1, max_size=40)


@settings(max_examples=60)
@given(SAMPLES)
def test_areas_equal_the_count_of_pairs(samples):
    scores, labels, users = (list(column) for column in zip(*samples, strict=True))
    logits, y, u = torch.tensor(scores).double(), torch.tensor(labels).double(), torch.tensor(users)
    assert auc(logits, y) == pytest.approx(slow_auc(scores, labels), abs=1e-6, nan_ok=True)
    assert user_auc(logits, y, u) == pytest.approx(slow_user_auc(scores, labels, users), abs=1e-12, nan_ok=True)


def test_large_logits_stay_apart():
    # A sigmoid in float32 would make ties of these.
    assert auc(torch.tensor([200.0, 100.0, 50.0]), torch.tensor([1.0, 1.0, 0.0])) == 1.0


def test_loss_and_ne_equal_the_formula():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(100, generator=generator)
    labels = (torch.rand(100, generator=generator) < 0.3).float()
    seen = Predictions()
    for part in range(0, 100, 30):
        seen.add(logits[part : part + 30], labels[part : part + 30], torch.arange(100)[part : part + 30])
    metrics = seen.metrics()

    p = [1 / (1 + math.exp(-x)) for x in logits.tolist()]
    loss = -sum(math.log(q) if y else math.log(1 - q) for q, y in zip(p, labels.tolist(), strict=True)) / 100
    rate = labels.mean().item()
    base = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics["ne"] == pytest.approx(loss / base, rel=1e-6)
    assert math.isnan(metrics["user_auc"])  # every user has one sample


def test_predicting_the_mean_has_an_ne_of_one():
    assert normalized_entropy(-0.2 * math.log(0.2) - 0.8 * math.log(0.8), 0.2) == pytest.approx(1.0)
    assert math.isnan(normalized_entropy(0.5, 1.0))


def test_labels_all_equal_have_no_auc():
    assert math.isnan(auc(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0])))
