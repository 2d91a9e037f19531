"""GrowingIds against a dict in plain Python, and tables whose rows begin anew for new ids."""

import copy
import zlib

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from jfi import FusedEmbeddingBagCollection, FusedEmbeddingCollection, SequenceDLRM, SequenceFeatureConfig
from jfi.modules import GrowingIds, GrowingTable, defer_steps
from jfi.modules.growing_ids import initial_rows
from jfi.utils.encoding import mix

LARGEST = 2**63 - 1
KEYS = ["item", "history_item", "tag"]


def growing(capacity=5, **options):
    every = options.pop("every", 100)
    return GrowingIds([GrowingTable("item", capacity, ["item", "history_item"], **options)], every)


def batch(items, histories=None, tags=None):
    """A batch with one item a sample; other keys have no ids by default."""
    histories = [[] for _ in items] if histories is None else histories
    tags = [1 for _ in items] if tags is None else tags
    flat = [*items, *[id for history in histories for id in history], *tags]
    lengths = [1] * len(items) + [len(history) for history in histories] + [1] * len(tags)
    return KeyedJaggedTensor(KEYS, torch.tensor(flat), lengths=torch.tensor(lengths))


class Dict:
    """What GrowingIds promises, of one table: ids by row in a dict, the scores of the policies written out."""

    def __init__(self, capacity, min_count=1, evict="lru"):
        self.capacity, self.min_count, self.evict = capacity, min_count, evict
        self.owned, self.last, self.counts = set(), {}, {}
        self.recorded, self.now = [], 0

    def record(self, ids):
        self.recorded += [id for id in ids if id not in (0, -1, LARGEST)]

    def score(self, id):
        if self.evict == "lru":
            return self.last[id]
        return self.counts[id] / (self.now - self.last[id] + 1)

    def admit(self):
        """Returns the ids that got a row."""
        found = {id: self.recorded.count(id) for id in sorted(set(self.recorded))}
        self.recorded = []
        if not found:
            return set()
        self.now += 1
        found = {id: n for id, n in found.items() if id in self.owned or n >= self.min_count}
        new = sorted([id for id in found if id not in self.owned], key=lambda id: (-found[id], id))
        for id, n in found.items():
            self.last[id] = self.now
            self.counts[id] = n + (self.counts[id] if id in self.owned else 0)
        # Of equal scores those stay that have a row; of these the ones with the smaller ids.
        ranked = sorted([*sorted(self.owned), *new], key=lambda id: -self.score(id))
        owned = set(ranked[: self.capacity - 1])
        admitted = owned - self.owned
        self.owned = owned
        return admitted


def owners(module, table="item"):
    return {id for id in module.ids(table).tolist() if id}


@pytest.mark.parametrize("min_count", [1, 3])
@pytest.mark.parametrize("evict", ["lru", "lfu"])
def test_rows_go_to_the_ids_of_a_dict(evict, min_count):
    torch.manual_seed(0)
    module, truth = growing(9, min_count=min_count, evict=evict), Dict(9, min_count, evict)
    moved = 0
    for window in range(60):
        before = {id: row for row, id in enumerate(module.ids("item").tolist()) if id}
        for _ in range(1 + window % 3):
            # Popular ids that drift, of any sign, and those that never have a row.
            ids = (torch.randn(12).abs() * 5).long() + window // 2 - 8
            ids[:3] = torch.tensor([0, LARGEST, -(2**63)])
            histories = [[int(id)] for id in ids[4:8]]
            module.record(batch(ids[:4].tolist(), histories))
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
    module.record(batch([-(2**63), 5, -(2**63)]))
    module.admit()
    assert owners(module) == {-(2**63), 5}


def test_the_map_replaces_raw_ids_alone():
    module = growing(6)
    module.record(batch([70, 71, -5]))
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
    module.record(batch([7]))
    module.admit()
    narrow = KeyedJaggedTensor(KEYS[:2], torch.tensor([7, 8, -1], dtype=torch.int32), lengths=torch.tensor([1, 2]))
    assert module(narrow).values().dtype == torch.int32
    assert module(narrow).values().tolist() == [int(module.ids("item").argmax()), 0, -1]
    module.record(narrow)
    empty = KeyedJaggedTensor(KEYS, torch.empty(0, dtype=torch.int64), lengths=torch.empty(0, dtype=torch.int64))
    assert module(empty).values().shape == (0,)
    module.record(empty)
    module.admit()
    assert owners(module) == {7, 8}


def test_a_batch_padded_to_capacity_keeps_its_padding():
    module = growing()
    module.record(batch([7]))
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
    module.record(ids)
    assert module.admit() == {} and owners(module) == {7}


