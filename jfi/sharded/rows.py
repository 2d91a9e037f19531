"""Rows that owners send to the ranks of the samples that read them, and small tables that every rank reads whole."""

import torch
import torch.distributed as dist
from torch import Tensor

from jfi.ops.gather_rows import gather_bounded
from jfi.sharded.exchange import gradient_scale
from jfi.sharded.ownership import Owners
from jfi.sharded.routes import Arrived
from jfi.utils.padding import padding_state


def fetch_rows(handle: Tensor, memory: Tensor, arrived: Arrived) -> list[Tensor]:
    """The rows [S, D] of each sequence of a route, on the rank of its samples; all ranks call it together.

    Args:
        handle: [R, D] without memory, of the dtype that is sent; its gradient is that of the owner's rows.
        memory: [M, D], the owner's rows.
        arrived: the rows that are requested of this owner.
    """
    return list(_Fetch.apply(handle, memory, arrived).split(arrived.sizes))


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, handle: Tensor, memory: Tensor, arrived: Arrived) -> Tensor:
        ctx.arrived = arrived
        ctx.has_room = padding_state.is_padded  # of this thread; backward may run in another one
        rows = gather_bounded((memory,), (arrived.rows,), handle.dtype)
        rows, ctx.places = arrived.events.back.send(rows), arrived.places()
        if ctx.places is None:
            return rows
        return rows.index_select(0, ctx.places.clamp(min=0) if padding_state.is_padded else ctx.places)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        events = ctx.arrived.events
        grad = grad * gradient_scale(events.group)
        if ctx.places is not None:
            grad = _to_slots(grad, ctx.places, sum(events.sent), ctx.has_room)
        return events.send(grad), None, None


def _to_slots(grad: Tensor, slots: Tensor, count: int, has_room: bool) -> Tensor:
    """[count, D]: gradients [S, D] in the order in which they are sent; 0 for places left."""
    if not has_room:
        return grad.new_zeros(count, grad.size(1)).index_copy_(0, slots, grad)
    # The gradients of padding, whose slot is -1, go to a row of their own behind all.
    sent = grad.new_zeros(count + 1, grad.size(1))
    return sent.index_copy_(0, slots.remainder(count + 1), grad)[:count]


class Replicate(torch.autograd.Function):
    """Whole tables [N, D] on every rank, from the rows that each owns; back to sums of all ranks' gradients.

    All tables travel in one all-reduce, whose order of summation is fixed, as is that of each rank's gradients. These
    have the scale of tables already: see `Scaled`.

    Args:
        handle: [r, D] without memory, of the tables' rows that this rank owns, table by table.
        memory: [M, D], the rows that this rank owns.
        group: all ranks.
        owners: of the tables.
    """

    @staticmethod
    def forward(
        ctx, handle: Tensor, memory: Tensor, group: dist.ProcessGroup, owners: list[Owners]
    ) -> tuple[Tensor, ...]:
        rank, sizes = group.rank(), [one.num_rows for one in owners]
        ctx.group, ctx.own, ctx.sizes, ctx.dtype = group, [one.rows_of(rank) for one in owners], sizes, handle.dtype
        ctx.set_materialize_grads(False)
        whole = memory.new_zeros(sum(sizes), memory.size(1))
        for rows, one in zip(whole.split(sizes), owners, strict=True):
            to, of = one.rows_of(rank), one.memory_of(rank)
            rows[to.start : to.stop] = memory[of.start : of.stop]
        if group.size() > 1:
            dist.all_reduce(whole, group=group)
        return whole.split(sizes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = next(grad for grad in grads if grad is not None)
        whole = [given.new_zeros(n, given.size(1)) if g is None else g for g, n in zip(grads, ctx.sizes, strict=True)]
        whole = torch.cat(whole)
        if ctx.group.size() > 1:
            dist.all_reduce(whole, group=ctx.group)
        own = [rows[part.start : part.stop] for rows, part in zip(whole.split(ctx.sizes), ctx.own, strict=True)]
        return torch.cat(own).to(ctx.dtype), None, None, None


class Scaled(torch.autograd.Function):
    """A replicated table as this rank's own samples read it: their gradients get the scale of tables.

    Owners read the table itself: attention gives them gradients that have it.
    """

    @staticmethod
    def forward(ctx, table: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.scale = gradient_scale(group)
        return table.view_as(table)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None
