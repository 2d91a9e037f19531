"""The layer against nn.MultiheadAttention and against the plain formula, and as a TorchRec module."""

import copy
import io
import sys

import pytest
import torch
from ops import budget
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.models.dlrm import InteractionArch

from jfi import JaggedFeatureInteraction, KeyBias, PositionBias, SequenceFeatureConfig, WeightBias
from jfi.modules import stacked_attention
from jfi.modules.stacked_attention import FeatureAttention
from jfi.tables import table_rows

from .conftest import EMBEDDING_DIM, LENGTHS


def taste(**kwargs):
    return SequenceFeatureConfig(**{"name": "taste", "sequence_keys": ["history"], "target_keys": ["item"], **kwargs})


def plain_layer(layer, sequences, targets):
    """The layer's formula, sample by sample and head by head, with the history projected; float64.

    Reads parameters by their documented layout alone.
    """
    outputs = []
    for feature in layer.features:
        own = getattr(layer.attention, feature.name)
        heads, queries, dim = layer.num_heads, layer.num_queries, layer.embedding_dim // layer.num_heads

        def combined(tensors, how=feature.combine):
            return torch.cat(tensors, dim=-1) if how == "concat" else torch.stack(tensors).sum(0)

        first = sequences[feature.sequence_keys[0]]
        histories = combined([sequences[key].values() for key in feature.sequence_keys]).split(first.lengths().tolist())
        start, samples = 0, []
        for b, history in enumerate(histories):
            count = history.size(0)
            query = own.query_weight @ combined([targets[key][b] for key in feature.target_keys])
            query = (query + own.query_bias).view(queries, heads, dim)
            key = (history @ own.key_weight.T).view(count, heads, dim)
            value = (history @ own.value_weight.T).view(count, heads, dim)
            scores = torch.einsum("thd,nhd->thn", query, key) / dim**0.5
            rows = slice(start, start + count)
            if isinstance(feature.bias, WeightBias):
                scores = scores + first.weights()[rows].log()
            elif feature.bias is not None:
                if isinstance(feature.bias, PositionBias):
                    bucket = [(count - i).bit_length() - 1 for i in range(count)]
                    bucket = torch.tensor(bucket, dtype=torch.long).clamp(max=feature.num_buckets - 1)
                else:
                    bucket = sequences[feature.bias.key].values()[rows]
                scores = scores + own.bucket_bias[bucket].T
            if feature.weighted_values:
                value = value * first.weights()[rows, None, None]
            pooled = torch.einsum("thn,nhd->thd", scores.softmax(-1), value).flatten()
            samples.append(own.output_weight @ pooled + own.output_bias)
            start += count
        outputs.append(torch.stack(samples))
    return torch.cat(outputs, dim=1)


