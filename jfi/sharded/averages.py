"""Means over ranks of the gradients of dense parameters."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jfi.sharded.peer_memory import PeerMemory

#: The lane of what is sent during the backward pass.
_LANE = 1


class _Current(threading.local):
    """Those of the captured step that this thread makes."""

    averages: "GradientAverages | None" = None


_current = _Current()


class _Early(NamedTuple):
    """A gradient that was averaged during the backward pass."""

    grad: Tensor
    version: int
    mean: Tensor


class GradientAverages:
    """Averages the gradients of a step, those that are ready before attention's backward pass beside it.

    These are all of the layers above attention and beside it, and what is left has few numbers. A gradient that changes
    after it was averaged is averaged again.

    Args:
        device: of the parameters.
        group: the ranks.
        priority: of the stream on which gradients travel beside attention.
        then: called when all are averaged.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup, priority: int, then: Callable[[], None]) -> None:
        self._group, self._then, self._peers = group, then, None
        self._stream = torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None
        #: Of the last step.
        self._parameters: list[nn.Parameter] = []
        self._early: dict[int, _Early] = {}

    @contextmanager
    def step(self, peers: PeerMemory | None) -> Iterator[None]:
        """Around a step, with what it sends through, if not through the group."""
        self._peers, _current.averages = peers, self
        try:
            yield
        finally:
            _current.averages = None
            if self._early:  # `average_gradients` was not called
                self._wait()
                self._early = {}

    def begin(self) -> None:
        """Sends the gradients that are there, of the parameters of the step before; once in a step."""
        if self._early or self._group.size() == 1:
            return
        ready = [one for one in self._parameters if one.grad is not None]
        if not ready:
            return
        grads = [one.grad for one in ready]
        if self._stream is None:
            means = _means(grads, self._group, self._peers, _LANE)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                means = _means(grads, self._group, self._peers, _LANE)
        # The gradients stay until the streams have met again.
        self._early = {
            id(one): _Early(grad, grad._version, mean) for one, grad, mean in zip(ready, grads, means, strict=True)
        }

    def finish(self, parameters: list[nn.Parameter]) -> None:
        """Puts the mean in the place of the gradient of each parameter, which all require one."""
        if self._group.size() > 1:
            early, rest, self._parameters = self._early, [], parameters
            for one in parameters:
                sent = early.get(id(one))
                if sent is None or one.grad is not sent.grad or one.grad._version != sent.version:
                    rest.append(one)
            _average(rest, self._group, self._peers)
            if early:
                self._wait()
            for one in parameters:
                if id(one) in early and one.grad is early[id(one)].grad:
                    one.grad = early[id(one)].mean
            self._early = {}
        self._then()

    def _wait(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def current_averages() -> GradientAverages | None:
    """Those of the captured step that this thread makes."""
    return _current.averages


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
    """Puts the mean over ranks in the place of each gradient.

    Within the step of a `CapturedShardedStep` they travel as all else does, and those that are ready before attention's
    backward pass travel beside it. The tables' step begins after all of them: it fills the GPU, and would hold them up,
    but leaves room for the optimizer's small kernels that have begun before.

    Args:
        parameters: the same ones on every rank; of those that require a gradient one without counts as 0.
        group: the ranks; None for all.
    """
    trained = [one for one in parameters if one.requires_grad]
    averages = current_averages() if group is None else None
    if averages is not None:
        averages.finish(trained)
    elif dist.get_world_size(group) > 1:
        _average(trained, group, None)


def _average(parameters: list[nn.Parameter], group: dist.ProcessGroup | None, peers: PeerMemory | None) -> None:
    grads = [one.new_zeros(one.shape) if one.grad is None else one.grad for one in parameters]
    for one, mean in zip(parameters, _means(grads, group, peers, lane=0), strict=True):
        one.grad = mean


def _means(grads: list[Tensor], group: dist.ProcessGroup | None, peers: PeerMemory | None, lane: int) -> list[Tensor]:
    """The mean of each gradient, in one exchange of each dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        by_dtype.setdefault(grad.dtype, []).append(grad)
    found: dict[int, Tensor] = {}
    for own in by_dtype.values():
        means = None if peers is None else peers.average(own, lane)
        if means is None:
            means = torch.cat([grad.reshape(-1) for grad in own])
            dist.all_reduce(means, group=group)
            means /= dist.get_world_size(group)
        parts = means.split([grad.numel() for grad in own])
        found |= {id(grad): mean.view_as(grad) for grad, mean in zip(own, parts, strict=True)}
    return [found[id(grad)] for grad in grads]
