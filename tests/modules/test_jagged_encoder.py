"""The encoder against nn.TransformerEncoder and against the plain formula, and as a TorchRec module."""

import copy
import io
import re

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.distributed.train_pipeline.tracing import Tracer as PipelineTracer
from torchrec.fx import symbolic_trace

from jfi import JaggedEncoder, JaggedFeatureInteraction, KeyBias, PositionBias, SequenceFeatureConfig, WeightBias

from .conftest import EMBEDDING_DIM, LENGTHS


def taste(**kwargs):
    return SequenceFeatureConfig(**{"name": "taste", "sequence_keys": ["history"], "target_keys": ["item"], **kwargs})


def randomise(module):
    """Moves every parameter off its initial value: biases that start at zero would hide mistakes."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def torch_encoder(num_heads, num_layers, norm=True):
    layer = nn.TransformerEncoderLayer(
        EMBEDDING_DIM,
        num_heads,
        dim_feedforward=4 * EMBEDDING_DIM,
        dropout=0.0,
        activation="gelu",
        batch_first=True,
        norm_first=True,
        dtype=torch.float64,
    )
    norm = nn.LayerNorm(EMBEDDING_DIM, dtype=torch.float64)
    return randomise(nn.TransformerEncoder(layer, num_layers, norm, enable_nested_tensor=False))


def copy_parameters(stack, encoder):
    """From nn.TransformerEncoder into the blocks of one feature."""
    with torch.no_grad():
        for block, layer in zip(stack.blocks, encoder.layers, strict=True):
            attention = layer.self_attn
            for ours, weight in zip(
                (block.query, block.key, block.value), attention.in_proj_weight.chunk(3), strict=True
            ):
                ours.weight.copy_(weight)
            query_bias, _, value_bias = attention.in_proj_bias.chunk(3)
            block.query.bias.copy_(query_bias)
            block.output.weight.copy_(attention.out_proj.weight)
            # The probabilities sum to one, so a value bias passes through to the output projection.
            block.output.bias.copy_(attention.out_proj.bias + attention.out_proj.weight @ value_bias)
            for ours, theirs in (
                (block.attention_norm, layer.norm1),
                (block.feedforward_norm, layer.norm2),
                (block.feedforward[0], layer.linear1),
                (block.feedforward[3], layer.linear2),
            ):
                ours.load_state_dict(theirs.state_dict())
        stack.norm.load_state_dict(encoder.norm.state_dict())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("num_heads", "num_layers"), [(1, 1), (4, 2)])
def test_equals_torch_transformer_encoder_on_padded_input(events, num_heads, num_layers, causal):
    theirs = torch_encoder(num_heads, num_layers)
    ours = JaggedEncoder([taste()], EMBEDDING_DIM, num_heads, num_layers, causal=causal).double()
    copy_parameters(ours.stacks.taste, theirs)

    history = events()
    samples = history.values().split(LENGTHS)
    longest = max(LENGTHS)
    padded = torch.stack([nn.functional.pad(rows, (0, 0, 0, longest - rows.size(0))) for rows in samples])
    # An empty sample would be NaN: let its queries see one padded row, whose result nobody reads.
    mask = torch.arange(longest) >= torch.tensor(LENGTHS).clamp(min=1)[:, None]
    ahead = torch.ones(longest, longest, dtype=torch.bool).triu(1) if causal else None
    want = theirs(padded, mask=ahead, src_key_padding_mask=mask)
    want = torch.cat([rows[:length] for rows, length in zip(want, LENGTHS, strict=True)])

    got = ours({"history": history})["taste"]
    assert got.lengths().tolist() == LENGTHS
    torch.testing.assert_close(got.values(), want)

    weight = torch.randn_like(want)
    pairs = {"events": (history.values(), history.values())}
    for i, (block, layer) in enumerate(zip(ours.stacks.taste.blocks, theirs.layers, strict=True)):
        pairs[f"query bias {i}"] = block.query.bias, layer.self_attn.in_proj_bias
        pairs[f"output {i}"] = block.output.bias, layer.self_attn.out_proj.bias
        pairs[f"attention norm {i}"] = block.attention_norm.weight, layer.norm1.weight
        pairs[f"feed-forward {i}"] = block.feedforward[0].weight, layer.linear1.weight
        pairs[f"key {i}"] = block.key.weight, layer.self_attn.in_proj_weight
        pairs[f"value {i}"] = block.value.weight, layer.self_attn.in_proj_weight
    got_gradients = torch.autograd.grad((got.values() * weight).sum(), [ours for ours, _ in pairs.values()])
    want_gradients = torch.autograd.grad((want * weight).sum(), [theirs for _, theirs in pairs.values()])
    packed = {"query bias": 0, "key": 1, "value": 2}  # in in_proj
    for name, got_gradient, want_gradient in zip(pairs, got_gradients, want_gradients, strict=True):
        if name[:-2] in packed:
            want_gradient = want_gradient.chunk(3)[packed[name[:-2]]]
        torch.testing.assert_close(got_gradient, want_gradient, msg=lambda text, name=name: f"{name}: {text}")


def plain_stack(stack, history, lengths, biases):
    """The formula sample by sample and head by head; `biases` by block [S, H]."""
    outputs, start = [], 0
    for length in lengths:
        x = stack.input_projection(history[start : start + length])
        for block, bias in zip(stack.blocks, biases, strict=True):
            normed = block.attention_norm(x)
            heads = []
            for h in range(block.num_heads):
                columns = slice(h * block.head_width, (h + 1) * block.head_width)
                query, key, value = (p(normed)[:, columns] for p in (block.query, block.key, block.value))
                scores = query @ key.T / block.head_width**0.5 + bias[start : start + length, h]
                heads.append(scores.softmax(-1) @ value)
            x = x + block.output(torch.cat(heads, dim=1))
            x = x + block.feedforward(block.feedforward_norm(x))
        outputs.append(stack.norm(x))
        start += length
    return torch.cat(outputs)


@pytest.mark.parametrize("combine", ["sum", "concat"])
@pytest.mark.parametrize("bias", [PositionBias(3), KeyBias("age", 3), WeightBias()])
def test_biases_and_aligned_fields_equal_the_plain_formula(events, combine, bias):
    feature = taste(sequence_keys=["history", "rating"], combine=combine, bias=bias)
    encoder = randomise(JaggedEncoder([feature], EMBEDDING_DIM, 2, 2).double())
    (stack,) = encoder.stacks.values()
    weights = torch.rand(sum(LENGTHS), dtype=torch.float64)
    ages = torch.randint(3, (sum(LENGTHS),))
    sequences = {
        "history": events(weights=weights),
        "rating": events(),
        "age": JaggedTensor(ages, lengths=torch.tensor(LENGTHS)),
    }
    fields = [sequences[key].values() for key in feature.sequence_keys]
    history = fields[0] + fields[1] if combine == "sum" else torch.cat(fields, dim=1)
    if bias == WeightBias():
        biases = [weights.log()[:, None].expand(-1, 2)] * 2
    else:
        # Events from the newest: 0; 1 and 2; 3 and more, where the rows end.
        newest = torch.tensor([min((length - i).bit_length() - 1, 2) for length in LENGTHS for i in range(length)])
        biases = [block.bucket_bias[newest if bias == PositionBias(3) else ages] for block in stack.blocks]

    got = encoder(sequences)["taste"]
    want = plain_stack(stack, history, LENGTHS, biases)
    torch.testing.assert_close(got.values(), want)
    leaves = dict(encoder.named_parameters()) | {key: sequences[key].values() for key in feature.sequence_keys}
    weight = torch.randn_like(want)
    got_gradients = torch.autograd.grad((got.values() * weight).sum(), leaves.values())
    want_gradients = torch.autograd.grad((want * weight).sum(), leaves.values())
    for name, got_gradient, want_gradient in zip(leaves, got_gradients, want_gradients, strict=True):
        torch.testing.assert_close(got_gradient, want_gradient, msg=lambda text, name=name: f"{name}: {text}")


def test_features_have_blocks_of_their_own_and_other_keys_pass_through(events):
    features = [taste(bias=WeightBias()), taste(name="clicks", sequence_keys=["clicks", "history"])]
    encoder = randomise(JaggedEncoder(features, EMBEDDING_DIM, 2).double())
    weights = torch.rand(sum(LENGTHS), dtype=torch.float64)
    sequences = {"history": events(weights=weights), "clicks": events(), "other": events([1, 2, 0, 0])}
    encoded = encoder(sequences)
    assert set(encoded) == {"history", "clicks", "other", "taste"}
    assert encoded["history"] is sequences["history"] and encoded["other"] is sequences["other"]
    # A feature named like a sequence key replaces it, and reads what stood there before.
    both = JaggedTensor(sequences["clicks"].values() + sequences["history"].values(), lengths=torch.tensor(LENGTHS))
    alone = JaggedEncoder([taste()], EMBEDDING_DIM, 2).double()
    alone.stacks.taste.load_state_dict(encoder.stacks.clicks.state_dict())
    torch.testing.assert_close(encoded["clicks"].values(), alone(both).values())
    assert encoded["taste"].weights() is weights


def test_stands_before_the_interaction(events, target):
    feature = taste(sequence_keys=["history", "rating"], combine="concat", bias=PositionBias())
    encoder = JaggedEncoder([feature], EMBEDDING_DIM, 2).double()
    layer = JaggedFeatureInteraction([feature.encoded()], EMBEDDING_DIM, 2).double()
    history, item = {"history": events(), "rating": events()}, target()
    layer(encoder(history), {"item": item}).values().sum().backward()
    for tensor in (*encoder.parameters(), *(events.values() for events in history.values()), item):
        assert tensor.grad is not None and tensor.grad.isfinite().all()


def test_a_jagged_tensor_alone_gives_a_jagged_tensor(events):
    encoder = JaggedEncoder([taste(bias=PositionBias())], EMBEDDING_DIM, 2).double()
    history = events()
    got = encoder(history)
    assert isinstance(got, JaggedTensor)
    torch.testing.assert_close(got.values(), encoder({"history": history})["taste"].values(), rtol=0, atol=0)


def test_weighted_values_belong_to_the_pooling(events):
    """Events without weights are encoded, and weights change nothing."""
    plain, weighted = (JaggedEncoder([taste(weighted_values=value)], EMBEDDING_DIM) for value in (False, True))
    weighted.load_state_dict(plain.state_dict())
    history = events(dtype=torch.float32)
    want = plain({"history": history})["taste"]
    got = weighted({"history": history})["taste"]
    assert torch.equal(got.values(), want.values()) and got.weights_or_none() is None
    scaled = JaggedTensor(history.values(), lengths=history.lengths(), weights=torch.randn(sum(LENGTHS)))
    assert torch.equal(weighted({"history": scaled})["taste"].values(), want.values())


@pytest.mark.parametrize("causal", [False, True])
def test_what_an_event_sees(events, causal):
    """A change of the second of five events shows in its own sample alone, and under `causal` from that event on."""
    encoder = randomise(JaggedEncoder([taste(bias=PositionBias())], EMBEDDING_DIM, 2, 2, causal=causal).double())
    history = events()
    changed = history.values().detach().clone()
    changed[5, 0] += 1  # a change of all elements alike is removed by LayerNorm
    other = encoder(JaggedTensor(changed, lengths=history.lengths())).values()
    differs = (other != encoder(history).values()).any(1).tolist()
    assert differs == [False] * (5 if causal else 4) + [True] * (4 if causal else 5)


@pytest.mark.parametrize("lengths", [[0, 0, 0], []], ids=["all empty", "no sample"])
def test_every_parameter_has_a_finite_gradient_without_any_event(events, lengths):
    features = [taste(bias=PositionBias()), taste(name="wide", sequence_keys=["history", "rating"], combine="concat")]
    encoder = JaggedEncoder(features, EMBEDDING_DIM, 2, 2).double()
    sequences = {"history": events(lengths), "rating": events(lengths)}
    encoded = encoder(sequences)
    assert encoded["wide"].values().shape == (0, EMBEDDING_DIM) and encoded["wide"].lengths().tolist() == lengths
    sum(encoded[feature.name].values().sum() for feature in features).backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("given", ["lengths", "offsets"])
def test_lengths_and_offsets_of_either_integer(events, dtype, given):
    encoder = JaggedEncoder([taste(bias=PositionBias())], EMBEDDING_DIM, 2).double()
    history = events()
    rows = (history.lengths() if given == "lengths" else history.offsets()).to(dtype)
    same = JaggedTensor(history.values(), **{given: rows})
    torch.testing.assert_close(encoder(same).values(), encoder(history).values(), rtol=0, atol=0)


def test_dropout_acts_in_training_alone(events):
    encoder, history = JaggedEncoder([taste()], EMBEDDING_DIM, 2, dropout=0.5).double(), events()
    assert not torch.equal(encoder(history).values(), encoder(history).values())
    encoder.eval()
    torch.testing.assert_close(encoder(history).values(), encoder(history).values(), rtol=0, atol=0)


def test_dropout_acts_behind_both_layers_of_the_feedforward_part(events):
    """And nowhere else: what enters that part is the same in every pass."""
    encoder, history = JaggedEncoder([taste()], EMBEDDING_DIM, 2, dropout=0.5).double(), events([40, 60])
    (block,) = encoder.stacks.taste.blocks
    zeros = {}
    for name, module in (("hidden", block.feedforward[2]), ("out", block.feedforward)):
        module.register_forward_hook(lambda *call, name=name: zeros.update({name: (call[2] == 0).double().mean()}))
    attended = []
    block.feedforward_norm.register_forward_pre_hook(lambda _, inputs: attended.append(inputs[0]))
    encoder(history), encoder(history)
    assert 0.4 < zeros["hidden"] < 0.6 and 0.4 < zeros["out"] < 0.6
    torch.testing.assert_close(attended[0], attended[1], rtol=0, atol=0)


@pytest.mark.parametrize("how", ["autocast", "half precision embeddings"])
def test_half_precision(events, how, monkeypatch):
    """Autocast runs projections and attention in bfloat16, while the residual stream and the result stay float32."""
    from jfi.modules import jagged_encoder

    seen = []

    def spy(query, *args, **kwargs):
        seen.append(query.dtype)
        return original(query, *args, **kwargs)

    original = jagged_encoder.jagged_attention
    monkeypatch.setattr(jagged_encoder, "jagged_attention", spy)
    feature = taste(sequence_keys=["history", "rating"], combine="concat", bias=PositionBias())
    encoder = JaggedEncoder([feature], EMBEDDING_DIM, 2, 2)
    autocast = how == "autocast"
    sequences = {key: events(dtype=torch.float32 if autocast else torch.bfloat16) for key in feature.sequence_keys}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        got = encoder(sequences)["taste"].values()
    assert got.dtype == torch.float32 and seen == [torch.bfloat16 if autocast else torch.float32] * 2
    wide = {key: JaggedTensor(rows.values().double(), lengths=rows.lengths()) for key, rows in sequences.items()}
    want = copy.deepcopy(encoder).double()(wide)["taste"].values()
    torch.testing.assert_close(got.double(), want, rtol=0.05, atol=0.05)
    got.sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in encoder.parameters())


def test_names_in_state_dict_and_round_trip(events):
    features = [taste(bias=PositionBias(3)), taste(name="wide", sequence_keys=["a", "b"], combine="concat")]
    encoder = JaggedEncoder(features, EMBEDDING_DIM, 2, 2, feedforward_ratio=3)
    shapes = {name: tuple(tensor.shape) for name, tensor in encoder.state_dict().items()}
    block = {
        "attention_norm.weight": (8,),
        "attention_norm.bias": (8,),
        "query.weight": (8, 8),
        "query.bias": (8,),
        "key.weight": (8, 8),
        "value.weight": (8, 8),
        "output.weight": (8, 8),
        "output.bias": (8,),
        "feedforward_norm.weight": (8,),
        "feedforward_norm.bias": (8,),
        "feedforward.0.weight": (24, 8),
        "feedforward.0.bias": (24,),
        "feedforward.3.weight": (8, 24),
        "feedforward.3.bias": (8,),
    }
    expected = {
        f"stacks.{f}.blocks.{i}.{name}": shape
        for f in ("taste", "wide")
        for i in (0, 1)
        for name, shape in block.items()
    }
    expected |= {f"stacks.taste.blocks.{i}.bucket_bias": (3, 2) for i in (0, 1)}
    expected |= {"stacks.wide.input_projection.weight": (8, 16), "stacks.wide.input_projection.bias": (8,)}
    expected |= {f"stacks.{f}.norm.{name}": (8,) for f in ("taste", "wide") for name in ("weight", "bias")}
    assert shapes == expected

    file = io.BytesIO()
    torch.save(randomise(encoder).state_dict(), file)
    file.seek(0)
    other = JaggedEncoder(features, EMBEDDING_DIM, 2, 2, feedforward_ratio=3)
    other.load_state_dict(torch.load(file))
    sequences = {key: events(dtype=torch.float32) for key in ("history", "a", "b")}
    for feature in features:
        got, want = other(sequences)[feature.name], encoder(sequences)[feature.name]
        torch.testing.assert_close(got.values(), want.values(), rtol=0, atol=0)


def test_meta_device_then_reset_parameters_sets_every_parameter():
    features = [taste(bias=PositionBias()), taste(name="wide", sequence_keys=["history", "rating"], combine="concat")]
    encoder = JaggedEncoder(features, EMBEDDING_DIM, 2, 2, device=torch.device("meta"))
    assert all(parameter.is_meta for parameter in encoder.parameters())
    encoder.to_empty(device="cpu")
    direct = JaggedEncoder(features, EMBEDDING_DIM, 2, 2)
    for module in (randomise(encoder), direct):
        torch.manual_seed(1)
        module.reset_parameters()
    for (name, got), want in zip(encoder.named_parameters(), direct.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, msg=name)


FEATURES = [
    taste(bias=KeyBias("age", 4)),
    taste(name="wide", sequence_keys=["history", "rating"], combine="concat", bias=PositionBias()),
]


class Model(nn.Module):
    """A collection, the encoder and the interaction, one after the other."""

    def __init__(self):
        super().__init__()
        self.ec = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name=f"table_{key}", embedding_dim=EMBEDDING_DIM, num_embeddings=10, feature_names=[key]
                )
                for key in ("history", "rating")
            ]
        )
        self.encoder = JaggedEncoder(FEATURES[1:], EMBEDDING_DIM, 2, 2)
        self.layer = JaggedFeatureInteraction([FEATURES[1].encoded()], EMBEDDING_DIM, 2)

    def forward(self, ids, targets):
        return self.layer(self.encoder(self.ec(ids)), targets)


def test_torchrecs_tracer_goes_all_the_way_through(events, target):
    encoder = JaggedEncoder(FEATURES, EMBEDDING_DIM, 2, 2, causal=True)
    ages = JaggedTensor(torch.randint(4, (sum(LENGTHS),)), lengths=torch.tensor(LENGTHS))
    sequences = {"history": events(dtype=torch.float32), "rating": events(dtype=torch.float32), "age": ages}
    got, want = symbolic_trace(encoder)(sequences), encoder(sequences)
    for feature in FEATURES:
        torch.testing.assert_close(got[feature.name].values(), want[feature.name].values(), rtol=0, atol=0)

    model = Model()
    ids = KeyedJaggedTensor(
        keys=["history", "rating"], values=torch.randint(4, (2 * sum(LENGTHS),)), lengths=torch.tensor(LENGTHS * 2)
    )
    targets = {"item": target(dtype=torch.float32)}
    torch.testing.assert_close(
        symbolic_trace(model)(ids, targets).values(), model(ids, targets).values(), rtol=0, atol=0
    )


def test_the_train_pipelines_tracer_finds_the_collection_fed_by_the_batch_alone():
    leaves = ["ec", "encoder", "layer"]
    graph = PipelineTracer(leaf_modules=leaves).trace(Model())
    calls = {node.target: node for node in graph.nodes if node.op == "call_module"}
    assert set(calls) == set(leaves)
    assert [argument.op for argument in calls["ec"].args] == ["placeholder"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"features": []}, ValueError, "features must hold at least one SequenceFeatureConfig, got []"),
        ({"embedding_dim": 0}, ValueError, "embedding_dim must be at least 1, got 0"),
        ({"num_heads": 3}, ValueError, "num_heads must divide embedding_dim=8, got 3"),
        ({"num_layers": 1.5}, TypeError, "num_layers must be an int, got 1.5"),
        ({"num_layers": 0}, ValueError, "num_layers must be at least 1, got 0"),
        ({"feedforward_ratio": 0}, ValueError, "feedforward_ratio must be at least 1, got 0"),
        ({"dropout": 1.0}, ValueError, "dropout must be in [0, 1), got 1.0"),
    ],
)
def test_construction_errors(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        JaggedEncoder(**{"features": [taste()], "embedding_dim": EMBEDDING_DIM, **arguments})


@pytest.mark.parametrize(
    ("feature", "sequences", "error", "message"),
    [
        (
            taste(),
            KeyedJaggedTensor(keys=["history"], values=torch.arange(9), lengths=torch.tensor(LENGTHS)),
            TypeError,
            "sequences must be a JaggedTensor or a dict of them, an embedding a row, got KeyedJaggedTensor",
        ),
        (taste(), torch.zeros(9, 8), TypeError, "an embedding a row, got Tensor"),
        (taste(), None, TypeError, "an embedding a row, got NoneType"),
        (
            taste(bias=KeyBias("age")),
            JaggedTensor(torch.zeros(9, 8), lengths=torch.tensor(LENGTHS)),
            TypeError,
            "sequences must be a dict of JaggedTensor, since features read ['age', 'history'], got one alone",
        ),
        (taste(), {}, ValueError, "sequences must hold the key 'history', got none of that name"),
        (
            taste(),
            {"history": JaggedTensor(torch.zeros(9, 4), lengths=torch.tensor(LENGTHS))},
            ValueError,
            "sequences['history'] must hold embeddings of shape [S, 8] (events, embedding_dim), got torch.float32 of ",
        ),
        (
            taste(bias=KeyBias("age")),
            {
                "history": JaggedTensor(torch.zeros(9, 8), lengths=torch.tensor(LENGTHS)),
                "age": JaggedTensor(torch.full((9,), 32), lengths=torch.tensor(LENGTHS)),
            },
            ValueError,
            "sequences['age'] must hold bucket ids from 0 to 31 (num_buckets=32 in feature 'taste'), got 32",
        ),
    ],
)
def test_sequences_that_do_not_fit(feature, sequences, error, message):
    with pytest.raises(error, match=re.escape(message)):
        JaggedEncoder([feature], EMBEDDING_DIM)(sequences)


def test_compiles_to_one_graph_for_every_number_of_events():
    compilations = torch._dynamo.testing.CompileCounter()
    encoder = randomise(JaggedEncoder([taste(bias=PositionBias())], EMBEDDING_DIM, 2, 2, causal=True))

    def encode(history, offsets):
        return encoder({"history": JaggedTensor(history, offsets=offsets)})["taste"].values()

    compiled = torch.compile(encode, backend=compilations, dynamic=True, fullgraph=True)
    for count in (9, 4, 31, 12):
        arguments = torch.randn(count, EMBEDDING_DIM), torch.tensor([0, 1, 1, 3, count])
        torch.testing.assert_close(compiled(*arguments), encode(*arguments))
    assert compilations.frame_count == 1


def test_the_sizes_that_are_not_given_are_the_documented_ones():
    encoder = JaggedEncoder([taste()], EMBEDDING_DIM)
    assert (encoder.num_heads, encoder.num_layers, encoder.causal) == (1, 1, False)
    (block,) = encoder.stacks["taste"].blocks
    widths = [one.out_features for one in block.feedforward if isinstance(one, nn.Linear)]
    assert widths == [4 * EMBEDDING_DIM, EMBEDDING_DIM]
    assert {one.p for one in block.modules() if isinstance(one, nn.Dropout)} == {0.0}
    layer = JaggedFeatureInteraction([taste()], EMBEDDING_DIM)
    assert (layer.num_heads, layer.num_queries) == (1, 1)
    assert PositionBias().num_buckets == KeyBias("age").num_buckets == 32


def test_the_tuple_of_a_managed_collision_collection_holds_the_histories(events):
    encoder, history = JaggedEncoder([taste()], EMBEDDING_DIM).double(), {"history": events()}
    found, expected = (encoder(sequences)["taste"].values() for sequences in ((history, None), history))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
