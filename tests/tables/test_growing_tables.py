"""Tables whose rows begin anew for new ids, alone and in a model."""

import copy
import zlib

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.fx import symbolic_trace

from jfi import FusedEmbeddingBagCollection, FusedEmbeddingCollection, SequenceDLRM, SequenceFeatureConfig
from jfi.cuda_graphs.capture_check import padding_ids, why_not_captured
from jfi.modules import GrowingIds, GrowingTable, defer_steps
from jfi.tables.growing_ids import initial_rows
from jfi.utils.encoding import mix

from .growing import batch, growing


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
        if one.growing_ids is not None and one.growing_ids.is_due(number):
            one.admit_ids()
    return losses


def test_where_all_ids_fit_it_trains_like_a_vocabulary():
    raw = torch.tensor([7, 10**15, -44, 90, 2**62, 123])
    grows, fixed = model(12, True), model(12, False)
    grows.growing_ids(batch(raw.tolist()))
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
    one.growing_ids(ids)
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


def test_torchrecs_tracer_goes_all_the_way_through():
    one = SequenceDLRM(
        None,
        EmbeddingCollection(tables=[table(12)]),
        [SequenceFeatureConfig("taste", ["history_item"], ["item"])],
        dense_in_features=2,
        dense_arch_layer_sizes=[4],
        over_arch_layer_sizes=[4, 1],
        growing_ids=growing(12),
    )
    one.growing_ids(batch([7, 8, 9]))
    one.admit_ids()
    dense, ids = torch.rand(2, 2), batch([7, 5], [[8, 9], []])
    torch.testing.assert_close(symbolic_trace(one)(dense, ids), one(dense, ids), rtol=0, atol=0)


def test_its_step_can_be_captured():
    ids = batch([7, 8], [[7, 9, 9], [8]])
    one = model(12, True)
    assert why_not_captured(one, (torch.rand(2, 2), ids)) is None
    assert padding_ids(one)["history_item"] == -1