def randomise(layer):
    """Moves every parameter off its initial value: biases that start at zero would hide mistakes."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer


@torch.no_grad()
def load(own: FeatureAttention, attention: torch.nn.MultiheadAttention) -> None:
    """Copies the weights of an attention, whose bias of values is the same for every event."""
    split = attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight
    weights = split if attention.in_proj_weight is None else attention.in_proj_weight.chunk(3)
    for parameter, weight in zip((own.query_weight, own.key_weight, own.value_weight), weights, strict=True):
        parameter.copy_(weight)
    own.output_weight.copy_(attention.out_proj.weight)
    own.query_bias.zero_()
    own.output_bias.zero_()
    if attention.in_proj_bias is not None:
        query_bias, _, value_bias = attention.in_proj_bias.chunk(3)
        own.query_bias.copy_(query_bias)
        own.output_bias.copy_(attention.out_proj.bias + attention.out_proj.weight @ value_bias)


@pytest.mark.parametrize(
    ("num_heads", "width", "options"),
    [
        (1, EMBEDDING_DIM, {"batch_first": True}),
        (2, EMBEDDING_DIM, {"bias": False}),
        (4, 3 * EMBEDDING_DIM, {"dropout": 0.5}),
        (2, 3 * EMBEDDING_DIM, {"batch_first": True, "bias": False}),
    ],
)
def test_equals_torch_multihead_attention_on_padded_input(events, target, num_heads, width, options):
    keys = ["history", "rating", "genre"][: width // EMBEDDING_DIM]
    features = [taste(name="other"), taste(sequence_keys=keys, combine="concat")]
    layer = JaggedFeatureInteraction(features, EMBEDDING_DIM, num_heads).double()
    randomise(layer)
    attention = torch.nn.MultiheadAttention(
        EMBEDDING_DIM, num_heads, kdim=width, vdim=width, dtype=torch.float64, **options
    )
    randomise(attention).eval()
    before = {name: tensor.clone() for name, tensor in layer.attention.other.state_dict().items()}
    load(layer.attention.taste, attention)
    if width == EMBEDDING_DIM:  # of the feature that shares the parameters' tensors nothing is overwritten
        assert all(torch.equal(tensor, before[name]) for name, tensor in layer.attention.other.state_dict().items())

    lengths = [3, 1, 5, 2]  # an empty history makes nn.MultiheadAttention give NaN
    sequences = {key: events(lengths) for key in keys}
    item = target()
    padded = torch.zeros(len(lengths), max(lengths), width, dtype=torch.float64)
    mask = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
    padded[~mask] = torch.cat([sequences[key].values() for key in keys], dim=1)
    query = item.unsqueeze(1)
    if not attention.batch_first:
        query, padded = query.transpose(0, 1), padded.transpose(0, 1)
    want, want_weights = attention(query, padded, padded, key_padding_mask=mask, average_attn_weights=False)
    want = want.squeeze(1 if attention.batch_first else 0)

    got = layer(sequences, {"item": item})["taste"]
    torch.testing.assert_close(got, want)
    weights = layer.attention_weights(sequences, {"item": item})["taste"]
    torch.testing.assert_close(weights.values()[:, 0], want_weights[:, :, 0].transpose(1, 2)[~mask])
    assert weights.lengths().tolist() == lengths


def every_kind_of_feature(events, target):
    """Features of every kind, most of them in twos, with several fields and several targets, and their inputs."""
    features = [
        taste(name="plain"),
        taste(name="position", bias=PositionBias(2)),
        taste(name="wide", sequence_keys=["history", "rating"], target_keys=["item", "genre"], combine="concat"),
        taste(name="bucket", sequence_keys=["clicks", "clicks_rating"], bias=KeyBias("clicks_age", 5)),
        taste(name="weighted", sequence_keys=["weighted"], target_keys=["item", "genre"], bias=WeightBias()),
        taste(name="wide target", target_keys=["item", "genre"], combine="concat"),
        taste(name="clicks position", sequence_keys=["clicks"], bias=PositionBias(2)),
        taste(name="history bucket", sequence_keys=["history", "rating"], bias=KeyBias("age", 5)),
        taste(name="clicks weighted", sequence_keys=["clicks"], target_keys=["genre", "item"], bias=WeightBias()),
        taste(name="scaled", sequence_keys=["clicks"], weighted_values=True),
        taste(name="other scaled", sequence_keys=["weighted"], target_keys=["genre"], weighted_values=True),
        taste(name="both", sequence_keys=["weighted"], bias=WeightBias(), weighted_values=True, max_seqlen=9),
        taste(name="scaled by position", sequence_keys=["weighted"], bias=PositionBias(), weighted_values=True),
        taste(name="clicks plain", sequence_keys=["clicks"], target_keys=["genre"], max_seqlen=7),
    ]
    clicks = [0, 2, 7, 1]

    def weights(lengths):
        return (torch.rand(sum(lengths), dtype=torch.float64) + 0.1).requires_grad_()

    def ids(lengths, rows):
        return JaggedTensor(values=torch.randint(rows, (sum(lengths),)), lengths=torch.tensor(lengths))

    sequences = {
        "history": events(),
        "rating": events(),
        "age": ids(LENGTHS, 3),
        "clicks": events(clicks, weights=weights(clicks)),
        "clicks_rating": events(clicks),
        "clicks_age": ids(clicks, 5),
        "weighted": events(weights=weights(LENGTHS)),
    }
    return features, sequences, {"item": target(), "genre": target()}


def leaves_of(layer, sequences, targets):
    """All that a gradient goes to, by name."""
    embeddings = {key: tensor.values() for key, tensor in sequences.items() if tensor.values().is_floating_point()}
    weights = {
        f"weights of {key}": tensor.weights()
        for key, tensor in sequences.items()
        if tensor.weights_or_none() is not None
    }
    return dict(layer.named_parameters()) | embeddings | weights | targets


def check_gradients(got, want, leaves, other_leaves=None):
    """Compares the gradients of a random projection of both outputs."""
    weight = torch.randn_like(want)
    got_gradients = torch.autograd.grad((got * weight).sum(), leaves.values())
    want_gradients = torch.autograd.grad((want * weight).sum(), (other_leaves or leaves).values())
    for name, got_gradient, want_gradient in zip(leaves, got_gradients, want_gradients, strict=True):
        torch.testing.assert_close(got_gradient, want_gradient, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("num_heads", "num_queries"), [(1, 1), (2, 3), (4, 1), (8, 2)])
def test_outputs_and_gradients_equal_the_plain_formula(events, target, num_heads, num_queries):
    features, sequences, targets = every_kind_of_feature(events, target)
    layer = JaggedFeatureInteraction(features, EMBEDDING_DIM, num_heads, num_queries).double()
    assert len(layer.groups) == 9
    randomise(layer)
    got = layer(sequences, targets)
    want = plain_layer(layer, sequences, targets)
    assert got.keys() == [feature.name for feature in features]
    torch.testing.assert_close(got.values(), want)
    check_gradients(got.values(), want, leaves_of(layer, sequences, targets))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_the_device_outputs_and_all_gradients_keep_the_budget(events, target, device, dtype):
    features, sequences, targets = every_kind_of_feature(events, target)
    layer = JaggedFeatureInteraction(features, EMBEDDING_DIM, 2, 3).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter)).copy_(parameter.to(dtype))  # biases start at zero
    cotangent = torch.randn(len(LENGTHS), len(features) * EMBEDDING_DIM)

    def results(function, dtype, device):
        """The output and the gradient of everything, by name."""

        def moved(x):
            return x if x is None else x.detach().to(device, dtype).requires_grad_()

        tensors = {
            key: JaggedTensor(
                values=moved(x.values()) if x.values().is_floating_point() else x.values().to(device),
                lengths=x.lengths().to(device),
                weights=moved(x.weights_or_none()),
            )
            for key, x in sequences.items()
        }
        items = {key: moved(x) for key, x in targets.items()}
        here = copy.deepcopy(layer).to(device, dtype)
        leaves = leaves_of(here, tensors, items)
        out = function(here, tensors, items)
        gradients = torch.autograd.grad(out, list(leaves.values()), cotangent.to(out))
        return {"output": out.detach().cpu()} | {name: x.cpu() for name, x in zip(leaves, gradients, strict=True)}

    with torch.no_grad():  # the same numbers for all
        for x in (*(x.values() for x in sequences.values()), *targets.values()):
            if x.is_floating_point():
                x.copy_(x.to(dtype))
        for x in sequences.values():
            if x.weights_or_none() is not None:
                x.weights().copy_(x.weights().to(dtype))
    truth = results(plain_layer, torch.float64, "cpu")
    plain = results(plain_layer, dtype, "cpu")
    got = results(lambda layer, *inputs: layer(*inputs).values(), dtype, device)
    terms = 4 * max(float(x.norm()) for x in truth.values())
    for name, x in got.items():
        budget.check(name, x, plain[name], truth[name], terms)


def test_attention_weights_sum_to_one_and_follow_the_bias(events, target):
    features, sequences, targets = every_kind_of_feature(events, target)
    layer = randomise(JaggedFeatureInteraction(features, EMBEDDING_DIM, 2, 3).double())
    weights = layer.attention_weights(sequences, targets)
    assert list(weights) == [feature.name for feature in features]
    for feature in features:
        values, lengths = weights[feature.name].values(), weights[feature.name].lengths()
        assert values.shape == (sequences[feature.sequence_keys[0]].values().size(0), 3, 2)
        assert not values.requires_grad
        for sample in values.split(lengths.tolist()):
            if sample.size(0):
                torch.testing.assert_close(sample.sum(0), torch.ones(3, 2, dtype=torch.float64))


def test_attention_weights_have_the_bias_of_their_own_head(events, target):
    layer = JaggedFeatureInteraction([taste(bias=PositionBias(4))], EMBEDDING_DIM, 2, 3).double()
    own = layer.attention["taste"]
    with torch.no_grad():
        own.query_weight.zero_()
        own.query_bias.zero_()
        own.bucket_bias.copy_(torch.tensor([[0.0, 3.0], [1.0, -1.0], [2.5, 0.5], [7.0, 7.0]]))
    weights = layer.attention_weights({"history": events([4])}, {"item": target(1)})["taste"].values()
    # 3, 2, 1 and 0 events come after; the scores are the bias alone.
    wanted = own.bucket_bias[[2, 1, 1, 0]].softmax(0)
    torch.testing.assert_close(weights, wanted[:, None].expand(4, 3, 2))


def test_an_event_of_weight_two_counts_twice_and_one_of_weight_zero_not_at_all(events, target):
    layer = JaggedFeatureInteraction([taste(bias=WeightBias())], EMBEDDING_DIM, 2).double()
    history = events([3])
    weighted = JaggedTensor(history.values(), weights=torch.tensor([2.0, 0.0, 1.0]).double(), lengths=history.lengths())
    repeated = JaggedTensor(
        history.values()[[0, 0, 2]], weights=torch.ones(3, dtype=torch.float64), lengths=torch.tensor([3])
    )
    item = target(1)
    torch.testing.assert_close(
        layer({"history": weighted}, {"item": item}).values(), layer({"history": repeated}, {"item": item}).values()
    )


class LargestTensor(TorchDispatchMode):
    """The most elements that an operation's output has, views of `but` aside."""

    numel = 0

    def __init__(self, but=None):
        super().__init__()
        self.but = but

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and not (self.but is not None and output.data_ptr() == self.but.data_ptr()):
            self.numel = max(self.numel, output.numel())
        return output


