import pytest
import torch
from torchrec import JaggedTensor

from jfi import PositionBias, SequenceFeatureConfig
from jfi.modules import JaggedMeanPooling

from .conftest import EMBEDDING_DIM, LENGTHS


def test_is_the_mean_of_the_combined_events_and_zero_without_any(events):
    features = [
        SequenceFeatureConfig("sum", ["history", "rating"], ["item"], bias=PositionBias()),
        SequenceFeatureConfig("concat", ["history", "rating"], ["item"], combine="concat"),
    ]
    sequences = {"history": events(), "rating": events()}
    pooling = JaggedMeanPooling(features, EMBEDDING_DIM)
    pooled = pooling(sequences)
    both = [sequences[key].values().split(LENGTHS) for key in ("history", "rating")]
    for b, length in enumerate(LENGTHS):
        means = [field[b].mean(0) if length else torch.zeros(EMBEDDING_DIM).double() for field in both]
        torch.testing.assert_close(pooled["sum"][b], means[0] + means[1])
        torch.testing.assert_close(pooled["concat"][b], torch.cat(means))
    assert pooled.values().size(1) == pooling.output_width == 3 * EMBEDDING_DIM
    gradient = torch.autograd.grad(pooled["concat"][:, 0].sum(), sequences["history"].values())[0][:, 0]
    torch.testing.assert_close(gradient, torch.tensor([1 / n for n in LENGTHS for _ in range(n)]).double())


@pytest.mark.parametrize(
    ("targets", "message"),
    [({"item": torch.zeros(len(LENGTHS), EMBEDDING_DIM)}, "target_times needs ragged targets"), (None, "targets must")],
)
def test_times_without_ragged_targets_are_refused(events, targets, message):
    pooling = JaggedMeanPooling([SequenceFeatureConfig("taste", ["history"], ["item"])], EMBEDDING_DIM)
    times = JaggedTensor(torch.arange(len(LENGTHS)), lengths=torch.ones(len(LENGTHS), dtype=torch.int64))
    with pytest.raises((TypeError, ValueError), match=message):
        pooling({"history": events()}, targets, times)
