"""Means of gradients, some of which travel during the backward pass, on two ranks of which the other has twice ours."""

import pytest
import torch
import torch.distributed as dist
from recorded_streams import Streams
from torch import Tensor, nn

from jfi.sharded.averages import GradientAverages, average_gradients, current_averages
from jfi.sharded.exchange import Lane


class Group:
    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


class Ranks:
    """What two ranks send each other; also in the place of their peer memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, parameters: list[nn.Parameter], size: int = 2) -> None:
        self.sent: list[tuple[int, int]] = []
        self.launched = 0
        #: Of the first step, the parameters whose gradients are ready on the other rank.
        self.others = [1] * len(parameters)
        monkeypatch.setattr(dist, "get_world_size", lambda group: size)
        monkeypatch.setattr(dist, "all_reduce", self._all_reduce)
        self.table = nn.Parameter(torch.zeros(7))
        self.averages = GradientAverages(parameters, [self.table], Group(size), torch.device("cpu"), 0, self._launch)

    def _launch(self) -> None:
        self.launched += 1

    def _all_reduce(self, x: Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM, group: Group | None = None) -> None:
        if op == dist.ReduceOp.MIN:
            x.mul_(torch.tensor(self.others))
        else:
            self.sent.append((x.numel(), Lane.STEP))
            x.mul_(3)

    def average(self, numbers: list[Tensor], lane: int) -> Tensor:
        flat = torch.cat([one.reshape(-1) for one in numbers])
        self.sent.append((flat.numel(), lane))
        return flat * 1.5


@pytest.fixture
def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size)) for size in (2, 3, 5)]


@pytest.fixture
def ranks(monkeypatch, parameters) -> Ranks:
    return Ranks(monkeypatch, parameters)


def give(parameters: list[nn.Parameter], value: float) -> None:
    for one in parameters:
        one.grad = torch.full_like(one, value)


def begin_with(ranks: Ranks, parameters: list[nn.Parameter], ready: int) -> None:
    """The first step, in which so many gradients are ready before attention's backward pass."""
    with ranks.averages.step(ranks):
        give(parameters[:ready], 2.0)
        ranks.averages.begin()
        give(parameters[ready:], 2.0)
        average_gradients(parameters)
    assert ranks.sent == [(10, Lane.STEP)] and all((one.grad == 3).all() for one in parameters)
    ranks.sent.clear()
    for one in parameters:
        one.grad = None


def values(parameters: list[nn.Parameter]) -> list[list[float]]:
    return [one.grad.unique().tolist() for one in parameters]


def test_gradients_that_are_ready_travel_at_once(ranks, parameters):
    begin_with(ranks, parameters, 2)
    for _ in range(2):
        with ranks.averages.step(ranks):
            assert current_averages() is ranks.averages
            for one in parameters:
                one.grad = None
            give(parameters[:2], 2.0)
            ranks.averages.begin()
            ranks.averages.begin()  # of another attention
            assert ranks.sent == [(5, Lane.AVERAGES)] and (parameters[0].grad == 2).all()
            give(parameters[2:], 4.0)
            average_gradients(parameters)
        assert ranks.sent == [(5, Lane.AVERAGES), (5, Lane.STEP)] and current_averages() is None
        assert values(parameters) == [[3], [3], [6]]
        ranks.sent.clear()
    assert ranks.launched == 3


def test_only_what_is_ready_on_all_ranks_travels_at_once(ranks, parameters):
    ranks.others = [0, 1, 1]
    begin_with(ranks, parameters, 2)
    with ranks.averages.step(ranks):
        give(parameters, 2.0)
        ranks.averages.begin()
        average_gradients(parameters)
    assert ranks.sent == [(3, Lane.AVERAGES), (7, Lane.STEP)] and values(parameters) == [[3], [3], [3]]


def test_what_changes_afterwards_is_averaged_again(ranks, parameters):
    begin_with(ranks, parameters, 3)
    with ranks.averages.step(ranks):
        give(parameters, 2.0)
        ranks.averages.begin()
        parameters[0].grad += 2  # a second backward pass
        parameters[1].grad = torch.full_like(parameters[1], 6.0)
        average_gradients(parameters)
    assert ranks.sent == [(10, Lane.AVERAGES), (5, Lane.STEP)] and values(parameters) == [[6], [9], [3]]


@pytest.mark.parametrize("changed", [0, 1, 3])
def test_streams_meet_before_the_step_ends(ranks, parameters, changed, monkeypatch):
    """Else a capture would fail."""
    begin_with(ranks, parameters, 3)
    met = []
    monkeypatch.setattr(ranks.averages, "_wait", lambda: met.append(len(ranks.sent)))
    with ranks.averages.step(ranks):
        give(parameters, 2.0)
        ranks.averages.begin()
        give(parameters[:changed], 4.0)
        average_gradients(parameters)
    assert met == [1 + (changed > 0)]


