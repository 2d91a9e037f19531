"""Means over ranks of the gradients of dense parameters."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import nn

from jfi.distributed.exchange import PeerMemory

#: By the parameters without a gradient on this rank, those of them that no rank has one of.
Absent = dict[tuple[nn.Parameter, ...], list[nn.Parameter]]
#: Of the captured step that runs: its ranks, their peer memory, the parameters of its tables, what eager steps found.
_step: ContextVar[tuple[dist.ProcessGroup, PeerMemory | None, set[nn.Parameter], Absent] | None]
_step = ContextVar("step", default=None)


@contextmanager
def captured_averages(
    group: dist.ProcessGroup,
    peers: PeerMemory | None,
    tables: Iterable[nn.Parameter],
    absent: Absent | None = None,
) -> Iterator[None]:
    """Lets `average_gradients` within the block send through peer memory, if there is any, and refuse the tables.

    A capture, which must not read what the ranks send, takes `absent` from the eager step before it.
    """
    token = _step.set((group, peers, set(tables), {} if absent is None else absent))
    try:
        yield
    finally:
        _step.reset(token)


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
    """Replaces each gradient by its mean over the ranks, in one all-reduce of each dtype.

    Within the step of a `CapturedShardedStep` they travel as all else does, through peer memory where there is any.

    Args:
        parameters: the same ones on every rank. One without a gradient counts as 0 where another rank has one, and is
            left without one where none has, as DistributedDataParallel leaves it. A rank that lacks a gradient waits
            for the device to learn which.
        group: the ranks; None for all.

    Raises:
        ValueError: within such a step, a parameter is a sharded table's.
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    known: Absent = {}
    peers, step = None, _step.get()
    if group is None and step is not None:
        group, peers, tables, known = step
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
        lacking = [index for index, parameter in enumerate(alike) if parameter.grad is None]
        has = grads[0].new_ones(len(alike))  # sent along: ranks that lack none need not look
        for index in lacking:
            has[index].zero_()
        grads.append(has)
        means = None if peers is None else peers.average(grads)
        if means is None:
            means = torch.cat([grad.reshape(-1) for grad in grads])
            dist.all_reduce(means, group=group)
            means /= dist.get_world_size(group)
        *by_parameter, has = means.split([grad.numel() for grad in grads])
        for parameter, mean in zip(alike, by_parameter, strict=True):
            parameter.grad = mean.view_as(parameter)
        if not lacking:
            continue
        key = tuple([alike[index] for index in lacking])
        if key not in known or not torch.cuda.is_current_stream_capturing():
            shares = has.tolist()
            known[key] = [alike[index] for index in lacking if not shares[index]]
        for parameter in known[key]:
            parameter.grad = None
