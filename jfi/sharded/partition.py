"""A route's events by owner in fixed shapes, and what has arrived of them moved together: by kernels or formulas."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torchrec.sparse.jagged_tensor import JaggedTensor

from jfi.ops import partition_ids as kernels
from jfi.sharded.routes import Route, Sent, brought_along, check_route_ids, sort_by_owner


class Partitioned(NamedTuple):
    """A route's events of this rank, in as many places for each owner.

    Attributes:
        buffer: [W · most, K] int32: by owner the events in the order of the batch.
        sums: [W] int64: events for each owner, more than `most` where they have no room.
        counts: [W, sequences · B] int32: of each sample, if attention reads them.
        slots: [S] int64: where an event of the batch is in the buffer, -1 for padding, if rows come back.
    """

    buffer: Tensor
    sums: Tensor
    counts: Tensor | None
    slots: Tensor | None


def partition(route: Route, by_key: dict[str, JaggedTensor], num_ranks: int, most: int, blank: Tensor) -> Partitioned:
    """Puts a route's events into places; nothing synchronizes with a GPU.

    Args:
        route: whose events.
        by_key: ids, bucket ids and weights, which may have room.
        num_ranks: W.
        most: places for each owner.
        blank: [1, K] int32: what is in places left; nobody reads those of events that attention reads.
    """
    sequences = [by_key[key] for key in route.keys]
    outside = route.outside.on(sequences[0].values().device)
    owned = [
        kernels.OwnedIds(
            one.values(), one.offsets(), *owners.tensors(one.values().device), owners.num_rows, outside[number:]
        )
        for number, (one, owners) in enumerate(zip(sequences, route.owners, strict=True))
    ]
    if not kernels.takes_ids(owned, num_ranks):
        sent = sort_by_owner(route, by_key, num_ranks)
        slots = _slots(sent, most)
        buffer = blank.repeat(num_ranks * most + 1, 1).index_copy_(0, slots, sent.columns)[:-1]
        if route.features:
            return Partitioned(buffer, sent.sums, sent.counts, None)
        slots = torch.where(slots == num_ranks * most, -1, slots)
        if sent.order is not None:
            slots = torch.empty_like(slots).index_copy_(0, sent.order, slots)
        return Partitioned(buffer, sent.sums, sent.counts, slots)
    check_route_ids(route, by_key)
    brought = brought_along(route, by_key, sequences)
    brought = torch.stack(brought, 1) if brought else None
    unread = bool(route.features)
    buffer, slots, sums = kernels.partition_ids(owned, brought, num_ranks, most, None if unread else blank)
    return Partitioned(buffer, sums, kernels.count_samples(owned, num_ranks) if unread else None, slots)


def _slots(sent: Sent, most: int) -> Tensor:
    """Returns where each sorted event lies in the buffer [S] int64; W · most for padding and events beyond `most`."""
    size, place = sent.sums.size(0), torch.arange(sent.columns.size(0), device=sent.columns.device)
    if sent.ranks is None:
        return torch.where(place < sent.sums.clamp(max=most), place, most)
    within = place - pad(sent.sums.cumsum(0), (1, 0))[sent.ranks]
    return torch.where((sent.ranks < size) & (within < most), sent.ranks * most + within, size * most)


def collect(arrived: Tensor, lengths: Tensor, blank: Tensor, num_ranks: int, room: int) -> Tensor:
    """[K, room] int32: the events of all ranks, one rank's behind the other's, then `blank`.

    Args:
        arrived: [W · most, K] int32: those of each rank in its first places.
        lengths: [W · n] int32: events by rank, sequence and sample.
        blank: [1, K] int32.
        num_ranks: W.
        room: of the result.
    """
    most = arrived.size(0) // num_ranks
    ends = lengths.view(num_ranks, -1).sum(1).cumsum(0)
    if arrived.is_cuda and num_ranks <= kernels.plan.MOST_SHARDS:
        return kernels.collect(arrived, ends, blank, most, room)
    at = torch.arange(room, device=ends.device)
    source = torch.searchsorted(ends, at, right=True).clamp_(max=num_ranks - 1)
    within = at - pad(ends[:-1], (1, 0))[source]
    columns = arrived.index_select(0, (source * most + within).clamp_(0, num_ranks * most - 1))
    return torch.where((at < ends[-1]).unsqueeze(1), columns, blank).t().contiguous()