def test_attention_weights_need_no_tensor_larger_than_the_history(events, target):
    layer = JaggedFeatureInteraction([taste()], EMBEDDING_DIM, num_heads=4, num_queries=2).double()
    history = events([100, 0, 50])
    with LargestTensor() as largest:
        layer.attention_weights({"history": history}, {"item": target(3)})
    assert 0 < largest.numel <= history.values().numel()


def test_ids_of_no_samples():
    table = EmbeddingConfig(name="item", embedding_dim=EMBEDDING_DIM, num_embeddings=10, feature_names=["history"])
    layer = JaggedFeatureInteraction([taste()], EMBEDDING_DIM, embedding_collection=EmbeddingCollection(tables=[table]))
    none = torch.empty(0, dtype=torch.long)
    ids = KeyedJaggedTensor(keys=["history"], values=none, lengths=none)
    assert layer(ids, {"item": torch.empty(0, EMBEDDING_DIM)})["taste"].shape == (0, EMBEDDING_DIM)


def test_learned_weights_have_finite_gradients_at_zero(events, target):
    layer = JaggedFeatureInteraction([taste(bias=WeightBias())], EMBEDDING_DIM, 2).double()
    weights = torch.tensor([2.0, 0.0, 1.0], dtype=torch.float64, requires_grad=True)
    layer({"history": events([3], weights=weights)}, {"item": target(1)}).values().sum().backward()
    assert weights.grad.isfinite().all() and weights.grad[1] == 0 and weights.grad[0] != 0