def test_gradients_that_are_kept_and_added_to_travel_once(ranks, parameters):
    """From the first step on; the last one is added to after attention."""
    give(parameters, 0.0)
    for step in range(3):
        with ranks.averages.step(ranks):
            for one in parameters:
                one.grad.zero_()
            for one in parameters[:2]:
                one.grad += 2
            ranks.averages.begin()
            parameters[2].grad += 4
            average_gradients(parameters)
        assert ranks.sent == ([(5, Lane.AVERAGES), (5, Lane.STEP)] if step else [(10, Lane.STEP)])
        assert values(parameters) == [[3], [3], [6]]
        ranks.sent.clear()


def test_what_becomes_ready_between_two_attentions_travels_once(ranks, parameters):
    for step in range(3):
        with ranks.averages.step(ranks):
            for one in parameters:
                one.grad = None
            for number, one in enumerate(parameters):
                one.grad = torch.full_like(one, 2.0)
                if number < 2:
                    ranks.averages.begin()
            average_gradients(parameters)
        assert ranks.sent == ([(2, Lane.AVERAGES), (8, Lane.STEP)] if step else [(10, Lane.STEP)])
        ranks.sent.clear()


def test_a_step_without_a_backward_pass_agrees_on_nothing(ranks, parameters):
    with ranks.averages.step(ranks):
        pass
    begin_with(ranks, parameters, 2)
    ranks.averages.forget()
    begin_with(ranks, parameters, 3)
    with ranks.averages.step(ranks):
        give(parameters, 2.0)
        ranks.averages.begin()
        average_gradients(parameters)
    assert ranks.sent == [(10, Lane.AVERAGES)]


def test_early_averages_run_on_a_stream_of_their_own(ranks, parameters, monkeypatch):
    streams = Streams(monkeypatch)
    ranks.averages._stream = streams.make("early")
    begin_with(ranks, parameters, 2)
    assert streams.log == []
    average = ranks.average
    ranks.average = lambda *given: (streams.log.append(f"average on {streams.current.name}"), average(*given))[1]
    with ranks.averages.step(ranks):
        give(parameters, 2.0)
        ranks.averages.begin()
        average_gradients(parameters)
    met = ["early waits for main", "average on early"]
    assert streams.log == [*met, "average on main", "main waits for early"]
    streams.log.clear()
    with ranks.averages.step(ranks):
        ranks.averages.begin()
    assert streams.log == [*met, "main waits for early"]


def test_two_optimizers_average_their_own(ranks, parameters):
    with ranks.averages.step(ranks):
        give(parameters, 2.0)
        ranks.averages.begin()
        average_gradients(parameters[:1])
        average_gradients(parameters[1:])
    ranks.sent.clear()
    with ranks.averages.step(ranks):
        give(parameters, 2.0)
        ranks.averages.begin()
        average_gradients(parameters[:1])
        average_gradients(parameters[1:])
    assert ranks.sent == [(10, Lane.AVERAGES)] and values(parameters) == [[3], [3], [3]]


def test_a_parameter_without_a_gradient_counts_as_0(ranks, parameters):
    begin_with(ranks, parameters, 2)
    with ranks.averages.step(ranks):
        give(parameters[:1], 2.0)
        ranks.averages.begin()
        average_gradients(parameters)
    assert ranks.sent == [(5, Lane.AVERAGES), (5, Lane.STEP)] and values(parameters) == [[3], [0], [0]]


def test_averages_that_nobody_takes_are_dropped(ranks, parameters):
    begin_with(ranks, parameters, 3)
    with ranks.averages.step(ranks):
        give(parameters, 2.0)
        ranks.averages.begin()
    with pytest.raises(KeyError), ranks.averages.step(ranks):
        ranks.averages.begin()
        raise KeyError
    assert values(parameters) == [[2], [2], [2]] and current_averages() is None
    give(parameters, 4.0)
    with ranks.averages.step(ranks):
        average_gradients(parameters)
    assert values(parameters) == [[6], [6], [6]]


def test_nothing_travels_at_once_through_the_group(ranks, parameters):
    begin_with(ranks, parameters, 3)
    with ranks.averages.step(None):
        give(parameters, 2.0)
        ranks.averages.begin()
        assert ranks.sent == []
        average_gradients(parameters)
    assert ranks.sent == [(10, Lane.STEP)] and values(parameters) == [[3], [3], [3]]


def test_tables_are_refused(ranks, parameters):
    with ranks.averages.step(ranks), pytest.raises(ValueError, match="must not have those of the sharded tables"):
        average_gradients([*parameters, ranks.table])
    assert ranks.sent == []


def test_one_rank_sends_nothing(monkeypatch, parameters):
    alone = Ranks(monkeypatch, parameters, 1)
    for _ in range(2):
        with alone.averages.step(None):
            give(parameters, 2.0)
            alone.averages.begin()
            average_gradients(parameters)
    assert alone.sent == [] and alone.launched == 2 and values(parameters) == [[2], [2], [2]]


def test_dtypes_travel_apart(monkeypatch):
    parameters = [nn.Parameter(torch.zeros(4, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    ranks = Ranks(monkeypatch, parameters)
    give(parameters, 2.0)
    average_gradients(parameters)
    assert ranks.sent == 2 * [(4, Lane.STEP)] and values(parameters) == [[3], [3]]
    assert [one.grad.dtype for one in parameters] == [torch.float32, torch.bfloat16]
