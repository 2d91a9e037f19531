"""A state_dict names weights by feature: features come and go, and the others keep their weights."""

import copy
import re

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torchrec import JaggedTensor

from jfi import JaggedEncoder, JaggedFeatureInteraction, KeyBias, PositionBias, SequenceFeatureConfig
from jfi.utils.arguments import module_name

from .conftest import EMBEDDING_DIM


def feature(name, **kwargs):
    return SequenceFeatureConfig(name, [f"{name}_item"], ["item"], **kwargs)


OLD = [feature("clicks", bias=PositionBias(3)), feature("orders"), feature("carts", bias=PositionBias(3))]
#: Alike with some of the old ones, before, between and behind them; and one of another kind, which makes a new group.
NEW = [
    feature("views", bias=PositionBias(3)),
    OLD[2],
    feature("aged", bias=KeyBias("age", 4)),
    OLD[1],
    feature("likes"),
    OLD[0],
]


def layer_of(features):
    layer = JaggedFeatureInteraction(features, EMBEDDING_DIM, 2)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


def encoder_of(features):
    return JaggedEncoder(features, EMBEDDING_DIM, 2)


@pytest.mark.parametrize("make", [layer_of, encoder_of])
def test_a_model_with_more_features_loads_the_old_weights(make):
    old, new = make(OLD), make(NEW)
    before = {name: x.clone() for name, x in new.state_dict().items()}
    missing, unexpected = new.load_state_dict(old.state_dict(), strict=False)
    assert not unexpected
    assert {name.split(".")[1] for name in missing} == {"views", "aged", "likes"}
    for name, x in new.state_dict().items():
        assert torch.equal(x, old.state_dict().get(name, before[name])), name
    # And the other way round: what belongs to features that are gone is left over.
    missing, unexpected = old.load_state_dict(new.state_dict(), strict=False)
    assert not missing and {name.split(".")[1] for name in unexpected} == {"views", "aged", "likes"}


def test_strict_loading_names_what_does_not_fit():
    layer = layer_of(OLD)
    state = layer.state_dict()
    state["attention.clicks.query_wieght"] = state.pop("attention.clicks.query_weight")
    state["attention.orders.key_weight"] = torch.zeros(3, 3)
    with pytest.raises(RuntimeError) as caught:
        layer.load_state_dict(state)
    message = str(caught.value)
    assert re.search(r"Missing key\(s\).*attention\.clicks\.query_weight", message)
    assert re.search(r"Unexpected key\(s\).*attention\.clicks\.query_wieght", message)
    assert re.search(r"size mismatch for attention\.orders\.key_weight: .*\[3, 3\].*\[8, 8\]", message)


@pytest.mark.parametrize("make", [layer_of, encoder_of])
def test_parameters_are_named_as_in_the_state_dict(make):
    model, sequences, targets = make(OLD), *batch_of(OLD)
    inputs = (sequences, targets) if make is layer_of else (sequences,)
    assert [name for name, _ in model.named_parameters()] == [*model.state_dict()]
    for name, parameter in model.named_parameters():
        assert model.get_parameter(name) is parameter
    other = make(OLD)
    want, got = model(*inputs), torch.func.functional_call(other, model.state_dict(), inputs)
    for feature in OLD:
        want_rows, got_rows = (x[feature.name] for x in (want, got))
        if make is encoder_of:
            want_rows, got_rows = want_rows.values(), got_rows.values()
        torch.testing.assert_close(got_rows, want_rows, rtol=0, atol=0)


def batch_of(features, dtype=torch.float32):
    lengths, options = torch.tensor([2, 0, 3]), {"dtype": dtype}
    rows = {f.sequence_keys[0]: torch.randn(5, EMBEDDING_DIM, **options) for f in features}
    sequences = {key: JaggedTensor(values, lengths=lengths) for key, values in rows.items()}
    return sequences, {"item": torch.randn(3, EMBEDDING_DIM, **options)}


def test_a_group_gives_each_feature_the_gradients_that_it_has_alone():
    layer, (sequences, targets) = layer_of(OLD).double(), batch_of(OLD, torch.float64)
    layer(sequences, targets).values().square().sum().backward()
    for one in OLD:
        alone = JaggedFeatureInteraction([one], EMBEDDING_DIM, 2).double()
        alone.load_state_dict(layer.state_dict(), strict=False)
        alone(sequences, targets).values().square().sum().backward()
        for name, x in alone.named_parameters():
            torch.testing.assert_close(layer.get_parameter(name).grad, x.grad)


