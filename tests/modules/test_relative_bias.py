"""The relative biases of a JaggedEncoder against the plain formula, and as options of a TorchRec module."""

import copy
import re

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.fx import symbolic_trace

from jfi import (
    JaggedEncoder,
    JaggedFeatureInteraction,
    KeyBias,
    PositionBias,
    SequenceDLRM,
    SequenceFeatureConfig,
    TimeBias,
    WeightBias,
)
from jfi.modules import JaggedPooling

from .conftest import EMBEDDING_DIM, LENGTHS
from .linear_bias import LinearBias

#: Of LENGTHS = [3, 0, 1, 5] events, with ties; the time falls from one sample to the next.
TIMES = [40, 40, 57, 3, 1, 2, 2, 9, 1000]
BY_POSITION, BY_TIME = PositionBias(3), TimeBias("time", 6)


def taste(relative, **kwargs):
    return SequenceFeatureConfig(
        **{"name": "taste", "sequence_keys": ["history"], "target_keys": ["item"], "relative_bias": relative, **kwargs}
    )


def encoder_of(*features, num_layers=2, **kwargs):
    """A causal encoder whose parameters are moved off their initial values: biases that are zero would hide faults."""
    encoder = JaggedEncoder(list(features), EMBEDDING_DIM, 2, num_layers, causal=True, **kwargs)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.normal_()
    return encoder


def times_of(values, lengths=LENGTHS, dtype=torch.int64):
    return JaggedTensor(torch.tensor(values, dtype=dtype), lengths=torch.tensor(lengths, dtype=torch.long))


def plain_stack(stack, history, lengths, amounts, key_bias=None):
    """The formula pair by pair; `amounts` [S]: the times or the places, whose differences have the buckets."""
    outputs, start = [], 0
    for length in lengths:
        rows = slice(start, start + length)
        x, amount = history[rows], amounts[rows]
        for block in stack.blocks:
            normed = block.attention_norm(x)
            heads = []
            for h in range(block.num_heads):
                columns = slice(h * block.head_width, (h + 1) * block.head_width)
                query, key, value = (p(normed)[:, columns] for p in (block.query, block.key, block.value))
                attended = []
                for i in range(length):
                    scores = []
                    for j in range(i + 1):
                        # The number of binary digits is floor(log2) + 1.
                        apart = int(amount[i] - amount[j]).bit_length()
                        bucket = min(apart, block.relative_bias.size(0) - 1)
                        score = query[i] @ key[j] / block.head_width**0.5 + block.relative_bias[bucket, h]
                        scores.append(score if key_bias is None else score + key_bias[start + j])
                    attended.append(torch.stack(scores).softmax(0) @ value[: i + 1])
                heads.append(torch.stack(attended) if attended else value)
            x = x + block.output(torch.cat(heads, dim=1))
            x = x + block.feedforward(block.feedforward_norm(x))
        outputs.append(stack.norm(x))
        start += length
    return torch.cat(outputs)


