import pytest
import torch
from torchrec import JaggedTensor
from torchrec.distributed.types import LazyNoWait

from jfi import PositionBias, SequenceFeatureConfig
from jfi.modules import JaggedPooling

from .conftest import EMBEDDING_DIM, LENGTHS


@pytest.mark.parametrize("mode", ["mean", "sum"])
def test_pools_the_combined_events_and_is_zero_without_any(events, mode):
    features = [
        SequenceFeatureConfig("sum", ["history", "rating"], ["item"], bias=PositionBias()),
        SequenceFeatureConfig("concat", ["history", "rating"], ["item"], combine="concat"),
    ]
    sequences = {"history": events(), "rating": events()}
    pooling = JaggedPooling(features, EMBEDDING_DIM, mode)
    pooled = pooling(sequences)
    both = [sequences[key].values().split(LENGTHS) for key in ("history", "rating")]
    for b, length in enumerate(LENGTHS):
        divisor = max(length, 1) if mode == "mean" else 1
        fields = [field[b].sum(0) / divisor for field in both]
        torch.testing.assert_close(pooled["sum"][b], fields[0] + fields[1])
        torch.testing.assert_close(pooled["concat"][b], torch.cat(fields))
    assert pooled.values().size(1) == pooling.output_width == 3 * EMBEDDING_DIM
    gradient = torch.autograd.grad(pooled["concat"][:, 0].sum(), sequences["history"].values())[0][:, 0]
    want = [1 / n if mode == "mean" else 1 for n in LENGTHS for _ in range(n)]
    torch.testing.assert_close(gradient, torch.tensor(want).double())


@pytest.mark.parametrize("max_events", [None, 2])
def test_the_sum_is_that_of_the_events_that_a_candidate_sees(max_events):
    pooling = JaggedPooling([SequenceFeatureConfig("taste", ["history"], ["item"])], 2, "sum")
    lengths, counts = torch.tensor([3, 0, 4, 1]), torch.tensor([2, 1, 4, 0])
    # Times that are not sorted over users, ties of candidates and events, and a candidate before all events.
    event_times, target_times = [5, 7, 7, 1, 2, 2, 9, 3], [7, 8, 0, 1, 2, 3, 99]
    events = JaggedTensor(torch.randn(8, 2), lengths=lengths)
    pooled = pooling(
        {"history": events},
        {"item": JaggedTensor(torch.randn(7, 2), lengths=counts)},
        JaggedTensor(torch.tensor(target_times), lengths=counts),
        JaggedTensor(torch.tensor(event_times), lengths=lengths),
        max_events,
    )["taste"]
    users = torch.repeat_interleave(torch.arange(4), lengths)
    for row, (user, time) in enumerate(
        zip(torch.repeat_interleave(torch.arange(4), counts), target_times, strict=True)
    ):
        seen = events.values()[(users == user) & (torch.tensor(event_times) < time)]
        seen = seen if max_events is None else seen[-max_events:]
        torch.testing.assert_close(pooled[row], seen.sum(0))


def test_candidates_of_a_sharded_collection_are_ragged_too():
    pooling = JaggedPooling([SequenceFeatureConfig("taste", ["history"], ["item"])], 2)
    events = {"history": JaggedTensor(torch.randn(4, 2), lengths=torch.tensor([3, 1]))}
    candidates = {"item": JaggedTensor(torch.randn(3, 2), lengths=torch.tensor([1, 2]))}
    found = pooling(events, LazyNoWait(candidates)).values()
    torch.testing.assert_close(found, pooling(events, candidates).values())
    assert len(found) == 3


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="mode must be 'mean' or 'sum', got 'max'"):
        JaggedPooling([SequenceFeatureConfig("taste", ["history"], ["item"])], 2, "max")


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            {"item": torch.zeros(len(LENGTHS), EMBEDDING_DIM)},
            "max_events need ragged targets",
        ),
        (None, "targets must"),
    ],
)
def test_times_without_ragged_targets_are_refused(events, targets, message):
    pooling = JaggedPooling([SequenceFeatureConfig("taste", ["history"], ["item"])], EMBEDDING_DIM)
    times = JaggedTensor(torch.arange(len(LENGTHS)), lengths=torch.ones(len(LENGTHS), dtype=torch.int64))
    with pytest.raises((TypeError, ValueError), match=message):
        pooling({"history": events()}, targets, times)


def test_a_long_history_of_float16_has_a_finite_sum():
    events = JaggedTensor(torch.zeros(70_000, 2, dtype=torch.float16), lengths=torch.tensor([70_000]))
    pooling = JaggedPooling([SequenceFeatureConfig("taste", ["history"], ["item"])], 2, "sum")
    assert pooling({"history": events})["taste"].eq(0).all()
