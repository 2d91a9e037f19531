"""GrowingIds against a dict in plain Python."""

import copy

import pytest
import torch
from torchrec import KeyedJaggedTensor

from jfi.modules import GrowingIds, GrowingTable, outside_ids

from .growing import KEYS, batch, growing, owners

LARGEST = 2**63 - 1


class Dict:
    """What GrowingIds promises, of one table: ids by row in a dict, the scores of the policy written out."""

    def __init__(self, capacity, min_count=1):
        self.capacity, self.min_count = capacity, min_count
        self.owned, self.last = set(), {}
        self.recorded, self.now = [], 0

    def record(self, ids):
        self.recorded += [id for id in ids if id not in (0, -1, LARGEST)]

    def admit(self):
        """Returns the ids that got a row."""
        found = {id: self.recorded.count(id) for id in sorted(set(self.recorded))}
        self.recorded = []
        if not found:
            return set()
        self.now += 1
        found = {id: n for id, n in found.items() if id in self.owned or n >= self.min_count}
        new = sorted([id for id in found if id not in self.owned], key=lambda id: (-found[id], id))
        self.last |= dict.fromkeys(found, self.now)
        # Of equal scores those stay that have a row; of these the ones with the smaller ids.
        ranked = sorted([*sorted(self.owned), *new], key=lambda id: -self.last[id])
        owned = set(ranked[: self.capacity - 1])
        admitted = owned - self.owned
        self.owned = owned
        return admitted


@pytest.mark.parametrize("min_count", [1, 3])
def test_rows_go_to_the_ids_of_a_dict(min_count):
    torch.manual_seed(0)
    module, truth = growing(9, min_count=min_count), Dict(9, min_count)
    moved = 0
    for window in range(60):
        before = {id: row for row, id in enumerate(module.ids("item").tolist()) if id}
        for _ in range(1 + window % 3):
            # Popular ids that drift, of any sign, and those that never have a row.
            ids = (torch.randn(12).abs() * 5).long() + window // 2 - 8
            ids[:3] = torch.tensor([0, LARGEST, -(2**63)])
            histories = [[int(id)] for id in ids[4:8]]
            module(batch(ids[:4].tolist(), histories))
            truth.record([*ids[:4].tolist(), *[id for history in histories for id in history]])
        admitted, rows = truth.admit(), module.admit().get("item", torch.empty(0, dtype=torch.int64))
        assert owners(module) == truth.owned
        assert {int(module.ids("item")[row]) for row in rows} == admitted
        assert rows.tolist() == sorted(set(rows.tolist())) and 0 not in rows
        after = {id: row for row, id in enumerate(module.ids("item").tolist()) if id}
        assert all(after[id] == row for id, row in before.items() if id in after)
        moved += len(before.keys() - after.keys())
    assert moved >= 20


def test_an_id_of_the_smallest_number_may_have_a_row():
    module = growing()
    module(batch([-(2**63), 5, -(2**63)]))
    module.admit()
    assert owners(module) == {-(2**63), 5}


def test_the_map_replaces_raw_ids_alone():
    module = growing(6)
    module(batch([70, 71, -5]))
    module.admit()
    row = {id: row for row, id in enumerate(module.ids("item").tolist())}
    ids = batch([70, 0, 999], [[-5, -1, 71], [LARGEST], []], tags=[70, 71, -5])
    weights = torch.arange(10.0)
    weighted = KeyedJaggedTensor(KEYS, ids.values(), weights, lengths=ids.lengths())
    mapped = module(weighted)
    assert mapped["item"].values().tolist() == [row[70], 0, 0]
    assert mapped["history_item"].values().tolist() == [row[-5], -1, row[71], 0]
    assert mapped["tag"].values().tolist() == [70, 71, -5]
    assert torch.equal(mapped.values(), torch.cat([mapped[key].values() for key in KEYS]))
    assert torch.equal(mapped.lengths(), ids.lengths()) and torch.equal(mapped.weights(), weights)
    assert torch.equal(mapped["history_item"].offsets(), ids["history_item"].offsets())
    assert mapped.keys() == KEYS and ids.values().tolist()[:3] == [70, 0, 999]