@pytest.mark.parametrize("bias", [None, WeightBias()], ids=["alone", "beside weights"])
@pytest.mark.parametrize(
    ("relative", "dtype", "scale"),
    [
        (BY_POSITION, None, 1),
        (PositionBias(1), None, 1),
        (BY_TIME, torch.int64, 1),
        (BY_TIME, torch.int32, 1),
        (TimeBias("time"), torch.int64, 10**9),
        (BY_TIME, torch.float64, 0.5),
    ],
    ids=["position", "one bucket", "int64", "int32", "far apart", "float64"],
)
def test_output_and_every_gradient_equal_the_plain_formula(events, relative, dtype, scale, bias):
    encoder = encoder_of(taste(relative, bias=bias)).double()
    weights = torch.rand(sum(LENGTHS), dtype=torch.float64)
    history = events(weights=weights)
    sequences = {"history": history}
    amounts = torch.arange(sum(LENGTHS))
    if dtype is not None:
        sequences["time"] = times_of([t * scale for t in TIMES], dtype=dtype)
        amounts = sequences["time"].values()

    got = encoder(sequences)["taste"].values()
    key_bias = None if bias is None else weights.log()
    want = plain_stack(encoder.stacks.taste, history.values(), LENGTHS, amounts, key_bias)
    torch.testing.assert_close(got, want)
    leaves = dict(encoder.named_parameters()) | {"history": history.values()}
    weight = torch.randn_like(want)
    got_gradients = torch.autograd.grad((got * weight).sum(), leaves.values())
    want_gradients = torch.autograd.grad((want * weight).sum(), leaves.values())
    for name, got_gradient, want_gradient in zip(leaves, got_gradients, want_gradients, strict=True):
        torch.testing.assert_close(got_gradient, want_gradient, msg=lambda text, name=name: f"{name}: {text}")
    assert all(leaves[f"stacks.taste.blocks.{i}.relative_bias"].shape[1] == 2 for i in (0, 1))


@pytest.mark.parametrize("relative", [BY_POSITION, BY_TIME], ids=["position", "time"])
@pytest.mark.parametrize("lengths", [[0, 0, 0], []], ids=["all empty", "no sample"])
def test_every_parameter_has_a_finite_gradient_without_any_event(events, lengths, relative):
    encoder = encoder_of(taste(relative)).double()
    encoded = encoder({"history": events(lengths), "time": times_of([], lengths)})["taste"]
    encoded.values().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_tables_that_are_zero_change_nothing(events):
    history = events()
    plain = encoder_of(taste(None)).double()
    want = plain({"history": history})["taste"].values()
    for relative in (BY_POSITION, BY_TIME):
        encoder = JaggedEncoder([taste(relative)], EMBEDDING_DIM, 2, 2, causal=True).double()
        missing, unexpected = encoder.load_state_dict(plain.state_dict(), strict=False)
        assert missing == [f"stacks.taste.blocks.{i}.relative_bias" for i in (0, 1)] and not unexpected
        got = encoder({"history": history, "time": times_of(TIMES)})["taste"].values()
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("relative", [BY_POSITION, BY_TIME], ids=["position", "time"])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision(events, relative, autocast):
    """Autocast runs the attention in bfloat16; half-precision embeddings are widened to the parameters' dtype."""
    encoder = JaggedEncoder([taste(relative)], EMBEDDING_DIM, 2, 2, causal=True)
    for block in encoder.stacks.taste.blocks:
        nn.init.normal_(block.relative_bias)
    history = events(dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        got = encoder({"history": history, "time": times_of(TIMES)})["taste"].values()
    wide = JaggedTensor(history.values().double(), lengths=history.lengths())
    want = copy.deepcopy(encoder).double()({"history": wide, "time": times_of(TIMES)})["taste"].values()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=0.05, atol=0.05)
    got.sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in encoder.parameters())


def test_features_have_tables_of_their_own(events):
    clicks = taste(TimeBias("click_time", 4), name="clicks", sequence_keys=["click"], bias=PositionBias(5))
    encoder = encoder_of(taste(BY_POSITION), clicks, num_layers=1)
    shapes = {name: tuple(t.shape) for name, t in encoder.state_dict().items() if name.endswith("_bias")}
    assert shapes == {
        "stacks.taste.blocks.0.relative_bias": (3, 2),
        "stacks.clicks.blocks.0.relative_bias": (4, 2),
        "stacks.clicks.blocks.0.bucket_bias": (5, 2),
    }
    encoder.double()
    lengths = [2, 0, 0, 4]
    sequences = {"history": events(), "click": events(lengths), "click_time": times_of([1, 9, 4, 5, 5, 90], lengths)}
    encoded = encoder(sequences)
    for feature in encoder.features:
        alone = encoder_of(feature, num_layers=1).double()
        alone.load_state_dict({k: v for k, v in encoder.state_dict().items() if k.startswith(f"stacks.{feature.name}")})
        torch.testing.assert_close(alone(sequences)[feature.name].values(), encoded[feature.name].values())


