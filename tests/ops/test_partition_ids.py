"""Ids in places for each owner, by kernels, against loops."""

import pytest
import torch
from torch import Tensor

from jfi.ops.partition_ids import OwnedIds, collect, count_samples, partition_ids
from jfi.utils import operands

#: By name: the number of ranks, first rows and ranks of the shards, lengths of each sequence and padding behind it.
CASES = {
    "two ranks": (2, [0, 50], [0, 1], [([3, 0, 5, 2], 7)]),
    "one rank": (1, [0], [0], [([4, 1], 3)]),
    "shards in another order": (3, [0, 10, 70], [2, 0, 1], [([1, 1, 1], 0), ([0, 9, 0], 5), ([2, 0, 3], 1)]),
    "many blocks": (2, [0, 30], [0, 1], [([2500, 0, 4097], 100), ([1] * 5, 0)]),
    "nothing": (2, [0, 50], [0, 1], [([0, 0], 4)]),
}


def owned(name: str, device: torch.device) -> tuple[int, list[OwnedIds], list[Tensor]]:
    """The number of ranks, the sequences, and of each the ranks of its own ids."""
    num_ranks, firsts, ranks, sequences = CASES[name]
    found, expected = [], []
    for lengths, capacity in sequences:
        offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
        ids = torch.randint(100, (sum(lengths) + capacity,))
        shifts = torch.tensor([1000 * rank - first for rank, first in zip(ranks, firsts, strict=True)])
        parts = (
            ids,
            offsets,
            torch.tensor(firsts[1:], dtype=torch.int64),
            torch.tensor(ranks, dtype=torch.uint8),
            shifts,
        )
        found.append(OwnedIds(*[part.to(device) for part in parts], num_rows=100))
        shard = torch.bucketize(ids, torch.tensor(firsts[1:]), right=True) if len(firsts) > 1 else torch.zeros_like(ids)
        expected.append(torch.tensor(ranks)[shard][: sum(lengths)])
    return num_ranks, found, expected


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_slots", [2, 10_000])
def test_ids_are_in_the_places_of_their_owners(name, num_slots, device, poisoned):
    num_ranks, sequences, ranks = owned(name, device)
    total = sum(one.ids.size(0) for one in sequences)
    payload = torch.arange(2 * total, dtype=torch.int32, device=device).view(total, 2)
    buffer, _, sums = partition_ids(sequences, payload, num_ranks, num_slots, None)
    padding = torch.full((1, 1), -1, dtype=torch.int32, device=device)
    alone, slots, _ = partition_ids(sequences, None, num_ranks, num_slots, padding)
    assert buffer.shape == (num_ranks * num_slots, 3) and alone.shape == (num_ranks * num_slots, 1)
    places = [[] for _ in range(num_ranks)]
    expected_slots, first = [], 0
    for one, own in zip(sequences, ranks, strict=True):
        for number, id in enumerate(one.ids.tolist()):
            slot = -1
            if number < len(own):
                rank = int(own[number])
                shard = sum(id >= boundary for boundary in one.boundaries.tolist())
                if len(places[rank]) < num_slots:
                    slot = rank * num_slots + len(places[rank])
                places[rank].append([id + int(one.shifts[shard]), *payload[first + number].tolist()])
            expected_slots.append(slot)
        first += one.ids.size(0)
    assert sums.tolist() == [len(found) for found in places] and slots.tolist() == expected_slots
    for rank, found in enumerate(places):
        part, kept = slice(rank * num_slots, (rank + 1) * num_slots), found[:num_slots]
        assert buffer[part][: len(kept)].tolist() == kept
        assert alone[part].flatten().tolist() == [row for row, *_ in kept] + [-1] * (num_slots - len(kept))


@pytest.mark.parametrize("name", CASES)
def test_events_of_samples_are_counted_by_owner(name, device, poisoned):
    num_ranks, sequences, ranks = owned(name, device)
    expected = []
    for one, own in zip(sequences, ranks, strict=True):
        for low, high in zip(one.offsets.tolist(), one.offsets.tolist()[1:], strict=False):
            expected.append([int((own[low:high] == rank).sum()) for rank in range(num_ranks)])
    assert count_samples(sequences, num_ranks).t().tolist() == expected


@pytest.mark.parametrize(
    ("counts", "capacity"), [([3, 0, 2], 9), ([0, 0, 0], 4), ([700, 1500, 1], 2201), ([5, 5, 5], 12)]
)
def test_what_arrived_is_moved_together(counts, capacity, device, poisoned):
    num_slots = max(*counts, 4)
    arrived = torch.arange(3 * num_slots * 2, dtype=torch.int32, device=device).view(3 * num_slots, 2)
    ends = torch.tensor(counts, device=device).cumsum(0)
    padding = torch.tensor([-1, 0], dtype=torch.int32, device=device)
    found = collect(arrived, ends, padding, num_slots, capacity)
    rows = torch.cat([arrived[rank * num_slots : rank * num_slots + count] for rank, count in enumerate(counts)])[
        :capacity
    ]
    assert torch.equal(found[:, : rows.size(0)], rows.t())
    assert (found[:, rows.size(0) :] == padding.unsqueeze(1)).all()


def test_blocks_of_any_size_give_the_same(device, monkeypatch):
    num_ranks, sequences, _ = owned("many blocks", device)
    padding = torch.full((1, 1), -1, dtype=torch.int32, device=device)
    found = [partition_ids(sequences, None, num_ranks, 5000, padding)]
    monkeypatch.setattr(operands, "PARTITIONED_IDS", 64)
    found.append(partition_ids(sequences, None, num_ranks, 5000, padding))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
