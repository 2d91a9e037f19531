"""The fixed shapes of captured sharded steps, on which all ranks agree, and batches in memory of these shapes.

A captured step has fixed shapes, and so have the collectives in it. How many ids each rank has for each owner is known
only when they are partitioned. So all ranks gather these counts, from which every one of them finds the same
capacities, or the same reason to run the step eagerly. Of the rows that are sent back within the step, every pair of
ranks has equally many slots.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jfi.cuda_graphs.static_batch import (
    OTHER_STRUCTURE,
    Buffers,
    CapacityBuckets,
    Described,
    UnsupportedBatch,
    describe,
    to_device,
)
from jfi.distributed.exchange import Exchange, PeerMemory, start_gather
from jfi.distributed.input_dist import GroupInput, InputDistOutput, check_keys, count_samples
from jfi.distributed.sharded_tables import ShardedTables
from jfi.modules.validation import allow_no_samples
from jfi.tables.gather_rows import bound_ids

#: Priorities of streams, lower numbers first: of a step, whose kernels wait for each other, and of the input dist,
#: whose kernels are small. The sorting of the tables' rows, which fills the GPU, has 0.
STEP, INPUT_DIST = -2, -1


class DistributedBatch(NamedTuple):
    """A batch whose ids are at the owner ranks of their rows, as a captured step reads it.

    Attributes:
        batch: this rank's.
        groups: of each table group that attention reads the events that arrived here, [K, capacity] int32, and their
            offsets by rank, sequence and sample, [n + 1] int32; of each other group the rows that every rank requests
            here, [W, slots] int32, and the slot in which the row of each id comes back, [S] int64. Padding is -1.
    """

    batch: Any
    groups: list[tuple[Tensor, Tensor]]


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
        self.reference = describe(reference)
        by_key = self.ids_by_key(self.reference)
        sums = [count_samples(group, by_key, pg.size()).sum(1) for group in self.groups]
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))
        with self.on_stream():
            shape = torch.tensor(self.shape_vector(self.reference), device=device)
            shapes = self.gather(shape, [x.to(device) for x in sums]).tolist()
        self.samples = [row[1] for row in shapes]
        lengths, fixed = self._of_all_ranks(shapes)
        self.buckets = CapacityBuckets(self.reference, fixed, lengths)
        self.smallest: Any = self.buckets.capacities(lengths, fixed)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Runs the block on the stream of the input dist."""
        with torch.no_grad(), nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            yield

    def shape_vector(self, batch: Described) -> list[int]:
        """Returns the shape of this rank's batch as numbers.

        They are whether its structure is the reference's, its samples, its values by key, and by key whether it has one
        value a sample.
        """
        if batch.structure != self.reference.structure:
            return [0] * (2 + 2 * len(self.reference.keys))
        return [1, ids_of(batch).stride(), *batch.lengths, *batch.fixed_length()]

    def gather(self, shape: Tensor, sums: list[Tensor]) -> Tensor:
        """Returns of every rank its `shape_vector` and its events for each rank by group, [W, n] int64."""
        gathered, work = start_gather(torch.cat([shape, *sums]), self.pg)
        if work is not None:
            work.wait()
        return gathered

    def agree(self, shapes: list[list[int]]) -> tuple[int, ...] | str:
        """Returns the capacities that hold a batch of gathered shapes, or why none do: the same on each rank."""
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

    def discount(self, batch: Any) -> None:
        """Subtracts a batch's ids outside of their tables from the counts: they are counted when it is sent again."""
        if self.stream is not None:  # the step before counts as well
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with self.on_stream():
            by_key = ids_of(describe(to_device(batch, self.device))).to_dict()
            for group in self.groups:
                counts = group.outside.on(self.device)
                outside = torch.zeros_like(counts)
                bound_ids([by_key[key].values() for key in group.keys], [s.num_rows for s in group.shardings], outside)
                counts -= outside
        if self.stream is not None:  # the step counts as well
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    @contextmanager
    def given(self, batch: DistributedBatch, pg: dist.ProcessGroup, peers: PeerMemory | None) -> Iterator[None]:
        """Lets the collections read a batch within the block, and no other ids.

        The step sends through peer memory if there is any, else through the process group of all ranks.
        """
        described, inputs = describe(batch.batch), []
        by_key = self.ids_by_key(described)
        for group, (arrived, index) in zip(self.groups, batch.groups, strict=True):
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


