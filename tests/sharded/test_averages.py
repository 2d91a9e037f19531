"""Means of gradients, some of which travel during the backward pass, on two ranks of which the other has twice ours."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from jfi.sharded.averages import GradientAverages, average_gradients, current_averages


class Group:
    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


class Ranks:
    """What the ranks send each other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.sent: list[int] = []
        self.launched = 0
        monkeypatch.setattr(dist, "get_world_size", lambda group: size)
        monkeypatch.setattr(dist, "all_reduce", self._all_reduce)
        self.averages = GradientAverages(torch.device("cpu"), Group(size), 0, self._launch)

    def _launch(self) -> None:
        self.launched += 1

    def _all_reduce(self, x: Tensor, group: Group) -> None:
        self.sent.append(x.numel())
        x.mul_(3)


@pytest.fixture
def ranks(monkeypatch) -> Ranks:
    return Ranks(monkeypatch, 2)


@pytest.fixture
def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size)) for size in (2, 3, 5)]


def give(parameters: list[nn.Parameter], value: float) -> None:
    for one in parameters:
        one.grad = torch.full_like(one, value)


def known(ranks: Ranks, parameters: list[nn.Parameter]) -> None:
    """A step, after which the parameters are known."""
    with ranks.averages.step(None):
        give(parameters, 2.0)
        ranks.averages.begin()
        average_gradients(parameters)
    assert ranks.sent == [10] and all((one.grad == 3).all() for one in parameters)
    ranks.sent.clear()
    for one in parameters:
        one.grad = None


def test_gradients_that_are_ready_travel_at_once(ranks, parameters):
    known(ranks, parameters)
    with ranks.averages.step(None):
        assert current_averages() is ranks.averages
        give(parameters[:2], 2.0)
        ranks.averages.begin()
        ranks.averages.begin()  # of another attention
        assert ranks.sent == [5] and (parameters[0].grad == 2).all()
        give(parameters[2:], 4.0)
        average_gradients(parameters)
    assert ranks.sent == [5, 5] and ranks.launched == 2 and current_averages() is None
    assert [one.grad.unique().tolist() for one in parameters] == [[3], [3], [6]]


def test_what_changes_afterwards_is_averaged_again(ranks, parameters):
    known(ranks, parameters)
    with ranks.averages.step(None):
        give(parameters, 2.0)
        ranks.averages.begin()
        parameters[0].grad += 2  # a second backward pass
        parameters[1].grad = torch.full_like(parameters[1], 6.0)
        average_gradients(parameters)
    assert ranks.sent == [10, 5]
    assert [one.grad.unique().tolist() for one in parameters] == [[6], [9], [3]]


def test_a_parameter_without_a_gradient_counts_as_0(ranks, parameters):
    known(ranks, parameters)
    with ranks.averages.step(None):
        give(parameters[:1], 2.0)
        ranks.averages.begin()
        average_gradients(parameters)
    assert [one.grad.unique().tolist() for one in parameters] == [[3], [0], [0]]


def test_averages_that_nobody_takes_are_dropped(ranks, parameters):
    known(ranks, parameters)
    with ranks.averages.step(None):
        give(parameters, 2.0)
        ranks.averages.begin()
    assert all((one.grad == 2).all() for one in parameters)
    with ranks.averages.step(None):
        average_gradients(parameters)
    assert all((one.grad == 3).all() for one in parameters)


def test_one_rank_sends_nothing(monkeypatch, parameters):
    alone = Ranks(monkeypatch, 1)
    for _ in range(2):
        with alone.averages.step(None):
            give(parameters, 2.0)
            alone.averages.begin()
            average_gradients(parameters)
    assert alone.sent == [] and alone.launched == 2 and all((one.grad == 2).all() for one in parameters)


def test_dtypes_travel_apart(ranks):
    parameters = [nn.Parameter(torch.zeros(4, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    give(parameters, 2.0)
    average_gradients(parameters)
    assert ranks.sent == [4, 4] and all((one.grad == 3).all() for one in parameters)
    assert [one.grad.dtype for one in parameters] == [torch.float32, torch.bfloat16]
