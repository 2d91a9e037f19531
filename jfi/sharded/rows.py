"""Rows that owners send to the ranks of the samples that read them, and small tables that every rank reads whole."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from jfi.ops.gather_rows import gather_rows
from jfi.room import here
from jfi.sharded.exchange import gradient_scale
from jfi.sharded.ownership import Owners
from jfi.sharded.routes import Arrived

Beside = Callable[[Tensor], AbstractContextManager[None]]


def fetch_rows(handle: Tensor, memory: Tensor, arrived: Arrived, beside: Beside) -> list[Tensor]:
    """The rows [S, D] of each sequence of a route, on the rank of its samples; all ranks call it together.

    Args:
        handle: [R, D] without memory, of the dtype that is sent; its gradient is that of the owner's rows.
        memory: [M, D], the owner's rows.
        arrived: the rows that are requested of this owner.
        beside: around what nobody waits for but the step of the rows, given what that reads.
    """
    return list(_Fetch.apply(handle, memory, arrived, beside).split(arrived.sizes))


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, handle: Tensor, memory: Tensor, arrived: Arrived, beside: Beside) -> Tensor:
        ctx.arrived, ctx.beside = arrived, beside
        rows = gather_rows((memory,), (arrived.rows,), dtype=handle.dtype)
        rows, places = arrived.events.back._replace(lane=0).send(rows), arrived.places()
        ctx.places = ctx.sent = None
        if places is None:
            return rows
        if ctx.needs_input_grad[0]:
            with beside(places):
                ctx.places, ctx.sent = _slots(rows, places, sum(arrived.events.sent), here.has_room)
        return rows.index_select(0, places.clamp(min=0) if here.has_room else places)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        events = ctx.arrived.events
        with ctx.beside(grad):
            grad = grad * gradient_scale(events.group)
            if ctx.places is not None:
                grad = ctx.sent.index_copy_(0, ctx.places, grad)[: sum(events.sent)]
            return events.send(grad), None, None, None


def _slots(rows: Tensor, places: Tensor, count: int, has_room: bool) -> tuple[Tensor, Tensor]:
    """(where the gradients [S, D] of the rows go, [S]; what is sent of them, from `count` on of padding, of zeros)."""
    if not has_room:
        return places, rows.new_zeros(count, rows.size(1))
    # The gradients of padding, whose place is -1, go to a row of their own behind all.
    return places.remainder(count + 1), rows.new_zeros(count + 1, rows.size(1))


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
