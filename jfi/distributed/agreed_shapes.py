"""The shapes of captured sharded steps, on which all ranks agree.

A captured step has fixed shapes, and so have the collectives in it. How many ids each rank has for each owner is known
only when they are partitioned. So all ranks gather these counts, from which every one of them finds the same
capacities, or the same reason to run the step eagerly. Of the rows that are sent back within the step, every pair of
ranks has equally many slots.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from jfi.cuda_graphs.static_batch import (
    OTHER_STRUCTURE,
    CapacityBuckets,
    Described,
    describe,
    fixed_length_keys,
    not_fixed_length,
    to_device,
)
from jfi.distributed.distributed_batch import (
    column_keys,
    groups_of,
    ids_of,
    padding_of,
    requested_key,
    sent_key,
    slot_keys,
)
from jfi.distributed.input_dist import check_keys, sort_by_owner
from jfi.distributed.sharded_tables import ShardedTables
from jfi.modules import lookups

#: Priorities of streams, lower numbers first: of a step, whose kernels wait for each other, and of the input dist,
#: whose kernels are small. The sorting of the tables' rows, which fills the GPU, has 0.
STEP, INPUT_DIST = -2, -1


class AgreedShapes:
    """The capacities of batches that go to their owners before their steps; all ranks call it with the same batches.

    Args:
        collections: of the model.
        pg: all ranks, for ids alone: the collectives of a process group run one after the other, and these must not
            wait for the step.
        device: of the step.

    Attributes:
        groups: the table groups of the collections.
        pg, device: as given.
        stream: on a GPU, that of the input dist.
        padding: ids behind a batch's own, by key.
        reference: the batch that capacities follow from, taken apart; None before `set_reference`.
        samples: that batch's, of every rank.
        ladder: the capacities by name: the batch's keys, the keys of a `DistributedBatch`, and for each group that
            attention reads the maximum of the events that a rank has for another one; None before `set_reference`.
        names: of the capacities.
    """

    def __init__(self, collections: list[ShardedTables], pg: dist.ProcessGroup, device: torch.device) -> None:
        self.groups, self.pg, self.device = groups_of(collections), pg, device
        self.stream = torch.cuda.Stream(device, priority=INPUT_DIST) if device.type == "cuda" else None
        self.padding = padding_of(collections)
        self.reference: Described | None = None
        self.ladder: CapacityBuckets | None = None
        self.names: list[str] = []
        self.samples: tuple[int, ...] = ()
        #: By key of the batch, whether it has one value a sample in the reference of every rank.
        self._fixed_length: list[bool] = []

    @property
    def fixed_length_keys(self) -> frozenset[str]:
        """The keys with one value a sample in all batches that run in buffers."""
        return frozenset() if self.ladder is None else self.ladder.fixed_length_keys

    @property
    def padded_keys(self) -> set[str]:
        """The other keys of the batches."""
        return {key for key, fixed in zip(self.reference.keys, self._fixed_length, strict=True) if not fixed}

    def set_reference(self, batch: Any) -> tuple[int, ...]:
        """Takes the capacities from this batch, and returns those that hold it."""
        with self.on_stream():
            self.reference = describe(batch)
            shape = torch.tensor(self.shape_vector(self.reference), device=self.device)
            by_key = self.ids_by_key(to_device(batch, self.device))
            # Ids outside of their tables are counted when the batch is sent.
            sorted_ids = [sort_by_owner(group, by_key, self.pg.size(), count_outside=False) for group in self.groups]
            shapes = self.gather(shape, [ids.sums for ids in sorted_ids]).tolist()
        self.samples = tuple([row[1] for row in shapes])
        keys = len(self.reference.keys)
        self._fixed_length = [all(column) for column in list(zip(*shapes, strict=True))[2 + keys : 2 + 2 * keys]]
        self.names, lengths, fixed = self._lengths(shapes)
        self.ladder = CapacityBuckets(
            None, self.names, lengths, fixed, fixed_length_keys(self.reference, self._fixed_length)
        )
        return self.ladder.capacities(lengths)

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
        return [
            batch.structure == self.reference.structure,
            ids_of(batch).stride(),
            *batch.lengths,
            *batch.fixed_length(),
        ]

    def gather(self, shape: Tensor, sums: list[Tensor]) -> Tensor:
        """Returns of every rank its `shape_vector` and its events for each rank by group, [W, n] int64."""
        own, size = torch.cat([shape, *sums]), self.pg.size()
        if size == 1:
            return own.unsqueeze(0)
        gathered = own.new_empty(size, own.size(0))
        dist.all_gather_into_tensor(gathered.view(-1), own, group=self.pg)
        return gathered

    def agree(self, shapes: list[list[int]]) -> tuple[int, ...] | str:
        """Returns the capacities that hold a batch of gathered shapes, or why none do: the same on each rank."""
        alike, samples, *columns = zip(*shapes, strict=True)
        keys = self.reference.keys
        fixed = [all(column) for column in columns[len(keys) : 2 * len(keys)]]
        lost = [key for key, was, now in zip(keys, self._fixed_length, fixed, strict=False) if was > now]
        if not all(alike) or len(set(samples)) > 1:
            return OTHER_STRUCTURE
        return not_fixed_length(lost[0]) if lost else self.ladder.capacities(self._lengths(shapes)[1])

    def ids_by_key(self, batch: Any) -> dict[str, JaggedTensor]:
        """Returns the ids of a batch on the device, checked."""
        ids = ids_of(describe(batch))
        lookups.allow_no_samples(ids)
        by_key = ids.to_dict()
        for group in self.groups:
            check_keys(group, by_key)
        return by_key

    def _lengths(self, shapes: list[list[int]]) -> tuple[list[str], tuple[int, ...], list[bool]]:
        """Returns all names of the ladder, the lengths that their capacities must hold, and whether these are fixed."""
        keys, size = self.reference.keys, self.pg.size()
        maxima = [max(column) for column in zip(*shapes, strict=True)][2 : 2 + len(keys)]
        own = dict(zip(keys, zip(maxima, self._fixed_length, strict=True), strict=True))
        sums = [row[len(row) - size * len(self.groups) :] for row in shapes]
        events, requested, slots, most = [], [], [], []
        for number, group in enumerate(self.groups):
            sent = [row[number * size : (number + 1) * size] for row in sums]  # by rank, to each other one
            if group.features:
                arriving = max(map(sum, zip(*sent, strict=True)))
                events += [(name, arriving, False) for name in column_keys(number, group)]
                most.append((sent_key(number), max(map(max, sent)), False))
            else:
                requested.append((requested_key(number), size * max(map(max, sent)), False))
                slots += [(name, *own[key]) for name, key in zip(slot_keys(number, group), group.keys, strict=True)]
        found = [(key, *own[key]) for key in keys] + events + requested + slots + most
        names, lengths, fixed = zip(*found, strict=True)
        return list(names), lengths, list(fixed)
