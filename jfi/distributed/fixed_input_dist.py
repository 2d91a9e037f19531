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
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jfi.cuda_graphs.captured_step import CudaGraphs
from jfi.cuda_graphs.static_batch import Buffers, Described, describe
from jfi.distributed.agreed_shapes import AgreedShapes
from jfi.distributed.distributed_batch import DistributedBatch, column_keys, jagged, requested_key, sent_key, slot_keys
from jfi.distributed.exchange import Exchange
from jfi.distributed.input_dist import SortedIds, check_ids, counts_for_owners, payload_of, sort_by_owner
from jfi.distributed.planning import TableGroup
from jfi.ops import partition_ids as kernels
from jfi.utils.operands import MAX_SHARDS
from jfi.utils.padding import padded_to_capacity

#: Batches that are on their way while a step runs.
AHEAD = 2
#: Batches that are sent by single launches before a graph is captured for each memory slot.
_WARM_UP = 2


class _MemorySlot:
    """Memory of a batch that was sent, the shapes of all ranks, and the graph that fills it."""

    def __init__(self, block: Tensor, shapes: Tensor) -> None:
        self.block, self.shapes = block, shapes
        self.replay: Callable[[], None] | None = None
        #: On a GPU: it is filled; the step has copied it.
        self.filled, self.copied = (torch.cuda.Event() if block.is_cuda else None for _ in range(2))


