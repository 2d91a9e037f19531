"""The ids of the next batch on their way to the owners of their rows while a step runs, for steps of fixed shapes.

A captured step (`jfi.sharded.captured`) has fixed shapes, and so have the collectives in it. How many ids each rank has
for each owner is known only when they are sorted. So all ranks tell each other these counts, from which every one of
them finds the same capacities, or the same reason to run the step eagerly. Events travel in their exact number and go
into buffers with room at their owner. Of the rows that are sent back within the step, every pair of ranks has as many
places as the capacity says.

The collectives that send ids have a process group of their own: those of a group run one after the other, and these
shall not wait for the step.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from jfi.modules import inputs
from jfi.sharded.exchange import Exchange
from jfi.sharded.routed import RoutedCollection
from jfi.sharded.routes import Arrived, ArrivedIds, Route, Sent, check_route, sort_by_owner
from jfi.static_batch import (
    OTHER_STRUCTURE,
    Described,
    Ladder,
    UnsupportedBatch,
    describe,
    moved,
    not_single,
    single_keys,
)


@dataclass
class SentBatch:
    """A batch whose ids are at the owners of their rows; a tree as `jfi.static_batch` takes it apart.

    Attributes:
        batch: this rank's.
        samples: of every rank.
        events: of each route that attention reads, the events that arrived here: a key for each column, the lengths
            are those by rank, sequence and sample.
        asked: of each other route, the rows that every rank asked for, in as many places each; -1 in places left.
        slots: of each other route by its keys, where the row of an id is among those that come back; -1 is padding.
    """

    batch: Any
    samples: tuple[int, ...]
    events: list[KeyedJaggedTensor]
    asked: list[KeyedJaggedTensor]
    slots: list[KeyedJaggedTensor]


def ids_of(batch: Described) -> KeyedJaggedTensor:
    """The ids of a batch.

    Raises:
        UnsupportedBatch: it has none, or several KeyedJaggedTensors.
    """
    if len(batch.jagged) != 1:
        raise UnsupportedBatch(f"the batch has {len(batch.jagged)} KeyedJaggedTensors, and must have one")
    return batch.jagged[0]


class Ready(NamedTuple):
    """A batch that was sent ahead, and how its step runs."""

    sent: SentBatch
    capacities: tuple[int, ...] | str  # or why the step runs eagerly

    def tensors(self) -> Iterator[Tensor | KeyedJaggedTensor | JaggedTensor]:
        """All that the step reads."""
        found = describe(self.sent)
        yield from (*found.tensors, *found.jagged)


class _Told(NamedTuple):
    """What a rank has told the others of a batch, and what it sends."""

    batch: Any  # on the device
    described: Described  # on the host
    sent: list[Sent]
    numbers: Tensor  # [W, 2 + 2 * keys + routes * W], on the host once `heard`
    heard: torch.cuda.Event | None


class _Agreed(NamedTuple):
    """What all ranks find of a batch from what they told each other."""

    samples: tuple[int, ...]  # of every rank
    places: list[list[list[int]]]  # by route what each rank sends to each other one
    names: list[str]  # of the keys of a `SentBatch`
    capacities: tuple[int, ...] | str  # of these keys, or why the step runs eagerly


class SendAhead:
    """Sends batches ahead of their steps; all ranks call it with their parts of the same batch.

    Args:
        collections: of the model.
        group: all ranks, for ids alone.
        device: of the step.
        in_buffers: whether steps run in buffers of fixed shapes; else each one runs eagerly.
    """

    def __init__(
        self,
        collections: list[RoutedCollection],
        group: dist.ProcessGroup,
        device: torch.device,
        in_buffers: bool,
    ) -> None:
        self._collections, self._group, self._device, self._in_buffers = collections, group, device, in_buffers
        self._routes = [route for one in collections for route in one.routes]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._first: Described | None = None
        self._ladder: Ladder | None = None
        #: Beside the batch's keys whether each has one value a sample in the first batch of every rank.
        self._singles: list[bool] = []

    @property
    def singles(self) -> frozenset[str]:
        """Keys with one value a sample in all batches that run in buffers."""
        return frozenset() if self._ladder is None else self._ladder.singles

    @property
    def with_room(self) -> set[str]:
        """The other keys of the batches."""
        return {key for key, single in zip(self._first.keys, self._singles, strict=True) if not single}

    @property
    def padding(self) -> dict[str, int]:
        """By key of a `SentBatch` the id of the places that are left; 0 for others."""
        found = {key: -1 for one in self._collections for key in one.local_keys}
        for place, route in enumerate(self._routes):
            if route.features:
                found |= dict.fromkeys(_columns(place, route)[: 1 + len(route.field_tables)], -1)
            else:
                found |= dict.fromkeys([_asked(place), *_slots(place, route)], -1)
        return found

    def refer(self, batch: Any) -> None:
        """Takes the capacities from this batch and not from the first one."""
        with self._on_stream():
            self._agree(self._tell(batch))

    def send(self, batch: Any) -> Ready:
        """Sends a batch in any memory; waits for its counts, but for no step that runs.

        Raises:
            UnsupportedBatch: a batch that is no tree of tensors and constants with one KeyedJaggedTensor.
            ValueError: features that do not fit the routes.
        """
        with self._on_stream():
            told = self._tell(batch)
            agreed = self._agree(told)
            return Ready(self._send(told, agreed), agreed.capacities)

    def wait(self, ready: Ready) -> None:
        """The current stream waits for what was sent."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for one in ready.tensors():
                one.record_stream(current)

    def arrived(self, sent: SentBatch, group: dist.ProcessGroup) -> list[ArrivedIds]:
        """What each collection reads.

        Args:
            sent: as it came, or in buffers with room.
            group: all ranks, for what the step sends.
        """
        ids = ids_of(describe(sent.batch))
        inputs.allow_no_samples(ids)
        by_key, found = ids.to_dict(), []
        events, asked, slots = iter(sent.events), iter(sent.asked), iter(sent.slots)
        for route in self._routes:
            queries = route.to_owners(group, list(sent.samples))
            if route.features:
                one = next(events)
                columns = one.values().view(len(one.keys()), -1).unbind(0)
                lengths = one.lengths()[: one.stride()]
                sizes = [by_key[key].values().size(0) for key in route.keys]
                found.append(Arrived(route, None, queries, columns, lengths, sizes))
                continue
            rows, where = next(asked).values(), next(slots)
            places = [rows.size(0) // group.size()] * group.size()
            exchange, sizes = Exchange(group, places, places), where.length_per_key()
            found.append(Arrived(route, exchange, queries, (rows[: sum(places)],), None, sizes, slots=where.values()))
        rest = iter(found)
        return [ArrivedIds([next(rest) for _ in one.routes], by_key) for one in self._collections]

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        with torch.no_grad(), nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield

    def _tell(self, batch: Any) -> _Told:
        described = describe(batch)
        ids_of(described)
        self._first = self._first or described
        alike, samples = described.structure == self._first.structure, described.jagged[0].stride()
        own = torch.tensor([alike, samples, *described.lengths, *described.single()])
        own = (own.pin_memory() if self._stream is not None else own).to(self._device, non_blocking=True)

        def move(part: Tensor | KeyedJaggedTensor) -> Tensor | KeyedJaggedTensor:
            return part.to(self._device, non_blocking=True)

        batch = moved(batch, move)
        ids = ids_of(describe(batch))
        inputs.allow_no_samples(ids)
        by_key, size = ids.to_dict(), self._group.size()
        for route in self._routes:
            check_route(route, by_key)
        sent = [sort_by_owner(route, by_key, size) for route in self._routes]
        told = torch.cat([own, *[one.sums for one in sent]])
        numbers = told.new_empty(size, told.size(0))
        if size == 1:
            numbers[0] = told
        else:
            dist.all_gather_into_tensor(numbers.view(-1), told, group=self._group)
        if self._stream is None:
            return _Told(batch, described, sent, numbers, None)
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        heard = torch.cuda.Event()
        heard.record(self._stream)
        return _Told(batch, described, sent, host, heard)

    def _agree(self, told: _Told) -> _Agreed:
        """What the ranks told each other; the same on all of them."""
        if told.heard is not None:
            told.heard.synchronize()
        rows, size, keys = told.numbers.tolist(), self._group.size(), len(told.described.keys)
        alike, samples, *columns = zip(*rows, strict=True)
        own, single, sums = columns[:keys], [all(one) for one in columns[keys : 2 * keys]], columns[2 * keys :]
        places = [[list(row) for row in zip(*sums[i : i + size], strict=True)] for i in range(0, len(sums), size)]
        if self._ladder is None:
            self._singles = single
        names, lengths, fixed = self._keys(told.described.keys, [max(one) for one in own], places)
        if self._ladder is None:
            self._ladder = Ladder(None, names, lengths, fixed, single_keys(self._first, self._singles))
        if not self._in_buffers:
            capacities = "without a GPU"
        elif not all(alike) or len(set(samples)) > 1:
            capacities = OTHER_STRUCTURE
        else:
            lost = [key for key, was, now in zip(told.described.keys, self._singles, single, strict=True) if was > now]
            capacities = not_single(lost[0]) if lost else self._ladder.capacities(lengths)
        return _Agreed(samples, places, names, capacities)

    def _keys(
        self, keys: list[str], lengths: list[int], places: list[list[list[int]]]
    ) -> tuple[list[str], tuple[int, ...], list[bool]]:
        """Of all keys of a `SentBatch` the names, the values that they need room for, and whether that is fixed."""
        own = dict(zip(keys, zip(lengths, self._singles, strict=True), strict=True))
        events, asked, slots = [], [], []
        for place, (route, sent) in enumerate(zip(self._routes, places, strict=True)):
            if route.features:
                most = max(map(sum, zip(*sent, strict=True)))
                events += [(name, most, False) for name in _columns(place, route)]
            else:
                asked.append((_asked(place), len(sent) * max(map(max, sent)), False))
                slots += [(name, *own[key]) for name, key in zip(_slots(place, route), route.keys, strict=True)]
        found = [(key, *own[key]) for key in keys] + events + asked + slots
        names, counts, fixed = zip(*found, strict=True)
        return list(names), counts, list(fixed)

    def _send(self, told: _Told, agreed: _Agreed) -> SentBatch:
        sent = SentBatch(told.batch, agreed.samples, [], [], [])
        ids = ids_of(describe(told.batch))
        for place, (route, own, counts) in enumerate(zip(self._routes, told.sent, agreed.places, strict=True)):
            if route.features:
                sent.events.append(self._events(place, own, counts, agreed.samples))
                continue
            most = max(map(max, counts))
            if not isinstance(agreed.capacities, str):
                most = agreed.capacities[agreed.names.index(_asked(place))] // len(counts)
            asked, slots = self._ask(place, own, most)
            sent.asked.append(asked)
            lengths = torch.cat([ids[key].lengths() for key in route.keys])
            sent.slots.append(_jagged(_slots(place, route), slots, lengths, own.sizes))
        return sent

    def _events(self, place: int, sent: Sent, counts: list[list[int]], samples: tuple[int, ...]) -> KeyedJaggedTensor:
        """The events that arrive here, of all ranks."""
        route, rank = self._routes[place], self._group.rank()
        events = Exchange(self._group, counts[rank], [row[rank] for row in counts])
        queries = route.to_owners(self._group, list(samples))
        started = events.start(sent.columns), queries.start(sent.counts_for(route))
        for _, work in started:
            if work is not None:
                work.wait()
        (columns, _), (lengths, _) = started
        count, width = columns.shape
        return _jagged(_columns(place, route), columns.t().flatten(), lengths.repeat(width), [count] * width)

    def _ask(self, place: int, sent: Sent, most: int) -> tuple[KeyedJaggedTensor, Tensor]:
        """The rows that all ranks ask for here, `most` from each, and [S] where those of this rank's ids come back."""
        size, rows = self._group.size(), sent.columns[:, 0]
        slots, asked = torch.arange(rows.size(0), device=rows.device), rows.new_full((size * most,), -1)
        if sent.order is not None:
            begins = sent.sums.cumsum(0) - sent.sums
            slots += sent.ranks * most - begins[sent.ranks]
        asked.index_copy_(0, slots, rows)
        arrived = Exchange(self._group, [most] * size, [most] * size).send(asked)
        if sent.order is not None:
            slots = torch.empty_like(slots).index_copy_(0, sent.order, slots)
        lengths = torch.full((size,), most, dtype=torch.int32, device=rows.device)
        return _jagged([_asked(place)], arrived, lengths, [size * most]), slots


def _jagged(keys: list[str], values: Tensor, lengths: Tensor, counts: list[int]) -> KeyedJaggedTensor:
    """Of keys with so many values each, whose numbers the host knows."""
    return KeyedJaggedTensor(
        keys=keys,
        values=values,
        lengths=lengths,
        stride=lengths.size(0) // len(keys),
        length_per_key=counts,
        offset_per_key=[0, *accumulate(counts)],
    )


def _columns(place: int, route: Route) -> list[str]:
    """The keys of what an event of a route brings along: ids of rows, then a bucket, then a weight."""
    names = ["row", *route.field_tables]
    names += ["bucket"] * route.brings_bucket + ["weight"] * route.brings_weight
    return [f"{place}.{number}.{name}" for number, name in enumerate(names)]


def _asked(place: int) -> str:
    return f"{place}.asked"


def _slots(place: int, route: Route) -> list[str]:
    return [f"{place}.slot.{key}" for key in route.keys]
