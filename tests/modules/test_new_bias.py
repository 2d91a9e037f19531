"""A bias by distance that the library does not know, in the layer and in the encoder, against the plain formula."""

import pytest
import torch
from torchrec import JaggedTensor

from jfi import JaggedEncoder, JaggedFeatureInteraction, PositionBias, SequenceFeatureConfig

from .conftest import EMBEDDING_DIM, LENGTHS
from .linear_bias import LinearBias, learn_slopes

HEADS, WIDTH = 2, EMBEDDING_DIM // 2


def taste(name="taste", **bias):
    return SequenceFeatureConfig(name, [f"{name}_history"], [f"{name}_item"], bias=LinearBias(**bias))


def randomized(module, slopes=True):
    """The module in float64 with random parameters; each bias has a slope for each head."""
    if slopes:
        learn_slopes(module)
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter.normal_()
    return module


def parameter_of(part):
    return part.parametrizations.bucket_bias.original if hasattr(part, "parametrizations") else part.bucket_bias


def pooled(own, history, target, slopes):
    """[B, D]: the layer's formula, target by target and head by head."""
    outputs, start = [], 0
    for length, one in zip(LENGTHS, target, strict=True):
        events, heads = history[start : start + length], []
        query, key, value = (
            one @ own.query_weight.T + own.query_bias,
            events @ own.key_weight.T,
            events @ own.value_weight.T,
        )
        distance = torch.arange(length - 1, -1, -1)
        for h in range(HEADS):
            columns = slice(h * WIDTH, (h + 1) * WIDTH)
            scores = key[:, columns] @ query[columns] / WIDTH**0.5 - slopes[h] * distance
            heads.append(scores.softmax(0) @ value[:, columns])
        outputs.append(torch.cat(heads) @ own.output_weight.T + own.output_bias)
        start += length
    return torch.stack(outputs)


def encoded(stack, history):
    """[S, D]: the formula of a causal encoder, pair by pair, the distance counted from each query."""
    outputs, start = [], 0
    for length in LENGTHS:
        x = history[start : start + length]
        for block in stack.blocks:
            normed, heads = block.attention_norm(x), []
            for h in range(HEADS):
                columns = slice(h * WIDTH, (h + 1) * WIDTH)
                query, key, value = (p(normed)[:, columns] for p in (block.query, block.key, block.value))
                ahead = torch.arange(length) - torch.arange(length)[:, None]  # of the event, seen from the query
                scores = query @ key.T / WIDTH**0.5 + parameter_of(block)[h] * ahead
                heads.append(scores.masked_fill(ahead > 0, -torch.inf).softmax(1) @ value)
            x = x + block.output(torch.cat(heads, dim=1))
            x = x + block.feedforward(block.feedforward_norm(x))
        outputs.append(stack.norm(x))
        start += length
    return torch.cat(outputs)


def assert_same_gradients(found, expected, inputs):
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(found)
    gradients = (torch.autograd.grad(output, inputs, upstream, retain_graph=True) for output in (found, expected))
    for one, other in zip(*gradients, strict=True):
        assert other.any()
        torch.testing.assert_close(one, other)


def test_a_layer_has_the_formula_and_its_gradients(events, target):
    features = [taste("first"), taste("second")]
    layer = randomized(JaggedFeatureInteraction(features, EMBEDDING_DIM, HEADS))
    assert len(layer.groups) == 1  # one launch for both
    histories, targets = (
        {f"{one.name}_history": events() for one in features},
        {f"{one.name}_item": target() for one in features},
    )
    output = layer(histories, targets).to_dict()
    for name, own in layer.attention.items():
        history, item = histories[f"{name}_history"].values(), targets[f"{name}_item"]
        slopes = parameter_of(own)
        assert slopes.shape == (HEADS,)
        expected = pooled(own, history, item, slopes)
        assert_same_gradients(output[name], expected, [history, item, slopes, own.query_weight, own.value_weight])