def test_evaluation_and_the_map_itself_change_nothing():
    module = growing()
    module.record(batch([1, 2]))
    module.admit()
    before = copy.deepcopy(module.state_dict())
    module.eval()
    module.record(batch([3, 3, 3]))
    module(batch([4, 5]))
    assert module.admit() == {}
    module.train()
    module(batch([4, 5]))
    assert module.admit() == {}
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())


def test_no_buffer_moves_when_ids_are_admitted():
    module = growing()
    places = {name: x.data_ptr() for name, x in module.state_dict().items()}
    for first in (1, 4, 9):
        module.record(batch([first, first + 1, first + 2]))
        module.admit()
    assert {name: x.data_ptr() for name, x in module.state_dict().items()} == places


@pytest.mark.parametrize("evict", ["lru", "lfu"])
def test_a_state_dict_goes_on_with_the_same_bits(evict):
    torch.manual_seed(1)
    steps = [(torch.randn(20).abs() * 6).long().tolist() for _ in range(12)]
    module = growing(6, evict=evict)
    for step, items in enumerate(steps):
        if step == 7:
            other = growing(6, evict=evict)
            other.record(batch([90]))
            other.admit()  # numbers that loading must replace
            other.load_state_dict(module.state_dict())
        module.record(batch(items[:3], [[id] for id in items[3:6]]))
        expected = module.admit()
        if step >= 7:
            other.record(batch(items[:3], [[id] for id in items[3:6]]))
            found = other.admit()
            assert found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in found)
    assert all(torch.equal(x, other.state_dict()[name]) for name, x in module.state_dict().items())


def test_the_order_of_ids_and_steps_does_not_matter(monkeypatch):
    torch.manual_seed(2)
    ids = (torch.randn(60).abs() * 5).long() - 2
    whole, parts = growing(60), growing(60)
    whole.record(batch(ids.tolist()))
    monkeypatch.setattr("jfi.modules.growing_ids._MAX_RECORDED", 7)  # counts within the window
    for part in ids[torch.randperm(60)].split(5):
        parts.record(batch(part.tolist()))
    assert torch.equal(whole.admit()["item"], parts.admit()["item"])
    assert all(torch.equal(x, parts.state_dict()[name]) for name, x in whole.state_dict().items())


def test_admissions_are_soon_due_and_then_seldom():
    module = growing(every=10)
    assert [step for step in range(41) if module.is_due(step)] == [1, 2, 4, 8, 10, 20, 30, 40]


def test_a_batch_with_more_ids_than_rows_is_named():
    module = growing(4)
    module.record(batch([1, 2, 3, 1, 2, 0]))
    assert len(module.admit()["item"]) == 3
    module.record(batch([1, 2, 3, 4]))
    with pytest.raises(ValueError, match=r"capacity of table 'item' must be above .* 4, got 4"):
        module.admit()
    assert owners(module) == {1, 2, 3}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GrowingTable("item", 1, ["item"]), "capacity of GrowingTable 'item' must be at least 2, got 1"),
        (lambda: GrowingTable("item", 9, []), "feature_names of GrowingTable 'item' .* at least one"),
        (lambda: GrowingTable("item", 9, ["item"], min_count=0), "min_count of GrowingTable 'item' must be at least 1"),
        (
            lambda: GrowingTable("item", 9, ["item"], evict="fifo"),
            "evict of GrowingTable 'item' must be 'lru' or 'lfu'",
        ),
        (lambda: GrowingIds([]), "tables must have at least one"),
        (lambda: GrowingIds([GrowingTable("a", 9, ["x"]), GrowingTable("a", 9, ["y"])]), "distinct names, got"),
        (lambda: GrowingIds([GrowingTable("a", 9, ["x"]), GrowingTable("b", 9, ["x"])]), "distinct feature_names, got"),
        (lambda: growing(every=0), "every must be at least 1"),
        (lambda: growing().ids("items"), "tables must hold the key 'items'.*nearest"),
        (lambda: growing()(batch([1]).split([1, 2])[0]), "ids must hold the key 'history_item'"),
        (lambda: growing().record(batch([1]).split([1, 2])[0]), "ids must hold the key 'history_item'"),
    ],
)
def test_wrong_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("make", [lambda: GrowingIds("item"), lambda: growing()("item"), lambda: growing().record(3)])
def test_wrong_types_are_named(make):
    with pytest.raises(TypeError, match=r"(tables|ids) must be a"):
        make()


def table(rows, kind=EmbeddingConfig, width=4):
    return kind(name="item", embedding_dim=width, num_embeddings=rows, feature_names=["item", "history_item"])


