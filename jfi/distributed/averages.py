"""Means over ranks of the gradients of dense parameters."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import nn

from jfi.distributed.exchange import PeerMemory

#: The ranks of the captured step that runs, their peer memory, and the parameters of its tables.
_step: ContextVar[tuple[dist.ProcessGroup, PeerMemory | None, set[nn.Parameter]] | None]
_step = ContextVar("step", default=None)


@contextmanager
def captured_averages(
    group: dist.ProcessGroup, peers: PeerMemory | None, tables: Iterable[nn.Parameter]
) -> Iterator[None]:
    """Lets `average_gradients` within the block send through peer memory, if there is any, and refuse the tables."""
    token = _step.set((group, peers, set(tables)))
    try:
        yield
    finally:
        _step.reset(token)


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
    """Replaces each gradient by its mean over the ranks, in one all-reduce of each dtype.

    Within the step of a `CapturedShardedStep` they travel as all else does, through peer memory where there is any.

    Args:
        parameters: the same ones on every rank; of those that require a gradient one without counts as 0.
        group: the ranks; None for all.

    Raises:
        ValueError: within such a step, a parameter is a sharded table's.
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    peers, step = None, _step.get()
    if group is None and step is not None:
        group, peers, tables = step
        if not tables.isdisjoint(parameters):
            raise ValueError(
                "parameters must not have those of the sharded tables, which are stepped where they lie: take those of "
                "in_backward_optimizer_filter(model.named_parameters())"
            )
    if dist.get_world_size(group) == 1:
        return
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for alike in by_dtype.values():
        grads = [x.new_zeros(x.shape) if x.grad is None else x.grad for x in alike]
        means = None if peers is None else peers.average(grads)
        if means is None:
            means = torch.cat([grad.reshape(-1) for grad in grads])
            dist.all_reduce(means, group=group)
            means /= dist.get_world_size(group)
        for parameter, mean in zip(alike, means.split([grad.numel() for grad in grads]), strict=True):
            parameter.grad = mean.view_as(parameter)
