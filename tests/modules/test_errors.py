"""Every message names what it is about, what it got and what it must be."""

import re

import pytest
import torch
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor

from jfi import JaggedFeatureInteraction, KeyBias, PositionBias, SequenceFeatureConfig, WeightBias
from jfi.modules import JaggedPooling

from .conftest import EMBEDDING_DIM, LENGTHS


def taste(**kwargs):
    return SequenceFeatureConfig(**{"name": "taste", "sequence_keys": ["history"], "target_keys": ["item"], **kwargs})


def buckets(values, lengths=LENGTHS):
    return JaggedTensor(values=torch.as_tensor(values), lengths=torch.tensor(lengths))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"name": ""}, ValueError, "name must not be empty or contain a period, got ''"),
        ({"sequence_keys": "history"}, TypeError, "sequence_keys of feature 'taste' must be a list of keys, got 'hist"),
        (
            {"target_keys": []},
            ValueError,
            "target_keys of feature 'taste' must be a list of distinct keys, at least ",
        ),
        (
            {"sequence_keys": ["a", "b", "a"]},
            ValueError,
            "list of distinct keys, at least one, got ['a', 'b', 'a']",
        ),
        ({"combine": "mean"}, ValueError, "combine of feature 'taste' must be 'sum' or 'concat', got 'mean'"),
        (
            {"bias": KeyBias("history")},
            ValueError,
            "bias of feature 'taste' must not read one of its sequence_keys, got KeyBias(key='history', num_",
        ),
        (
            {"bias": "postion"},
            TypeError,
            "bias of feature 'taste' must be a PositionBias, WeightBias, KeyBias or None, got 'postion'",
        ),
        ({"bias": PositionBias}, TypeError, "must be a PositionBias, WeightBias, KeyBias or None, got <class"),
        ({"name": "a.b"}, ValueError, "name must not be empty or contain a period, got 'a.b'"),
        ({"name": 3}, TypeError, "name must be a str, got 3"),
        (
            {"sequence_keys": ["a", 1]},
            TypeError,
            "sequence_keys of feature 'taste' must be a list of keys, got ['a', 1",
        ),
        ({"weighted_values": "weights"}, TypeError, "weighted_values of feature 'taste' must be a bool, got 'weights'"),
        ({"max_seqlen": 0}, ValueError, "max_seqlen of feature 'taste' must be at least 1, got 0"),
        ({"max_seqlen": 9.0}, TypeError, "max_seqlen of feature 'taste' must be an int, got 9.0"),
    ],
)
def test_config(changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        taste(**changes)


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "message"),
    [
        (PositionBias, (0,), ValueError, "num_buckets of PositionBias must be at least 1, got 0"),
        (PositionBias, (True,), TypeError, "num_buckets of PositionBias must be an int, got True"),
        (KeyBias, ("age", 2.5), TypeError, "num_buckets of KeyBias must be an int, got 2.5"),
        (KeyBias, ("",), ValueError, "key of KeyBias must be a key without spaces around it, got ''"),
        (KeyBias, (" age",), ValueError, "key of KeyBias must be a key without spaces around it, got ' age'"),
        (KeyBias, (32,), TypeError, "key of KeyBias must be a str, got 32"),
    ],
)
def test_biases(kind, arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        kind(*arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"features": []}, ValueError, "features must hold at least one SequenceFeatureConfig, got []"),
        ({"features": taste()}, TypeError, "features must be a list of SequenceFeatureConfig, got SequenceFeat"),
        ({"features": [taste(), taste()]}, ValueError, "features must have distinct names, got ['taste'] more than"),
        ({"num_heads": 3}, ValueError, "num_heads must divide embedding_dim=8, got 3"),
        ({"num_heads": 2.0}, TypeError, "num_heads must be an int, got 2.0"),
        ({"num_heads": 0}, ValueError, "num_heads must be at least 1, got 0"),
        ({"num_queries": 0}, ValueError, "num_queries must be at least 1, got 0"),
        ({"embedding_dim": 0}, ValueError, "embedding_dim must be at least 1, got 0"),
    ],
)
def test_construction(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        JaggedFeatureInteraction(**{"features": [taste()], "embedding_dim": EMBEDDING_DIM, **arguments})


IDS = KeyedJaggedTensor(keys=["histroy"], values=torch.arange(9), lengths=torch.tensor(LENGTHS))


@pytest.mark.parametrize("sequences", [None, buckets(range(9))], ids=["none", "one alone"])
@pytest.mark.parametrize("kind", [JaggedFeatureInteraction, JaggedPooling])
def test_sequences_of_another_type(kind, sequences):
    message = f"sequences must be a dict of JaggedTensor by key, got {type(sequences).__name__}"
    with pytest.raises(TypeError, match=message):
        kind([taste()], EMBEDDING_DIM)(sequences, {})


@pytest.mark.parametrize("bias", [None, PositionBias()])
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            {"lengths": [1, 2]},
            "sequences['history'] must have offsets from 0 to 5, the number of its events, got 0 to 3",
        ),
        (
            {"offsets": [1, 5]},
            "sequences['history'] must have offsets from 0 to 5, the number of its events, got 1 to 5",
        ),
        ({"offsets": [0, 3, 2, 5]}, "sequences['history'] must have lengths of at least 0, got -1"),
    ],
)
def test_lengths_that_do_not_fit_the_events(bias, rows, message):
    history = JaggedTensor(torch.zeros(5, EMBEDDING_DIM), **{name: torch.tensor(row) for name, row in rows.items()})
    with pytest.raises(ValueError, match=re.escape(message)):
        JaggedFeatureInteraction([taste(bias=bias)], EMBEDDING_DIM)({"history": history}, {})


