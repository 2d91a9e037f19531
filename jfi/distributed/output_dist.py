"""The output dist: rows that owners send to the ranks of the samples that read them, and replicated tables."""

import torch
import torch.distributed as dist
from torch import Tensor

from jfi.distributed.exchange import gradient_scale
from jfi.distributed.input_dist import GroupInput
from jfi.distributed.planning import RowSharding
from jfi.tables.gather_rows import gather_bounded
from jfi.utils.context import once_differentiable


def fetch_rows(handle: Tensor, memory: Tensor, arrived: GroupInput) -> list[Tensor]:
    """Returns the rows [S, D] of each sequence of a table group; all ranks call it together.

    Args:
        handle: [R, D], a zero-stride placeholder of the dtype that is sent; its gradient is that of the owner's rows.
        memory: [M, D], the rows that this rank owns.
        arrived: the rows that are requested of this rank.
    """
    return list(_Fetch.apply(handle, memory, arrived).split(arrived.sizes))


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, handle: Tensor, memory: Tensor, arrived: GroupInput) -> Tensor:
        ctx.arrived = arrived
        rows = gather_bounded((memory,), (arrived.columns[0],), handle.dtype)
        return arrived.events.back.send(rows).index_select(0, arrived.slots.clamp(min=0))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        events = ctx.arrived.events
        grad, count = grad * gradient_scale(events.pg), sum(events.sent)
        sent = grad.new_zeros(count + 1, grad.size(1))  # the last row is for padding, whose slot is -1
        sent.index_copy_(0, ctx.arrived.slots.remainder(count + 1), grad)
        return events.send(sent[:count]), None, None


def copy_tables(
    memory: Tensor, pg: dist.ProcessGroup, shardings: list[RowSharding], ids: list[tuple[RowSharding, Tensor]]
) -> tuple[list[Tensor], Tensor]:
    """Returns whole tables [N, D] on every rank, and [r] bool, True for rows of this rank that some rank reads.

    Rows and marks travel in one all-reduce. The r rows are those that this rank owns, table by table.

    Args:
        memory: [M, D], the rows that this rank owns.
        pg: all ranks.
        shardings: of the tables.
        ids: the ids [S] that this rank reads, each tensor with the sharding of its table; -1 is no row.
    """
    sizes, width = [sharding.num_rows for sharding in shardings], memory.size(1)
    count = sum(sizes) * width
    buffer = memory.new_zeros(count + sum(sizes) + len(sizes))  # the last mark of a table is for ids of -1
    tables = list(buffer[:count].view(-1, width).split(sizes))
    marks = dict(zip(shardings, buffer[count:].split([size + 1 for size in sizes]), strict=True))
    owned = [sharding.owned_by(pg.rank()) for sharding in shardings]
    for table, (rows, positions) in zip(tables, owned, strict=True):
        table[rows.start : rows.stop] = memory[positions.start : positions.stop]
    for sharding, requested in ids:
        marks[sharding].index_fill_(0, requested.long(), 1)
    if pg.size() > 1:
        dist.all_reduce(buffer, group=pg)
    counts = [mark[rows.start : rows.stop] for mark, (rows, _) in zip(marks.values(), owned, strict=True)]
    return tables, torch.cat(counts) > 0


class Replicate(torch.autograd.Function):
    """Gives whole tables of `copy_tables` their gradients, the sums of all ranks'.

    They travel in one all-reduce, whose order of summation is fixed, as is that of each rank's gradients. These have
    the scale of tables already, see `scaled`, and the tables' dtype, in which they are summed.

    Args:
        handle: [r, D], a zero-stride placeholder of the tables' rows that this rank owns, table by table.
        pg: all ranks.
        shardings: of the tables.
        tables: [N, D] each.
    """

    @staticmethod
    def forward(
        ctx, handle: Tensor, pg: dist.ProcessGroup, shardings: list[RowSharding], *tables: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.pg, ctx.sizes, ctx.dtype = pg, [len(table) for table in tables], handle.dtype
        ctx.rows = [sharding.owned_by(pg.rank())[0] for sharding in shardings]
        ctx.set_materialize_grads(False)
        return tuple([table.view_as(table) for table in tables])

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        like = next(grad for grad in grads if grad is not None)
        whole = [like.new_zeros(n, like.size(1)) if g is None else g for g, n in zip(grads, ctx.sizes, strict=True)]
        whole = torch.cat(whole)
        if ctx.pg.size() > 1:
            dist.all_reduce(whole, group=ctx.pg)
        owned = [grad[rows.start : rows.stop] for grad, rows in zip(whole.split(ctx.sizes), ctx.rows, strict=True)]
        return torch.cat(owned).to(ctx.dtype), None, None, *([None] * len(grads))


def scaled(table: Tensor, pg: dist.ProcessGroup) -> Tensor:
    """Returns a replicated table for this rank's own samples, whose gradients get the scale of tables.

    Owner ranks read the table without it: attention gives them gradients that have the scale.
    """
    table, scale = table.view_as(table), gradient_scale(pg)
    if table.requires_grad:
        table.register_hook(lambda grad: grad * scale)
    return table
