"""Means over ranks of the gradients of dense parameters."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jfi.sharded.exchange import Lane
from jfi.sharded.peer_memory import PeerMemory


class _Current(threading.local):
    """Of this thread."""

    averages: "GradientAverages | None" = None


_current = _Current()


class _Early(NamedTuple):
    """A gradient as it was before attention's backward pass."""

    grad: Tensor | None
    version: int
    mean: Tensor | None  # None if it was not averaged then


class GradientAverages:
    """Averages the dense gradients of a captured step, those that are ready before attention's backward pass beside it.

    These are all of the layers above attention and beside it, and what is left has few numbers. Which they are is
    agreed on after the first step that has a backward pass: those that were ready on all ranks before the first
    attention's and did not change afterwards. One that changes in a later step is averaged again, on all ranks alike if
    their steps do the same. Only with peer memory: the collectives of a process group run one after the other, and
    those of attention would wait.

    Args:
        parameters: the dense ones of the model.
        tables: those of its sharded collections, which have no mean.
        group: the ranks.
        device: of the parameters.
        priority: of the stream on which gradients travel beside attention.
        then: called when `average_gradients` is done.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        tables: list[nn.Parameter],
        group: dist.ProcessGroup,
        device: torch.device,
        priority: int,
        then: Callable[[], None],
    ) -> None:
        self._parameters, self._group, self._device, self._then = parameters, group, device, then
        self._tables = {id(one) for one in tables}
        self._stream = torch.cuda.Stream(device, priority=priority) if device.type == "cuda" else None
        self._peers: PeerMemory | None = None
        #: Those that are averaged early; None before that is agreed on.
        self._agreed: list[nn.Parameter] | None = None
        #: Of this step: whether attention's backward pass has begun, and `finish` was called; gradients when it began;
        #: the parameters whose gradients did not change between the two.
        self._has_begun = self._has_finished = False
        self._early: dict[int, _Early] = {}
        self._ready: set[int] = set()

    def forget(self) -> None:
        """The next step agrees anew."""
        self._agreed = None

    @contextmanager
    def step(self, peers: PeerMemory | None) -> Iterator[None]:
        """Around a step.

        Args:
            peers: what the step sends through, if not through the group.
        """
        self._peers, _current.averages = peers, self
        self._has_begun = self._has_finished = False
        self._ready = set()
        try:
            yield
            if self._agreed is None and self._has_begun and self._has_finished:
                self._agree()
        finally:
            self._peers = _current.averages = None
            early, self._early = self._early, {}
            if _is_sent(early):  # `average_gradients` was not called
                self._wait()

    def _agree(self) -> None:
        """Called after a step that is not captured."""
        ready = [id(one) in self._ready for one in self._parameters]
        ready = torch.tensor(ready, dtype=torch.int32, device=self._device)
        dist.all_reduce(ready, dist.ReduceOp.MIN, group=self._group)
        self._agreed = [one for one, is_ready in zip(self._parameters, ready.tolist(), strict=True) if is_ready]

    def begin(self) -> None:
        """Sends the gradients that are averaged early; called in each attention's backward pass."""
        if self._peers is None or self._has_begun:
            return
        self._has_begun = True
        if self._agreed is None:
            ready = [one for one in self._parameters if one.grad is not None]
            self._early = {id(one): _Early(one.grad, one.grad._version, None) for one in ready}
            return
        if not self._agreed:
            return
        grads = [one.grad for one in self._agreed]
        if self._stream is None:
            means = self._early_means(grads)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                means = self._early_means(grads)
        # The gradients are kept until the streams have met again.
        self._early = {
            id(one): _Early(grad, 0 if grad is None else grad._version, mean)
            for one, grad, mean in zip(self._agreed, grads, means, strict=True)
        }

    def _early_means(self, grads: list[Tensor | None]) -> list[Tensor]:
        given = [one.new_zeros(one.shape) if g is None else g for one, g in zip(self._agreed, grads, strict=True)]
        return _means(given, self._group, self._peers, Lane.AVERAGES)

    def finish(self, parameters: list[nn.Parameter]) -> None:
        """`average_gradients`, of parameters that all require a gradient."""
        if any(id(one) in self._tables for one in parameters):
            raise ValueError(
                "parameters must not have those of the sharded tables, which are stepped where they lie: take those of "
                "in_backward_optimizer_filter(model.named_parameters())"
            )
        self._has_finished = True
        if self._group.size() > 1:
            early = {id(one): self._early.pop(id(one)) for one in parameters if id(one) in self._early}
            same = [one for one in parameters if id(one) in early and _is_same(one, early[id(one)])]
            self._ready |= {id(one) for one in same}
            done = {id(one): early[id(one)].mean for one in same if early[id(one)].mean is not None}
            _average([one for one in parameters if id(one) not in done], self._group, self._peers)
            if _is_sent(early):
                self._wait()
            for one in parameters:
                if id(one) in done:
                    one.grad = done[id(one)]
        self._then()

    def _wait(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def _is_same(parameter: nn.Parameter, early: _Early) -> bool:
    """Whether its gradient has not changed."""
    grad = parameter.grad
    return grad is early.grad and (grad is None or grad._version == early.version)


def _is_sent(early: dict[int, _Early]) -> bool:
    """Whether gradients were averaged on another stream."""
    return any(one.mean is not None for one in early.values())


def current_averages() -> GradientAverages | None:
    """Those of the captured step that runs in this thread."""
    return _current.averages


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
    """Puts the mean over ranks in the place of each gradient.

    Within the step of a `CapturedShardedStep` they travel as all else does. With peer memory those that are ready
    before attention's backward pass travel beside it; if one changes afterwards, in a way that autograd counts, it is
    averaged again. Call it once, with all parameters: the tables' step begins after the first call. It fills the GPU,
    and would hold averages up, but leaves room for the optimizer's small kernels that have begun before.

    Args:
        parameters: the same ones on every rank; of those that require a gradient one without counts as 0.
        group: the ranks; None for all.

    Raises:
        ValueError: within such a step, a parameter is a sharded table's.
    """
    trained = [one for one in parameters if one.requires_grad]
    averages = current_averages() if group is None else None
    if averages is not None:
        averages.finish(trained)
    elif dist.get_world_size(group) > 1:
        _average(trained, group, None)


def _average(parameters: list[nn.Parameter], group: dist.ProcessGroup | None, peers: PeerMemory | None) -> None:
    grads = [one.new_zeros(one.shape) if one.grad is None else one.grad for one in parameters]
    for one, mean in zip(parameters, _means(grads, group, peers, Lane.STEP), strict=True):
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
        # With a version counter each: that of a view is its base's, and all would seem to change with one.
        found |= {id(grad): mean.view_as(grad).data for grad, mean in zip(own, parts, strict=True)}
    return [found[id(grad)] for grad in grads]
