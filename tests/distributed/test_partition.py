"""The events of a table group by owner: kernels against the formulas, which sort."""

import pytest
import torch
from ops.unchecked import as_on_a_gpu
from torchrec.sparse.jagged_tensor import JaggedTensor

from jfi import KeyBias, SequenceFeatureConfig
from jfi.distributed.input_dist import count_samples, partition
from jfi.distributed.planning import TableGroup, row_shardings
from jfi.ops import partition_ids as kernels
from jfi.utils.context import padded_to_capacity

RANKS, BATCH = 2, 6


SHARDINGS = row_shardings({"a": [25, 15], "b": [0, 9]})
HISTORY = SequenceFeatureConfig("taste", ["taste_item"], ["item"], bias=KeyBias("taste_age", 5))
GROUPS = {
    "fetched": TableGroup(("x", "y"), (SHARDINGS["a"], SHARDINGS["b"])),
    "history": TableGroup(("taste_item",), (SHARDINGS["a"],), ("taste_item",), (HISTORY,), ("taste_item",), ((),)),
}


def ids_of(group: TableGroup, room: int, device: torch.device) -> dict[str, JaggedTensor]:
    """Of each key, with room behind them."""
    torch.manual_seed(0)
    found = {}
    for place, (key, table) in enumerate(zip(group.keys, group.shardings, strict=True)):
        lengths = torch.randint(0, 9, (BATCH,)) + place
        count = int(lengths.sum())
        values = torch.cat([torch.randint(table.num_rows, (count,)), torch.full((room,), -1)])
        found[key] = JaggedTensor(values.to(device), lengths=lengths.int().to(device))
        if group.features:
            ages = torch.cat([torch.randint(5, (count,)), torch.zeros(room, dtype=torch.int64)])
            found["taste_age"] = JaggedTensor(ages.to(device), lengths=lengths.int().to(device))
    return found


@pytest.mark.parametrize("name", GROUPS)
def test_ids_outside_are_at_no_place_and_counted(name, device, monkeypatch):
    group = GROUPS[name]
    by_key = ids_of(group, 7, device)
    for key in group.keys:
        values = by_key[key].values()
        values[[0, 3, 5]] = torch.tensor([100, 2**40, -9], device=device)
    padding = torch.full((1, 2 if group.features else 1), -1, dtype=torch.int32, device=device)
    found, counts = [], []
    for in_kernels in (False, True):
        monkeypatch.setattr(kernels, "takes_ids", lambda ids, ranks, own=in_kernels: own)
        outside = torch.zeros(len(group.keys), dtype=torch.int64, device=device)
        with as_on_a_gpu(device), padded_to_capacity(frozenset()):
            found.append((*partition(group, by_key, RANKS, 100, padding, outside), count_samples(group, by_key, RANKS)))
        counts.append(outside.tolist())
    (buffer, *expected), (kernel_buffer, *others) = found
    assert all(map(torch.equal, expected, others))
    sums = expected[0]
    ids, places = [], []
    for rank, count in enumerate(sums.tolist()):
        filled = slice(rank * 100, rank * 100 + count)
        assert torch.equal(buffer[filled], kernel_buffer[filled])
        places += kernel_buffer[filled, 0].tolist()
    for key in group.keys:
        ids += by_key[key].values()[: int(by_key[key].lengths().sum())].tolist()
    assert len(places) == len(ids) and places.count(-1) == 3 * len(group.keys)
    assert counts == [[3] * len(group.keys)] * 2


@pytest.mark.parametrize("room", [0, 7])
@pytest.mark.parametrize("most", [3, 100])
@pytest.mark.parametrize("has_slots", [True, False])
@pytest.mark.parametrize("name", GROUPS)
def test_kernels_have_the_places_of_the_formulas(name, has_slots, most, room, device, monkeypatch):
    group = GROUPS[name]
    by_key = ids_of(group, room, device)
    padding = torch.full((1, 2 if group.features else 1), -1, dtype=torch.int32, device=device)
    found = []
    for in_kernels in (False, True):
        monkeypatch.setattr(kernels, "takes_ids", lambda ids, ranks, own=in_kernels: own)
        with padded_to_capacity(frozenset()):
            outside = torch.zeros(len(group.keys), dtype=torch.int64, device=device)
            parts = partition(group, by_key, RANKS, most, padding if has_slots else None, outside)
            found.append((*parts, count_samples(group, by_key, RANKS)))
    (buffer, sums, index, counts), (kernel_buffer, *others) = found
    assert torch.equal(sums, others[0]) and torch.equal(counts, others[2]) and all(sums.tolist())
    assert torch.equal(index, others[1]) if has_slots else index is None and others[1] is None
    assert torch.equal(counts.sum(1), sums) and counts.dtype == others[2].dtype == torch.int32
    for rank, count in enumerate(sums.tolist()):  # empty slots are not written without padding
        filled = slice(rank * most, rank * most + (most if has_slots else min(count, most)))
        assert torch.equal(buffer[filled], kernel_buffer[filled])