class DistributedBuffers:
    """A `DistributedBatch` of given capacities in one block of memory.

    Args:
        shapes: agreed on by all ranks.
        capacities: those of `shapes.buckets` that the memory has.

    Attributes:
        raw: the memory of the batch itself, the first part of a block.
    """

    def __init__(self, shapes: FixedShapes, capacities: tuple[int, ...]) -> None:
        device, by_key = shapes.device, dict(zip(shapes.reference.keys, capacities, strict=False))
        self.raw = Buffers(shapes.buckets.structure, capacities[: len(by_key)], shapes.padding, device)
        self._groups, parts = shapes.groups, []  # of which only the shapes are taken
        #: By group, the capacities of its keys.
        self._sizes = [[by_key[key] for key in group.keys] for group in shapes.groups]
        by_group = zip(shapes.groups, self._sizes, shapes.group_capacities(capacities), strict=True)
        for group, sizes, (sent, arriving) in by_group:
            if group.features:
                samples = sum(group.to_owners(shapes.pg, shapes.samples).received)
                arrived, index = (len(group.padding), arriving), torch.empty(samples + 1, dtype=torch.int32)
            else:
                arrived, index = (shapes.pg.size(), sent), torch.empty(sum(sizes), dtype=torch.int64)
            parts.append((torch.empty(arrived, dtype=torch.int32), index))
        self._arrived = Buffers(describe(parts).structure, (), {}, device)

    def new_block(self) -> Tensor:
        """Returns memory of one batch."""
        return torch.cat([self.raw.new_block(), self._arrived.new_block()])

    def fill(self, block: Tensor, groups: list[tuple[Tensor, Tensor]]) -> None:
        """Writes what has arrived to a block, behind the batch itself."""
        self._arrived.fill(block[self.raw.size :], describe(groups))

    def batch(self, block: Tensor) -> DistributedBatch:
        """Returns the batch in a block."""
        raw, arrived = block[: self.raw.size], block[self.raw.size :]
        return DistributedBatch(self.raw.batch(raw), self._arrived.batch(arrived))

    def narrow(self, block: Tensor, wider: "DistributedBuffers", wider_block: Tensor) -> None:
        """Copies a batch that fits these capacities from a block of wider buffers."""
        self.raw.narrow(block[: self.raw.size], wider.raw, wider_block[: wider.raw.size])
        views, more = self._arrived.batch(block[self.raw.size :]), wider._arrived.batch(wider_block[wider.raw.size :])
        parts = zip(self._groups, views, more, self._sizes, wider._sizes, strict=True)
        for group, (arrived, index), (wide, wide_index), sizes, wide_sizes in parts:
            arrived.copy_(wide[:, : arrived.size(1)])
            if group.features:
                index.copy_(wide_index)
                continue
            slots = torch.cat([x[:size] for x, size in zip(wide_index.split(wide_sizes), sizes, strict=True)])
            had, has = wide.size(1), arrived.size(1)
            index.copy_(torch.where(slots < 0, -1, slots // had * has + slots % had))


def ids_of(batch: Described) -> KeyedJaggedTensor:
    """Returns the ids of a batch.

    Raises:
        UnsupportedBatch: it has none, or several KeyedJaggedTensors.
    """
    if len(batch.jagged) != 1:
        raise UnsupportedBatch(f"the batch has {len(batch.jagged)} KeyedJaggedTensors, and must have one")
    return batch.jagged[0]