def test_a_bias_key_that_the_encoded_events_would_replace():
    with pytest.raises(ValueError, match="bias of feature 'age' must not read one of its sequence_keys, got KeyBias"):
        taste(name="age", bias=KeyBias("age")).encoded()


def test_ids_without_a_collection():
    with pytest.raises(TypeError, match="sequences is a KeyedJaggedTensor of ids, which needs embedding_collection"):
        JaggedFeatureInteraction([taste()], EMBEDDING_DIM)(IDS, {})


def test_no_ids_for_the_collection():
    table = EmbeddingConfig(name="item_table", embedding_dim=8, num_embeddings=10, feature_names=["history"])
    layer = JaggedFeatureInteraction([taste()], EMBEDDING_DIM, embedding_collection=EmbeddingCollection(tables=[table]))
    with pytest.raises(TypeError, match="sequences must be a KeyedJaggedTensor of ids, got dict"):
        layer({}, {})


def test_bucket_ids_absent_from_the_ids(target):
    table = EmbeddingConfig(name="item_table", embedding_dim=8, num_embeddings=10, feature_names=["histroy"])
    layer = JaggedFeatureInteraction(
        [taste(sequence_keys=["histroy"], bias=KeyBias("age"))],
        EMBEDDING_DIM,
        embedding_collection=EmbeddingCollection(tables=[table]),
    )
    with pytest.raises(
        ValueError, match=re.escape("sequences must hold the key 'age', got none of that name; known: ['histroy']")
    ):
        layer(IDS, {"item": target()})


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        (
            "history",
            None,
            ValueError,
            "sequences must hold the key 'history', got none of that name; known: ['age', 'rating']",
        ),
        ("history", torch.zeros(9, 8), TypeError, "sequences['history'] must be a JaggedTensor, got Tensor"),
        (
            "rating",
            JaggedTensor(torch.zeros(9, 4), lengths=torch.tensor(LENGTHS)),
            ValueError,
            "sequences['rating'] must hold embeddings of shape [S, 8] (events, embedding_dim), "
            "got torch.float32 of shape [9, 4]",
        ),
        ("rating", buckets(range(9)), ValueError, "embedding_dim), got torch.int64 of shape [9]"),
        (
            "rating",
            JaggedTensor(torch.zeros(8, 8), lengths=torch.tensor([3, 0, 0, 5])),
            ValueError,
            "sequences['rating'] must be aligned with 'history', which has 9 events, got 8",
        ),
        (
            "rating",
            JaggedTensor(torch.zeros(9, 8), lengths=torch.tensor([3, 1, 0, 5])),
            ValueError,
            "sequences['rating'] must be aligned with 'history', got other lengths in at least one sample",
        ),
        (
            "rating",
            JaggedTensor(torch.zeros(9, 8, dtype=torch.bfloat16), lengths=torch.tensor(LENGTHS)),
            ValueError,
            "sequences['rating'] must be torch.float32 like 'history', got torch.bfloat16",
        ),
        (
            "age",
            None,
            ValueError,
            "sequences must hold the key 'age', got none of that name; known: ['history', 'rating']",
        ),
        ("age", torch.zeros(9), TypeError, "sequences['age'] must be a JaggedTensor, got Tensor"),
        (
            "age",
            buckets(torch.rand(9)),
            TypeError,
            "sequences['age'] must hold integer bucket ids of shape [S], since it is the bias of feature 'taste', "
            "got torch.float32 of shape [9]",
        ),
        ("age", buckets(range(9), [3, 1, 0, 5]), ValueError, "sequences['age'] must be aligned with 'history'"),
        (
            "age",
            buckets([0, 1, 2, 3, 4, 5, 6, 7, 32]),
            ValueError,
            "sequences['age'] must hold bucket ids from 0 to 31 (num_buckets=32 in feature 'taste'), got 32",
        ),
        ("age", buckets([0, 1, 2, 3, 4, 5, 6, 7, -1]), ValueError, "bucket ids from 0 to 31 (num_buckets=32"),
    ],
)
def test_sequences(events, target, key, value, error, message):
    layer = JaggedFeatureInteraction([taste(sequence_keys=["history", "rating"], bias=KeyBias("age"))], EMBEDDING_DIM)
    sequences = {
        "history": events(dtype=torch.float32),
        "rating": events(dtype=torch.float32),
        "age": buckets(range(9)),
        key: value,
    }
    sequences = {key: value for key, value in sequences.items() if value is not None}
    with pytest.raises(error, match=re.escape(message)):
        layer(sequences, {"item": target(dtype=torch.float32)})


