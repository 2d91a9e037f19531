"""The fused collections against TorchRec's and the same optimizers of torch.optim and fbgemm."""

import copy
import pickle
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest
import torch
from ops.absorbed import absorbed_target_attention
from ops.row_optimizers import CLASSES, states_of, torch_step
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection as TorchRecFused
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import jfi
from jfi import FusedEmbeddingBagCollection, FusedEmbeddingCollection, SequenceDLRM, SequenceFeatureConfig
from jfi.models import AttentionPooling
from jfi.modules import JaggedEncoder, JaggedFeatureInteraction, JaggedPooling, TableRows
from jfi.tables.rows_by_id import RowsById
from jfi.tables.step_rows import RowOptimizer

HALVES = [DataType.FP16, DataType.BF16]
WIDTH = 8
KEYS = ["item", "history_item", "history_brand", "user", "tags"]
ROWS = {"item": 30, "brand": 5, "user": 9, "tag": 12}
OPTIONS = {
    "sgd": {"lr": 0.05},
    "adagrad": {"lr": 0.05},
    "rowwise_adagrad": {"lr": 0.05},
    "adam": {"lr": 0.01, "betas": (0.8, 0.95)},
    "adamw": {"lr": 0.01, "weight_decay": 0.1},
}


def events():
    return [
        EmbeddingConfig(
            name="item", embedding_dim=WIDTH, num_embeddings=ROWS["item"], feature_names=["item", "history_item"]
        ),
        EmbeddingConfig(
            name="brand", embedding_dim=WIDTH, num_embeddings=ROWS["brand"], feature_names=["history_brand"]
        ),
    ]


def bags(pooling=PoolingType.SUM, width=WIDTH):
    return [
        EmbeddingBagConfig(name="user", embedding_dim=WIDTH, num_embeddings=ROWS["user"], feature_names=["user"]),
        EmbeddingBagConfig(
            name="tag", embedding_dim=width, num_embeddings=ROWS["tag"], feature_names=["tags"], pooling=pooling
        ),
    ]


def batch(size=6, weighted=False):
    ones, many = torch.ones(size, dtype=torch.int64), torch.randint(0, 6, (size,))
    tags = torch.randint(0, 4, (size,))
    n = int(many.sum())
    ids = [
        torch.randint(0, ROWS["item"], (size,)),
        torch.randint(0, 10, (n,)),
        torch.randint(0, ROWS["brand"], (n,)),
        torch.randint(0, ROWS["user"], (size,)),
        torch.randint(0, ROWS["tag"], (int(tags.sum()),)),
    ]
    values = torch.cat(ids)
    weights = torch.rand(len(values)) if weighted else None
    return KeyedJaggedTensor(KEYS, values, weights, torch.cat([ones, many, many, ones, tags]))


def fused_events(name="adagrad", **options):
    return FusedEmbeddingCollection(events(), CLASSES[name][0], OPTIONS[name], **options)


def fused_bags(name="adagrad", pooling=PoolingType.SUM, width=WIDTH, **options):
    return FusedEmbeddingBagCollection(bags(pooling, width), CLASSES[name][0], OPTIONS[name], **options)


def dlrm(bag_collection, collection):
    return SequenceDLRM(
        bag_collection,
        collection,
        [SequenceFeatureConfig("taste", ["history_item", "history_brand"], ["item"])],
        dense_in_features=2,
        dense_arch_layer_sizes=[WIDTH],
        over_arch_layer_sizes=[8, 1],
        pooling=AttentionPooling(2),
    )


def step_touched(name, parameter, states, ids, t):
    """torch.optim's step of the rows `ids` of a parameter with a dense gradient."""
    options = dict(OPTIONS[name])
    lr = options.pop("lr")
    beta1, beta2 = options.pop("betas", (0.9, 0.999))
    eps = 1e-8 if "adam" in name else 1e-10
    optimizer = RowOptimizer(name, eps, beta1, beta2, options.get("weight_decay", 0.0))
    rows = ids.unique()
    with torch.no_grad():
        torch_step_grad = parameter.grad[rows]
    with torch.enable_grad():
        torch_step(optimizer, parameter.data, states, rows, torch_step_grad, lr, t)
    parameter.grad = None


