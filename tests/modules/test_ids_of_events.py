"""Weights and bucket ids that a layer without a collection reads of the ids of its events."""

import re

import pytest
import torch
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.fx import symbolic_trace
from torchrec.sparse.jagged_tensor import JaggedTensor

from jfi import (
    FusedEmbeddingCollection,
    JaggedEncoder,
    JaggedFeatureInteraction,
    KeyBias,
    SequenceFeatureConfig,
    TimeBias,
    WeightBias,
)

FEATURES = [
    SequenceFeatureConfig("taste", ["history"], ["item"], bias=WeightBias()),
    SequenceFeatureConfig("mood", ["history", "rating"], ["item"], bias=KeyBias("age", 4), weighted_values=True),
]
LENGTHS = torch.tensor([2, 0, 3])


@pytest.fixture
def ids() -> KeyedJaggedTensor:
    values = {
        "item": torch.tensor([4, 1, 7]),
        "history": torch.tensor([7, 3, 5, 1, 7]),
        "rating": torch.tensor([4, 5, 1, 2, 5]),
        "age": torch.tensor([0, 3, 1, 2, 1]),
    }
    return KeyedJaggedTensor(
        list(values),
        torch.cat(list(values.values())),
        weights=torch.arange(18).float() / 7,
        lengths=torch.cat([torch.ones(3, dtype=torch.int64), *[LENGTHS] * 3]),
    )


def tables(*, separate: bool = False) -> list[EmbeddingConfig]:
    """One table for targets and events; with `separate` a further one of the same ids, so that keys name a table."""
    shared = [EmbeddingConfig(10, 8, name="item", feature_names=["item", "history", "rating"])]
    return shared + [EmbeddingConfig(10, 8, name="other", feature_names=["history"])] * separate


def rebuilt(events: dict[str, JaggedTensor], ids: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
    """The events with the weights of their ids, which the caller had to add himself."""
    parts = {key: ids[key.split("@")[0]] for key in events}
    weighted = {
        key: JaggedTensor(one.values(), lengths=one.lengths(), weights=parts[key].weights())
        for key, one in events.items()
    }
    return weighted | {"age": ids["age"]}


@pytest.mark.parametrize("kind", [EmbeddingCollection, FusedEmbeddingCollection])
def test_a_layer_reads_them(ids, kind):
    options = {} if kind is EmbeddingCollection else {"optimizer_type": torch.optim.SGD, "optimizer_kwargs": {"lr": 1}}
    collection = kind(tables=tables(), **options)
    layer = JaggedFeatureInteraction(FEATURES, 8, num_heads=2)
    found = []
    for way in ("ids", "rebuilt"):
        events = collection(ids)
        targets = {"item": torch.randn(3, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)}
        own = (events, targets) if way == "ids" else (rebuilt(events, ids), targets)
        pooled = layer(*own, ids=ids if way == "ids" else None)
        weights = layer.attention_weights(*own, ids=ids if way == "ids" else None)
        gradients = torch.autograd.grad(pooled.values().square().sum(), [*layer.parameters(), targets["item"]])
        found.append([pooled.values(), *[one.values() for one in weights.values()], *gradients])
        if way == "ids":
            assert all(one.weights_or_none() is None for one in events.values())
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_events_that_are_not_read_stay_so(ids):
    collection = FusedEmbeddingCollection(tables=tables(), optimizer_type=torch.optim.SGD, optimizer_kwargs={"lr": 1.0})
    events = collection(ids)
    layer = JaggedFeatureInteraction(FEATURES[:1], 8)
    layer(events, {"item": torch.randn(3, 8)}, ids=ids)
    assert not events["history"].is_read


def test_keys_that_name_a_table(ids):
    features = [SequenceFeatureConfig("taste", ["history@other"], ["item"], bias=WeightBias())]
    layer, targets = JaggedFeatureInteraction(features, 8), {"item": torch.randn(3, 8)}
    events = EmbeddingCollection(tables=tables(separate=True))(ids)
    assert "history@other" in events
    torch.testing.assert_close(layer(events, targets, ids=ids)["taste"], layer(rebuilt(events, ids), targets)["taste"])


def test_an_encoder_reads_them_and_hands_the_weights_on(ids):
    features = [SequenceFeatureConfig("taste", ["history"], ["item"], bias=WeightBias(), relative_bias=TimeBias("age"))]
    times = KeyedJaggedTensor(
        ["history", "age"],
        torch.cat([ids["history"].values(), torch.tensor([0, 3, 1, 2, 5])]),
        weights=torch.cat([ids["history"].weights(), torch.zeros(5)]),
        lengths=torch.cat([LENGTHS, LENGTHS]),
    )
    encoder = JaggedEncoder(features, 8, num_heads=2, causal=True)
    layer = JaggedFeatureInteraction([features[0].encoded()], 8)
    events = {"history": EmbeddingCollection(tables=tables())(ids)["history"]}
    targets = {"item": torch.randn(3, 8)}
    own, want = encoder(events, times), encoder(rebuilt(events, times))
    torch.testing.assert_close(layer(own, targets)["taste"], layer(want, targets)["taste"], rtol=0, atol=0)


def test_torchrecs_tracer_goes_through(ids):
    layer, targets = JaggedFeatureInteraction(FEATURES, 8), {"item": torch.randn(3, 8)}
    events = EmbeddingCollection(tables=tables())(ids)
    want = layer(events, targets, ids=ids).values()
    traced = symbolic_trace(layer)
    torch.testing.assert_close(traced(events, targets, ids=ids).values(), want, rtol=0, atol=0)


def without_weights(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(ids.keys(), ids.values(), lengths=ids.lengths())


def of_other_lengths(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    lengths = ids.lengths().view(4, 3).flip(1).flatten()
    return KeyedJaggedTensor(ids.keys(), ids.values(), weights=ids.weights(), lengths=lengths)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda ids: ids.to_dict(), TypeError, "ids must be a KeyedJaggedTensor of ids, got dict"),
        (lambda ids: ids.permute([0, 2, 3]), ValueError, "ids must hold the key 'history', got none of that name"),
        (lambda ids: ids.permute([0, 1, 2]), ValueError, "ids must hold the key 'age', got none of that name"),
        (without_weights, ValueError, "ids['history'] must have weights, which feature 'taste' reads, got none"),
        (of_other_lengths, ValueError, "ids['history'] must be aligned with 'history', got other lengths"),
        (
            lambda ids: None,
            ValueError,
            "sequences['history'] must have floating weights of shape [5], since feature 'taste' has a WeightBias, got "
            "none; an EmbeddingCollection drops its input's weights: give that KeyedJaggedTensor too, as ids=",
        ),
    ],
)
def test_what_does_not_fit_is_named(ids, change, error, message):
    events = EmbeddingCollection(tables=tables())(ids)
    with pytest.raises(error, match=re.escape(message)):
        JaggedFeatureInteraction(FEATURES, 8)(events, {"item": torch.randn(3, 8)}, ids=change(ids))


def test_a_layer_that_looks_up_takes_no_further_ids(ids):
    layer = JaggedFeatureInteraction(FEATURES, 8, embedding_collection=EmbeddingCollection(tables=tables()))
    with pytest.raises(TypeError, match="ids must be None where sequences are the ids that embedding_collection"):
        layer(ids, {"item": torch.randn(3, 8)}, ids=ids)
    with pytest.raises(ValueError, match=r"sequences\['history'\] must have weights, which feature 'taste' reads"):
        layer(without_weights(ids), {"item": torch.randn(3, 8)})
