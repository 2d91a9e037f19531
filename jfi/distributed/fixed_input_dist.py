"""The input dist of captured steps: in fixed shapes, as a CUDA graph of its own, where nothing waits for the host.

A captured step has fixed shapes, and so have the collectives in it. Every pair of ranks has slots for as many ids as
one of them may have for the other, by the capacities of the batches before. How many it has is known when ids are
partitioned: all ranks gather these counts. The host reads them when the batch's step comes, long after they arrived,
and every rank finds the same capacities that hold all of it, or the same reason to run the step eagerly.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jfi.cuda_graphs.captured_step import CudaGraphs, StagingBlock
from jfi.cuda_graphs.static_batch import (
    OTHER_STRUCTURE,
    Buffers,
    CapacityBuckets,
    Described,
    UnsupportedBatch,
    describe,
)
from jfi.distributed.exchange import Exchange, PeerMemory, gather
from jfi.distributed.input_dist import (
    GroupInput,
    InputDistOutput,
    check_keys,
    collect,
    count_samples,
    offsets_of,
    partition,
    send_events,
)
from jfi.distributed.sharded_tables import ShardedTables
from jfi.modules.validation import allow_no_samples
from jfi.utils.context import padded_to_capacity

#: Priorities of streams, lower numbers first: of a step, whose kernels wait for each other, and of the input dist,
#: whose kernels are small. The sorting of the tables' rows, which fills the GPU, has 0.
STEP, INPUT_DIST = -2, -1
#: Batches that are on their way while a step runs.
AHEAD = 2
#: Batches that are sent by single launches before a graph is captured for each memory slot.
_WARM_UP = 2


class DistributedBatch(NamedTuple):
    """A batch whose ids are at the owner ranks of their rows, as a captured step reads it.

    Attributes:
        batch: this rank's.
        groups: of each table group that attention reads the events that arrived here, [K, capacity] int32, and their
            offsets by rank, sequence and sample, [n + 1] int32; of each other group the rows that every rank requests
            here, [W, slots] int32, and the slot in which the row of each id comes back, [S] int64. Padding is -1. Then
            of both this rank's ids outside of their tables by sequence, [sequences] int64.
    """

    batch: Any
    groups: list[tuple[Tensor, Tensor, Tensor]]


class FixedShapes:
    """The shapes of batches that go to their owners before their steps; all ranks call it with the same batches.

    Args:
        collections: of the model.
        pg: all ranks, for ids alone: the collectives of a process group run one after the other, and these must not
            wait for the step.
        device: of the step.
        reference: the batch that capacities follow from.

    Attributes:
        groups: the table groups of the collections.
        stream: on a GPU, that of the input dist.
        samples: those of the reference on every rank.
        buckets: the capacities of a batch's keys, then by group of the events that a rank sends to another one and, if
            attention reads them, of those that it receives.
        smallest: the capacities that hold the reference.
    """

    def __init__(
        self, collections: list[ShardedTables], pg: dist.ProcessGroup, device: torch.device, reference: Any
    ) -> None:
        self._collections, self.pg, self.device = collections, pg, device
        self.groups = [group for collection in collections for group in collection.groups]
        self.stream = torch.cuda.Stream(device, priority=INPUT_DIST) if device.type == "cuda" else None
        self.padding = {key: -1 for collection in collections for key in collection.local.keys}
        self.batch, self.reference = reference, describe(reference)
        by_key = self.ids_by_key(self.reference)
        sums = [count_samples(group, by_key, pg.size()).sum(1) for group in self.groups]
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.no_grad(), torch.cuda.stream(self.stream):  # of None: the current one
            shape = torch.tensor(self.shape_vector(self.reference), device=device)
            shapes = gather(torch.cat([shape, *[x.to(device) for x in sums]]), pg).tolist()
        self.samples = [row[1] for row in shapes]
        lengths, fixed = self._of_all_ranks(shapes)
        self.buckets = CapacityBuckets(self.reference, fixed, lengths)
        self.smallest: Any = self.buckets.capacities(lengths, fixed)

    def shape_vector(self, batch: Described) -> list[int]:
        """Returns the shape of this rank's batch as numbers.

        They are whether its structure is the reference's, its samples, its values by key, and by key whether it has one
        value a sample.
        """
        if batch.structure != self.reference.structure:
            return [0] * (2 + 2 * len(self.reference.keys))
        return [1, ids_of(batch).stride(), *batch.lengths, *batch.fixed_length()]

    def agree(self, shapes: list[list[int]]) -> tuple[int, ...] | str:
        """Returns the capacities that hold a batch, or why none do, the same on each rank.

        Args:
            shapes: of every rank its `shape_vector` and its events for each rank by group.
        """
        if not all(row[0] for row in shapes):
            return OTHER_STRUCTURE
        return self.buckets.capacities(*self._of_all_ranks(shapes))

    def _of_all_ranks(self, shapes: list[list[int]]) -> tuple[list[int], list[bool]]:
        """Returns the lengths that the capacities must hold, and by key whether all ranks have one value a sample."""
        keys, size = len(self.reference.keys), self.pg.size()
        columns = list(zip(*shapes, strict=True))[2:]
        lengths, fixed = list(map(max, columns[:keys])), list(map(all, columns[keys : 2 * keys]))
        for number, group in enumerate(self.groups):
            to_rank = columns[2 * keys + number * size : 2 * keys + (number + 1) * size]
            lengths += [max(map(max, to_rank)), max(map(sum, to_rank)) if group.features else 0]
        return lengths, fixed

    def group_capacities(self, capacities: tuple[int, ...]) -> list[tuple[int, int]]:
        """Returns by group the capacities of its events for another rank, and of those that arrive."""
        rest = capacities[len(self.reference.keys) :]
        return list(zip(rest[::2], rest[1::2], strict=True))

    def ids_by_key(self, batch: Described) -> dict[str, JaggedTensor]:
        """Returns the ids of a batch, checked."""
        ids = ids_of(batch)
        allow_no_samples(ids)
        by_key = ids.to_dict()
        for group in self.groups:
            check_keys(group, by_key)
        return by_key

    @contextmanager
    def given(self, batch: DistributedBatch, pg: dist.ProcessGroup, peers: PeerMemory | None) -> Iterator[None]:
        """Lets the collections read a batch within the block, and no other ids.

        The step sends through peer memory if there is any, else through the process group of all ranks.
        """
        described, inputs = describe(batch.batch), []
        by_key = self.ids_by_key(described)
        for group, (arrived, index, outside) in zip(self.groups, batch.groups, strict=True):
            group.outside.on(self.device).add_(outside)
            sizes = [by_key[key].values().size(0) for key in group.keys]
            if group.features:
                queries = group.to_owners(pg, self.samples, peers)
                inputs.append(GroupInput(group, None, queries, arrived.unbind(0), index, sizes))
            else:
                counts = [arrived.size(1)] * pg.size()
                rows = Exchange(pg, counts, counts, peers)
                inputs.append(GroupInput(group, rows, None, (arrived.view(-1),), None, sizes, slots=index))
        rest = iter(inputs)
        with ExitStack() as stack:
            for collection in self._collections:
                output = InputDistOutput([next(rest) for _ in collection.groups], by_key)
                stack.enter_context(collection.given(ids_of(described), output))
            yield


class DistributedBuffers(Buffers):
    """A `DistributedBatch` of given capacities in one block of memory.

    Args:
        shapes: agreed on by all ranks.
        capacities: those of `shapes.buckets` that the memory has.

    Attributes:
        capacities: as given.
    """

    def __init__(self, shapes: FixedShapes, capacities: tuple[int, ...]) -> None:
        self.capacities = capacities
        by_key, parts = dict(zip(shapes.reference.keys, capacities, strict=False)), []
        #: By group that attention does not read, the capacities of its keys.
        self._sizes: list[list[int] | None] = []
        for group, (sent, arriving) in zip(shapes.groups, shapes.group_capacities(capacities), strict=True):
            if group.features:
                samples = sum(group.to_owners(shapes.pg, shapes.samples).received)
                arrived, index = (len(group.padding), arriving), torch.empty(samples + 1, dtype=torch.int32)
                self._sizes.append(None)
            else:
                self._sizes.append([by_key[key] for key in group.keys])
                arrived, index = (shapes.pg.size(), sent), torch.empty(sum(self._sizes[-1]), dtype=torch.int64)
            parts.append((torch.empty(arrived, dtype=torch.int32), index, group.outside.counts))
        structure = describe(DistributedBatch(shapes.batch, parts)).structure
        super().__init__(structure, capacities[: len(by_key)], shapes.padding, shapes.device)

    def narrow(self, block: Tensor, wider: "DistributedBuffers", wider_block: Tensor) -> None:
        """Copies a batch that fits these capacities from a block of wider buffers."""
        super().narrow(block, wider, wider_block)
        groups = zip(self._groups(block), wider._groups(wider_block), self._sizes, wider._sizes, strict=True)
        for (arrived, index, _), (wide, wide_index, _), sizes, wide_sizes in groups:
            if sizes is not None:
                slots = torch.cat([x[:size] for x, size in zip(wide_index.split(wide_sizes), sizes, strict=True)])
                had, has = wide.size(1), arrived.size(1)
                index.copy_(torch.where(slots < 0, -1, slots // had * has + slots % had))

    def _groups(self, block: Tensor) -> list[tuple[Tensor, ...]]:
        """Returns the groups of the batch in a block, without the batch."""
        parts = iter(self._views(block)[0][-3 * len(self._sizes) :])
        return list(zip(parts, parts, parts, strict=True))


class MemorySlot(StagingBlock):
    """Memory of a batch that was sent, the shapes of all ranks, and the graph that fills it."""

    def __init__(self, sender: "FixedInputDist", block: Tensor, shapes: Tensor) -> None:
        super().__init__(block)
        self.sender, self.shapes = sender, shapes
        self.replay: Callable[[], None] | None = None

    def wait(self) -> list[list[int]]:
        """Waits for the shapes of all ranks, see `FixedShapes.agree`."""
        if self.filled is not None:
            self.filled.synchronize()
        return self.shapes.tolist()


class FixedInputDist:
    """Sends batches of fixed capacities; all ranks call it with their parts of the same batch.

    Args:
        shapes: agreed on by all ranks.
        capacities: those of `shapes.buckets` that it has.
        graphs: makes CUDA graphs; None to send by single launches.
    """

    def __init__(self, shapes: FixedShapes, capacities: tuple[int, ...], graphs: CudaGraphs | None) -> None:
        self._agreed, self._graphs, self._buffers = shapes, graphs, DistributedBuffers(shapes, capacities)
        self._by_group = shapes.group_capacities(capacities)
        device, size = shapes.device, shapes.pg.size()
        # Made here, since a capture copies nothing from the host.
        self._shape = torch.tensor(shapes.shape_vector(shapes.reference), device=device)
        self._shapes = self._shape.new_zeros(size, self._shape.size(0) + size * len(shapes.groups))
        self._padding = [torch.tensor([group.padding], dtype=torch.int32, device=device) for group in shapes.groups]
        self._slots = []
        for _ in range(AHEAD + 1):
            on_host = torch.zeros(self._shapes.shape, dtype=torch.int64, pin_memory=shapes.stream is not None)
            self._slots.append(MemorySlot(self, self._buffers.new_block(), on_host))
        self._count = 0
        if shapes.stream is not None:
            shapes.stream.wait_stream(torch.cuda.current_stream(device))

    def send(self, batch: Any) -> MemorySlot:
        """Sends a batch in any memory, best in pinned memory, and waits for nothing.

        Raises:
            UnsupportedBatch: a batch that is no tree of tensors and constants with one KeyedJaggedTensor.
            ValueError: features that do not fit the table groups.
        """
        described, stream = describe(batch), self._agreed.stream
        self._agreed.ids_by_key(described)  # checked here, since keys have equal capacities in the buffers
        shape = torch.tensor(self._agreed.shape_vector(described))
        slot = self._slots[self._count % len(self._slots)]
        with torch.no_grad(), torch.cuda.stream(stream):
            if stream is not None:
                stream.wait_event(slot.copied)
            if self._holds(described):
                self._buffers.fill(slot.block, described)
            else:  # none of it is sent, as all ranks will see from the shapes
                self._buffers.clear(slot.block)
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
        return slot

    def holds(self, capacities: tuple[int, ...]) -> bool:
        """Returns whether its capacities are at least these."""
        return all(capacity >= other for capacity, other in zip(self._buffers.capacities, capacities, strict=True))

    def load(self, slot: MemorySlot, buffers: DistributedBuffers, block: Tensor) -> None:
        """Copies a sent batch to a block of buffers that hold it; the current stream waits for the batch's arrival."""
        stream = None if slot.filled is None else torch.cuda.current_stream(block.device)
        if stream is not None:
            stream.wait_event(slot.filled)
        if buffers.capacities == self._buffers.capacities:
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
        lengths = zip(batch.keys, batch.lengths, self._buffers.capacities, strict=False)
        return all(n == most if key in buckets.fixed_length_keys else n <= most for key, n, most in lengths)

    def _fill(self, block: Tensor) -> None:
        """Sends the batch in a block, and `_shape`; writes what arrives to its groups, and `_shapes`."""
        agreed, size, parts = self._agreed, self._agreed.pg.size(), []
        with padded_to_capacity(agreed.buckets.fixed_length_keys):
            batch, groups = self._buffers.batch(block)
            by_key = agreed.ids_by_key(describe(batch))
            for group, padding, (slots, _), (*_, outside) in zip(
                agreed.groups, self._padding, self._by_group, groups, strict=True
            ):
                empty = None if group.features else padding
                buffer, sums, index = partition(group, by_key, size, slots, empty, outside.zero_())
                parts.append((buffer, sums, count_samples(group, by_key, size) if index is None else index))
            self._shapes.copy_(gather(torch.cat([self._shape, *[sums for _, sums, _ in parts]]), agreed.pg))
            for group, padding, (slots, capacity), (buffer, _, own), (arrived, index, _) in zip(
                agreed.groups, self._padding, self._by_group, parts, groups, strict=True
            ):
                received, lengths = send_events(group, buffer, slots, own, agreed.samples, agreed.pg)
                if lengths is None:
                    arrived.copy_(received.view(size, slots))
                    index.copy_(own)
                else:
                    arrived.copy_(collect(received, lengths, padding, size, capacity))
                    index.copy_(offsets_of(lengths))


def ids_of(batch: Described) -> KeyedJaggedTensor:
    """Returns the ids of a batch.

    Raises:
        UnsupportedBatch: it has none, or several KeyedJaggedTensors.
    """
    if len(batch.jagged) != 1:
        raise UnsupportedBatch(f"the batch has {len(batch.jagged)} KeyedJaggedTensors, and must have one")
    return batch.jagged[0]
