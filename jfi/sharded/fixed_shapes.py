"""The ids of batches on their way in fixed shapes, so that sending them is a CUDA graph: nothing waits for the host.

Every pair of ranks has places for the most ids that one of them may have for the other, -1 in places left. What has
arrived is moved together at its owner, as if the exact numbers had been sent. The host reads the numbers of a batch
when its step comes, long after they arrived, and finds whether there was room for all of it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jfi.cuda_graphs.captured_step import CudaGraphs
from jfi.cuda_graphs.static_batch import Buffers, Described, describe
from jfi.sharded.exchange import Exchange
from jfi.sharded.partition import Partitioned, collect, partition
from jfi.sharded.routes import Route, counts_for
from jfi.sharded.send_ahead import SendAhead
from jfi.sharded.sent_batch import SentBatch, column_keys, jagged, requested_key, sent_key, slot_keys
from jfi.utils.padding import padded_to_capacity

#: Batches that are on their way while a step runs.
AHEAD = 2
#: Batches that a sender sends by single launches before it captures a graph for each of its slots.
_WARM_UP = 2


class _Slot:
    """Memory of a batch that was sent, the counts of all ranks, and the graph that fills it."""

    def __init__(self, block: Tensor, numbers: Tensor) -> None:
        self.block, self.numbers = block, numbers
        self.replay: Callable[[], None] | None = None
        #: On a GPU: it is filled; the step has it.
        self.filled, self.copied = (torch.cuda.Event() if block.is_cuda else None for _ in range(2))


class FixedSender:
    """Sends batches of fixed capacities; all ranks call it with their parts of the same batch.

    Args:
        ahead: which knows the ladder, after `refer`.
        capacities: by name of the ladder.
        graphs: makes CUDA graphs; None to send by single launches.

    Attributes:
        capacities: as given.
    """

    def __init__(self, ahead: SendAhead, capacities: tuple[int, ...], graphs: CudaGraphs | None) -> None:
        self.ahead, self.capacities, self._graphs = ahead, capacities, graphs
        self._room = dict(zip(ahead.names, capacities, strict=True))
        device, first, size = ahead.device, ahead.first, ahead.group.size()
        keys = len(first.keys)
        self._own = torch.zeros(2 + 2 * keys, dtype=torch.int64, device=device)
        self._numbers = torch.zeros(size, 2 + 2 * keys + size * len(ahead.routes), dtype=torch.int64, device=device)
        self._samples = ahead.samples
        self._raw = Buffers(first.structure, capacities[:keys], ahead.padding, device)
        # Made here, since a capture copies nothing from the host.
        self._owners = [torch.tensor(route.ranks, device=device) for route in ahead.routes]
        self._blank = [self._blank_event(place, route) for place, route in enumerate(ahead.routes)]
        #: Of a `SentBatch`, made of the first one. The batch itself comes first in them.
        self._buffers: Buffers | None = None
        self._slots: list[_Slot] = []
        self._count = 0
        if ahead.stream is not None:
            ahead.stream.wait_stream(torch.cuda.current_stream(device))

    def send(self, batch: Any) -> "Sending":
        """Sends a batch in any memory, best in pinned memory, and waits for nothing.

        Raises:
            UnsupportedBatch: a batch that is no tree of tensors and constants with one KeyedJaggedTensor.
            ValueError: features that do not fit the routes.
        """
        described = describe(batch)
        self.ahead.ids_by_key(batch)  # checked here, since keys have equal room in the buffers
        own, stream = torch.tensor(self.ahead.numbers_of(described)), self.ahead.stream
        with self.ahead.sending():
            slot = self._slots[self._count % len(self._slots)] if self._slots else None
            if slot is not None and stream is not None:
                stream.wait_event(slot.copied)
            raw = self._raw.new_block() if slot is None else slot.block[: self._raw.size]
            if self._holds(described):
                self._raw.fill(raw, described)
            else:  # nothing of it is sent here, as all ranks will see from their numbers
                self._raw.clear(raw)
            self._own.copy_(own if stream is None else own.pin_memory(), non_blocking=True)
            if slot is None:
                slot = self._first_slot(raw)
            else:
                self._run(slot)
            self._count += 1
            slot.numbers.copy_(self._numbers, non_blocking=True)
            if stream is not None:
                slot.filled.record(stream)
        return Sending(batch, self, slot)

    def holds(self, capacities: tuple[int, ...]) -> bool:
        """Whether it has room for batches of these capacities."""
        return all(own >= other for own, other in zip(self.capacities, capacities, strict=True))

    def load(self, slot: _Slot, capacities: tuple[int, ...], buffers: Buffers, block: Tensor) -> None:
        """Copies a sent batch of these capacities, which it has room for, into a block of buffers that have them."""
        if capacities == self.capacities:
            block.copy_(slot.block)
            return
        buffers.narrow(block, self._buffers, slot.block)
        given, taken = self._buffers.batch(slot.block), buffers.batch(block)
        fetched = [place for place, route in enumerate(self.ahead.routes) if not route.features]
        size, by_name = self.ahead.group.size(), dict(zip(self.ahead.names, capacities, strict=True))
        parts = zip(fetched, given.requested, taken.requested, taken.slots, strict=True)
        for place, requested, to, slots in parts:
            had, has = (room[requested_key(place)] // size for room in (self._room, by_name))
            rows = requested.values()[: size * had].view(size, had)
            to.values()[: size * has].view(size, has).copy_(rows[:, :has])
            where = slots.values()  # narrowed already
            where.copy_(torch.where(where < 0, -1, where // had * has + where % had))

    @property
    def structure(self) -> object:
        """Of a `SentBatch`."""
        return self._buffers.structure

    def _holds(self, batch: Described) -> bool:
        if batch.structure != self.ahead.first.structure:
            return False
        singles = self.ahead.singles
        kinds = zip(batch.keys, batch.lengths, self.capacities, strict=False)
        return all(count == most if key in singles else count <= most for key, count, most in kinds)

    def _first_slot(self, raw: Tensor) -> _Slot:
        """Makes the slots, and fills the first one from a raw batch and `_own`."""
        found, device, pinned = self._sent(raw), self.ahead.device, self.ahead.stream is not None
        self._buffers = Buffers(found.structure, self.capacities, self.ahead.padding, device)
        for _ in range(AHEAD + 1):
            numbers = torch.zeros(self._numbers.shape, dtype=torch.int64, pin_memory=pinned)
            self._slots.append(_Slot(self._buffers.new_block(), numbers))
        self._buffers.fill(self._slots[0].block, found)
        return self._slots[0]

    def _run(self, slot: _Slot) -> None:
        """Fills a slot behind the raw batch in it."""

        def fill() -> None:
            self._buffers.fill(slot.block, self._sent(slot.block[: self._raw.size]), behind=self._raw)

        if slot.replay is None and self._graphs is not None and self._count >= _WARM_UP:
            slot.replay, _ = self._graphs.capture(fill)
        if slot.replay is None:
            fill()
        else:
            slot.replay()

    def _sent(self, raw: Tensor) -> Described:
        """What arrives of a raw batch and `_own`; writes `_numbers`."""
        with padded_to_capacity(self.ahead.singles):
            return describe(self._exchanged(self._raw.batch(raw)))

    def _exchanged(self, batch: Any) -> SentBatch:
        group, routes = self.ahead.group, self.ahead.routes
        by_key, size, parts = self.ahead.ids_by_key(batch), group.size(), []
        for place, (route, blank) in enumerate(zip(routes, self._blank, strict=True)):
            most = self._room[sent_key(place)] if route.features else self._room[requested_key(place)] // size
            parts.append(partition(route, by_key, size, most, blank))
        self._numbers.copy_(self.ahead.gather_counts(self._own, [one.sums for one in parts]))
        sent = SentBatch(batch, self._samples, [], [], [])
        for place, (route, own) in enumerate(zip(routes, parts, strict=True)):
            if route.features:
                sent.events.append(self._events(place, route, own))
                continue
            sent.requested.append(request_rows(group, place, own.buffer))
            lengths = torch.cat([by_key[key].lengths() for key in route.keys])
            sizes = [by_key[key].values().size(0) for key in route.keys]
            sent.slots.append(jagged(slot_keys(place, route), own.slots, lengths, sizes))
        return sent

    def _events(self, place: int, route: Route, own: Partitioned) -> KeyedJaggedTensor:
        """The events that arrive here, of all ranks, with room behind them."""
        group, blank, keys = self.ahead.group, self._blank[place], column_keys(place, route)
        size, most, room = group.size(), self._room[sent_key(place)], self._room[keys[0]]
        going = own.buffer
        if len(route.ranks) < size:
            going = going.view(size, most, -1).index_select(0, self._owners[place]).flatten(0, 1)
        is_owner = group.rank() in route.ranks
        counts = [most if rank in route.ranks else 0 for rank in range(size)], [most if is_owner else 0] * size
        arrived = Exchange(group, *counts).send(going)
        lengths = route.to_owners(group, list(self._samples)).send(counts_for(route, own.counts))
        if is_owner:
            columns = collect(arrived, lengths, blank, size, room)
        else:
            columns = blank.view(-1, 1).expand(-1, room)
        return jagged(keys, columns.flatten(), lengths.repeat(len(keys)), [room] * len(keys))

    def _blank_event(self, place: int, route: Route) -> Tensor:
        """[1, K] int32: what is in the places left."""
        keys = column_keys(place, route) if route.features else [requested_key(place)]
        found = [self.ahead.padding.get(key, 0) for key in keys]
        return torch.tensor([found], dtype=torch.int32, device=self.ahead.device)


class Sending(NamedTuple):
    """A batch on its way."""

    batch: Any  # as it was given
    sender: FixedSender | None  # None if it is not sent ahead
    slot: _Slot | None

    def numbers(self) -> list[list[int]]:
        """The counts of all ranks, see `SendAhead.gather_counts`."""
        if self.slot.filled is not None:
            self.slot.filled.synchronize()
        return self.slot.numbers.tolist()

    def load(self, capacities: tuple[int, ...], buffers: Buffers, block: Tensor) -> None:
        """Copies the batch into a block of buffers; the current stream waits for its arrival."""
        if self.slot.filled is None:
            self.sender.load(self.slot, capacities, buffers, block)
            return
        current = torch.cuda.current_stream(block.device)
        current.wait_event(self.slot.filled)
        self.sender.load(self.slot, capacities, buffers, block)
        self.slot.copied.record(current)


def request_rows(group: dist.ProcessGroup, place: int, going: Tensor) -> KeyedJaggedTensor:
    """What all ranks request here, given what this one requests: [W · most, 1], as many places for each owner."""
    size = group.size()
    most = going.size(0) // size
    arrived = Exchange(group, [most] * size, [most] * size).send(going.view(-1))
    lengths = torch.full((size,), most, dtype=torch.int32, device=going.device)
    return jagged([requested_key(place)], arrived, lengths, [size * most])