def test_meta_device_then_reset_parameters_sets_the_tables():
    encoder = JaggedEncoder([taste(BY_TIME)], EMBEDDING_DIM, 2, causal=True, device=torch.device("meta"))
    assert all(parameter.is_meta for parameter in encoder.parameters())
    encoder.to_empty(device="cpu")
    (block,) = encoder.stacks.taste.blocks
    nn.init.ones_(block.relative_bias)
    encoder.reset_parameters()
    assert block.relative_bias.shape == (6, 2) and not block.relative_bias.any()
    recent = PositionBias(4, recency=True)
    (block,) = JaggedEncoder([taste(recent)], EMBEDDING_DIM, 2, causal=True).stacks.taste.blocks
    assert torch.equal(block.relative_bias, recent.initial_table(2))


def test_repr_shows_the_relative_bias():
    text = repr(encoder_of(taste(BY_POSITION), taste(TimeBias("time"), name="clicks")))
    assert "taste: item -> history, relative_bias=PositionBias(num_buckets=3, recency=False)" in text
    assert "clicks: item -> history, relative_bias=TimeBias(key='time', num_buckets=32)" in text
    assert "relative_bias" not in repr(encoder_of(taste(None)))


@pytest.mark.parametrize("relative", [BY_POSITION, BY_TIME], ids=["position", "time"])
def test_compiles_to_one_graph_and_is_traced(events, relative):
    encoder = encoder_of(taste(relative))

    def encode(history, times, offsets):
        sequences = {"history": JaggedTensor(history, offsets=offsets), "time": JaggedTensor(times, offsets=offsets)}
        return encoder(sequences)["taste"].values()

    compilations = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(encode, backend=compilations, dynamic=True, fullgraph=True)
    for count in (9, 4, 31):
        offsets, times = torch.tensor([0, 1, 1, 3, count]), torch.arange(count) ** 2
        arguments = torch.randn(count, EMBEDDING_DIM), times, offsets
        torch.testing.assert_close(compiled(*arguments), encode(*arguments))
    assert compilations.frame_count == 1

    sequences = {"history": events(dtype=torch.float32), "time": times_of(TIMES)}
    got, want = symbolic_trace(encoder)(sequences), encoder(sequences)
    torch.testing.assert_close(got["taste"].values(), want["taste"].values(), rtol=0, atol=0)


@pytest.mark.parametrize("pooling", ["attention", "mean"])
def test_sequence_dlrm_reads_the_times_beside_the_ids(pooling):
    feature = taste(BY_TIME)
    table = EmbeddingConfig(
        name="item", embedding_dim=EMBEDDING_DIM, num_embeddings=10, feature_names=["item", "history"]
    )
    model = SequenceDLRM(
        None,
        EmbeddingCollection(tables=[table]),
        [taste(None)],
        dense_in_features=1,
        dense_arch_layer_sizes=[EMBEDDING_DIM],
        over_arch_layer_sizes=[4, 1],
        pooling=pooling,
        encoder=encoder_of(feature),
    )
    items, lengths = torch.arange(4 + sum(LENGTHS)) % 10, torch.tensor([1, 1, 1, 1, *LENGTHS])

    def score(times):
        ids = KeyedJaggedTensor(
            keys=["item", "history", "time"],
            values=torch.cat([items, torch.tensor(times)]),
            lengths=torch.cat([lengths, torch.tensor(LENGTHS)]),
        )
        return model(torch.zeros(4, 1), ids).squeeze(1)

    # Another time of the last event changes its own sample alone.
    differs = (score(TIMES) != score([*TIMES[:-1], 10])).tolist()
    assert differs == [False, False, False, True]
    with pytest.raises(ValueError, match="sparse_features must hold the key 'time', got none of that name"):
        model(torch.zeros(4, 1), KeyedJaggedTensor(keys=["item", "history"], values=items, lengths=lengths))


