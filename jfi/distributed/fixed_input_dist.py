"""The input dist in fixed shapes, as a CUDA graph: nothing waits for the host.

Every pair of ranks has slots for as many ids as one of them may have for the other, with padding in empty ones. At its
owner, what has arrived is moved together, as if the exact numbers had been sent. The host reads the counts of a batch
when its step comes, long after they arrived, and finds whether the capacities hold all of it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torchrec.sparse.jagged_tensor import JaggedTensor

from jfi.cuda_graphs.captured_step import CudaGraphs, StagingBlock
from jfi.cuda_graphs.static_batch import Described, describe
from jfi.distributed.exchange import Exchange
from jfi.distributed.fixed_shapes import DistributedBuffers, FixedShapes
from jfi.distributed.input_dist import SortedIds, check_ids, counts_for_owners, payload_of, sort_by_owner
from jfi.distributed.planning import TableGroup
from jfi.ops import partition_ids as kernels
from jfi.utils.context import padded_to_capacity
from jfi.utils.operands import MAX_SHARDS

#: Batches that are on their way while a step runs.
AHEAD = 2
#: Batches that are sent by single launches before a graph is captured for each memory slot.
_WARM_UP = 2


class _MemorySlot(StagingBlock):
    """Memory of a batch that was sent, the shapes of all ranks, and the graph that fills it."""

    def __init__(self, block: Tensor, shapes: Tensor) -> None:
        super().__init__(block)
        self.shapes = shapes
        self.replay: Callable[[], None] | None = None


class FixedInputDist:
    """Sends batches of fixed capacities; all ranks call it with their parts of the same batch.

    Args:
        shapes: agreed on by all ranks.
        capacities: those of `shapes.buckets` that it has.
        graphs: makes CUDA graphs; None to send by single launches.

    Attributes:
        capacities: as given.
    """

    def __init__(self, shapes: FixedShapes, capacities: tuple[int, ...], graphs: CudaGraphs | None) -> None:
        self.capacities, self._agreed, self._graphs = capacities, shapes, graphs
        self._buffers, self._by_group = DistributedBuffers(shapes, capacities), shapes.group_capacities(capacities)
        device, size = shapes.device, shapes.pg.size()
        # Made here, since a capture copies nothing from the host.
        self._shape = torch.tensor(shapes.shape_vector(shapes.reference), device=device)
        self._shapes = self._shape.new_zeros(size, self._shape.size(0) + size * len(shapes.groups))
        self._owners = [torch.tensor(group.owner_ranks, device=device) for group in shapes.groups]
        self._padding = [torch.tensor([group.padding], dtype=torch.int32, device=device) for group in shapes.groups]
        self._slots = []
        for _ in range(AHEAD + 1):
            on_host = torch.zeros(self._shapes.shape, dtype=torch.int64, pin_memory=shapes.stream is not None)
            self._slots.append(_MemorySlot(self._buffers.new_block(), on_host))
        self._count = 0
        if shapes.stream is not None:
            shapes.stream.wait_stream(torch.cuda.current_stream(device))

    def send(self, batch: Any) -> "InFlightBatch":
        """Sends a batch in any memory, best in pinned memory, and waits for nothing.

        Raises:
            UnsupportedBatch: a batch that is no tree of tensors and constants with one KeyedJaggedTensor.
            ValueError: features that do not fit the table groups.
        """
        described, raw, stream = describe(batch), self._buffers.raw, self._agreed.stream
        self._agreed.ids_by_key(described)  # checked here, since keys have equal capacities in the buffers
        shape = torch.tensor(self._agreed.shape_vector(described))
        slot, is_held = self._slots[self._count % len(self._slots)], self._holds(described)
        with self._agreed.on_stream():
            if stream is not None:
                stream.wait_event(slot.copied)
            if is_held:
                raw.fill(slot.block[: raw.size], described)
            else:  # none of it is sent, as all ranks will see from the shapes
                raw.clear(slot.block[: raw.size])
            self._shape.copy_(shape if stream is None else shape.pin_memory(), non_blocking=True)
            if slot.replay is None and self._graphs is not None and self._count >= _WARM_UP:
                slot.replay, _ = self._graphs.capture(lambda: self._fill(slot.block))
            if slot.replay is None:
                self._fill(slot.block)
            else:
                slot.replay()
            slot.shapes.copy_(self._shapes, non_blocking=True)
            if stream is not None:
                slot.filled.record(stream)
        self._count += 1
        return InFlightBatch(batch, is_held, self, slot)

    def holds(self, capacities: tuple[int, ...]) -> bool:
        """Returns whether its capacities are at least these."""
        return all(capacity >= other for capacity, other in zip(self.capacities, capacities, strict=True))

    def load(self, slot: _MemorySlot, capacities: tuple[int, ...], buffers: DistributedBuffers, block: Tensor) -> None:
        """Copies a sent batch of these capacities, which it holds, into a block of buffers that have them.

        The current stream waits for the batch's arrival.
        """
        stream = None if slot.filled is None else torch.cuda.current_stream(block.device)
        if stream is not None:
            stream.wait_event(slot.filled)
        if capacities == self.capacities:
            block.copy_(slot.block)
        else:
            buffers.narrow(block, self._buffers, slot.block)
        if stream is not None:
            slot.copied.record(stream)

    def _holds(self, batch: Described) -> bool:
        """Returns whether the buffers hold this rank's batch."""
        buckets = self._agreed.buckets
        if batch.structure != buckets.structure:
            return False
        lengths = zip(batch.keys, batch.lengths, self.capacities, strict=False)
        return all(n == most if key in buckets.fixed_length_keys else n <= most for key, n, most in lengths)

    def _fill(self, block: Tensor) -> None:
        """Sends the raw batch in a block, and `_shape`; writes what arrives behind the batch, and `_shapes`."""
        agreed, parts, size = self._agreed, [], self._agreed.pg.size()
        with padded_to_capacity(agreed.buckets.fixed_length_keys):
            batch = self._buffers.raw.batch(block[: self._buffers.raw.size])
            by_key = agreed.ids_by_key(describe(batch))
            for group, padding, (slots, _) in zip(agreed.groups, self._padding, self._by_group, strict=True):
                parts.append(partition(group, by_key, size, slots, padding))
            self._shapes.copy_(agreed.gather(self._shape, [sums for _, sums, _ in parts]))
            arrived = [self._send(number, buffer, index) for number, (buffer, _, index) in enumerate(parts)]
            self._buffers.fill(block, arrived)

    def _send(self, number: int, buffer: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Sends a group's partitioned events to their owners; returns what arrives, see `DistributedBatch`."""
        agreed, group, padding = self._agreed, self._agreed.groups[number], self._padding[number]
        pg, size, owners = agreed.pg, agreed.pg.size(), group.owner_ranks
        slots, capacity = self._by_group[number]
        if not group.features:
            arrived = Exchange(pg, [slots] * size, [slots] * size).send(buffer.view(-1))
            return arrived.view(size, slots), index
        is_owner = pg.rank() in owners
        if len(owners) < size:
            buffer = buffer.view(size, slots, -1).index_select(0, self._owners[number]).flatten(0, 1)
        sent, received = [slots if rank in owners else 0 for rank in range(size)], [slots if is_owner else 0] * size
        arrived = Exchange(pg, sent, received).send(buffer)
        lengths = group.to_owners(pg, agreed.samples).send(counts_for_owners(group, index))
        if is_owner:
            columns = collect(arrived, lengths, padding, size, capacity)
        else:
            columns = padding.view(-1, 1).expand(-1, capacity)
        return columns, pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


class InFlightBatch(NamedTuple):
    """A batch on its way to the owner ranks of its ids."""

    batch: Any  # as it was given
    is_counted: bool = False  # whether its ids outside of their tables are
    sender: Any = None  # the FixedInputDist; None if it is not sent ahead of its step
    slot: Any = None  # of memory that the sender has filled

    def shapes(self) -> list[list[int]]:
        """Waits for the shapes of all ranks, see `FixedShapes.gather`."""
        if self.slot.filled is not None:
            self.slot.filled.synchronize()
        return self.slot.shapes.tolist()


def partition(
    group: TableGroup, by_key: dict[str, JaggedTensor], num_ranks: int, slots: int, padding: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Puts the events of a table group, which may be padded, into equally many slots for each of W owner ranks.

    Nothing synchronizes with a GPU. Empty slots are `padding` [1, K] int32, or anything if attention reads the events.

    Returns:
        By owner the events in the order of the batch, [W · slots, K] int32. The number of events for each owner, [W]
        int64, more than its slots if they do not hold them. The events of each sample for each owner, [W, sequences ·
        B] int32, if attention reads them; else the slot of each event of the batch, [S] int64, -1 for padding.
    """
    sequences = [by_key[key] for key in group.keys]
    device = sequences[0].values().device
    outside = group.outside.on(device)
    owned = [
        kernels.OwnedIds(
            sequence.values(), sequence.offsets(), *sharding.tensors(device), sharding.num_rows, outside[number:]
        )
        for number, (sequence, sharding) in enumerate(zip(sequences, group.shardings, strict=True))
    ]
    if not kernels.takes_ids(owned, num_ranks):
        return _partition_sorted(sort_by_owner(group, by_key, num_ranks), slots, padding)
    check_ids(group, by_key)
    payload = payload_of(group, by_key, sequences)
    payload = torch.stack(payload, 1) if payload else None
    padding = None if group.features else padding
    buffer, where, sums = kernels.partition_ids(owned, payload, num_ranks, slots, padding)
    return buffer, sums, kernels.count_samples(owned, num_ranks) if group.features else where


def _partition_sorted(ids: SortedIds, slots: int, padding: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `partition` of sorted events, where the kernels do not take them."""
    size, index = ids.sums.size(0), torch.arange(ids.columns.size(0), device=ids.columns.device)
    end = size * slots  # the slot of padding and of events that have none
    if ids.ranks is None:
        where = torch.where(index < ids.sums.clamp(max=slots), index, end)
    else:
        within = index - pad(ids.sums.cumsum(0), (1, 0))[ids.ranks]
        where = torch.where((ids.ranks < size) & (within < slots), ids.ranks * slots + within, end)
    buffer = padding.repeat(end + 1, 1).index_copy_(0, where, ids.columns)[:-1]
    if ids.counts is not None:
        return buffer, ids.sums, ids.counts
    where = torch.where(where == end, -1, where)
    if ids.order is not None:
        where = torch.empty_like(where).index_copy_(0, ids.order, where)
    return buffer, ids.sums, where


def collect(arrived: Tensor, lengths: Tensor, padding: Tensor, num_ranks: int, capacity: int) -> Tensor:
    """Moves the events of W ranks together, followed by `padding` [1, K]: [K, capacity] int32.

    Args:
        arrived: [W · slots, K] int32: those of each rank in its first slots.
        lengths: [W · n] int32: events by rank, sequence and sample.
    """
    slots = arrived.size(0) // num_ranks
    ends = lengths.view(num_ranks, -1).sum(1).cumsum(0)
    if arrived.is_cuda and num_ranks <= MAX_SHARDS:
        return kernels.collect(arrived, ends, padding, slots, capacity)
    index = torch.arange(capacity, device=ends.device)
    source = torch.searchsorted(ends, index, right=True).clamp_(max=num_ranks - 1)
    within = index - pad(ends[:-1], (1, 0))[source]
    columns = arrived.index_select(0, (source * slots + within).clamp_(0, num_ranks * slots - 1))
    return torch.where((index < ends[-1]).unsqueeze(1), columns, padding).t().contiguous()