def test_ids_of_32_bits_and_a_batch_of_no_samples():
    module = growing()
    module(batch([7]))
    module.admit()
    narrow = KeyedJaggedTensor(KEYS[:2], torch.tensor([7, 8, -1], dtype=torch.int32), lengths=torch.tensor([1, 2]))
    assert module(narrow).values().dtype == torch.int32
    assert module(narrow).values().tolist() == [int(module.ids("item").argmax()), 0, -1]
    module(narrow)
    empty = KeyedJaggedTensor(KEYS, torch.empty(0, dtype=torch.int64), lengths=torch.empty(0, dtype=torch.int64))
    assert module(empty).values().shape == (0,)
    module(empty)
    module.admit()
    assert owners(module) == {7, 8}


def test_a_batch_padded_to_capacity_keeps_its_padding():
    module = growing()
    module(batch([7]))
    module.admit()
    # Of "history_item" two values are padding, which its lengths do not count.
    ids = KeyedJaggedTensor(
        KEYS[:2], torch.tensor([7, 7, 7, -1, -1]), lengths=torch.tensor([1, 1, 1, 0]), length_per_key=[2, 3]
    )
    row = int(module.ids("item").argmax())
    mapped = module(ids)
    assert mapped.values().tolist() == [row, row, row, -1, -1]
    assert mapped.length_per_key() == [2, 3]
    assert mapped["history_item"].lengths().tolist() == [1, 0]
    module(ids)
    assert module.admit() == {} and owners(module) == {7}


def test_evaluation_changes_nothing():
    module = growing()
    module(batch([1, 2]))
    module.admit()
    before = copy.deepcopy(module.state_dict())
    module.eval()
    module(batch([3, 3, 3]))
    module(batch([4, 5]))
    assert module.admit() == {}
    module.train()
    assert module.admit() == {}
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())


def test_no_buffer_moves_when_ids_are_admitted():
    module = growing()
    places = {name: x.data_ptr() for name, x in module.state_dict().items()}
    for first in (1, 4, 9):
        module(batch([first, first + 1, first + 2]))
        module.admit()
    assert {name: x.data_ptr() for name, x in module.state_dict().items()} == places


def test_the_state_is_in_proportion_to_the_capacity():
    def bytes_of(capacity):
        return sum(x.nbytes for x in growing(capacity).state_dict().values())

    assert bytes_of(9) < 10_000 and bytes_of(1000) < 250 * 1000
    (map_of_3,) = growing(1000, min_count=3).maps.values()
    assert len(map_of_3.new_ids) == 3 * 16 * 1000
    module = growing(9)
    for ids in ([1], list(range(2, 2000))):  # of which the first 1,024 are kept
        module(batch(ids))
    assert len(module.admit()["item"]) == 8


def test_a_state_dict_goes_on_with_the_same_bits():
    torch.manual_seed(1)
    steps = [(torch.randn(20).abs() * 6).long().tolist() for _ in range(12)]
    module = growing(6)
    for step, items in enumerate(steps):
        if step == 7:
            other = growing(6)
            other(batch([90]))
            other.admit()  # numbers that loading must replace
            other.load_state_dict(module.state_dict())
        module(batch(items[:3], [[id] for id in items[3:6]]))
        expected = module.admit()
        if step >= 7:
            other(batch(items[:3], [[id] for id in items[3:6]]))
            found = other.admit()
            assert found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in found)
    assert all(torch.equal(x, other.state_dict()[name]) for name, x in module.state_dict().items())


def test_the_order_of_ids_and_steps_does_not_matter():
    torch.manual_seed(2)
    ids = (torch.randn(60).abs() * 5).long() - 2
    whole, parts = growing(60), growing(60)
    whole(batch(ids.tolist()))
    for part in ids[torch.randperm(60)].split(5):
        parts(batch(part.tolist()))
    assert torch.equal(whole.admit()["item"], parts.admit()["item"])
    assert all(torch.equal(x, parts.state_dict()[name]) for name, x in whole.state_dict().items())