def test_behind_the_encoder_a_feature_has_no_relative_bias(events, target):
    feature = taste(BY_TIME)
    assert feature.encoded() == SequenceFeatureConfig("taste", ["taste"], ["item"])
    JaggedFeatureInteraction([feature.encoded()], EMBEDDING_DIM)
    with pytest.raises(ValueError, match=r"^relative_bias of feature 'taste' must be None in this layer, got Time"):
        JaggedFeatureInteraction([feature], EMBEDDING_DIM)
    history = events()
    means = [JaggedPooling([taste(one)], EMBEDDING_DIM)({"history": history}).values() for one in (BY_TIME, None)]
    assert torch.equal(*means)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: taste(PositionBias(65)),
            ValueError,
            "num_buckets of relative_bias of feature 'taste' must be at most 64, got 65",
        ),
        (
            lambda: taste(LinearBias(4)),
            ValueError,
            "relative_bias of feature 'taste' must have the buckets of PositionBias, got LinearBias(",
        ),
        (
            lambda: taste("distance"),
            TypeError,
            "relative_bias of feature 'taste' must be a PositionBias, TimeBias or None, got 'distance'",
        ),
        (
            lambda: taste(TimeBias("history")),
            ValueError,
            "relative_bias of feature 'taste' must read a key of its own, got TimeBias(key='history'",
        ),
        (
            lambda: taste(TimeBias("age"), bias=KeyBias("age")),
            ValueError,
            "relative_bias of feature 'taste' must read a key of its own, got TimeBias(key='age'",
        ),
        (
            lambda: JaggedEncoder([taste(BY_POSITION)], EMBEDDING_DIM),
            ValueError,
            "causal must be True, since feature 'taste' has relative_bias=PositionBias(num_buckets=3, recency=False)",
        ),
    ],
)
def test_construction_errors(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("times", "error", "message"),
    [
        (None, ValueError, "sequences must hold the key 'time', got none of that name"),
        (torch.zeros(9), TypeError, "sequences['time'] must be a JaggedTensor, got Tensor"),
        (
            times_of(TIMES, dtype=torch.float32),
            TypeError,
            "sequences['time'] must hold times of shape [S], int32, int64 or float64, since feature 'taste' has a "
            "relative TimeBias, got torch.float32 of shape [9]",
        ),
        (times_of([[t] for t in TIMES]), TypeError, "got torch.int64 of shape [9, 1]"),
        (
            times_of(TIMES[:-1], [3, 0, 1, 4]),
            ValueError,
            "sequences['time'] must be aligned with 'history', which has 9 events, got 8",
        ),
        (
            times_of(TIMES, [2, 1, 1, 5]),
            ValueError,
            "sequences['time'] must be aligned with 'history', got other lengths in at least one sample",
        ),
        (
            times_of([40, 40, 57, 3, 1, 2, 9, 2, 1000]),
            ValueError,
            "sequences['time'] must not decrease within a sample, got 9 then 2 at event 7",
        ),
        (
            times_of([0.0] * 8 + [float("nan")], dtype=torch.float64),
            ValueError,
            "sequences['time'] must be finite, got nan",
        ),
    ],
)
def test_times_that_do_not_fit(events, times, error, message):
    sequences = {"history": events()} | ({} if times is None else {"time": times})
    with pytest.raises(error, match=re.escape(message)):
        encoder_of(taste(BY_TIME)).double()(sequences)


def test_a_jagged_tensor_alone_has_no_times(events):
    history = events()
    encoder = encoder_of(taste(BY_POSITION)).double()
    torch.testing.assert_close(encoder(history).values(), encoder({"history": history})["taste"].values())
    with pytest.raises(TypeError, match=re.escape("since features read ['history', 'time'], got one alone")):
        encoder_of(taste(BY_TIME)).double()(history)
