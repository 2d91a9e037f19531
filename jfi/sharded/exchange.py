"""Rows of tensors that ranks send each other."""

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.comm_ops import get_gradient_division


class Exchange(NamedTuple):
    """What each rank sends to each other one: `sent[r]` rows to rank r, `received[r]` from it.

    Attributes:
        group: the ranks.
        sent: rows to each rank.
        received: rows from each rank.
    """

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]

    @property
    def back(self) -> "Exchange":
        """The way back of what was sent."""
        return Exchange(self.group, self.received, self.sent)

    def start(self, rows: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Begins to send rows [sum(sent), ...], which lie by the rank that they go to.

        Returns:
            What arrives [sum(received), ...], by the rank that it comes from, and what to wait for before it is read.
        """
        if self.group.size() == 1:
            return rows, None
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


def gradient_scale(group: dist.ProcessGroup) -> float:
    """The factor of a table's gradient, a sum over ranks: of the rest DistributedDataParallel takes means."""
    return 1 / group.size() if get_gradient_division() else 1.0