def test_admissions_are_soon_due_and_then_seldom():
    module = growing(every=10)
    assert [step for step in range(41) if module.is_due(step)] == [1, 2, 4, 8, 10, 20, 30, 40]


def test_a_batch_with_more_ids_than_rows_is_named():
    module = growing(4)
    module(batch([1, 2, 3, 1, 2, 0]))
    assert len(module.admit()["item"]) == 3
    module(batch([1, 2, 3, 4]))
    with pytest.raises(ValueError, match=r"capacity of table 'item' must be above .* 4, got 4"):
        module.admit()
    assert owners(module) == {1, 2, 3}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GrowingTable("item", 1, ["item"]), "capacity of GrowingTable 'item' must be at least 2, got 1"),
        (lambda: GrowingTable("item", 9, []), "feature_names of GrowingTable 'item' .* at least one"),
        (lambda: GrowingTable("item", 9, ["item"], min_count=0), "min_count of GrowingTable 'item' must be at least 1"),
        (lambda: GrowingIds([]), "tables must have at least one"),
        (lambda: GrowingIds([GrowingTable("a", 9, ["x"]), GrowingTable("a", 9, ["y"])]), "distinct names, got"),
        (lambda: GrowingIds([GrowingTable("a", 9, ["x"]), GrowingTable("b", 9, ["x"])]), "distinct feature_names, got"),
        (lambda: growing(every=0), "every must be at least 1"),
        (lambda: growing().ids("items"), "tables must hold the key 'items'.*nearest"),
        (lambda: growing()(batch([1]).split([1, 2])[0]), "ids must hold the key 'history_item'"),
    ],
)
def test_wrong_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("make", [lambda: GrowingIds("item"), lambda: growing()("item")])
def test_wrong_types_are_named(make):
    with pytest.raises(TypeError, match=r"(tables|ids) must be a"):
        make()


def test_ids_that_are_no_integers_are_refused():
    floats = KeyedJaggedTensor(KEYS, torch.tensor([1.9, 7.2]), lengths=torch.tensor([1, 1, 0]))
    with pytest.raises(TypeError, match=r"ids must hold int32 or int64 ids \[S\], got torch.float32"):
        growing()(floats)


def test_reserved_ids_have_no_row_and_are_counted():
    module = growing()
    ids = batch([2**63 - 1, 0, 5, -(2**63)], [[2**63 - 1], [], [], []])
    module(ids)
    module.admit()
    assert owners(module) == {5, -(2**63)}
    assert module.eval()(ids)["item"].values().tolist()[:2] == [0, 0]
    assert outside_ids(module) == {"item": 2}
    assert set(module.state_dict()) == set(growing().state_dict()) and not outside_ids(growing())


def test_it_compiles_to_one_graph_that_sees_later_admissions():
    module = growing(12)
    compiled = torch.compile(
        lambda values, lengths: module(KeyedJaggedTensor(KEYS[:2], values, lengths=lengths, stride=2)).values(),
        backend="eager",
        fullgraph=True,
        dynamic=True,
    )
    for first in (1, 5):
        values, lengths = torch.tensor([first, first + 1, -1, first]), torch.tensor([1, 1, 2, 0])
        module(KeyedJaggedTensor(KEYS[:2], values, lengths=lengths))
        module.admit()
        found = compiled(values, lengths)
        assert torch.equal(found, module(KeyedJaggedTensor(KEYS[:2], values, lengths=lengths)).values())
        assert (found > 0).tolist() == [True, True, False, True]


def test_a_module_made_on_the_meta_device_begins_empty():
    module = GrowingIds([GrowingTable("item", 5, ["item", "history_item"])], device=torch.device("meta"))
    module.to_empty(device="cpu")
    module.reset_parameters()
    module(batch([7, 7, 9]))
    assert len(module.admit()["item"]) == 2 and owners(module) == {7, 9}


def test_a_copy_goes_on_by_itself():
    module = growing()
    module(batch([1, 2]))
    other = copy.deepcopy(module)
    module.admit()
    assert owners(other) == set()
    other.admit()
    assert owners(other) == {1, 2}