class FixedInputDist:
    """Sends batches of fixed capacities; all ranks call it with their parts of the same batch.

    Args:
        agreed: the ladder of capacities, after `set_reference`.
        capacities: by name of the ladder.
        graphs: makes CUDA graphs; None to send by single launches.

    Attributes:
        capacities: as given.
    """

    def __init__(self, agreed: AgreedShapes, capacities: tuple[int, ...], graphs: CudaGraphs | None) -> None:
        self.capacities, self._agreed, self._graphs = capacities, agreed, graphs
        self._by_name = dict(zip(agreed.names, capacities, strict=True))
        device, reference, size = agreed.device, agreed.reference, agreed.pg.size()
        keys = len(reference.keys)
        self._shape = torch.zeros(2 + 2 * keys, dtype=torch.int64, device=device)
        self._shapes = torch.zeros(size, 2 + 2 * keys + size * len(agreed.groups), dtype=torch.int64, device=device)
        self._raw = Buffers(reference.structure, capacities[:keys], agreed.padding, device)
        # Made here, since a capture copies nothing from the host.
        self._owners = [torch.tensor(group.owner_ranks, device=device) for group in agreed.groups]
        self._padding = [self._padding_event(number, group) for number, group in enumerate(agreed.groups)]
        #: Of a `DistributedBatch`, made of the first one. The batch itself comes first in them.
        self._buffers: Buffers | None = None
        self._memory_slots: list[_MemorySlot] = []
        self._count = 0
        if agreed.stream is not None:
            agreed.stream.wait_stream(torch.cuda.current_stream(device))

    def send(self, batch: Any) -> "InFlightBatch":
        """Sends a batch in any memory, best in pinned memory, and waits for nothing.

        Raises:
            UnsupportedBatch: a batch that is no tree of tensors and constants with one KeyedJaggedTensor.
            ValueError: features that do not fit the table groups.
        """
        described = describe(batch)
        self._agreed.ids_by_key(batch)  # checked here, since keys have equal capacities in the buffers
        shape, stream = torch.tensor(self._agreed.shape_vector(described)), self._agreed.stream
        with self._agreed.on_stream():
            slot = self._memory_slots[self._count % len(self._memory_slots)] if self._memory_slots else None
            if slot is not None and stream is not None:
                stream.wait_event(slot.copied)
            raw = self._raw.new_block() if slot is None else slot.block[: self._raw.size]
            if self._holds_raw(described):
                self._raw.fill(raw, described)
            else:  # none of it is sent, as all ranks will see from the shapes
                self._raw.clear(raw)
            self._shape.copy_(shape if stream is None else shape.pin_memory(), non_blocking=True)
            if slot is None:
                slot = self._first_slot(raw)
            else:
                self._run(slot)
            self._count += 1
            slot.shapes.copy_(self._shapes, non_blocking=True)
            if stream is not None:
                slot.filled.record(stream)
        return InFlightBatch(batch, self, slot)

    def holds(self, capacities: tuple[int, ...]) -> bool:
        """Returns whether its capacities are at least these."""
        return all(capacity >= other for capacity, other in zip(self.capacities, capacities, strict=True))

    def load(self, slot: _MemorySlot, capacities: tuple[int, ...], buffers: Buffers, block: Tensor) -> None:
        """Copies a sent batch of these capacities, which it holds, into a block of buffers that have them."""
        if capacities == self.capacities:
            block.copy_(slot.block)
            return
        buffers.narrow(block, self._buffers, slot.block)
        wide, narrow = self._buffers.batch(slot.block), buffers.batch(block)
        fetched = [number for number, group in enumerate(self._agreed.groups) if not group.features]
        size, by_name = self._agreed.pg.size(), dict(zip(self._agreed.names, capacities, strict=True))
        parts = zip(fetched, wide.requested, narrow.requested, narrow.slots, strict=True)
        for number, source, target, slots in parts:
            had, has = (capacity[requested_key(number)] // size for capacity in (self._by_name, by_name))
            rows = source.values()[: size * had].view(size, had)
            target.values()[: size * has].view(size, has).copy_(rows[:, :has])
            where = slots.values()  # narrowed already
            where.copy_(torch.where(where < 0, -1, where // had * has + where % had))

    @property
    def structure(self) -> object:
        """The structure of a `DistributedBatch`."""
        return self._buffers.structure

    def _holds_raw(self, batch: Described) -> bool:
        if batch.structure != self._agreed.reference.structure:
            return False
        fixed = self._agreed.fixed_length_keys
        lengths = zip(batch.keys, batch.lengths, self.capacities, strict=False)
        return all(count == most if key in fixed else count <= most for key, count, most in lengths)

    def _first_slot(self, raw: Tensor) -> _MemorySlot:
        """Makes the memory slots, and fills the first one from a raw batch and `_shape`."""
        sent, agreed = self._send_raw(raw), self._agreed
        self._buffers = Buffers(sent.structure, self.capacities, agreed.padding, agreed.device)
        for _ in range(AHEAD + 1):
            shapes = torch.zeros(self._shapes.shape, dtype=torch.int64, pin_memory=agreed.stream is not None)
            self._memory_slots.append(_MemorySlot(self._buffers.new_block(), shapes))
        self._buffers.fill(self._memory_slots[0].block, sent)
        return self._memory_slots[0]

    def _run(self, slot: _MemorySlot) -> None:
        """Fills a memory slot behind the raw batch in it."""

        def fill() -> None:
            self._buffers.fill(slot.block, self._send_raw(slot.block[: self._raw.size]), behind=self._raw)

        if slot.replay is None and self._graphs is not None and self._count >= _WARM_UP:
            slot.replay, _ = self._graphs.capture(fill)
        if slot.replay is None:
            fill()
        else:
            slot.replay()

    def _send_raw(self, raw: Tensor) -> Described:
        """Sends a raw batch and `_shape`, and returns the `DistributedBatch` that arrives; writes `_shapes`."""
        agreed, parts, size = self._agreed, [], self._agreed.pg.size()
        with padded_to_capacity(agreed.fixed_length_keys):
            batch = self._raw.batch(raw)
            by_key = agreed.ids_by_key(batch)
            for number, (group, padding) in enumerate(zip(agreed.groups, self._padding, strict=True)):
                slots = self._by_name[sent_key(number) if group.features else requested_key(number)]
                slots = slots if group.features else slots // size
                parts.append(partition(group, by_key, size, slots, padding))
            self._shapes.copy_(agreed.gather(self._shape, [part.sums for part in parts]))
            sent = DistributedBatch(batch, agreed.samples, [], [], [])
            for number, (group, part) in enumerate(zip(agreed.groups, parts, strict=True)):
                if group.features:
                    sent.events.append(self._send_events(number, group, part))
                    continue
                sent.requested.append(self._request_rows(number, part.buffer))
                lengths = torch.cat([by_key[key].lengths() for key in group.keys])
                sizes = [by_key[key].values().size(0) for key in group.keys]
                sent.slots.append(jagged(slot_keys(number, group), part.slots, lengths, sizes))
            return describe(sent)

    def _send_events(self, number: int, group: TableGroup, part: "Partitioned") -> KeyedJaggedTensor:
        """Sends a group's events, and returns those of all ranks that arrive, with padding behind them."""
        pg, padding, keys = self._agreed.pg, self._padding[number], column_keys(number, group)
        size, slots, capacity = pg.size(), self._by_name[sent_key(number)], self._by_name[keys[0]]
        buffer, owners = part.buffer, group.owner_ranks
        if len(owners) < size:
            buffer = buffer.view(size, slots, -1).index_select(0, self._owners[number]).flatten(0, 1)
        is_owner = pg.rank() in owners
        sent, received = [slots if rank in owners else 0 for rank in range(size)], [slots if is_owner else 0] * size
        arrived = Exchange(pg, sent, received).send(buffer)
        lengths = group.to_owners(pg, list(self._agreed.samples)).send(counts_for_owners(group, part.counts))
        if is_owner:
            columns = collect(arrived, lengths, padding, size, capacity)
        else:
            columns = padding.view(-1, 1).expand(-1, capacity)
        return jagged(keys, columns.flatten(), lengths.repeat(len(keys)), [capacity] * len(keys))

    def _request_rows(self, number: int, buffer: Tensor) -> KeyedJaggedTensor:
        """Sends the rows [W · slots, 1] that this rank requests, and returns what all ranks request of this one."""
        size = self._agreed.pg.size()
        slots = buffer.size(0) // size
        arrived = Exchange(self._agreed.pg, [slots] * size, [slots] * size).send(buffer.view(-1))
        lengths = torch.full((size,), slots, dtype=torch.int32, device=buffer.device)
        return jagged([requested_key(number)], arrived, lengths, [size * slots])

    def _padding_event(self, number: int, group: TableGroup) -> Tensor:
        """Returns the columns [1, K] int32 of padding."""
        keys = column_keys(number, group) if group.features else [requested_key(number)]
        padding = [self._agreed.padding.get(key, 0) for key in keys]
        return torch.tensor([padding], dtype=torch.int32, device=self._agreed.device)


class InFlightBatch(NamedTuple):
    """A batch on its way to the owner ranks of its ids."""

    batch: Any  # as it was given
    sender: FixedInputDist | None  # None if it is not sent ahead of its step
    slot: _MemorySlot | None

    def shapes(self) -> list[list[int]]:
        """Waits for the shapes of all ranks, see `AgreedShapes.gather`."""
        if self.slot.filled is not None:
            self.slot.filled.synchronize()
        return self.slot.shapes.tolist()

    def load(self, capacities: tuple[int, ...], buffers: Buffers, block: Tensor) -> None:
        """Copies the batch into a block of buffers; the current stream waits for its arrival."""
        if self.slot.filled is None:
            self.sender.load(self.slot, capacities, buffers, block)
            return
        current = torch.cuda.current_stream(block.device)
        current.wait_event(self.slot.filled)
        self.sender.load(self.slot, capacities, buffers, block)
        self.slot.copied.record(current)


class Partitioned(NamedTuple):
    """The events of a table group on this rank, in equally many slots for each owner.

    Attributes:
        buffer: [W · slots, K] int32: by owner the events in the order of the batch.
        sums: [W] int64: events for each owner, more than its slots if they do not hold them.
        counts: [W, sequences · B] int32: of each sample, if attention reads them.
        slots: [S] int64: where an event of the batch is in the buffer, -1 for padding, if rows come back.
    """

    buffer: Tensor
    sums: Tensor
    counts: Tensor | None
    slots: Tensor | None


def partition(
    group: TableGroup, by_key: dict[str, JaggedTensor], num_ranks: int, slots: int, padding: Tensor
) -> Partitioned:
    """Puts the events of a table group into slots by owner rank; nothing synchronizes with a GPU.

    Args:
        group: of the events.
        by_key: ids, bucket ids and weights, which may be padded.
        num_ranks: W.
        slots: for each owner.
        padding: [1, K] int32, of empty slots; not written for events that attention reads.
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
        return _partition_sorted(group, sort_by_owner(group, by_key, num_ranks), slots, padding)
    check_ids(group, by_key)
    payload = payload_of(group, by_key, sequences)
    payload = torch.stack(payload, 1) if payload else None
    if group.features:
        buffer, _, sums = kernels.partition_ids(owned, payload, num_ranks, slots, None)
        return Partitioned(buffer, sums, kernels.count_samples(owned, num_ranks), None)
    buffer, where, sums = kernels.partition_ids(owned, payload, num_ranks, slots, padding)
    return Partitioned(buffer, sums, None, where)


def _partition_sorted(group: TableGroup, ids: SortedIds, slots: int, padding: Tensor) -> Partitioned:
    """Puts sorted events into slots, where the kernels do not take them."""
    size, index = ids.sums.size(0), torch.arange(ids.columns.size(0), device=ids.columns.device)
    end = size * slots  # the slot of padding and of events that have none
    if ids.ranks is None:
        where = torch.where(index < ids.sums.clamp(max=slots), index, end)
    else:
        within = index - pad(ids.sums.cumsum(0), (1, 0))[ids.ranks]
        where = torch.where((ids.ranks < size) & (within < slots), ids.ranks * slots + within, end)
    buffer = padding.repeat(end + 1, 1).index_copy_(0, where, ids.columns)[:-1]
    if group.features:
        return Partitioned(buffer, ids.sums, ids.counts, None)
    where = torch.where(where == end, -1, where)
    if ids.order is not None:
        where = torch.empty_like(where).index_copy_(0, ids.order, where)
    return Partitioned(buffer, ids.sums, None, where)


def collect(arrived: Tensor, lengths: Tensor, padding: Tensor, num_ranks: int, capacity: int) -> Tensor:
    """Moves the events of all ranks together, followed by `padding`: [K, capacity] int32.

    Args:
        arrived: [W · slots, K] int32: those of each rank in its first slots.
        lengths: [W · n] int32: events by rank, sequence and sample.
        padding: [1, K] int32.
        num_ranks: W.
        capacity: of the result.
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