def test_weights_of_values_are_of_either_sign_and_leaves_the_attention_alone(events, target):
    scaled, plain = (
        JaggedFeatureInteraction([taste(weighted_values=weighted)], EMBEDDING_DIM, 2).double()
        for weighted in (True, False)
    )
    plain.load_state_dict(randomise(scaled).state_dict())
    history, targets = events(weights=torch.randn(sum(LENGTHS), dtype=torch.float64)), {"item": target()}
    want = plain_layer(scaled, {"history": history}, targets)
    torch.testing.assert_close(scaled({"history": history}, targets).values(), want)
    weights = [layer.attention_weights({"history": history}, targets)["taste"].values() for layer in (scaled, plain)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_an_empty_history_gives_the_output_bias(events, target):
    layer = randomise(JaggedFeatureInteraction([taste()], EMBEDDING_DIM, 2).double())
    got = layer({"history": events()}, {"item": target()})["taste"]
    torch.testing.assert_close(got[1], layer.attention.taste.output_bias, rtol=0, atol=0)


def test_a_permutation_of_samples_permutes_the_output(events, target):
    layer = randomise(JaggedFeatureInteraction([taste(bias=PositionBias())], EMBEDDING_DIM, 2).double())
    history, item, order = events(), target(), [3, 1, 0, 2]
    pieces = history.values().split(LENGTHS)
    permuted = JaggedTensor(
        values=torch.cat([pieces[b] for b in order]), lengths=torch.tensor([LENGTHS[b] for b in order])
    )
    torch.testing.assert_close(
        layer({"history": permuted}, {"item": item[order]}).values(),
        layer({"history": history}, {"item": item}).values()[order],
    )


@pytest.mark.parametrize("lengths", [[0, 0, 0], []], ids=["all empty", "no sample"])
def test_every_parameter_has_a_finite_gradient_without_any_event(events, target, lengths):
    features = [taste(), taste(name="near", bias=PositionBias()), taste(name="wide", target_keys=["item", "genre"])]
    layer = JaggedFeatureInteraction(features, EMBEDDING_DIM, 2, 2).double()
    history, item = events(lengths), target(len(lengths))
    layer({"history": history}, {"item": item, "genre": item}).values().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    assert history.values().grad is not None and item.grad is not None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("given", ["lengths", "offsets"])
def test_lengths_and_offsets_of_either_integer(events, target, dtype, given):
    layer = JaggedFeatureInteraction([taste(bias=PositionBias())], EMBEDDING_DIM).double()
    history, item = events(), {"item": target()}
    rows = (history.lengths() if given == "lengths" else history.offsets()).to(dtype)
    same = JaggedTensor(history.values(), **{given: rows})
    torch.testing.assert_close(
        layer({"history": same}, item).values(), layer({"history": history}, item).values(), rtol=0, atol=0
    )


def test_targets_as_keyed_tensor_and_as_dict_give_the_same(events, target):
    layer = JaggedFeatureInteraction([taste(target_keys=["genre"])], EMBEDDING_DIM).double()
    history, targets = events(), {"item": target(), "genre": target()}
    keyed = KeyedTensor.from_tensor_list(list(targets), list(targets.values()))
    torch.testing.assert_close(
        layer({"history": history}, keyed).values(), layer({"history": history}, targets).values(), rtol=0, atol=0
    )


def test_ragged_targets_as_keyed_jagged_tensor_and_as_dict_give_the_same(events, target):
    layer, lengths = JaggedFeatureInteraction([taste()], EMBEDDING_DIM).double(), torch.tensor([2, 0, 1, 1])
    history, rows = {"history": events()}, target()
    keyed = KeyedJaggedTensor(["item"], rows, lengths=lengths)
    expected = layer(history, {"item": JaggedTensor(rows, lengths=lengths)}).values()
    torch.testing.assert_close(layer(history, keyed).values(), expected, rtol=0, atol=0)


def test_a_tuple_is_no_targets(events, target):
    layer = JaggedFeatureInteraction([taste()], EMBEDDING_DIM).double()
    with pytest.raises(TypeError, match=r"targets must be a KeyedTensor or a dict of Tensor .*, got tuple"):
        layer({"history": events()}, ({"item": target()}, None))


def test_output_enters_torchrecs_interaction_arch(events, target):
    layer = JaggedFeatureInteraction([taste(), taste(name="second")], EMBEDDING_DIM).double()
    pooled = layer({"history": events()}, {"item": target()})
    interaction = InteractionArch(num_sparse_features=len(pooled.keys()))
    dense = torch.randn(len(LENGTHS), EMBEDDING_DIM, dtype=torch.float64)
    assert interaction(dense, pooled.values().view(len(LENGTHS), -1, EMBEDDING_DIM)).shape == (4, EMBEDDING_DIM + 3)


def test_float32_parameters_with_half_precision_embeddings(events, target):
    layer = JaggedFeatureInteraction([taste(bias=PositionBias())], EMBEDDING_DIM, 2)
    history = events(dtype=torch.bfloat16)
    item = target(dtype=torch.bfloat16)
    got = layer({"history": history}, {"item": item}).values()
    assert got.dtype == torch.float32
    want = copy.deepcopy(layer).double()
    wide = JaggedTensor(history.values().double(), lengths=history.lengths())
    torch.testing.assert_close(
        got.double(), want({"history": wide}, {"item": item.double()}).values(), rtol=0.05, atol=0.05
    )


@pytest.fixture
def calls(monkeypatch):
    """The arguments of every call of the attention's kernels that the layer makes."""
    absorbed = sys.modules["jfi.ops.absorbed_target_attention"]
    attend, seen = absorbed.run_forward, []

    def spy(*args):
        seen.append(args)
        with _disable_current_modes():  # the kernels' own memory is not the layer's
            return attend(*args)

    monkeypatch.setattr(absorbed, "run_forward", spy)
    return seen


@pytest.mark.parametrize("bias", [None, PositionBias()])
def test_autocast_projects_in_bfloat16_and_leaves_the_history_alone(bias, events, target, calls, monkeypatch):
    for module in (
        table_rows,
        sys.modules["jfi.ops.absorbed_target_attention"],
    ):  # the eager call, though a mode looks on
        monkeypatch.setattr(module, "is_traced", lambda: False)
    layer = JaggedFeatureInteraction([taste(bias=bias)], EMBEDDING_DIM, 2)
    history = events([2000, 7], dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16), LargestTensor(but=history.values()) as largest:
        pooled = layer({"history": history}, {"item": target(2, dtype=torch.float32)})
    assert pooled.values().dtype == torch.bfloat16
    assert 0 < largest.numel < history.values().numel()  # no copy of the history, in whatever dtype
    (((query, key, value, *_), *_),) = calls
    assert key.data_ptr() == history.values().data_ptr() and value is None  # read once, where it is
    assert query.dtype == torch.float32
    pooled.values().sum().backward()
    assert history.values().grad.dtype == torch.float32


@pytest.mark.parametrize(("longest", "want"), [((7,), [7]), ((None,), [None]), ((7, 9), [9]), ((7, None), [None])])
def test_the_operator_gets_the_longest_history_of_a_group(longest, want, events, target, monkeypatch):
    seen, attend = [], stacked_attention.attend_absorbed
    monkeypatch.setattr(
        stacked_attention, "attend_absorbed", lambda *x, **y: seen.append(y["max_seqlen"]) or attend(*x, **y)
    )
    features = [taste(name=f"taste{f}", max_seqlen=length) for f, length in enumerate(longest)]
    layer = JaggedFeatureInteraction(features, EMBEDDING_DIM, 2).double()
    layer({"history": events()}, {"item": target()})
    assert seen == want


def test_names_in_state_dict_and_round_trip(events, target):
    aged = [taste(name=f"aged{f}", bias=KeyBias("age", 3)) for f in range(2)]
    features = [aged[0], taste(), aged[1]]
    layer = JaggedFeatureInteraction(features, EMBEDDING_DIM, 2, 3)
    projections = {
        "query_weight": (24, 8),
        "query_bias": (24,),
        "key_weight": (8, 8),
        "value_weight": (8, 8),
        "output_weight": (8, 24),
        "output_bias": (8,),
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    assert shapes == {
        f"attention.{feature.name}.{name}": shape
        for feature in features
        for name, shape in (projections | ({"bucket_bias": (3, 2)} if feature.bias else {})).items()
    }
    file = io.BytesIO()
    torch.save(randomise(layer).state_dict(), file)
    file.seek(0)
    other = JaggedFeatureInteraction(features, EMBEDDING_DIM, 2, 3)
    other.load_state_dict(torch.load(file))
    ages = JaggedTensor(torch.randint(3, (sum(LENGTHS),)), lengths=torch.tensor(LENGTHS))
    inputs = {"history": events(dtype=torch.float32), "age": ages}, {"item": target(dtype=torch.float32)}
    torch.testing.assert_close(other(*inputs).values(), layer(*inputs).values(), rtol=0, atol=0)


def test_meta_device_then_reset_parameters_equals_a_direct_start():
    features = [taste(bias=PositionBias()), taste(name="wide", sequence_keys=["history", "rating"], combine="concat")]
    features += [taste(name=f"aged{rows}", bias=KeyBias("age", rows)) for rows in (3, 5, 2)]
    layer = JaggedFeatureInteraction(features, EMBEDDING_DIM, 2, 2, device=torch.device("meta"))
    assert all(parameter.is_meta for parameter in layer.parameters())
    layer.to_empty(device="cpu")
    torch.manual_seed(1)
    layer.reset_parameters()
    torch.manual_seed(1)
    direct = JaggedFeatureInteraction(features, EMBEDDING_DIM, 2, 2)
    for (name, got), want in zip(layer.named_parameters(), direct.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: _through_pickle(layer)], ids=["deepcopy", "pickle"])
def test_copies(events, target, duplicate):
    layer = JaggedFeatureInteraction([taste(bias=PositionBias())], EMBEDDING_DIM, 2).double()
    inputs = {"history": events()}, {"item": target()}
    other = duplicate(layer)
    torch.testing.assert_close(other(*inputs).values(), layer(*inputs).values(), rtol=0, atol=0)
    randomise(other)
    assert not torch.equal(other(*inputs).values(), layer(*inputs).values())


def _through_pickle(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_few_steps_lower_the_loss(events, target):
    layer = JaggedFeatureInteraction([taste()], EMBEDDING_DIM, 2)
    sequences, targets = {"history": events(dtype=torch.float32)}, {"item": target(dtype=torch.float32)}
    wanted = torch.randn(len(LENGTHS), EMBEDDING_DIM)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.03)
    losses = []
    for _ in range(30):
        loss = (layer(sequences, targets).values() - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_one_feature_is_one_node():
    """Its parameters and targets enter the node as they are, and its output is the layer's."""
    layer = JaggedFeatureInteraction([SequenceFeatureConfig("taste", ["history"], ["item"])], 8)
    history = JaggedTensor(torch.randn(5, 8), lengths=torch.tensor([2, 0, 3]))
    output = layer({"history": history}, {"item": torch.randn(3, 8)}).values()
    node = output.grad_fn
    inputs = [type(x).__name__ for x, _ in node.next_functions if x is not None]
    assert type(node).__name__ == "absorbed_target_attention_fwdBackward"
    assert inputs == ["AccumulateGrad"] * 6