def test_a_frozen_feature_of_a_group_gets_no_gradient():
    layer, (sequences, targets) = layer_of(OLD), batch_of(OLD)
    layer.attention.carts.requires_grad_(False)
    layer(sequences, targets).values().sum().backward()
    assert all((x.grad is None) == name.startswith("attention.carts") for name, x in layer.named_parameters())


def test_a_state_dict_shares_its_memory_with_the_layer():
    layer = layer_of(OLD)
    layer.state_dict()["attention.carts.bucket_bias"].fill_(7)
    assert (layer.attention.carts.bucket_bias == 7).all() and not (layer.attention.clicks.bucket_bias == 7).any()


def test_weights_load_into_a_layer_on_the_meta_device():
    layer = layer_of(OLD)
    other = JaggedFeatureInteraction(OLD, EMBEDDING_DIM, 2, device=torch.device("meta"))
    other.load_state_dict(layer.state_dict(), assign=True)
    assert not any(parameter.is_meta for parameter in other.parameters())
    for (name, got), want in zip(other.named_parameters(), layer.parameters(), strict=True):
        assert torch.equal(got, want), name


def test_weights_of_some_features_leave_the_others_on_the_meta_device():
    old = layer_of([OLD[0], OLD[1]])
    layer = JaggedFeatureInteraction(OLD, EMBEDDING_DIM, 2, device=torch.device("meta"))  # clicks and carts are alike
    missing, unexpected = layer.load_state_dict(old.state_dict(), strict=False, assign=True)
    assert not unexpected and {name.split(".")[1] for name in missing} == {"carts"}
    for name, x in layer.state_dict().items():
        assert x.is_meta if "carts" in name else torch.equal(x, old.state_dict()[name]), name


def test_frozen_parameters_stay_frozen_when_they_leave_the_meta_device():
    layer = JaggedFeatureInteraction(OLD, EMBEDDING_DIM, 2, device=torch.device("meta"))
    names = [name for name, _ in layer.named_parameters()]
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    layer.load_state_dict(layer_of(OLD).state_dict(), assign=True)
    assert [name for name, _ in layer.named_parameters()] == names
    assert all(x.requires_grad == name.endswith("bias") and not x.is_meta for name, x in layer.named_parameters())


def test_distributed_checkpoints_state_dict_functions():
    layer, other = layer_of(OLD), layer_of(OLD)
    state = get_model_state_dict(layer)
    assert set(state) == set(layer.state_dict())
    set_model_state_dict(other, copy.deepcopy(state))
    for (name, got), want in zip(other.named_parameters(), layer.parameters(), strict=True):
        assert torch.equal(got, want), name


@pytest.mark.parametrize("name", ["type", "training", "0", "_modules", "5%"])
def test_a_feature_may_have_the_name_of_a_modules_attribute(name):
    def layers():
        features = [feature("clicks"), feature(name)]
        return torch.nn.ModuleDict({"layer": layer_of(features), "encoder": encoder_of(features)})

    model, other, own = layers(), layers(), module_name(name)
    loaded = torch.randn(EMBEDDING_DIM, EMBEDDING_DIM)
    with torch.no_grad():
        model["layer"].attention[own].output_weight.copy_(loaded)
    state = get_model_state_dict(model)
    torch.testing.assert_close(state[f"layer.attention.{own}.output_weight"], loaded, rtol=0, atol=0)
    assert set(state) == set(model.state_dict())
    assert set(layer_state := model["layer"].state_dict()) == {f"attention.{x}" for x in keys_of("clicks", own)}
    assert not torch.equal(layer_state["attention.clicks.output_weight"], loaded)
    set_model_state_dict(other, copy.deepcopy(state))
    for (key, got), want in zip(copy.deepcopy(other).named_parameters(), model.parameters(), strict=True):
        assert torch.equal(got, want), key
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    names = [key for group in get_optimizer_state_dict(model, optimizer)["param_groups"] for key in group["params"]]
    assert names == [key for key, _ in model.named_parameters()]


def keys_of(*names):
    kinds = ("query_weight", "query_bias", "key_weight", "value_weight", "output_weight", "output_bias")
    return [f"{name}.{kind}" for name in names for kind in kinds]


def test_repr_shows_features_heads_queries_and_biases():
    text = repr(JaggedFeatureInteraction(OLD, EMBEDDING_DIM, 2, 3)) + repr(encoder_of(OLD))
    assert "clicks: item -> clicks_item, bias=PositionBias(num_buckets=3, recency=False)" in text
    assert "num_heads=2, num_queries=3" in text and "num_heads=2, num_layers=1, causal=False" in text
