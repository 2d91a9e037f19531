"""A batch whose ids are at the owners of their rows, as a step reads it: a tree for `jfi.cuda_graphs.static_batch`."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from jfi.cuda_graphs.static_batch import Described, UnsupportedBatch, describe
from jfi.modules import lookups
from jfi.sharded.exchange import Exchange, Transport
from jfi.sharded.routed import RoutedCollection
from jfi.sharded.routes import Arrived, ArrivedIds, Route


@dataclass
class SentBatch:
    """A batch whose ids are at the owners of their rows.

    Attributes:
        batch: this rank's.
        samples: of every rank.
        events: of each route that attention reads, the events that arrived here: a key for each column, the lengths
            are those by rank, sequence and sample.
        requested: of each other route, the rows that every rank requests here, in as many places each; -1 fills up.
        slots: of each other route by its keys, where the row of an id is among those that come back; -1 is padding.
    """

    batch: Any
    samples: tuple[int, ...]
    events: list[KeyedJaggedTensor]
    requested: list[KeyedJaggedTensor]
    slots: list[KeyedJaggedTensor]

    def arrived(
        self, collections: list[RoutedCollection], group: dist.ProcessGroup, transport: Transport | None
    ) -> list[ArrivedIds]:
        """What each collection reads.

        Args:
            collections: of the model.
            group: all ranks, for what the step sends.
            transport: of what the step sends, tried before the group.
        """
        ids = ids_of(describe(self.batch))
        lookups.allow_no_samples(ids)
        by_key, found = ids.to_dict(), []
        events, requested, slots = iter(self.events), iter(self.requested), iter(self.slots)
        for route in routes_of(collections):
            queries = route.to_owners(group, list(self.samples), transport)
            if route.features:
                one = next(events)
                columns = one.values().view(len(one.keys()), -1).unbind(0)
                offsets = one.lengths().new_zeros(1)
                if one.stride():  # TorchRec cannot divide what has no samples
                    offsets = one.to_dict()[one.keys()[0]].offsets()  # of every column
                sizes = [by_key[key].values().size(0) for key in route.keys]
                found.append(Arrived(route, None, queries, columns, offsets, sizes))
                continue
            rows, where = next(requested).values(), next(slots)
            places = [rows.size(0) // group.size()] * group.size()
            exchange, sizes, rows = (
                Exchange(group, places, places, transport),
                where.length_per_key(),
                rows[: sum(places)],
            )
            found.append(Arrived(route, exchange, queries, (rows,), None, sizes, slots=where.values()))
        rest = iter(found)
        return [ArrivedIds([next(rest) for _ in one.routes], by_key) for one in collections]


def routes_of(collections: list[RoutedCollection]) -> list[Route]:
    """The routes of all collections, in the order in which a `SentBatch` has them."""
    return [route for one in collections for route in one.routes]


def ids_of(batch: Described) -> KeyedJaggedTensor:
    """The ids of a batch.

    Raises:
        UnsupportedBatch: it has none, or several KeyedJaggedTensors.
    """
    if len(batch.jagged) != 1:
        raise UnsupportedBatch(f"the batch has {len(batch.jagged)} KeyedJaggedTensors, and must have one")
    return batch.jagged[0]


def padding_of(collections: list[RoutedCollection]) -> dict[str, int]:
    """By key of a `SentBatch` the id of the places that are left; 0 for others."""
    found = {key: -1 for one in collections for key in one.local_keys}
    for place, route in enumerate(routes_of(collections)):
        if route.features:
            found |= dict.fromkeys(column_keys(place, route)[: 1 + len(route.field_tables)], -1)
        else:
            found |= dict.fromkeys([requested_key(place), *slot_keys(place, route)], -1)
    return found


def column_keys(place: int, route: Route) -> list[str]:
    """The keys of what an event of a route brings along: ids of rows, then a bucket, then a weight."""
    names = ["row", *route.field_tables]
    names += ["bucket"] * route.brings_bucket + ["weight"] * route.brings_weight
    return [f"{place}.{number}.{name}" for number, name in enumerate(names)]


def requested_key(place: int) -> str:
    """The key of the rows that are requested on a route."""
    return f"{place}.requested"


def sent_key(place: int) -> str:
    """The name of the events that a rank has for another one on a route."""
    return f"{place}.sent"


def slot_keys(place: int, route: Route) -> list[str]:
    """The keys of where the rows of a route come back."""
    return [f"{place}.slot.{key}" for key in route.keys]


def jagged(keys: list[str], values: Tensor, lengths: Tensor, counts: list[int]) -> KeyedJaggedTensor:
    """Of keys with so many values each, whose numbers the host knows."""
    return KeyedJaggedTensor(
        keys=keys,
        values=values,
        lengths=lengths,
        stride=lengths.size(0) // len(keys),
        length_per_key=counts,
        offset_per_key=[0, *accumulate(counts)],
    )
