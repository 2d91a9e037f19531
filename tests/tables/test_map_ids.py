"""Rows of ids of any number, and the record of those that occur, against a dict in plain Python."""

from collections import Counter

import pytest
import torch

from jfi.tables.map_ids import map_ids
from jfi.utils.context import interprets
from jfi.utils.operands import MISSING, NO_ID, PADDING, IdMap


def table(capacity: int, owned: int, device: torch.device, kept: int = 0) -> IdMap:
    """Ascending ids of a table with so many owners, negative ones among them, their rows, and nothing recorded."""
    ids = torch.randperm(10 * capacity)[:owned].long() * (2**40 + 1) - 3 * 2**40
    ids = ids[(ids != MISSING) & (ids != PADDING)].sort().values
    sorted_ids = torch.full((capacity,), NO_ID)
    sorted_ids[: len(ids)] = ids
    rows = torch.cat([torch.randperm(capacity - 1) + 1, torch.zeros(1, dtype=torch.int64)])
    recorded = [torch.zeros(size, dtype=torch.int64, device=device) for size in (capacity, kept, 1, 1)]
    return IdMap(sorted_ids.to(device), rows.to(device), recorded[0].bool(), *recorded[1:])


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize(("capacity", "owned"), [(2, 0), (2, 1), (3, 2), (1000, 999), (1024, 700), (1025, 1024)])
@pytest.mark.parametrize("size", [0, 1, 700])
def test_rows_and_seen_ids_are_those_of_a_dict(capacity, owned, size, impl, device, monkeypatch):
    if impl == "torch":
        if device.type == "cuda":
            pytest.skip("a GPU takes the kernel")
        monkeypatch.setattr("jfi.tables.map_ids.interprets", lambda: False)
    elif device.type == "cpu" and not interprets():
        pytest.skip("needs a GPU or Triton's interpreter")
    ids_of_table = table(capacity, owned, device, kept=2 * size)
    sorted_ids, rows = ids_of_table[:2]
    known = dict(zip(sorted_ids.tolist(), rows.tolist(), strict=True))
    known.pop(NO_ID, None)
    special = torch.tensor([MISSING, PADDING, NO_ID, 5, -(2**63)])
    choice = torch.cat([sorted_ids.cpu(), special, torch.arange(7, 12)])
    ids = choice[torch.randint(len(choice), (size,))]
    expected = [PADDING if one == PADDING else known.get(one, 0) for one in ids.tolist()]
    assert map_ids(ids.to(device), ids_of_table, records=False).tolist() == expected
    assert not ids_of_table.is_seen.any() and ids_of_table.num_new == 0
    for _ in range(2):
        assert map_ids(ids.to(device), ids_of_table, records=True).tolist() == expected
    assert ids_of_table.is_seen.tolist() == [one in known and one in ids.tolist() for one in sorted_ids.tolist()]
    new = [one for one in ids.tolist() if one not in known and one not in (MISSING, PADDING, NO_ID)]
    assert ids_of_table.num_new.tolist() == [2 * len(new)]
    assert ids_of_table.num_reserved.tolist() == [2 * ids.tolist().count(NO_ID)]
    assert Counter(ids_of_table.new_ids[: 2 * len(new)].tolist()) == Counter(2 * new)


def test_new_ids_beyond_the_room_are_counted_and_not_kept(device):
    ids_of_table = table(10, 0, device, kept=3)
    for _ in range(2):
        assert map_ids(torch.arange(1, 6, device=device), ids_of_table, records=True).tolist() == [0] * 5
    assert ids_of_table.num_new.tolist() == [10]
    assert set(ids_of_table.new_ids.tolist()) <= {1, 2, 3, 4, 5} and len(set(ids_of_table.new_ids.tolist())) == 3


def test_a_compiler_maps_and_records_nothing(device):
    ids_of_table = table(10, 5, device, kept=3)
    ids = torch.cat([ids_of_table.sorted_ids, torch.tensor([3, 0, -1], device=device)])
    found = torch.compile(lambda x: map_ids(x, ids_of_table, True), fullgraph=True, backend="eager")(ids)
    assert found.tolist() == map_ids(ids, ids_of_table, False).tolist()
    assert not ids_of_table.num_new.any()
