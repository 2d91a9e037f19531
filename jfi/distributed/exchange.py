"""Exchanges of rows between ranks: by the process group's all-to-all, or through peer memory.

Within the steps of fixed shapes of a CUDA graph, a rank writes what it sends to where the others read it, over NVLink,
and a barrier on the device follows: 11 µs for 2 MB to each of two GPUs, where NCCL's all-to-all takes 27 (H100). The
memory is PyTorch's symmetric memory. Each exchange of a step has an offset in it, in the order in which they are made,
so that the same step finds it again; a barrier at the beginning of a step keeps ranks from writing to what another one
still reads for the step before.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.comm_ops import get_gradient_division

from jfi.ops.push import push
from jfi.utils import compat

_ALIGNMENT = 256
#: The factor by which new memory is larger than a step needs.
_MARGIN = 1.25


class Exchange(NamedTuple):
    """An all-to-all: this rank sends `sent[r]` rows to rank r and receives `received[r]` from it.

    Attributes:
        pg: the ranks.
        sent: rows to each rank.
        received: rows from each rank.
        peers: memory through which it is sent if it fits, rather than by the group's all-to-all.
    """

    pg: dist.ProcessGroup
    sent: list[int]
    received: list[int]
    peers: "PeerMemory | None" = None

    @property
    def back(self) -> "Exchange":
        """The exchange in the opposite direction."""
        return self._replace(sent=self.received, received=self.sent)

    def send(self, rows: Tensor, shared: bool = False) -> Tensor:
        """Sends rows; the host does not wait for a GPU.

        Args:
            rows: [sum(sent), ...], in the order of the ranks that they go to; with `shared` those that each rank gets.
            shared: all ranks that receive any get the same rows.

        Returns:
            What arrives [sum(received), ...], by the rank that it comes from.
        """
        if self.pg.size() == 1:
            return rows
        if self.peers is not None:
            arrived = self.peers.send(rows, self.sent, self.received, shared)
            if arrived is not None:
                return arrived
        if shared and (count := sum(1 for sent in self.sent if sent)) != 1:
            rows = rows.unsqueeze(0).expand(count, *rows.shape).flatten(0, 1)
        arrived, rows = rows.new_empty(sum(self.received), *rows.shape[1:]), rows.contiguous()
        dist.all_to_all_single(arrived, rows, self.received, self.sent, group=self.pg, async_op=True).wait()
        return arrived


def gather(counts: Tensor, pg: dist.ProcessGroup) -> Tensor:
    """Returns the numbers [n] of every rank, [W, n]; the host does not wait for a GPU."""
    if pg.size() == 1:
        return counts.unsqueeze(0)
    gathered = counts.new_empty(pg.size(), counts.size(0))
    compat.all_gather(gathered.view(-1), counts, group=pg, async_op=True).wait()
    return gathered


def gradient_scale(pg: dist.ProcessGroup) -> float:
    """Returns the factor of a table's gradient, a sum over ranks: of the rest DistributedDataParallel takes means."""
    return 1 / pg.size() if get_gradient_division() else 1.0


class PeerMemory:
    """Memory on each rank that all of them write to.

    Args:
        pg: ranks whose GPUs can reach each other, see `are_peers`.
        device: of this rank.
    """

    def __init__(self, pg: dist.ProcessGroup, device: torch.device) -> None:
        self.pg, self._device = pg, device
        # Made in the eager step before any capture, which copies nothing from the host.
        self._ranks = cache(lambda ranks: torch.tensor(ranks, dtype=torch.int64, device=device))
        #: Memory with its handle and the addresses that kernels read; graphs may still write to all but the last.
        self._made: list[tuple[Tensor, object, Tensor]] = []
        self._used = 0
        self._grow(0)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Wraps a step; all ranks make the same exchanges within, in the same order.

        Exchanges that do not fit the memory are not made here. After an eager step it is large enough for all of its
        exchanges, so a step that is captured must come after an eager one with the same exchanges.
        """
        self._used = 0
        self._handle.barrier(channel=0)
        yield
        if self._used > self._memory.size(0) and not torch.cuda.is_current_stream_capturing():
            self._grow(self._used)

    def forget(self) -> None:
        """Frees memory from before its last growth, once all graphs are gone."""
        del self._made[:-1]

    def _grow(self, size: int) -> None:
        size = _aligned(max(1, int(size * _MARGIN)))
        self._memory, self._handle = compat.symmetric_memory(size, self._device, self.pg)
        self._addresses = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=self._device)
        self._made.append((self._memory, self._handle, self._addresses))

    def send(self, rows: Tensor, sent: list[int], received: list[int], shared: bool) -> Tensor | None:
        """Returns what arrives [sum(received), ...], valid until the end of the step; None if it does not fit.

        Args:
            rows: in the order of the ranks that they go to; with `shared` those that each of these ranks gets.
            sent: rows to each rank: equally many for all that get any, and as many as arrive from a rank.
            received: rows from each rank.
            shared: whether all ranks get the same rows.
        """
        chunk, row = max(*sent, *received), math.prod(rows.shape[1:]) * rows.element_size()
        targets, sources = ([rank for rank, count in enumerate(counts) if count] for counts in (sent, received))
        if chunk * row % 4 or any(after != before + 1 for before, after in pairwise(sources)):
            return None
        target, offset = self._ranks(tuple(targets)), self._used
        self._used += _aligned(len(sent) * chunk * row)
        if self._used > self._memory.size(0):
            return None
        push(rows.contiguous(), target, self._addresses, offset + self.pg.rank() * chunk * row, shared)
        self._handle.barrier(channel=0)
        begin = offset + (sources[0] if sources else 0) * chunk * row
        arrived = self._memory[begin : begin + len(sources) * chunk * row].view(rows.dtype)
        return arrived.view(len(sources) * chunk, *rows.shape[1:])


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def are_peers(pg: dist.ProcessGroup, device: torch.device) -> bool:
    """Returns whether the ranks' GPUs are different ones of one host that reach each other; all ranks call it."""
    own, found = device.index, [None] * pg.size()
    indices = range(torch.cuda.device_count())
    reached = {_uuid(other) for other in indices if other == own or torch.cuda.can_device_access_peer(own, other)}
    dist.all_gather_object(found, (_uuid(own), reached), group=pg)
    uuids = {uuid for uuid, _ in found}
    return len(uuids) == pg.size() and all(uuids <= reached for _, reached in found)


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