@pytest.mark.parametrize(
    ("targets", "error", "message"),
    [
        (
            {"itme": torch.zeros(4, 8)},
            ValueError,
            "targets must hold the key 'item', got none of that name; nearest: ['itme']",
        ),
        (
            {"item": torch.zeros(4, 16)},
            ValueError,
            "targets['item'] must have shape [4, 8] (samples, embedding_dim), got [4, 16]",
        ),
        ({"item": torch.zeros(3, 8)}, ValueError, "must have shape [4, 8] (samples, embedding_dim), got [3, 8]"),
        ({"item": list(range(4))}, TypeError, "targets['item'] must be a Tensor, got list"),
        (
            torch.zeros(4, 8),
            TypeError,
            "targets must be a KeyedTensor or a dict of Tensor by target key, such as {'item': target}, got Tensor",
        ),
    ],
)
def test_targets(events, targets, error, message):
    layer = JaggedFeatureInteraction([taste()], EMBEDDING_DIM)
    with pytest.raises(error, match=re.escape(message)):
        layer({"history": events(dtype=torch.float32)}, targets)


@pytest.mark.parametrize(
    ("weights", "got"), [(None, "got none"), (torch.arange(9), "got torch.int64 of shape [9]")], ids=["none", "integer"]
)
@pytest.mark.parametrize(
    ("use", "reason"),
    [({"bias": WeightBias()}, "a WeightBias"), ({"weighted_values": True}, "weighted_values=True")],
)
def test_weights(events, target, weights, got, use, reason):
    layer = JaggedFeatureInteraction([taste(**use)], EMBEDDING_DIM)
    message = f"sequences['history'] must have floating weights of shape [9], since feature 'taste' has {reason}, "
    with pytest.raises(ValueError, match=re.escape(message + got)):
        layer({"history": events(dtype=torch.float32, weights=weights)}, {"item": target(dtype=torch.float32)})


@pytest.mark.parametrize("weight", [-1.0, float("nan")])
def test_a_weight_that_has_no_logarithm(events, target, weight):
    layer = JaggedFeatureInteraction([taste(bias=WeightBias())], EMBEDDING_DIM)
    weights = torch.ones(9)
    weights[4] = weight
    message = "sequences['history'] must have weights of at least 0, since feature 'taste' has a WeightBias, got "
    with pytest.raises(ValueError, match=re.escape(f"{message}{weight}")):
        layer({"history": events(dtype=torch.float32, weights=weights)}, {"item": target(dtype=torch.float32)})
