"""Means of gradients on two ranks of which the other has twice ours."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from jfi.distributed.captured_step import average_gradients, captured_averages


class Ranks:
    """What two ranks send each other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int = 2) -> None:
        self.sent: list[int] = []
        monkeypatch.setattr(dist, "get_world_size", lambda: size)
        monkeypatch.setattr(dist, "all_reduce", self._all_reduce)

    def _all_reduce(self, x: Tensor) -> None:
        self.sent.append(x.numel())
        x.mul_(3)


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


def test_all_gradients_travel_together(ranks, parameters):
    with captured_averages(set(), {}):
        for _ in range(2):
            give(parameters[:1], 4.0)
            give(parameters[1:], 2.0)
            average_gradients(parameters)
            assert ranks.sent == [10 + 3] and values(parameters) == [[6], [3], [3]]
            ranks.sent.clear()
    give(parameters, 2.0)
    average_gradients(parameters)
    assert ranks.sent == [10 + 3] and values(parameters) == [[3], [3], [3]]


def test_gradients_that_are_kept_are_averaged_again(ranks, parameters):
    give(parameters, 0.0)
    for _ in range(3):
        with captured_averages(set(), {}):
            for one in parameters:
                one.grad.zero_()
                one.grad += 2
            average_gradients(parameters)
        assert values(parameters) == [[3], [3], [3]]


def test_two_optimizers_average_their_own(ranks, parameters):
    with captured_averages(set(), {}):
        give(parameters, 2.0)
        average_gradients(parameters[:1])
        average_gradients(parameters[1:])
    assert ranks.sent == [2 + 1, 8 + 2] and values(parameters) == [[3], [3], [3]]


def test_a_parameter_without_a_gradient_on_any_rank_has_none(ranks, parameters, monkeypatch):
    """A capture, in which nothing can be read, knows it from the eager step before it."""
    absent = {}
    for is_capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda answer=is_capturing: answer)
        with captured_averages(set(), absent):
            give(parameters, None)
            give(parameters[:1], 2.0)
            with monkeypatch.context() as patch:
                if is_capturing:
                    patch.setattr(Tensor, "tolist", None)
                average_gradients(parameters)
        assert values(parameters[:1]) == [[3]] and [one.grad for one in parameters[1:]] == [None, None]
    assert ranks.sent == 2 * [10 + 3]


def test_a_parameter_without_a_gradient_on_one_rank_counts_as_0(ranks, parameters, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda x: x.add_(1))  # of a rank that has all
    give(parameters[:1], 2.0)
    average_gradients(parameters)
    assert values(parameters) == [[1.5], [0.5], [0.5]]


def test_a_step_that_raises_leaves_nothing(ranks, parameters):
    with pytest.raises(KeyError), captured_averages(set(), {}):
        raise KeyError
    give(parameters, 2.0)
    average_gradients(parameters)
    assert ranks.sent == [10 + 3]


def test_tables_are_refused(ranks, parameters):
    table = nn.Parameter(torch.zeros(7))
    with (
        captured_averages({table}, {}),
        pytest.raises(ValueError, match="must not have those of the sharded tables"),
    ):
        average_gradients([*parameters, table])
    assert ranks.sent == []


def test_one_rank_sends_nothing(monkeypatch, parameters):
    alone = Ranks(monkeypatch, 1)
    with captured_averages(set(), {}):
        give(parameters, 2.0)
        average_gradients(parameters)
    assert alone.sent == [] and values(parameters) == [[2], [2], [2]]


def test_dtypes_travel_apart(monkeypatch):
    parameters = [nn.Parameter(torch.zeros(4, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    ranks = Ranks(monkeypatch)
    give(parameters, 2.0)
    average_gradients(parameters)
    assert ranks.sent == 2 * [4 + 1] and values(parameters) == [[3], [3]]
    assert [one.grad.dtype for one in parameters] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("size", "sent"), [(5, []), (2**21, [2**21 + 1])], ids=["few", "many"])
def test_few_gradients_travel_through_the_memory_of_peers(ranks, size, sent):
    class Peers:
        def send(self, rows: Tensor, sent: list[int], received: list[int], shared: bool) -> Tensor | None:
            assert sent == received == 2 * [rows.size(0)] and shared
            return torch.cat([rows, 2 * rows])

    parameter = nn.Parameter(torch.zeros(size))
    with captured_averages(set(), {}, Peers()):
        give([parameter], 2.0)
        average_gradients([parameter])
    assert ranks.sent == sent and values([parameter]) == [[3]]
    give([parameter], 2.0)
    average_gradients([parameter])
    assert ranks.sent == [*sent, size + 1]


def test_gradients_that_do_not_fit_the_memory_of_peers_travel_through_the_group(ranks, parameters):
    class Full:
        def send(self, *_: object, **__: object) -> None:
            return None

    with captured_averages(set(), {}, Full()):
        give(parameters, 2.0)
        average_gradients(parameters)
    assert ranks.sent == [10 + 3] and values(parameters) == [[3], [3], [3]]
