"""A route's events by owner: kernels against the formulas, which sort."""

import pytest
import torch
from ops.unchecked import as_on_a_gpu
from torch.distributed._shard.metadata import ShardMetadata
from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding
from torchrec.sparse.jagged_tensor import JaggedTensor

from jfi import KeyBias, SequenceFeatureConfig
from jfi.ops import partition_ids as kernels
from jfi.sharded.ownership import all_owners
from jfi.sharded.partition import Partitioned, partition
from jfi.sharded.routes import Route
from jfi.utils.padding import padded_to_capacity

RANKS, BATCH = 2, 6


def sharding(*shards: tuple[int, int, int]) -> ParameterSharding:
    """(first row, rows, rank) of each shard."""
    spec = [ShardMetadata([first, 0], [rows, 8], f"rank:{rank}/cpu") for first, rows, rank in shards]
    return ParameterSharding("row_wise", "fused", [rank for *_, rank in shards], EnumerableShardingSpec(spec))


OWNERS = all_owners({"a": 40, "b": 9}, {"a": sharding((0, 15, 1), (15, 25, 0)), "b": sharding((0, 9, 1))})
HISTORY = SequenceFeatureConfig("taste", ["taste_item"], ["item"], bias=KeyBias("taste_age", 5))
ROUTES = {
    "fetched": Route(("x", "y"), ("a", "b"), (OWNERS["a"], OWNERS["b"])),
    "history": Route(("taste_item",), ("a",), (OWNERS["a"],), (HISTORY,), (0,), ((),)),
}


def ids_of(route: Route, room: int, device: torch.device) -> dict[str, JaggedTensor]:
    """Of each key, with room behind them."""
    torch.manual_seed(0)
    found = {}
    for place, (key, owners) in enumerate(zip(route.keys, route.owners, strict=True)):
        lengths = torch.randint(0, 9, (BATCH,)) + place
        count = int(lengths.sum())
        values = torch.cat([torch.randint(owners.num_rows, (count,)), torch.full((room,), -1)])
        found[key] = JaggedTensor(values.to(device), lengths=lengths.int().to(device))
        if route.features:
            ages = torch.cat([torch.randint(5, (count,)), torch.zeros(room, dtype=torch.int64)])
            found["taste_age"] = JaggedTensor(ages.to(device), lengths=lengths.int().to(device))
    return found


@pytest.mark.parametrize("name", ROUTES)
def test_ids_outside_are_at_no_place_and_counted(name, device, monkeypatch):
    route = ROUTES[name]
    by_key = ids_of(route, 7, device)
    for key in route.keys:
        values = by_key[key].values()
        values[[0, 3, 5]] = torch.tensor([100, 2**40, -9], device=device)
    blank = torch.full((1, 2 if route.features else 1), -1, dtype=torch.int32, device=device)
    found, counts = [], []
    for in_kernels in (False, True):
        monkeypatch.setattr(kernels, "takes_ids", lambda ids, ranks, own=in_kernels: own)
        before = route.outside.on(device).clone()
        with as_on_a_gpu(device), padded_to_capacity(frozenset()):
            found.append(partition(route, by_key, RANKS, 100, blank))
        counts.append((route.outside.counts - before).tolist())
    formula, kernel = found
    assert formula.sums.tolist() == kernel.sums.tolist()
    for one, other in ((formula.counts, kernel.counts), (formula.slots, kernel.slots)):
        assert (one is None) == (other is None) and (one is None or torch.equal(one, other))
    ids, places = [], []
    for rank, count in enumerate(formula.sums.tolist()):
        filled = slice(rank * 100, rank * 100 + count)
        assert torch.equal(formula.buffer[filled], kernel.buffer[filled])
        places += kernel.buffer[filled, 0].tolist()
    for key in route.keys:
        ids += by_key[key].values()[: int(by_key[key].lengths().sum())].tolist()
    assert len(places) == len(ids) and places.count(-1) == 3 * len(route.keys)
    assert counts == [[3] * len(route.keys)] * 2


@pytest.mark.parametrize("room", [0, 7])
@pytest.mark.parametrize("most", [3, 100])
@pytest.mark.parametrize("name", ROUTES)
def test_kernels_have_the_places_of_the_formulas(name, most, room, device, monkeypatch):
    route = ROUTES[name]
    by_key = ids_of(route, room, device)
    blank = torch.full((1, 2 if route.features else 1), -1, dtype=torch.int32, device=device)
    found: list[Partitioned] = []
    for in_kernels in (False, True):
        monkeypatch.setattr(kernels, "takes_ids", lambda ids, ranks, own=in_kernels: own)
        with padded_to_capacity(frozenset()):
            found.append(partition(route, by_key, RANKS, most, blank))
    formula, kernel = found
    sums = formula.sums.tolist()
    assert sums == kernel.sums.tolist() and all(sums)
    for one, other in ((formula.counts, kernel.counts), (formula.slots, kernel.slots)):
        assert (one is None) == (other is None) and (one is None or torch.equal(one, other))
    assert (formula.slots is None) == bool(route.features)
    for rank, count in enumerate(sums):  # places left are of no use to attention, and not written
        filled = slice(rank * most, rank * most + (min(count, most) if route.features else most))
        assert torch.equal(formula.buffer[filled], kernel.buffer[filled])
