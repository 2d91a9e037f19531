"""The input dist in fixed shapes, as a CUDA graph: nothing waits for the host.

Every pair of ranks has slots for as many ids as one of them may have for the other, by the capacities of the batches
before. The host reads the counts of a batch when its step comes, long after they arrived, and finds whether the
capacities hold all of it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from jfi.cuda_graphs.captured_step import CudaGraphs, StagingBlock
from jfi.cuda_graphs.static_batch import Described, describe
from jfi.distributed.fixed_shapes import DistributedBuffers, FixedShapes
from jfi.distributed.input_dist import collect, count_samples, counts_for_owners, partition, start_events
from jfi.utils.context import padded_to_capacity

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
                buffer, sums, index = partition(group, by_key, size, slots, None if group.features else padding)
                parts.append((buffer, sums, count_samples(group, by_key, size) if index is None else index))
            self._shapes.copy_(agreed.gather(self._shape, [sums for _, sums, _ in parts]))
            arrived = [self._send(number, buffer, index) for number, (buffer, _, index) in enumerate(parts)]
            self._buffers.fill(block, arrived)

    def _send(self, number: int, buffer: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Sends a group's partitioned events to their owners; returns what arrives, see `DistributedBatch`."""
        agreed, group, padding = self._agreed, self._agreed.groups[number], self._padding[number]
        (slots, capacity), size = self._by_group[number], agreed.pg.size()
        arrived, work = start_events(group, buffer, slots, agreed.pg)
        if work is not None:
            work.wait()
        if not group.features:
            return arrived.view(size, slots), index
        lengths = group.to_owners(agreed.pg, agreed.samples).send(counts_for_owners(group, index))
        if arrived.size(0):
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
