"""All-to-all exchanges of tensors whose rows go to ranks in given numbers."""

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.comm_ops import get_gradient_division

from jfi.distributed.peer_memory import PeerMemory


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
    peers: PeerMemory | None = None

    @property
    def back(self) -> "Exchange":
        """The exchange in the opposite direction."""
        return self._replace(sent=self.received, received=self.sent)

    def start(self, rows: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Begins to send rows [sum(sent), ...], in the order of the ranks that they go to.

        Returns:
            What arrives [sum(received), ...], by the rank that it comes from, and the work to wait for.
        """
        if self.pg.size() == 1:
            return rows, None
        if self.peers is not None:
            arrived = self.peers.send(rows, self.sent, self.received, shared=False)
            if arrived is not None:
                return arrived, None
        arriving = rows.new_empty(sum(self.received), *rows.shape[1:])
        work = dist.all_to_all_single(
            arriving, rows.contiguous(), self.received, self.sent, group=self.pg, async_op=True
        )
        return arriving, work

    def send(self, rows: Tensor) -> Tensor:
        """Sends rows [sum(sent), ...] and returns what arrives [sum(received), ...]; the host does not wait."""
        arrived, work = self.start(rows)
        if work is not None:
            work.wait()
        return arrived

    def share(self, rows: Tensor) -> Tensor:
        """Sends the same rows to every rank that receives any, and returns what arrives."""
        count = sum(1 for sent in self.sent if sent)
        if self.peers is not None and self.pg.size() > 1:
            arrived = self.peers.send(rows, self.sent, self.received, shared=True)
            if arrived is not None:
                return arrived
        return self.send(rows if count == 1 else rows.unsqueeze(0).expand(count, *rows.shape).flatten(0, 1))


def gradient_scale(pg: dist.ProcessGroup) -> float:
    """Returns the factor of a table's gradient, a sum over ranks: of the rest DistributedDataParallel takes means."""
    return 1 / pg.size() if get_gradient_division() else 1.0
