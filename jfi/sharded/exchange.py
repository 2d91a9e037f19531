"""Rows of tensors that ranks send each other."""

from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.comm_ops import get_gradient_division


class Transport(Protocol):
    """A faster way for exchanges that it can make, such as `jfi.sharded.peer_memory.PeerMemory`."""

    def send(self, rows: Tensor, sent: list[int], received: list[int], shared: bool) -> Tensor | None:
        """What arrives, or None if this exchange is not for it, on all ranks alike."""


class Exchange(NamedTuple):
    """What each rank sends to each other one: `sent[r]` rows to rank r, `received[r]` from it.

    Attributes:
        group: the ranks.
        sent: rows to each rank.
        received: rows from each rank.
        transport: tried before the group's own all-to-all.
    """

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]
    transport: Transport | None = None

    @property
    def back(self) -> "Exchange":
        """The way back of what was sent."""
        return self._replace(sent=self.received, received=self.sent)

    def start(self, rows: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Begins to send rows [sum(sent), ...], which lie by the rank that they go to.

        Returns:
            What arrives [sum(received), ...], by the rank that it comes from, and what to wait for before it is read.
        """
        if self.group.size() == 1:
            return rows, None
        if self.transport is not None:
            arrived = self.transport.send(rows, self.sent, self.received, shared=False)
            if arrived is not None:
                return arrived, None
        arriving = rows.new_empty(sum(self.received), *rows.shape[1:])
        work = dist.all_to_all_single(
            arriving, rows.contiguous(), self.received, self.sent, group=self.group, async_op=True
        )
        return arriving, work

    def send(self, rows: Tensor) -> Tensor:
        """What arrives [sum(received), ...] of rows [sum(sent), ...]; the stream waits for it, the host does not."""
        arrived, work = self.start(rows)
        if work is not None:
            work.wait()
        return arrived

    def share(self, rows: Tensor) -> Tensor:
        """What arrives of the same rows, sent to every rank that gets any."""
        count = sum(1 for sent in self.sent if sent)
        if self.transport is not None and self.group.size() > 1:
            arrived = self.transport.send(rows, self.sent, self.received, shared=True)
            if arrived is not None:
                return arrived
        return self.send(rows if count == 1 else rows.unsqueeze(0).expand(count, *rows.shape).flatten(0, 1))


def gradient_scale(group: dist.ProcessGroup) -> float:
    """The factor of a table's gradient, a sum over ranks: of the rest DistributedDataParallel takes means."""
    return 1 / group.size() if get_gradient_division() else 1.0