def test_a_causal_encoder_has_the_formula_of_pairs_and_its_gradients(events):
    encoder = randomized(JaggedEncoder([taste()], EMBEDDING_DIM, HEADS, num_layers=2, causal=True))
    stack, history = encoder.stacks["taste"], events()
    slopes = [parameter_of(block) for block in stack.blocks]
    found = encoder({"taste_history": history})["taste"].values()
    weights = [block.query.weight for block in stack.blocks]
    assert_same_gradients(found, encoded(stack, history.values()), [history.values(), *slopes, *weights])


def test_without_slopes_each_distance_has_a_parameter(events, target):
    layer = JaggedFeatureInteraction([taste(num_buckets=3)], EMBEDDING_DIM, HEADS)
    own = layer.attention["taste"]
    torch.testing.assert_close(own.bucket_bias, torch.tensor([[0.0, 0.0], [-1 / 16, -1 / 256], [-1 / 8, -1 / 128]]))
    layer(
        {"taste_history": events(dtype=torch.float32)}, {"taste_item": target(dtype=torch.float32)}
    ).values().sum().backward()
    assert own.bucket_bias.grad.shape == (3, HEADS) and own.bucket_bias.grad.any()


def test_candidates_that_share_a_history_have_the_formula(events, target):
    layer, history, counts = (
        randomized(JaggedFeatureInteraction([taste()], EMBEDDING_DIM, HEADS)),
        events(),
        [2, 1, 0, 3],
    )
    candidates = target(sum(counts))
    item = JaggedTensor(candidates, lengths=torch.tensor(counts))
    found = layer({"taste_history": history}, {"taste_item": item})["taste"]
    offsets, parts = history.offsets().tolist(), []
    for user, count in enumerate(counts):
        own = JaggedTensor(
            history.values()[offsets[user] : offsets[user + 1]].repeat(count, 1),
            lengths=torch.full((count,), LENGTHS[user]),
        )
        parts.append(own)
    lengths, values = torch.cat([one.lengths() for one in parts]), torch.cat([one.values() for one in parts])
    expected = layer({"taste_history": JaggedTensor(values, lengths=lengths)}, {"taste_item": candidates})["taste"]
    slopes = parameter_of(layer.attention["taste"])
    assert_same_gradients(found, expected, [history.values(), candidates, slopes])


def test_biases_with_other_settings_are_not_grouped():
    layer = JaggedFeatureInteraction([taste("first"), taste("second", steepness=2.0)], EMBEDDING_DIM, HEADS)
    assert len(layer.groups) == 2


class Recent(PositionBias):
    """Other initial values, the buckets of PositionBias."""

    def initial_table(self, num_heads):
        return -torch.arange(self.num_buckets)[:, None] * torch.ones(num_heads)


def test_other_buckets_are_refused_with_times_and_other_values_are_not(events, target):
    lengths = torch.ones(4, dtype=torch.long)
    times, item = JaggedTensor(torch.arange(4), lengths=lengths), JaggedTensor(target(), lengths=lengths)
    event_times = JaggedTensor(torch.arange(sum(LENGTHS)), lengths=torch.tensor(LENGTHS))
    inputs = {"taste_history": events()}, {"taste_item": item}, times, event_times
    layer = JaggedFeatureInteraction([taste()], EMBEDDING_DIM, HEADS).double()
    with pytest.raises(ValueError, match=r"target_times must be None for feature 'taste' with LinearBias"):
        layer(*inputs)
    feature = SequenceFeatureConfig("taste", ["taste_history"], ["taste_item"], bias=Recent(8))
    layer = JaggedFeatureInteraction([feature], EMBEDDING_DIM, HEADS).double()
    assert layer.attention["taste"].bucket_bias[2].tolist() == [-2.0, -2.0]
    assert layer(*inputs)["taste"].shape == (4, EMBEDDING_DIM)
