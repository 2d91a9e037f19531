"""Counts the bytes that a process sends to others through torch.distributed's Python functions and peer memory.

DistributedDataParallel's all-reduces of the dense parameters are made in C++ and are not among them: they are the same
for every way to exchange rows, and do not depend on the batch.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from jfi.distributed.exchange import PeerMemory


class SentBytes:
    """Counts within a `with` block, by collective.

    Attributes:
        sent: bytes that left this process, by the collective's name.
        calls: how often each was called.

    Example:
        >>> with SentBytes() as counted:
        ...     pass
        >>> counted.total
        0
    """

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.sent.values())

    def __enter__(self) -> "SentBytes":
        self._patches = ExitStack()
        for name, leaving in _LEAVING.items():
            self._patches.enter_context(mock.patch.object(dist, name, self._counted(name, leaving)))
        self._patches.enter_context(mock.patch.object(PeerMemory, "send", self._counted_to_peers()))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _counted_to_peers(self) -> Callable:
        original = PeerMemory.send

        def send(memory: PeerMemory, rows: Tensor, sent: list[int], *args: object, **kwargs: object) -> Tensor | None:
            made = original(memory, rows, sent, *args, **kwargs)
            if made is not None:
                self.sent["peer_memory"] += _bytes(rows[:1]) * (sum(sent) - sent[memory.pg.rank()])
                self.calls["peer_memory"] += 1
            return made

        return send

    def _counted(self, name: str, leaving: Callable[..., int]) -> Callable:
        original = getattr(dist, name)

        def call(*args: object, **kwargs: object) -> object:
            self.sent[name] += leaving(*args, **kwargs)
            self.calls[name] += 1
            return original(*args, **kwargs)

        return call


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _all_to_all(
    output: Tensor, input: Tensor, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
) -> int:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if not input_split_sizes:
        return _bytes(input) * (size - 1) // size
    row = _bytes(input) // max(1, input.shape[0])
    return row * (sum(input_split_sizes) - input_split_sizes[rank])


def _all_gather(output: Tensor, input: Tensor, group=None, async_op=False) -> int:
    return _bytes(input) * (dist.get_world_size(group) - 1)


def _reduce_scatter(output: Tensor, input: Tensor | list[Tensor], op=None, group=None, async_op=False) -> int:
    size, parts = dist.get_world_size(group), input if isinstance(input, list) else [input]
    return sum(_bytes(part) for part in parts) * (size - 1) // size


def _all_reduce(tensor: Tensor, op=None, group=None, async_op=False) -> int:
    size = dist.get_world_size(group)
    return 2 * _bytes(tensor) * (size - 1) // size


_LEAVING = {
    "all_to_all_single": _all_to_all,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
}
