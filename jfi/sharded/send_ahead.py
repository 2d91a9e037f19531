"""The ids of a batch on their way to the owners of their rows before its step, for steps of fixed shapes.

A captured step (`jfi.sharded.captured`) has fixed shapes, and so have the collectives in it. How many ids each rank has
for each owner is known only when they are sorted. So all ranks gather these counts, from which every one of
them finds the same capacities, or the same reason to run the step eagerly. Of the rows that are sent back within the
step, every pair of ranks has as many places.

Here ids travel in their exact number, which the host must know; `jfi.sharded.fixed_shapes` sends those of captured
steps.

The collectives that send ids have a process group of their own: those of a group run one after the other, and these
shall not wait for the step.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

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
from jfi.sharded.exchange import Exchange
from jfi.sharded.routed import RoutedCollection
from jfi.sharded.routes import Sent, check_route, counts_for, sort_by_owner
from jfi.sharded.sent_batch import (
    SentBatch,
    column_keys,
    ids_of,
    jagged,
    padding_of,
    requested_key,
    routes_of,
    sent_key,
    slot_keys,
)

#: Priorities of streams, lower numbers first: of a step, whose kernels wait for each other, and of what sends ids,
#: whose kernels are small. The sorting and the step of the tables, which fill the GPU, have 0.
STEP, SENDING = -2, -1


class Agreed(NamedTuple):
    """What all ranks find of a batch from the counts of each."""

    samples: tuple[int, ...]  # of every rank
    places: list[list[list[int]]]  # by route what each rank sends to each other one
    capacities: tuple[int, ...] | str  # by name of `SendAhead.ladder`, or why none hold it


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
            *_, numbers = self._sort(batch, counts=False)  # it is sent again
            rows = numbers.tolist()
            self.samples = tuple([row[1] for row in rows])
            keys = len(self.first.keys)
            self._singles = [all(one) for one in list(zip(*rows, strict=True))[2 + keys : 2 + 2 * keys]]
            self.names, lengths, fixed = self._keys(rows)
            singles = single_keys(self.first, self._singles)
            self.ladder = CapacityBuckets(None, self.names, lengths, fixed, singles)
            return self.ladder.capacities(lengths)

    def send(self, batch: Any, in_buffers: bool) -> tuple[SentBatch, tuple[int, ...] | str]:
        """Sends a batch in any memory; waits for its counts, but for no step that runs.

        Args:
            batch: this rank's.
            in_buffers: whether the step will read it in buffers, if there are capacities that hold it.

        Returns:
            What was sent, and the capacities that hold it, or why none do.

        Raises:
            UnsupportedBatch: a batch that is no tree of tensors and constants with one KeyedJaggedTensor.
            ValueError: features that do not fit the routes.
        """
        with self.sending():
            batch, sent, numbers = self._sort(batch)
            agreed = self.agree(numbers.tolist())
            room = agreed.capacities if in_buffers and not isinstance(agreed.capacities, str) else None
            return self._send(batch, sent, agreed, room), agreed.capacities

    def wait(self, sent: SentBatch) -> None:
        """The current stream waits for what was sent."""
        if self.stream is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self.stream)
            for one in sent.tensors():
                one.record_stream(current)

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

    def agree(self, rows: list[list[int]]) -> Agreed:
        """What follows of a batch from the counts of all ranks; the same on all of them."""
        alike, samples, *columns = zip(*rows, strict=True)
        keys = self.first.keys
        single = [all(one) for one in columns[len(keys) : 2 * len(keys)]]
        lost = [key for key, was, now in zip(keys, self._singles, single, strict=False) if was > now]
        if not all(alike) or len(set(samples)) > 1:
            capacities = OTHER_STRUCTURE
        else:
            capacities = not_single(lost[0]) if lost else self.ladder.capacities(self._keys(rows)[1])
        return Agreed(samples, self._places(rows), capacities)

    def _sort(self, batch: Any, counts: bool = True) -> tuple[Any, list[Sent], Tensor]:
        """The batch on the device, its sorted ids, and the counts of all ranks on the host."""
        described = describe(batch)
        ids_of(described)
        self.first = self.first or described
        own = torch.tensor(self.numbers_of(described))
        own = (own.pin_memory() if self.stream is not None else own).to(self.device, non_blocking=True)

        batch = moved(batch, partial(to_device, device=self.device))
        by_key = self.ids_by_key(batch)
        sent = [sort_by_owner(route, by_key, self.group.size(), counts) for route in self.routes]
        return batch, sent, self.gather_counts(own, [one.sums for one in sent]).cpu()

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

    def _send(self, batch: Any, all_sent: list[Sent], agreed: Agreed, room: tuple[int, ...] | None) -> SentBatch:
        sent = SentBatch(batch, agreed.samples, [], [], [])
        ids = ids_of(describe(batch))
        for place, (route, own, counts) in enumerate(zip(self.routes, all_sent, agreed.places, strict=True)):
            if route.features:
                sent.events.append(self._events(place, own, counts, agreed.samples))
                continue
            most = max(map(max, counts))
            if room is not None:
                most = room[self.names.index(requested_key(place))] // self.group.size()
            blank = own.columns.new_full((1, 1), -1)
            sent.requested.append(request_rows(self.group, place, own.in_places(most, blank)))
            lengths = torch.cat([ids[key].lengths() for key in route.keys])
            sent.slots.append(jagged(slot_keys(place, route), own.places(most), lengths, own.sizes))
        return sent

    def _events(self, place: int, sent: Sent, counts: list[list[int]], samples: tuple[int, ...]) -> KeyedJaggedTensor:
        """The events that arrive here, of all ranks."""
        route, rank = self.routes[place], self.group.rank()
        events = Exchange(self.group, counts[rank], [row[rank] for row in counts])
        queries = route.to_owners(self.group, list(samples))
        started = events.start(sent.columns), queries.start(counts_for(route, sent.counts))
        for _, work in started:
            if work is not None:
                work.wait()
        (columns, _), (lengths, _) = started
        count, width = columns.shape
        return jagged(column_keys(place, route), columns.t().flatten(), lengths.repeat(width), [count] * width)


def request_rows(group: dist.ProcessGroup, place: int, going: Tensor) -> KeyedJaggedTensor:
    """What all ranks request here, given what this one requests: [W · most, 1], as many places for each owner."""
    size = group.size()
    most = going.size(0) // size
    arrived = Exchange(group, [most] * size, [most] * size).send(going.view(-1))
    lengths = torch.full((size,), most, dtype=torch.int32, device=going.device)
    return jagged([requested_key(place)], arrived, lengths, [size * most])
