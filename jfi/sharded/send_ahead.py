"""The ids of a batch on their way to the owners of their rows before its step, for steps of fixed shapes.

A captured step (`jfi.sharded.captured`) has fixed shapes, and so have the collectives in it. How many ids each rank has
for each owner is known only when they are sorted. So all ranks gather these counts, from which every one of
them finds the same capacities, or the same reason to run the step eagerly. Of the rows that are sent back within the
step, every pair of ranks has as many places.

The collectives that send ids have a process group of their own: those of a group run one after the other, and these
shall not wait for the step.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
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
    moved,
    not_single,
    single_keys,
    to_device,
)
from jfi.modules import lookups
from jfi.sharded.routed import RoutedCollection
from jfi.sharded.routes import check_route, sort_by_owner
from jfi.sharded.sent_batch import (
    column_keys,
    ids_of,
    padding_of,
    requested_key,
    routes_of,
    sent_key,
    slot_keys,
)

#: Priorities of streams, lower numbers first: of a step, whose kernels wait for each other, and of what sends ids,
#: whose kernels are small. The sorting, which fills the GPU, has 0.
STEP, SENDING = -2, -1


class SendAhead:
    """Sends batches ahead of their steps; all ranks call it with their parts of the same batch.

    Args:
        collections: of the model.
        group: all ranks, for ids alone.
        device: of the step.

    Attributes:
        routes: of the collections.
        group, device: as given.
        stream: on a GPU, the one that sends.
        first: the batch that capacities follow from, taken apart; None before `refer`.
        samples: that batch's, of every rank.
        ladder: the capacities by name: the batch's keys, the keys of a `SentBatch`, and for each route that attention
            reads the most events that a rank has for another one; None before `refer`.
    """

    def __init__(self, collections: list[RoutedCollection], group: dist.ProcessGroup, device: torch.device) -> None:
        self.routes, self.group, self.device = routes_of(collections), group, device
        self.stream = torch.cuda.Stream(device, priority=SENDING) if device.type == "cuda" else None
        self.padding = padding_of(collections)
        self.first: Described | None = None
        self.ladder: CapacityBuckets | None = None
        self.names: list[str] = []
        self.samples: tuple[int, ...] = ()
        #: Beside the batch's keys whether each has one value a sample in the first batch of every rank.
        self._singles: list[bool] = []

    @property
    def singles(self) -> frozenset[str]:
        """Keys with one value a sample in all batches that run in buffers."""
        return frozenset() if self.ladder is None else self.ladder.singles

    @property
    def with_room(self) -> set[str]:
        """The other keys of the batches."""
        return {key for key, single in zip(self.first.keys, self._singles, strict=True) if not single}

    def refer(self, batch: Any) -> tuple[int, ...]:
        """Takes the capacities from this batch, and returns those that hold it."""
        with self.sending():
            self.first = describe(batch)
            numbers = torch.tensor(self.numbers_of(self.first), device=self.device)
            by_key = self.ids_by_key(moved(batch, partial(to_device, device=self.device)))
            size = self.group.size()
            # Ids outside of their tables are counted when the batch is sent.
            sums = [sort_by_owner(route, by_key, size, counts=False).sums for route in self.routes]
            rows = self.gather_counts(numbers, sums).tolist()
            self.samples = tuple([row[1] for row in rows])
            keys = len(self.first.keys)
            self._singles = [all(one) for one in list(zip(*rows, strict=True))[2 + keys : 2 + 2 * keys]]
            self.names, lengths, fixed = self._keys(rows)
            singles = single_keys(self.first, self._singles)
            self.ladder = CapacityBuckets(None, self.names, lengths, fixed, singles)
            return self.ladder.capacities(lengths)

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Around all that sends ids."""
        with torch.no_grad(), nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            yield

    def numbers_of(self, described: Described) -> list[int]:
        """What this rank knows of its batch: whether it is like the first one, samples, values by key, single keys."""
        alike, samples = described.structure == self.first.structure, ids_of(described).stride()
        return [alike, samples, *described.lengths, *described.single()]

    def gather_counts(self, own: Tensor, sums: list[Tensor]) -> Tensor:
        """[W, n] int64: of every rank its `numbers_of`, and what it has of each route for every rank."""
        counts, size = torch.cat([own, *sums]), self.group.size()
        if size == 1:
            return counts.unsqueeze(0)
        numbers = counts.new_empty(size, counts.size(0))
        dist.all_gather_into_tensor(numbers.view(-1), counts, group=self.group)
        return numbers

    def agree(self, rows: list[list[int]]) -> tuple[int, ...] | str:
        """Returns the capacities that hold a batch, or why none do, from the counts of all ranks: the same on each."""
        alike, samples, *columns = zip(*rows, strict=True)
        keys = self.first.keys
        single = [all(one) for one in columns[len(keys) : 2 * len(keys)]]
        lost = [key for key, was, now in zip(keys, self._singles, single, strict=False) if was > now]
        if not all(alike) or len(set(samples)) > 1:
            return OTHER_STRUCTURE
        return not_single(lost[0]) if lost else self.ladder.capacities(self._keys(rows)[1])

    def ids_by_key(self, batch: Any) -> dict[str, JaggedTensor]:
        """The ids of a batch on the device, checked."""
        ids = ids_of(describe(batch))
        lookups.allow_no_samples(ids)
        by_key = ids.to_dict()
        for route in self.routes:
            check_route(route, by_key)
        return by_key

    def _places(self, rows: list[list[int]]) -> list[list[list[int]]]:
        """By route what each rank sends to each other one."""
        size = self.group.size()
        sums = [row[len(row) - size * len(self.routes) :] for row in rows]
        return [[row[first : first + size] for row in sums] for first in range(0, size * len(self.routes), size)]

    def _keys(self, rows: list[list[int]]) -> tuple[list[str], tuple[int, ...], list[bool]]:
        """Of all names of the ladder the names, the values that they need room for, and whether that is fixed."""
        keys, columns = self.first.keys, list(zip(*rows, strict=True))[2:]
        own = dict(zip(keys, zip(map(max, columns), self._singles, strict=False), strict=False))
        events, requested, slots, most = [], [], [], []
        for place, (route, sent) in enumerate(zip(self.routes, self._places(rows), strict=True)):
            if route.features:
                arriving = max(map(sum, zip(*sent, strict=True)))
                events += [(name, arriving, False) for name in column_keys(place, route)]
                most.append((sent_key(place), max(map(max, sent)), False))
            else:
                requested.append((requested_key(place), len(sent) * max(map(max, sent)), False))
                slots += [(name, *own[key]) for name, key in zip(slot_keys(place, route), route.keys, strict=True)]
        found = [(key, *own[key]) for key in keys] + events + requested + slots + most
        names, counts, fixed = zip(*found, strict=True)
        return list(names), counts, list(fixed)