@pytest.mark.parametrize("name", OPTIONS)
def test_a_hundred_steps_are_those_of_torchrec_and_torch(name):
    """The rows of table item are target and history in one batch; each has one step, with the sum."""
    plain = dlrm(EmbeddingBagCollection(bags()), EmbeddingCollection(events()))
    model = dlrm(fused_bags(name), fused_events(name))
    model.load_state_dict(plain.state_dict())
    tables = {key: p for key, p in plain.named_parameters() if "embedding" in key.split(".")[0]}
    states = {key: states_of(name, table.detach(), decay=name == "adamw") for key, table in tables.items()}
    dense = [p for key, p in plain.named_parameters() if key not in tables]
    own = [p for key, p in model.named_parameters() if key not in tables]
    optimizers = [torch.optim.SGD(parameters, lr=0.05) for parameters in (dense, own)]
    readers = {"item": ["item", "history_item"], "brand": ["history_brand"], "user": ["user"], "tag": ["tags"]}
    losses = []
    for t in range(1, 101):
        ids, numbers, labels = batch(), torch.randn(6, 2), torch.randint(0, 2, (6, 1)).float()
        both = []
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(one(numbers, ids), labels)
            loss.backward()
            optimizer.step()
            both.append(loss.item())
        for key, table in tables.items():
            read = torch.cat([ids[reader].values() for reader in readers[key.split(".")[-2]]])
            step_touched(name, table, states[key], read, t)
        losses.append(both)
        assert all(p.grad is None for key, p in model.named_parameters() if key in tables)
    expected, got = torch.tensor(losses).T
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert expected[0] != expected[1]
    for (key, one), other in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4, msg=key)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_rows_that_are_read_seldom_decay_as_those_of_torch(name):
    """Without gradients a row has, once it is read again, the decay that torch makes in each step: lr 0.001 of it."""
    plain = nn.Parameter(torch.ones(2, 4))
    config = EmbeddingConfig(name="t", embedding_dim=4, num_embeddings=2, feature_names=["a"])
    fused = FusedEmbeddingCollection([config], CLASSES[name][0], {"lr": 0.01, "weight_decay": 0.1})
    fused.embeddings["t"].weight.data.fill_(1.0)
    optimizer = CLASSES[name][0]([plain], lr=0.01, weight_decay=0.1)
    for t in range(41):
        ids = [0, 1] if t % 20 == 0 else [0]
        rows = fused(KeyedJaggedTensor(["a"], torch.tensor(ids), lengths=torch.tensor([len(ids)])))["a"].values()
        (rows * 0).sum().backward()
        plain.grad = torch.zeros_like(plain)
        optimizer.step()
    torch.testing.assert_close(fused.embeddings["t"].weight, plain, rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad"])
def test_without_decay_untouched_rows_make_no_difference(name):
    """Where a row without a gradient stays as it is, the step is that of torch.optim on the whole table."""
    plain, fused = EmbeddingCollection(events()), fused_events(name)
    fused.load_state_dict(plain.state_dict())
    optimizer = CLASSES[name][0](plain.parameters(), **OPTIONS[name])
    for _ in range(20):
        ids, weight = batch(), torch.randn(WIDTH)
        for collection in (plain, fused):
            optimizer.zero_grad()
            sum((rows.values() @ weight).sin().sum() for rows in collection(ids).values()).backward()
            if collection is plain:
                optimizer.step()
    torch.testing.assert_close(fused.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad"])
def test_steps_are_those_of_fbgemm(name, pooling):
    kind, options = CLASSES[name][0], {"lr": 0.05} | ({} if name == "sgd" else {"eps": 1e-10})
    other = TorchRecFused(bags(pooling), kind, options, device=torch.device("cpu"))
    fused = FusedEmbeddingBagCollection(bags(pooling), kind, options)
    with torch.no_grad():
        for table, module in fused.embedding_bags.items():
            module.weight.copy_(other.embedding_bags[table].weight)
    for _ in range(20):
        ids, weight = batch(), torch.randn(2 * WIDTH)
        results = []
        for collection in (other, fused):
            pooled = collection(ids)
            results.append(torch.cat([pooled[key] for key in ("user", "tags")], dim=1))
            (results[-1] @ weight).sin().sum().backward()
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [WIDTH, 3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_bags_are_pooled_as_by_torchrec(pooling, weighted, width):
    if weighted and pooling == PoolingType.MEAN:
        pytest.skip("nn.EmbeddingBag has no weighted mean")
    plain = EmbeddingBagCollection(bags(pooling, width), is_weighted=weighted)
    fused = fused_bags("sgd", pooling, width, is_weighted=weighted)
    fused.load_state_dict(plain.state_dict())
    ids = batch(weighted=weighted)
    got, expected = fused(ids), plain(ids)
    assert got.keys() == expected.keys() and got.length_per_key() == expected.length_per_key()
    torch.testing.assert_close(got.values(), expected.values())
    weight = torch.randn(got.values().shape)
    for one in (got, expected):
        (one.values() * weight).sum().backward()
    for table, module in plain.embedding_bags.items():
        moved = module.weight.detach() - OPTIONS["sgd"]["lr"] * module.weight.grad
        torch.testing.assert_close(fused.embedding_bags[table].weight.detach(), moved)


def test_a_weighted_mean_divides_by_the_number_of_ids_and_weights_have_gradients():
    fused = fused_bags("sgd", PoolingType.MEAN, is_weighted=True)
    weights = torch.tensor([0.5, 2.0, 3.0], requires_grad=True)
    ids = KeyedJaggedTensor(["user", "tags"], torch.tensor([1, 2, 3]), weights, torch.tensor([1, 0, 2, 0]))
    table = fused.embedding_bags["tag"].weight.detach().clone()
    pooled = fused(ids)["tags"]
    torch.testing.assert_close(pooled.detach(), torch.stack([(2 * table[2] + 3 * table[3]) / 2, torch.zeros(WIDTH)]))
    pooled.sum().backward()
    torch.testing.assert_close(weights.grad, torch.stack([torch.tensor(0.0), table[2].sum() / 2, table[3].sum() / 2]))


def test_names_configs_and_types_are_torchrecs():
    for plain, fused in (
        (EmbeddingCollection(events()), fused_events()),
        (EmbeddingBagCollection(bags()), fused_bags()),
    ):
        assert isinstance(fused, type(plain))
        assert list(fused.state_dict()) == list(plain.state_dict())
        assert [name for name, _ in fused.named_parameters()] == [name for name, _ in plain.named_parameters()]
        assert not list(fused.buffers())
        plain.load_state_dict(fused.state_dict())
        fused.load_state_dict(plain.state_dict())
    assert [config.name for config in fused_events().embedding_configs()] == ["item", "brand"]
    assert [config.name for config in fused_bags().embedding_bag_configs()] == ["user", "tag"]
    assert "optimizer=adagrad, lr=0.05" in repr(fused_events()) and "ema_decay=0.9" in repr(fused_events(ema_decay=0.9))


@pytest.mark.parametrize("name", ["adagrad", "rowwise_adagrad", "adam", "adamw"])
def test_states_load_into_the_unfused_optimizer_and_back(name):
    fused, plain = fused_events(name), EmbeddingCollection(events())
    for _ in range(3):
        sum(rows.values().square().sum() for rows in fused(batch()).values()).backward()
    parameters = dict(plain.named_parameters())
    wrapper = KeyedOptimizerWrapper(parameters, lambda values: CLASSES[name][0](values, **OPTIONS[name]))
    wrapper.init_state()
    plain.load_state_dict(fused.state_dict())
    saved = copy.deepcopy(fused.fused_optimizer.state_dict())
    stepped = [state.pop("stepped_at", None) for state in saved["state"].values()]  # torch's AdamW has none
    assert all((at is not None and bool((at == 3).any())) == (name == "adamw") for at in stepped)
    shapes = {key: {k: v.shape for k, v in state.items()} for key, state in saved["state"].items()}
    assert shapes == {
        key: {k: v.shape for k, v in state.items()} for key, state in wrapper.state_dict()["state"].items()
    }
    wrapper.load_state_dict(saved)
    again = fused_events(name)
    again.load_state_dict(plain.state_dict())
    again.fused_optimizer.load_state_dict(wrapper.state_dict())
    if name == "adamw":
        for state, at in zip(again.fused_optimizer.state.values(), stepped, strict=True):
            state["stepped_at"].copy_(at)
    ids = batch()
    for one in (fused, again):
        sum(rows.values().square().sum() for rows in one(ids).values()).backward()
    torch.testing.assert_close(again.state_dict(), fused.state_dict(), rtol=0, atol=0)
    state = again.fused_optimizer.state_dict()["state"]["embeddings.item.weight"]
    assert int(state["step"]) == 4


@pytest.mark.parametrize("name", ["adagrad", "adamw"])
def test_states_without_the_steps_of_rows_load_alike_into_new_and_trained_tables(name):
    """Those of unfused optimizers: a row's weight decay counts the steps since then, at most."""
    tables = [EmbeddingConfig(name="item", embedding_dim=4, num_embeddings=9, feature_names=["item"])]
    options = {"lr": 0.1, "weight_decay": 0.5}
    new, trained, other = (FusedEmbeddingCollection(tables, CLASSES[name][0], options) for _ in range(3))

    def step(one):
        ids = KeyedJaggedTensor(["item"], torch.tensor([1, 2]), lengths=torch.tensor([2]))
        one(ids)["item"].values().sum().backward()

    for one in (other, other, *[trained] * 9):
        step(one)
    saved = copy.deepcopy(other.fused_optimizer.state_dict())
    for states in saved["state"].values():
        del states["stepped_at"]
    for one in (new, trained):
        one.load_state_dict(other.state_dict())
        one.fused_optimizer.load_state_dict(copy.deepcopy(saved))
    for one in (new, trained, other):
        step(one)
    for one in (new, trained):
        torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(("decays", "steps"), [(True, 2), (False, 1)])  # with neither there are no states
@pytest.mark.parametrize("rounds", [True, False])
def test_tables_in_half_precision_take_the_states_of_another_rounding_or_decay(rounds, decays, steps):
    def make(stochastic):
        options = {"lr": 0.1, "weight_decay": 0.5 * (stochastic == decays)}
        tables = [EmbeddingConfig(name="item", embedding_dim=4, num_embeddings=9, feature_names=["item"])]
        tables[0].data_type = DataType.BF16
        return FusedEmbeddingCollection(tables, torch.optim.SGD, options, stochastic_rounding=stochastic)

    own, other = make(rounds), make(not rounds)
    for one in (own, own, other):
        ids = KeyedJaggedTensor(["item"], torch.tensor([1, 2]), lengths=torch.tensor([2]))
        one(ids)["item"].values().sum().backward()
    saved = copy.deepcopy(other.fused_optimizer.state_dict())
    own.fused_optimizer.load_state_dict(saved)
    assert int(own.fused_optimizer.steps) == steps
    with pytest.raises(ValueError, match="Different parameter count"):
        own.fused_optimizer.load_state_dict({"state": {"embeddings.other.weight": {"sum": torch.zeros(9)}}})


def test_it_takes_part_in_a_combined_optimizer():
    fused = fused_events("adam")
    combined = CombinedOptimizer([("tables", fused.fused_optimizer)])
    assert list(combined.state_dict()["state"]) == ["tables.embeddings.item.weight", "tables.embeddings.brand.weight"]
    before = copy.deepcopy(fused.state_dict())
    combined.zero_grad()
    combined.step()
    torch.testing.assert_close(fused.state_dict(), before, rtol=0, atol=0)
    optimizer = fused.fused_optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    assert fused.fused_optimizer.param_groups[0]["lr"] == OPTIONS["adam"]["lr"] / 2


def test_a_written_learning_rate_is_that_of_the_next_step():
    fused = FusedEmbeddingCollection(events(), torch.optim.SGD, {"lr": 1.0})
    fused.fused_optimizer.param_groups[0]["lr"] = 0.25
    before = fused.embeddings["brand"].weight.detach().clone()
    fused(batch())["history_brand"].values().sum().backward()
    fused.fused_optimizer.param_groups[0].update(lr=0.0)
    moved = before - fused.embeddings["brand"].weight.detach()
    assert (moved / 0.25 - (moved / 0.25).round()).abs().max() < 1e-5 and moved.max() >= 0.25
    before = fused.embeddings["brand"].weight.detach().clone()
    fused(batch())["history_brand"].values().sum().backward()
    assert torch.equal(before, fused.embeddings["brand"].weight.detach())


def test_what_is_assigned_to_the_optimizer_takes_effect_or_is_refused():
    fused = FusedEmbeddingCollection(events(), torch.optim.SGD, {"lr": 1.0})
    optimizer = fused.fused_optimizer

    assert type(optimizer.param_groups[0].copy()) is dict

    def rate():
        before, ids = fused.embeddings["brand"].weight.detach().clone(), batch()
        fused(ids)["history_brand"].values().sum().backward()
        moved = (before - fused.embeddings["brand"].weight.detach())[:, 0]
        return (moved / ids["history_brand"].values().bincount(minlength=len(moved))).nanmean().item()

    def add(group):
        group |= {"lr": 0.5}

    def replace(groups):
        groups[0] = {"lr": 0.75}

    for change, want in (
        (lambda: optimizer.param_groups[0].update(lr=torch.tensor(2.0)), 2.0),
        (lambda: optimizer.param_groups[0].setdefault("lr", 4.0), 2.0),
        (lambda: add(optimizer.param_groups[0]), 0.5),
        (lambda: optimizer.param_groups[0].pop("initial_lr", None), 0.5),
    ):
        change()
        assert optimizer.param_groups[0]["lr"] == want and rate() == pytest.approx(want, rel=1e-4)
    other = nn.Parameter(torch.zeros(2))
    for kind, message, change in (
        (AttributeError, "param_groups", lambda: optimizer.add_param_group({"params": [other]})),
        (AttributeError, "append", lambda: optimizer.param_groups.append({"params": [other]})),
        (AttributeError, "param_groups", lambda: setattr(optimizer, "param_groups", [{"lr": 0.25}])),
        (TypeError, "assignment", lambda: replace(optimizer.param_groups)),
        (ValueError, "lr", lambda: optimizer.param_groups[0].pop("lr")),
        (ValueError, "lr", lambda: optimizer.param_groups[0].clear()),
        (ValueError, "params", lambda: optimizer.param_groups[0].update(params=[other])),
        (ValueError, "momentum", lambda: optimizer.param_groups[0].setdefault("momentum", 0.9)),
        (ValueError, "weight_decay", lambda: optimizer.param_groups[0].update(weight_decay=1)),
        (AttributeError, "state", lambda: setattr(optimizer, "state", {})),
        (AttributeError, "params", lambda: setattr(optimizer, "params", {})),
    ):
        with pytest.raises(kind, match=message):
            change()
    copied = copy.deepcopy(fused).fused_optimizer
    copied.param_groups[0]["lr"] = 8.0
    assert rate() == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("stepped", ["dense", "fused", "combined"])
def test_a_gradient_scaler_is_refused_if_it_is_enabled(stepped):
    for enabled in (False, True):
        fused, layer = fused_events("adam"), nn.Linear(WIDTH, 1)
        dense = torch.optim.SGD(layer.parameters(), lr=0.1)
        wrapped = KeyedOptimizerWrapper(dict(layer.named_parameters()), lambda _: dense)  # noqa: B023
        combined = CombinedOptimizer([("tables", fused.fused_optimizer), ("layer", wrapped)])
        optimizer = {"dense": dense, "fused": fused.fused_optimizer, "combined": combined}[stepped]
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        scaler.scale(layer(fused(batch())["item"].values()).sum()).backward()
        if enabled:
            with pytest.raises(RuntimeError, match="GradScaler has scaled the loss of a fused collection"):
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
    # A scaler of another model.
    dense.step()
    layer.zero_grad()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(layer(torch.ones(2, WIDTH)).sum()).backward()
    scaler.step(dense)


def test_meta_then_empty_then_reset():
    fused = fused_events("adam", ema_decay=0.9, device=torch.device("meta"))
    assert fused.device.type == "meta" and fused(batch().to(torch.device("meta")))["item"].values().is_meta
    fused.to_empty(device="cpu")
    fused.reset_parameters()
    for name, rows in ROWS.items():
        if name in fused.embeddings:
            weight = fused.embeddings[name].weight
            assert 0 < weight.abs().max() <= rows**-0.5
    sum(rows.values().sum() for rows in fused(batch()).values()).backward()
    state = fused.fused_optimizer.state_dict()["state"]["embeddings.item.weight"]
    assert int(state["step"]) == 1 and state["exp_avg"].any()
    fused.reset_parameters()
    state = fused.fused_optimizer.state_dict()["state"]["embeddings.item.weight"]
    assert int(state["step"]) == 0 and not state["exp_avg"].any()
    torch.testing.assert_close(fused.averages()["item"], fused.embeddings["item"].weight.detach())


@pytest.mark.parametrize("freeze_on", ["cpu", "meta"])
def test_rows_frozen_before_and_on_the_meta_device_stay(freeze_on):
    fused = fused_events("sgd", device=torch.device(freeze_on))
    frozen = torch.arange(ROWS["item"]) % 2 == 0
    fused.freeze_rows("item", frozen)
    fused.to("meta").to_empty(device="cpu")
    fused.reset_parameters()
    before = fused.embeddings["item"].weight.detach().clone()
    sum(rows.values().sum() for rows in fused(batch()).values()).backward()
    moved = (fused.embeddings["item"].weight.detach() != before).any(1)
    assert moved.any() and not moved[frozen].any()
    with pytest.raises(ValueError, match="rows must be bool of shape"):
        fused.to("meta").freeze_rows("item", frozen.to("meta"))


def test_tables_without_a_gradient_and_frozen_rows_stay():
    fused = fused_events("adamw")
    fused.embeddings["brand"].weight.requires_grad_(False)
    frozen = torch.zeros(ROWS["item"], dtype=torch.bool)
    fused.freeze_rows("item", frozen)
    frozen[:5] = True  # after the call, as a checkpoint does
    before = copy.deepcopy(fused.state_dict())
    ids = KeyedJaggedTensor(
        ["item", "history_item", "history_brand"], torch.tensor([1, 7, 2, 8, 1, 2]), lengths=torch.tensor([2, 2, 2])
    )
    rows = fused(ids)
    assert not rows["history_brand"].values().requires_grad
    sum(one.values().sum() for one in rows.values()).backward()
    moved = (fused.embeddings["item"].weight != before["embeddings.item.weight"]).any(1)
    assert moved.nonzero().flatten().tolist() == [7, 8]
    assert torch.equal(fused.embeddings["brand"].weight, before["embeddings.brand.weight"])
    with pytest.raises(ValueError, match=r"rows must be bool of shape \[30\]"):
        fused.freeze_rows("item", torch.zeros(3, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"rows must be a Tensor, got \[True\]"):
        fused.freeze_rows("item", [True])
    with pytest.raises(ValueError, match="tables must hold the key 'itm'"):
        fused.freeze_rows("itm", frozen)


def test_without_a_backward_pass_nothing_changes_and_no_grad_needs_none():
    fused = fused_events("adam")
    before = copy.deepcopy(fused.state_dict())
    fused(batch())["item"].values()
    with torch.no_grad():
        rows = fused(batch())["item"]
        assert not rows.values().requires_grad and not rows.rows.requires_grad
    fused.eval()
    torch.testing.assert_close(fused.state_dict(), before, rtol=0, atol=0)
    state = fused.fused_optimizer.state_dict()["state"]["embeddings.item.weight"]
    assert int(state["step"]) == 0
    fused(batch())["item"].values().sum().backward()  # the mode does not matter
    assert not torch.equal(fused.state_dict()["embeddings.item.weight"], before["embeddings.item.weight"])


def test_values_read_under_no_grad_do_not_lose_the_gradient():
    fused = fused_events("sgd")
    rows = fused(batch())["item"]
    with torch.no_grad():
        assert not rows.values().requires_grad
    assert rows.values().requires_grad and rows.values() is rows.values()
    before = fused.embeddings["item"].weight.detach().clone()
    rows.values().sum().backward()
    assert not torch.equal(fused.embeddings["item"].weight, before)


def test_two_look_ups_before_a_backward_pass_are_one_step():
    """As where gradients accumulate: Adagrad's step of the sum is another than two steps."""
    plain, fused = EmbeddingCollection(events()), fused_events("adagrad")
    fused.load_state_dict(plain.state_dict())
    optimizer = torch.optim.Adagrad(plain.parameters(), lr=OPTIONS["adagrad"]["lr"])
    for _ in range(3):
        first, second = batch(), batch(4)
        for collection in (plain, fused):
            optimizer.zero_grad()
            one, two = collection(first), collection(second)
            loss = one["item"].values().square().sum() + (two["item"].values() * two["item"].values()).sum()
            (loss + two["history_brand"].values().sin().sum()).backward()
            if collection is plain:
                optimizer.step()
    torch.testing.assert_close(fused.state_dict(), plain.state_dict(), rtol=1e-4, atol=1e-5)
    assert int(fused.fused_optimizer.state_dict()["state"]["embeddings.item.weight"]["step"]) == 3


def test_a_gradient_that_the_step_would_lose_is_refused():
    fused = fused_events("sgd")
    weight = fused.embeddings["item"].weight
    before = weight.detach().clone()
    loss = fused(batch())["item"].values().sum() + weight.square().sum()
    with pytest.raises(RuntimeError, match="no loss may read their weights"):
        loss.backward()
    torch.testing.assert_close(weight.detach(), before, rtol=0, atol=0)


def test_a_failed_backward_pass_leaves_nothing_behind():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("on purpose")

    fused = fused_events("sgd")
    before = copy.deepcopy(fused.state_dict())
    x = torch.randn(6, WIDTH, requires_grad=True)
    with pytest.raises(RuntimeError, match="on purpose"):
        # The look-up is later in the graph, so its gradient comes first.
        y = Fails.apply(x)
        (fused(batch())["item"].values() * y).sum().backward()
    torch.testing.assert_close(fused.state_dict(), before, rtol=0, atol=0)
    fused(batch())["item"].values().sum().backward()
    assert not torch.equal(fused.state_dict()["embeddings.item.weight"], before["embeddings.item.weight"])
    ids, loss = batch(), fused(batch())["item"].values().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert fused(ids)["item"].values().shape == (6, WIDTH)
    before = copy.deepcopy(fused.state_dict())
    with pytest.raises(RuntimeError, match="on purpose"), jfi.modules.defer_steps(fused):
        (fused(batch())["item"].values() * Fails.apply(x)).sum().backward()
    fused.fused_optimizer.step()
    torch.testing.assert_close(fused.state_dict(), before, rtol=0, atol=0)
    assert not fused._fused._running


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_a_copy_has_tables_and_states_of_its_own(is_scheduled):
    fused = fused_events("adam", ema_decay=0.9)
    if is_scheduled:  # wraps the optimizer's step
        torch.optim.lr_scheduler.LambdaLR(fused.fused_optimizer, lambda _: 1.0)
        pickle.dumps(fused)
    sum(rows.values().sum() for rows in fused(batch()).values()).backward()
    other = copy.deepcopy(fused)
    other.fused_optimizer.param_groups[0]["lr"] = 0.5
    assert fused.fused_optimizer.param_groups[0]["lr"] == OPTIONS["adam"]["lr"]
    before = copy.deepcopy((fused.state_dict(), fused.fused_optimizer.state_dict()))
    sum(rows.values().sum() for rows in other(batch()).values()).backward()
    torch.testing.assert_close((fused.state_dict(), fused.fused_optimizer.state_dict()), before, rtol=0, atol=0)
    state = other.fused_optimizer.state_dict()["state"]["embeddings.item.weight"]
    assert int(state["step"]) == 2
    moved = (other.embeddings["item"].weight - fused.embeddings["item"].weight).abs().max()
    assert moved > 0.1  # the copy's own learning rate


@pytest.mark.parametrize("data_type, dtype", [(DataType.FP16, torch.float16), (DataType.BF16, torch.bfloat16)])
def test_tables_in_half_precision(data_type, dtype):
    config = EmbeddingConfig(name="t", embedding_dim=4, num_embeddings=6, feature_names=["a"], data_type=data_type)
    fused = FusedEmbeddingCollection([config], torch.optim.Adagrad, {"lr": 0.1})
    weight = fused.embeddings["t"].weight
    assert weight.dtype == dtype
    expected = nn.Parameter(weight.detach().double())
    optimizer = torch.optim.Adagrad([expected], lr=0.1)
    ids = KeyedJaggedTensor(["a"], torch.tensor([1, 3, 1]), lengths=torch.tensor([2, 1]))
    rows = fused(ids)["a"].values()
    assert rows.dtype == torch.float32 and torch.equal(rows.detach(), weight.detach()[[1, 3, 1]].float())
    rows.square().sum().backward()
    expected[[1, 3, 1]].square().sum().backward()
    optimizer.step()
    torch.testing.assert_close(weight.detach().double(), expected.detach(), rtol=torch.finfo(dtype).eps, atol=1e-6)
    state = fused.fused_optimizer.state_dict()["state"]["embeddings.t.weight"]
    assert state["sum"].dtype == torch.float32


def one_table(data_type, optimizer_type, options, size=64, **keywords):
    config = EmbeddingConfig(name="t", embedding_dim=16, num_embeddings=size, feature_names=["a"], data_type=data_type)
    return FusedEmbeddingCollection([config], optimizer_type, options, **keywords)


def rows_of(fused, ids):
    return fused(KeyedJaggedTensor(["a"], ids, lengths=torch.ones_like(ids)))["a"].values()


@pytest.mark.parametrize("data_type", HALVES)
def test_steps_too_small_for_a_half_precision_table_add_up(data_type):
    fused = one_table(data_type, torch.optim.SGD, {"lr": 1e-3})
    weight = nn.init.ones_(fused.embeddings["t"].weight)
    for _ in range(500):
        rows_of(fused, torch.arange(64)).sum().backward()
    # A step has at most the variance of 1e-3 times the distance of two numbers, below 1 half of eps.
    deviation = (500 * 1e-3 * torch.finfo(weight.dtype).eps / 2) ** 0.5
    assert (weight.double().mean() - 0.5).abs() < 5 * deviation / weight.numel() ** 0.5
    assert weight.double().std() < 1.1 * deviation


def test_rowwise_adagrad_of_half_precision_tables_learns_as_in_float32():
    def error_of(data_type):
        fused = one_table(data_type, RowWiseAdagrad, {"lr": 0.05}, 30)
        draw = torch.Generator().manual_seed(1)
        nn.init.zeros_(fused.embeddings["t"].weight)
        truth = torch.randn(30, 16, generator=draw)
        for _ in range(500):
            ids = torch.randint(0, 30, (64,), generator=draw)
            noise = torch.randn(64, 16, generator=draw)
            (rows_of(fused, ids) - truth[ids] - noise).square().mean(0).sum().backward()
        return (fused.embeddings["t"].weight.float() - truth).square().mean().item()

    error = error_of(DataType.FP32)
    for data_type in HALVES:  # to nearest BF16 has 1.8 times the error
        assert error_of(data_type) == pytest.approx(error, rel=0.05)


@pytest.mark.parametrize("name", ["sgd", "rowwise_adagrad"])
def test_half_precision_tables_go_on_from_a_checkpoint_with_the_same_bits(name):
    def run(steps, *states):
        fused = one_table(DataType.BF16, CLASSES[name][0], {"lr": 0.01}, ema_decay=0.9 if name == "sgd" else None)
        nn.init.ones_(fused.embeddings["t"].weight)
        for one, state in zip((fused, fused.fused_optimizer), states, strict=bool(states)):
            one.load_state_dict(state)
        for step in steps:
            ids = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(step))
            rows_of(fused, ids).sin().sum().backward()
        return copy.deepcopy((fused.state_dict(), fused.fused_optimizer.state_dict()))

    whole = run(range(6))
    torch.testing.assert_close(run(range(3, 6), *run(range(3))), whole, rtol=0, atol=0)
    torch.testing.assert_close(run(range(6)), whole, rtol=0, atol=0)


def test_float64_and_output_dtype():
    fused = fused_events("adagrad", output_dtype=torch.float64).double()
    plain = nn.Parameter(fused.embeddings["brand"].weight.detach().clone())
    optimizer = torch.optim.Adagrad([plain], lr=OPTIONS["adagrad"]["lr"])
    for _ in range(3):
        ids = batch()
        rows = fused(ids)["history_brand"].values()
        assert rows.dtype == torch.float64
        rows.sin().sum().backward()
        optimizer.zero_grad()
        plain[ids["history_brand"].values()].sin().sum().backward()
        optimizer.step()
    torch.testing.assert_close(fused.embeddings["brand"].weight.detach(), plain.detach(), rtol=1e-7, atol=1e-8)
    half = fused_events("adagrad", output_dtype=torch.bfloat16)
    rows = half(batch())["item"].values()
    assert rows.dtype == torch.bfloat16
    rows.sum().backward()
    assert fused_bags(output_dtype=torch.bfloat16)(batch()).values().dtype == torch.bfloat16


def test_batches_of_nothing():
    for collection in (fused_events("adam"), fused_bags("adam")):
        before = copy.deepcopy(collection.state_dict())
        no_ids = KeyedJaggedTensor(KEYS, torch.tensor([], dtype=torch.int64), lengths=torch.zeros(15).long())
        no_samples = KeyedJaggedTensor(KEYS, torch.tensor([], dtype=torch.int64), lengths=torch.zeros(0).long())
        for ids, size in ((no_ids, 3), (no_samples, 0)):
            out = collection(ids)
            if isinstance(out, dict):
                assert out["item"].values().shape == (0, WIDTH) and out["item"].lengths().shape == (size,)
                sum(rows.values().sum() for rows in out.values()).backward()
            else:
                assert out["tags"].shape == (size, WIDTH) and not out.values().any()
                out.values().sum().backward()
        torch.testing.assert_close(collection.state_dict(), before, rtol=0, atol=0)


def test_a_key_of_two_tables_and_keys_that_no_table_reads():
    def configs(kind):
        return [
            kind(name="a", embedding_dim=4, num_embeddings=6, feature_names=["x", "y"]),
            kind(name="b", embedding_dim=4, num_embeddings=6, feature_names=["x"]),
        ]

    ids = KeyedJaggedTensor(["z", "y", "x"], torch.tensor([9, 1, 2, 3, 3]), lengths=torch.tensor([1, 0, 1, 1, 1, 1]))
    plain = EmbeddingCollection(configs(EmbeddingConfig))
    fused = FusedEmbeddingCollection(configs(EmbeddingConfig), torch.optim.SGD, {"lr": 0.1})
    fused.load_state_dict(plain.state_dict())
    got, expected = fused(ids), plain(ids)
    assert list(got) == list(expected) == ["x@a", "y", "x@b"]
    for key, rows in expected.items():
        torch.testing.assert_close(got[key].values(), rows.values())
        assert torch.equal(got[key].lengths(), rows.lengths()) and torch.equal(got[key].offsets(), rows.offsets())
    for one in (got, expected):
        sum((k + 1) * rows.values().sum() for k, rows in enumerate(one.values())).backward()
    for table in "ab":
        moved = plain.embeddings[table].weight.detach() - 0.1 * plain.embeddings[table].weight.grad
        torch.testing.assert_close(fused.embeddings[table].weight.detach(), moved)
    bags_of = EmbeddingBagCollection(configs(EmbeddingBagConfig))
    fused_of = FusedEmbeddingBagCollection(configs(EmbeddingBagConfig), torch.optim.SGD, {"lr": 0.1})
    fused_of.load_state_dict(bags_of.state_dict())
    assert fused_of(ids).keys() == bags_of(ids).keys()
    torch.testing.assert_close(fused_of(ids).values(), bags_of(ids).values())


def test_ids_out_of_range_are_refused_by_name():
    def ids(*values):
        return KeyedJaggedTensor(
            ["item", "history_item", "history_brand"], torch.tensor(values), lengths=torch.ones(3).long()
        )

    with torch.no_grad():
        for values, message in (
            ((30, 0, 0), r"features\['item'\] must be from 0 to 29, rows of table 'item', got 30"),
            ((0, -2, 0), r"features\['history_item'\] must be from 0 to 29, rows of table 'item', got -2"),
            ((0, 0, -1), r"features\['history_brand'\] must be from 0 to 4, rows of table 'brand', got -1"),
        ):
            with pytest.raises(ValueError, match=message):
                fused_events()(ids(*values))
    with pytest.raises(ValueError, match="features must hold the key 'history_brand'"):
        fused_events()(KeyedJaggedTensor(["item", "history_item"], torch.tensor([1, 2]), lengths=torch.ones(2).long()))
    with pytest.raises(TypeError, match=r"features must hold int32 or int64 ids .* got torch.float32"):
        fused_events()(ids(0.0, 1.0, 2.0))
    with pytest.raises(TypeError, match="features must be a KeyedJaggedTensor"):
        fused_events()({"item": torch.tensor([1])})


def test_room_behind_the_lengths_is_padding():
    """A buffer of a CUDA graph has room for more ids than the batch has."""
    config = EmbeddingConfig(name="t", embedding_dim=4, num_embeddings=6, feature_names=["a", "b"])
    fused = FusedEmbeddingCollection([config], torch.optim.AdamW, {"lr": 0.1})

    def ids(*values):
        return KeyedJaggedTensor(
            ["a", "b"],
            torch.tensor(values),
            lengths=torch.tensor([1, 1, 2, 0]),
            length_per_key=[4, 3],
            stride=2,
        )

    before = fused.embeddings["t"].weight.detach().clone()
    rows = fused(ids(1, 2, -1, -1, 2, 3, -1))
    assert rows["a"].values().shape == (4, 4) and not rows["a"].values()[2:].any() and rows["b"].values()[:2].any()
    sum(one.values().sum() for one in rows.values()).backward()
    moved = (fused.embeddings["t"].weight != before).any(1)
    assert moved.nonzero().flatten().tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match=r"features\['a'\] must be -1 behind the 2 that its lengths count, got 5"):
        fused(ids(1, 2, -1, 5, 2, 3, -1))
    with pytest.raises(ValueError, match=r"features\['b'\] must be from 0 to 5, rows of table 't', got -1"):
        fused(ids(1, 2, -1, -1, 2, -1, -1))


def test_averages_are_those_of_all_rows_and_all_steps():
    fused, decay = fused_events("adam", ema_decay=0.8), 0.8
    expected = None
    for step in range(12):
        sum(rows.values().sin().sum() for rows in fused(batch(2)).values()).backward()
        now = {name: table.weight.detach().double() for name, table in fused.embeddings.items()}
        expected = (
            now
            if expected is None
            else {name: decay * average + (1 - decay) * now[name] for name, average in expected.items()}
        )
        if step in (3, 11):
            for name, average in fused.averages().items():
                torch.testing.assert_close(average.double(), expected[name], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="ema_decay must be given at construction"):
        fused_events().averages()


def test_an_interrupted_average_goes_on_with_the_same_bits():
    def run(fused, seeds):
        for seed in seeds:
            torch.manual_seed(seed)
            sum(rows.values().sin().sum() for rows in fused(batch(2)).values()).backward()
        return fused

    whole, first = run(fused_events("adam", ema_decay=0.8), []), fused_events("adam", ema_decay=0.8)
    first.load_state_dict(whole.state_dict())
    run(whole, range(10))
    run(first, range(4))
    second = fused_events("adam", ema_decay=0.8)
    second.load_state_dict(first.state_dict())
    state = second.fused_optimizer.state_dict()  # filled in place, as torch.distributed.checkpoint does
    for name, saved in first.fused_optimizer.state_dict()["state"].items():
        for key, value in saved.items():
            state["state"][name][key].copy_(value)
    second.fused_optimizer.load_state_dict(state)
    run(second, range(4, 10))
    torch.testing.assert_close(second.averages(), whole.averages(), rtol=0, atol=0)
    torch.testing.assert_close(second.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_an_average_loaded_before_the_first_step_begins_as_the_weight():
    saved, fused = fused_events(ema_decay=0.8), fused_events(ema_decay=0.8)
    fused.fused_optimizer.load_state_dict(copy.deepcopy(saved.fused_optimizer.state_dict()))
    torch.testing.assert_close(fused.averages()["item"], fused.embeddings["item"].weight.detach(), rtol=0, atol=0)
    fused(batch())["history_brand"].values().sum().backward()
    torch.testing.assert_close(fused.averages()["item"], fused.embeddings["item"].weight.detach(), rtol=0, atol=0)


@pytest.mark.parametrize(
    "kind, options, keywords, message",
    [
        (torch.optim.RMSprop, {}, {}, "optimizer_type must be one of SGD, .*, got RMSprop"),
        (torch.optim.SGD, {"momentum": 0.9}, {}, r"optimizer_kwargs of SGD must be of .*, got \['momentum'\]"),
        (torch.optim.SGD, {"lr": -1.0}, {}, r"optimizer_kwargs\['lr'\] must be 0 or more and finite, got -1.0"),
        (torch.optim.SGD, {"lr": "x"}, {}, r"optimizer_kwargs\['lr'\] must be a number 0 or more and finite, got 'x'"),
        (torch.optim.Adam, {"betas": (0.9, 1.0)}, {}, r"optimizer_kwargs\['betas'\] must be two numbers in \[0, 1\)"),
        (torch.optim.Adam, {"betas": (False, 0.9)}, {}, r"optimizer_kwargs\['betas'\] must be two numbers in \[0, 1\)"),
        (torch.optim.SGD, {}, {"ema_decay": 1.0}, "ema_decay must be between 0 and 1, or None, got 1.0"),
        (torch.optim.SGD, {}, {"stochastic_rounding": 1}, "stochastic_rounding must be a bool, got 1"),
        (torch.optim.SGD, {}, {"output_dtype": torch.int32}, "output_dtype must be a floating torch.dtype or None"),
    ],
)
def test_wrong_arguments(kind, options, keywords, message):
    with pytest.raises((ValueError, TypeError), match=message):
        FusedEmbeddingCollection(events(), kind, options, **keywords)
    with pytest.raises((ValueError, TypeError), match=message):
        FusedEmbeddingBagCollection(bags(), kind, options, **keywords)


def test_a_table_of_integers_and_no_table_are_refused():
    config = EmbeddingConfig(name="t", embedding_dim=4, num_embeddings=6, feature_names=["a"], data_type=DataType.INT8)
    with pytest.raises(ValueError, match="table 't' must have data_type FP32, FP16 or BF16, got INT8"):
        FusedEmbeddingCollection([config], torch.optim.SGD, {})
    with pytest.raises(ValueError, match="tables must have at least one config"):
        FusedEmbeddingCollection([], torch.optim.SGD, {})


def test_rows_are_a_jagged_tensor_without_memory():
    rows = fused_events()(batch())["history_item"]
    assert isinstance(rows, TableRows) and rows.rows.shape == (rows.ids.numel(), WIDTH) and rows.rows.stride() == (0, 0)
    assert rows.table.shape == (ROWS["item"], WIDTH) and not rows.table.requires_grad
    assert rows.device().type == "cpu" and rows.to(torch.device("cpu")).values().shape == rows.rows.shape
    assert [len(sample) for sample in rows.to_dense()] == rows.lengths().tolist()
    assert "JaggedTensor" in str(rows) and rows.weights_or_none() is None
    assert rows.to_padded_dense(3).shape == (6, 3, WIDTH)


@pytest.mark.parametrize("consumer", ["attention", "mean", "encoder", "ragged", "collection"])
def test_layers_that_do_not_know_it_read_the_values(consumer):
    plain, fused = EmbeddingCollection(events()), fused_events("sgd")
    fused.load_state_dict(plain.state_dict())
    features = [SequenceFeatureConfig("taste", ["history_item", "history_brand"], ["item"])]
    layer = JaggedFeatureInteraction(features, WIDTH, num_heads=2)
    encoder = JaggedEncoder(features, WIDTH, num_heads=2, num_layers=1).eval()
    ids = batch()
    outputs, moved = [], []
    for collection in (plain, fused):
        rows = collection(ids)
        targets = {"item": rows["item"].values()}
        if consumer == "mean":
            outputs.append(JaggedPooling(features, WIDTH)(rows)["taste"])
        elif consumer == "encoder":
            encoded = [feature.encoded() for feature in features]
            outputs.append(JaggedFeatureInteraction(encoded, WIDTH)(encoder(rows), targets)["taste"].float() * 0)
            outputs[-1] = next(iter(encoder(rows).values())).values()
        elif consumer == "ragged":
            outputs.append(layer(rows, {"item": rows["item"]})["taste"])
        elif consumer == "collection":
            inside = JaggedFeatureInteraction(features, WIDTH, num_heads=2, embedding_collection=collection)
            inside.load_state_dict(layer.state_dict(), strict=False)
            outputs.append(inside(ids, {"item": torch.ones(6, WIDTH)})["taste"])
        else:
            outputs.append(layer(rows, targets)["taste"])
        before = collection.embeddings["item"].weight.detach().clone()
        outputs[-1].square().sum().backward()
        weight = collection.embeddings["item"].weight
        step = before - weight.detach() if collection is fused else OPTIONS["sgd"]["lr"] * weight.grad
        moved.append(step)
    torch.testing.assert_close(*outputs)
    assert moved[0].any()
    torch.testing.assert_close(*moved, rtol=1e-4, atol=1e-6)


def test_exports():
    assert jfi.FusedEmbeddingCollection is FusedEmbeddingCollection and jfi.TableRows is TableRows
    assert jfi.FusedEmbeddingBagCollection is FusedEmbeddingBagCollection and RowWiseAdagrad is not None


def test_a_compiled_model_makes_the_same_steps():
    torch._dynamo.reset()
    model = dlrm(fused_bags("adagrad"), fused_events("adagrad"))
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="eager")
    for size in (6, 4):
        ids, numbers = batch(size), torch.randn(size, 2)
        losses = []
        for one in (model, compiled):
            loss = one(numbers, ids).square().sum()
            loss.backward()
            losses.append(loss)
        torch.testing.assert_close(*losses)
    torch.testing.assert_close(other.state_dict(), model.state_dict())


def test_deferred_passes_are_one_step_and_a_failed_one_leaves_nothing_behind():
    """As the step of both batches at once; then a pass that fails within the block counts for nothing."""
    parts = [batch(size=5), batch(size=4)]
    collection = fused_events("adam")
    twin = copy.deepcopy(collection)

    def total(one, ids):
        return sum(part.values().square().sum() for part in one(ids).values())

    with jfi.modules.defer_steps(collection):
        total(collection, parts[0]).backward()
    assert int(collection._fused.steps) == 0
    total(collection, parts[1]).backward()
    (total(twin, parts[0]) + total(twin, parts[1])).backward()
    before = {name: weight.detach().clone() for name, weight in collection.named_parameters()}
    for name, weight in twin.named_parameters():
        torch.testing.assert_close(before[name], weight.detach())
    for part in parts:
        with jfi.modules.defer_steps(collection):
            total(collection, part).backward()
    collection.fused_optimizer.step()
    collection.fused_optimizer.step()  # nothing waits any more
    (total(twin, parts[0]) + total(twin, parts[1])).backward()
    for name, weight in twin.named_parameters():
        torch.testing.assert_close(collection.get_parameter(name).detach(), weight.detach())
    before = {name: weight.detach().clone() for name, weight in collection.named_parameters()}
    with pytest.raises(RuntimeError, match="stop"), jfi.modules.defer_steps(collection):
        total(collection, parts[0]).backward()
        raise RuntimeError("stop")
    (0.0 * total(collection, parts[1])).backward()
    assert int(collection._fused.steps) == 3
    moved = {name for name, weight in collection.named_parameters() if not torch.equal(weight, before[name])}
    assert moved == set(before)  # by Adam's moments alone
    total(twin, parts[1]).mul(0.0).backward()
    for name, weight in twin.named_parameters():
        torch.testing.assert_close(collection.get_parameter(name).detach(), weight.detach())


def test_a_block_within_another_defers_to_the_end_of_the_outer_one():
    collection, ids = fused_events("sgd"), batch()
    with jfi.modules.defer_steps(collection):
        for _ in range(2):
            with jfi.modules.defer_steps(collection):
                collection(ids)["item"].values().sum().backward()
            assert int(collection._fused.steps) == 0
    collection.fused_optimizer.step()
    assert int(collection._fused.steps) == 1


def test_a_table_frozen_in_one_pass_does_not_split_the_step_of_the_others():
    collection, ids = fused_events("adagrad"), batch()
    twin = copy.deepcopy(collection)

    def total(one):
        return one(ids)["item"].values().sum()

    with jfi.modules.defer_steps(collection):
        collection.embeddings["brand"].weight.requires_grad_(False)
        total(collection).backward()
        collection.embeddings["brand"].weight.requires_grad_(True)
    total(collection).backward()
    (total(twin) + total(twin)).backward()
    torch.testing.assert_close(collection.state_dict(), twin.state_dict())
    assert int(collection._fused.steps) == 1


@pytest.mark.parametrize("nested", [False, True])
def test_reentrant_checkpoints_make_one_step_after_the_outer_pass(nested):
    """The second tower recomputes its rows from the table that the first has read; a failed pass counts for nothing."""
    collection, ids = fused_events("adagrad"), batch()
    twin, other = copy.deepcopy(collection), copy.deepcopy(collection)
    x = torch.ones(1, requires_grad=True)

    def tower(tables, x):
        return tables(ids)["item"].values().square() * x

    def checkpointed(tables, depth):
        def function(x):
            return tower(tables, x) if depth == 1 else checkpointed(tables, depth - 1)

        return checkpoint(function, x, use_reentrant=True)

    def loss(tables):
        return (checkpointed(tables, 1 + nested) + checkpointed(tables, 1 + nested)).sum()

    def fail(grad):
        raise RuntimeError("stop")

    product = x * 1.0
    product.register_hook(fail)
    with pytest.raises(RuntimeError, match="stop"):
        checkpoint(lambda x: tower(collection, x), product, use_reentrant=True).sum().backward()
    assert int(collection._fused.steps) == 0
    loss(collection).backward()
    (tower(twin, x) + tower(twin, x)).sum().backward()
    torch.testing.assert_close(collection.state_dict(), twin.state_dict())
    assert int(collection._fused.steps) == 1
    with jfi.modules.defer_steps(other):
        loss(other).backward()
    other.fused_optimizer.step()
    torch.testing.assert_close(other.state_dict(), twin.state_dict())


@pytest.mark.parametrize("operator", ["target_attention", "absorbed_target_attention"])
def test_two_backward_passes_over_one_graph_are_two_steps_by_the_rows_of_the_forward_pass(operator, device):
    """Also where a kernel reads the rows by id in the backward pass, from a table that has been stepped since."""
    collection, ids = fused_events("sgd").to(device), batch().to(device)
    query = torch.randn(6, 1, 2, WIDTH, device=device)
    shapes = (8, 8), (8,), (8, 8), (8, 8), (8, 8), (8,)
    weights = tuple(torch.randn(1, *shape, device=device) for shape in shapes)

    def two_passes(one, impl):
        rows = one(ids)["history_item"]
        history, options = RowsById(rows.rows, (rows.table,), (rows.ids,)), {"offsets": rows.offsets(), "impl": impl}
        if operator == "target_attention":
            out = jfi.ops.target_attention(query, history, **options)
        else:
            out = absorbed_target_attention(query[None, :, 0, 0], history, weights, num_heads=2, **options)
        loss = out.square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return one.embeddings["item"].weight.detach(), int(one.fused_optimizer.steps)

    found = [two_passes(copy.deepcopy(collection), impl) for impl in ("torch", "triton")]
    assert [steps for _, steps in found] == [2, 2]
    torch.testing.assert_close(found[0][0], found[1][0])
    assert not torch.equal(found[0][0], collection.embeddings["item"].weight)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU the step sorts")
def test_memory_that_others_take_on_the_sorting_stream_changes_no_step():
    """torch has 32 streams, so copies of batches may get the stream that sorts; the GPU is behind the host here."""
    config = EmbeddingConfig(name="item", embedding_dim=64, num_embeddings=9000, feature_names=["item"])
    made = []
    for is_shared in (False, True):
        torch.manual_seed(0)
        collection = FusedEmbeddingCollection([config], torch.optim.Adagrad, {"lr": 0.05}, device=torch.device("cuda"))
        for _ in range(20):
            ids, lengths = torch.randint(9000, (10240,)), torch.full((512,), 20)
            batch = KeyedJaggedTensor(["item"], ids, lengths=lengths, stride=512).to("cuda")
            loss = collection(batch)["item"].values().square().sum()
            torch.cuda._sleep(5_000_000)
            loss.backward()
            if is_shared:
                with torch.cuda.stream(collection._fused._side.stream):
                    kinds = 4 * (torch.int32, torch.int64)
                    others = [torch.full((10240,), 2**20, dtype=kind, device="cuda") for kind in kinds]
                del others
        made.append(collection.embeddings["item"].weight.detach().cpu())
    torch.testing.assert_close(*made, rtol=0, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU there is one stream")
def test_look_ups_and_the_end_of_the_block_wait_for_steps_beside_it():
    config = EmbeddingConfig(name="item", embedding_dim=64, num_embeddings=9000, feature_names=["item"])
    made = []
    for is_beside in (False, True):
        torch.manual_seed(0)
        collection = FusedEmbeddingCollection([config], torch.optim.Adagrad, {"lr": 0.05}, device=torch.device("cuda"))
        ids = torch.randint(9000, (512 * 400,), device="cuda")
        batch = KeyedJaggedTensor(["item"], ids, lengths=torch.full((512,), 400, device="cuda"), stride=512)
        optimizer = collection.fused_optimizer
        for _ in range(3):
            with optimizer.stepping_beside() if is_beside else nullcontext():
                for _ in range(3):
                    rows = [collection(batch)["item"].values() for _ in range(2)]
                    for one in rows:  # the second step follows the first one's on the side stream
                        one.square().sum().backward()
                        torch.full((512 * 400, 64), 1e9, device="cuda")  # memory of the first one's gradients
                    assert len(optimizer._side.kept) == 2 * is_beside
            made.append(collection.embeddings["item"].weight.detach().clone())
    for plain, beside in zip(made[:3], made[3:], strict=True):
        torch.testing.assert_close(beside, plain, rtol=0, atol=0)


@pytest.mark.parametrize("is_captured", [False, True])
def test_after_an_error_the_block_waits_for_steps_that_were_made(is_captured, monkeypatch):
    """And not for those of a capture that has failed, which never run."""
    optimizer, calls = fused_events("sgd").fused_optimizer, []
    optimizer._side = SimpleNamespace(wait=lambda: calls.append("wait"), forget=lambda: calls.append("forget"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_captured)
    with pytest.raises(RuntimeError), optimizer.stepping_beside():
        raise RuntimeError
    assert calls == ["forget", "wait"] if is_captured else ["wait"]
    assert not optimizer._steps_beside


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU there is one stream")
def test_a_look_up_after_an_error_reads_the_rows_that_were_stepped():
    made = []
    for is_beside in (False, True):
        torch.manual_seed(0)
        collection, ids = fused_events("sgd").to("cuda"), batch().to("cuda")
        optimizer = collection.fused_optimizer
        with suppress(KeyboardInterrupt), optimizer.stepping_beside() if is_beside else nullcontext():
            loss = collection(ids)["history_item"].values().square().sum()
            with torch.cuda.stream(optimizer._side.stream):
                torch.cuda._sleep(50_000_000)
            loss.backward()
            raise KeyboardInterrupt
        made.append(collection(ids)["history_item"].values().detach())
    torch.testing.assert_close(*made, rtol=0, atol=0)