def test_new_rows_follow_from_id_and_column():
    ids = torch.tensor([5, -3, 2**62, 5])
    rows = initial_rows(ids, table(100, width=3))
    seeds = mix((ids + zlib.crc32(b"item")).numpy().astype(np.uint64))
    bits = mix(seeds[:, None] + np.arange(3, dtype=np.uint64)) >> np.uint64(40)
    expected = (bits / 2**24 * 2 - 1) / 10
    torch.testing.assert_close(rows, torch.from_numpy(expected).float(), rtol=0, atol=1e-7)
    assert torch.equal(rows[0], rows[3])
    many = initial_rows(torch.arange(20_000), table(100, width=5))
    assert many.abs().max() <= 0.1 and abs(many.mean()) < 1e-3
    assert abs(many.var() * 300 - 1) < 0.01  # that of a uniform distribution
    assert len(torch.unique(many)) > 99_000


OPTIMIZERS = [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("is_bag", [False, True])
def test_reset_rows_begin_anew(optimizer, is_bag):
    kind = FusedEmbeddingBagCollection if is_bag else FusedEmbeddingCollection
    config = table(6, EmbeddingBagConfig if is_bag else EmbeddingConfig)
    tables = kind([config], optimizer, {"lr": 0.1}, ema_decay=0.5)
    step(tables, [1, 2, 3])
    before = {name: x.clone() for name, x in state_of(tables).items()}
    rows, ids = torch.tensor([2, 5]), torch.tensor([900, 901])
    tables.reset_rows("item", rows, ids)
    after = state_of(tables)
    assert torch.equal(after["weight"][rows], initial_rows(ids, config))
    kept = torch.tensor([0, 1, 3, 4])
    for name, x in after.items():
        if x.dim():
            assert torch.equal(x[kept], before[name][kept])
            assert name in ("weight", "average") or not x[rows].any()
    assert torch.equal(tables.averages()["item"][rows], initial_rows(ids, config))
    # A row that begins anew goes on like one that has never been read.
    fresh = kind([config], optimizer, {"lr": 0.1}, ema_decay=0.5)
    with torch.no_grad():
        for name, x in fresh.named_parameters():
            x.copy_(dict(tables.named_parameters())[name])
    step(fresh, [0])
    for one in (tables, fresh):
        step(one, [2, 5])
    assert torch.equal(state_of(tables)["weight"][rows], state_of(fresh)["weight"][rows])
    assert torch.equal(tables.averages()["item"][rows], fresh.averages()["item"][rows])


def step(tables, rows):
    out = tables(batch(rows))
    values = out.values() if hasattr(out, "values") and not isinstance(out, dict) else out["item"].values()
    values.square().sum().backward()


def state_of(tables):
    (states,) = tables.fused_optimizer.state.values()
    return {"weight": next(tables.parameters()).detach(), **states}


def test_rows_to_reset_are_checked():
    tables = FusedEmbeddingCollection([table(6)], torch.optim.SGD, {"lr": 0.1})
    with pytest.raises(ValueError, match="rows must be int64 of shape"):
        tables.reset_rows("item", torch.tensor([1.0]))
    with pytest.raises(ValueError, match=r"ids must be int64 of shape \[2\], got torch.int64 of shape \[1\]"):
        tables.reset_rows("item", torch.tensor([1, 2]), torch.tensor([1]))
    with pytest.raises(ValueError, match="tables must hold the key 'tag'"):
        tables.reset_rows("tag", torch.tensor([1]))


def model(capacity, grows, optimizer=torch.optim.Adagrad):
    torch.manual_seed(3)
    tags = EmbeddingBagConfig(name="tag", embedding_dim=4, num_embeddings=9, feature_names=["tag"])
    return SequenceDLRM(
        FusedEmbeddingBagCollection([tags], torch.optim.SGD, {"lr": 0.1}),
        FusedEmbeddingCollection([table(capacity)], optimizer, {"lr": 0.1}),
        [SequenceFeatureConfig("taste", ["history_item"], ["item"])],
        dense_in_features=2,
        dense_arch_layer_sizes=[4],
        over_arch_layer_sizes=[4, 1],
        growing_ids=growing(capacity) if grows else None,
    )


def log(steps, ids, seed=4):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        drawn = ids[torch.randint(len(ids), (3 + 6,), generator=generator)].tolist()
        dense = torch.rand(3, 2, generator=generator)
        yield dense, batch(drawn[:3], [drawn[3:5], [], drawn[5:]], tags=[1, 2, 3])


def train(one, batches):
    losses = []
    dense = torch.optim.SGD([p for name, p in one.named_parameters() if "embedding" not in name], 0.1)
    for number, (features, ids) in enumerate(batches, 1):
        dense.zero_grad()
        loss = one(features, ids).square().mean()
        loss.backward()
        dense.step()
        losses.append(loss.item())
        if one.growing_ids is not None:
            one.growing_ids.record(ids)
            if one.growing_ids.is_due(number):
                one.admit_ids()
    return losses


def test_where_all_ids_fit_it_trains_like_a_vocabulary():
    raw = torch.tensor([7, 10**15, -44, 90, 2**62, 123])
    grows, fixed = model(12, True), model(12, False)
    grows.growing_ids.record(batch(raw.tolist()))
    admitted = grows.admit_ids()["item"]
    row_of = {id: row for row, id in enumerate(grows.growing_ids.ids("item").tolist()) if id}
    # The vocabulary numbers the ids from 1 on; its rows begin with the same values.
    vocabulary = {id: number for number, id in enumerate(raw.tolist(), 1)}
    pairs = torch.tensor([[row_of[id], number] for id, number in vocabulary.items()])
    ours, theirs = (one.embedding_collection.embeddings["item"].weight for one in (grows, fixed))
    assert sorted(admitted.tolist()) == sorted(row_of.values())
    with torch.no_grad():
        theirs[pairs[:, 1]] = ours[pairs[:, 0]]
        theirs[0] = ours[0]
    known = torch.tensor([vocabulary[id] for id in raw.tolist()])
    losses = train(grows, log(20, raw)), train(fixed, log(20, known))
    assert losses[0] == losses[1]
    assert torch.equal(ours[pairs[:, 0]], theirs[pairs[:, 1]]) and torch.equal(ours[0], theirs[0])


def test_training_is_deterministic_and_its_rows_begin_with_their_ids():
    raw = torch.randint(-(2**62), 2**62, (40,), generator=torch.Generator().manual_seed(5))
    one, other = model(16, True), model(16, True)
    assert train(one, log(30, raw)) == train(other, log(30, raw))
    assert all(torch.equal(x, other.state_dict()[name]) for name, x in one.state_dict().items())
    one.admit_ids()  # what was recorded since the last admission
    new = torch.arange(1000, 1005)
    _, ids = next(iter(log(1, new)))
    one.growing_ids.record(ids)
    rows = one.admit_ids()["item"]
    weight = one.embedding_collection.embeddings["item"].weight.detach()
    owned = one.growing_ids.ids("item")[rows]
    assert {*owned.tolist()} <= {*new.tolist()} and len(rows)
    assert torch.equal(weight[rows], initial_rows(owned, table(16)))


def test_a_checkpoint_goes_on_with_the_same_bits():
    raw = torch.randint(-(2**62), 2**62, (40,), generator=torch.Generator().manual_seed(6))
    batches = list(log(24, raw))
    one, other = model(16, True), model(16, True)
    train(one, batches[:8])  # an admission is due after step 8
    other.load_state_dict(one.state_dict())
    states = copy.deepcopy(one.embedding_collection.fused_optimizer.state_dict())
    other.embedding_collection.fused_optimizer.load_state_dict(states)
    assert train(one, batches[8:]) == train(other, batches[8:])
    assert all(torch.equal(x, other.state_dict()[name]) for name, x in one.state_dict().items())


def test_a_deferred_step_forbids_an_admission():
    tables = FusedEmbeddingCollection([table(6)], torch.optim.SGD, {"lr": 0.1})
    with defer_steps(tables):
        step(tables, [1, 2])
    with pytest.raises(RuntimeError, match="rows of table 'item' must be reset after the step"):
        tables.reset_rows("item", torch.tensor([1]))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GrowingTable("items", 9, ["item", "history_item"]), "must hold the key 'items'"),
        (GrowingTable("item", 8, ["item", "history_item"]), "'item' must have the capacity 9 of the table, got 8"),
        (GrowingTable("item", 9, ["item"]), "'item' must have the keys .* of the table, got"),
    ],
)
def test_a_model_has_the_tables_that_grow(config, message):
    arguments = [None, EmbeddingCollection(tables=[table(9)]), [SequenceFeatureConfig("t", ["history_item"], ["item"])]]
    sizes = {"dense_in_features": 2, "dense_arch_layer_sizes": [4], "over_arch_layer_sizes": [4, 1]}
    with pytest.raises(ValueError, match=message):
        SequenceDLRM(*arguments, **sizes, growing_ids=GrowingIds([config]))


def test_a_model_without_growing_ids_admits_none():
    with pytest.raises(ValueError, match="admit_ids needs a model with growing_ids"):
        model(9, False).admit_ids()
