"""Means over ranks of the gradients of dense parameters."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jfi.sharded.peer_memory import PeerMemory

#: Of the bytes of all gradients: once so many are there, they are averaged while the backward pass goes on.
_EARLY = 0.9
#: The lane of these averages.
_LANE = 1


class _Early(NamedTuple):
    """A gradient that was averaged during the backward pass."""

    grad: Tensor
    version: int
    mean: Tensor


class GradientAverages:
    """Averages the gradients of a step, most of them on a stream of their own while the backward pass goes on.

    As DistributedDataParallel does, but in one part: the gradients of the layers above attention are ready before its
    backward pass, and what follows has few. A gradient that changes after it was averaged is averaged again.

    Args:
        device: of the parameters.
        priority: of the stream.
    """

    def __init__(self, device: torch.device, priority: int) -> None:
        self._stream = torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None
        #: Of the last step, which the next one resembles: its parameters, and the bytes of their gradients.
        self._watched: dict[int, nn.Parameter] = {}
        self._bytes = 0.0
        self._hooked: set[int] = set()
        self._begin(None)

    def _begin(self, peers: PeerMemory | None) -> None:
        self._peers, self._is_open = peers, False
        self._ready: dict[int, nn.Parameter] = {}
        self._early: dict[int, _Early] = {}

    def begin(self, peers: PeerMemory | None) -> None:
        """Called before a step, with what it sends through, if not through the process group."""
        self._begin(peers)
        self._is_open = True

    def end(self) -> None:
        """Called after a step, even if it raised."""
        if self._early:  # nobody has asked for them: no stream may be left in a capture
            self._wait()
        self._begin(None)

    def finish(self, parameters: list[nn.Parameter]) -> None:
        """Puts the mean in the place of each gradient.

        Args:
            parameters: those that require a gradient, the same ones on every rank.
        """
        early, self._early = self._early, {}
        self._is_open = False
        rest = []
        for one in parameters:
            found = early.get(id(one))
            if found is None or one.grad is not found.grad or one.grad._version != found.version:
                rest.append(one)
        for one, mean in zip(rest, _means(rest, self._peers, lane=0), strict=True):
            one.grad = mean
        if early:
            self._wait()
        for one in parameters:
            if id(one) in early and one.grad is early[id(one)].grad:
                one.grad = early[id(one)].mean
        self._watch(parameters)

    def _watch(self, parameters: list[nn.Parameter]) -> None:
        self._watched = {id(one): one for one in parameters}
        self._bytes = sum([one.numel() * one.element_size() for one in parameters])
        for one in parameters:
            if id(one) not in self._hooked:
                self._hooked.add(id(one))
                one.register_post_accumulate_grad_hook(self._accumulated)

    @torch.no_grad()
    def _accumulated(self, parameter: nn.Parameter) -> None:
        """Called when a gradient is there."""
        if not self._is_open or self._early or id(parameter) not in self._watched:
            return
        self._ready[id(parameter)] = parameter
        ready = list(self._ready.values())
        if sum([one.numel() * one.element_size() for one in ready]) < _EARLY * self._bytes:
            return
        grads = [one.grad for one in ready]
        if self._stream is None:
            means = _means(ready, self._peers, _LANE)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                means = _means(ready, self._peers, _LANE)
        # The gradients stay until all streams have met again.
        self._early = {
            id(one): _Early(grad, grad._version, mean) for one, grad, mean in zip(ready, grads, means, strict=True)
        }

    def _wait(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def average(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Puts the mean over the ranks of a group, None for all, in the place of each gradient."""
    trained = [one for one in parameters if one.requires_grad]
    if dist.get_world_size(group) > 1:
        for one, mean in zip(trained, _means(trained, None, 0, group), strict=True):
            one.grad = mean


def _means(
    parameters: list[nn.Parameter], peers: PeerMemory | None, lane: int, group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """The mean of each gradient, in one exchange of each dtype; a parameter without one counts as 0."""
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for one in parameters:
        by_dtype.setdefault(one.dtype, []).append(one)
    found: dict[int, Tensor] = {}
    for own in by_dtype.values():
        grads = [one.new_zeros(one.shape) if one.grad is None else one.grad for one in own]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        means = None if peers is None else peers.average(flat, lane)
        if means is None:
            dist.all_reduce(flat, group=group)
            means = flat.div_(dist.get_world_size(group))
        sizes = [one.numel() for one in own]
        found |= {id(one): mean.view_as(one) for one, mean in zip(own, means.split(sizes), strict=True)}
    return [found[id(one)] for one in parameters]
