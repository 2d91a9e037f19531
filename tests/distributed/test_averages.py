"""Means of gradients on two ranks of which the other has twice ours."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from jfi.distributed.averages import average_gradients, captured_averages


class Group:
    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


class Ranks:
    """What two ranks send each other; also in the place of their peer memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int = 2) -> None:
        self.sent: list[tuple[str, int]] = []
        self.group = Group(size)
        monkeypatch.setattr(dist, "get_world_size", lambda group: size)
        monkeypatch.setattr(dist, "all_reduce", self._all_reduce)

    def _all_reduce(self, x: Tensor, group: Group | None = None) -> None:
        self.sent.append(("group", x.numel()))
        x.mul_(3)

    def average(self, numbers: list[Tensor]) -> Tensor:
        flat = torch.cat([one.reshape(-1) for one in numbers])
        self.sent.append(("peers", flat.numel()))
        return flat * 1.5


@pytest.fixture
def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size)) for size in (2, 3, 5)]


@pytest.fixture
def ranks(monkeypatch) -> Ranks:
    return Ranks(monkeypatch)


def give(parameters: list[nn.Parameter], value: float | None) -> None:
    for one in parameters:
        one.grad = None if value is None else torch.full_like(one, value)


def values(parameters: list[nn.Parameter]) -> list[list[float]]:
    return [one.grad.unique().tolist() for one in parameters]


@pytest.mark.parametrize("way", ["peers", "group"])
def test_all_gradients_travel_together(ranks, parameters, way):
    with captured_averages(ranks.group, ranks if way == "peers" else None, []):
        for _ in range(2):
            give(parameters[:1], 4.0)
            give(parameters[1:], 2.0)
            average_gradients(parameters)
            assert ranks.sent == [(way, 10 + 3)] and values(parameters) == [[6], [3], [3]]
            ranks.sent.clear()
    give(parameters, 2.0)
    average_gradients(parameters)
    assert ranks.sent == [("group", 10 + 3)] and values(parameters) == [[3], [3], [3]]


def test_gradients_that_are_kept_are_averaged_again(ranks, parameters):
    give(parameters, 0.0)
    for _ in range(3):
        with captured_averages(ranks.group, ranks, []):
            for one in parameters:
                one.grad.zero_()
                one.grad += 2
            average_gradients(parameters)
        assert values(parameters) == [[3], [3], [3]]


def test_two_optimizers_average_their_own(ranks, parameters):
    with captured_averages(ranks.group, ranks, []):
        give(parameters, 2.0)
        average_gradients(parameters[:1])
        average_gradients(parameters[1:])
    assert ranks.sent == [("peers", 2 + 1), ("peers", 8 + 2)] and values(parameters) == [[3], [3], [3]]


def test_a_parameter_without_a_gradient_on_any_rank_has_none(ranks, parameters, monkeypatch):
    """A capture, in which nothing can be read, knows it from the eager step before it."""
    absent = {}
    for is_capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda answer=is_capturing: answer)
        with captured_averages(ranks.group, ranks, [], absent):
            give(parameters, None)
            give(parameters[:1], 2.0)
            with monkeypatch.context() as patch:
                if is_capturing:
                    patch.setattr(Tensor, "tolist", None)
                average_gradients(parameters)
        assert values(parameters[:1]) == [[3]] and [one.grad for one in parameters[1:]] == [None, None]
    assert ranks.sent == 2 * [("peers", 10 + 3)]


def test_a_parameter_without_a_gradient_on_one_rank_counts_as_0(ranks, parameters, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: x.add_(1))  # of a rank that has all
    give(parameters[:1], 2.0)
    average_gradients(parameters)
    assert values(parameters) == [[1.5], [0.5], [0.5]]


def test_a_step_that_raises_leaves_nothing(ranks, parameters):
    with pytest.raises(KeyError), captured_averages(ranks.group, ranks, []):
        raise KeyError
    give(parameters, 2.0)
    average_gradients(parameters)
    assert ranks.sent == [("group", 10 + 3)]


def test_tables_are_refused(ranks, parameters):
    table = nn.Parameter(torch.zeros(7))
    with (
        captured_averages(ranks.group, ranks, [table]),
        pytest.raises(ValueError, match="must not have those of the sharded tables"),
    ):
        average_gradients([*parameters, table])
    assert ranks.sent == []


def test_one_rank_sends_nothing(monkeypatch, parameters):
    alone = Ranks(monkeypatch, 1)
    with captured_averages(alone.group, None, []):
        give(parameters, 2.0)
        average_gradients(parameters)
    assert alone.sent == [] and values(parameters) == [[2], [2], [2]]


def test_dtypes_travel_apart(monkeypatch):
    parameters = [nn.Parameter(torch.zeros(4, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    ranks = Ranks(monkeypatch)
    give(parameters, 2.0)
    average_gradients(parameters)
    assert ranks.sent == 2 * [("group", 4 + 1)] and values(parameters) == [[3], [3]]
    assert [one.grad.dtype for one in parameters] == [torch.float32, torch.bfloat16]
