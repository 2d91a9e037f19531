"""SequenceDLRM: what enters the interaction, how histories do, and TorchRec's tracers and checks."""

import re
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
)
from torchrec.distributed.train_pipeline.tracing import Tracer as PipelineTracer
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
from jfi.models import AttentionPooling

DIM = 8
LENGTHS = {
    "user": [1, 1, 1, 1],
    "item": [1, 1, 1, 1],
    "genre": [2, 0, 1, 3],
    "history_item": [3, 0, 1, 5],
    "history_genre": [3, 0, 1, 5],
    "history_age": [3, 0, 1, 5],
}
FEATURE = SequenceFeatureConfig(
    "taste", ["history_item", "history_genre"], ["item", "genre"], bias=KeyBias("history_age", 4)
)


LABELS = torch.tensor([0.0, 1.0, 1.0, 0.0])


class Inputs(NamedTuple):
    """The two arguments of `SequenceDLRM.forward`."""

    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor


def batch(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    flat = [length for key in lengths for length in lengths[key]]
    dense = torch.randn(4, 3, generator=generator)
    ids = torch.randint(4, (sum(flat),), generator=generator)
    return Inputs(dense, KeyedJaggedTensor(keys=list(lengths), values=ids, lengths=torch.tensor(flat)))


def bags(names=("user",)):
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=f"bag_{name}", embedding_dim=DIM, num_embeddings=10, feature_names=[name])
            for name in names
        ]
    )


def embeddings():
    return EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name=f"table_{name}",
                embedding_dim=DIM,
                num_embeddings=10,
                feature_names=[name, f"history_{name}"],
            )
            for name in ("item", "genre")
        ]
    )


def build(ebc="default", ec="default", features=(FEATURE,), pooling="attention", attention=None, **kwargs):
    if pooling == "attention":
        pooling = AttentionPooling(**{"num_heads": 2, **(attention or {})})
    return SequenceDLRM(
        bags() if ebc == "default" else ebc,
        embeddings() if ec == "default" else ec,
        list(features),
        **{
            "dense_in_features": 3,
            "dense_arch_layer_sizes": [6, DIM],
            "over_arch_layer_sizes": [6, 1],
            "pooling": pooling,
            **kwargs,
        },
    )


def encoder(width=DIM, heads=2, **changes):
    return JaggedEncoder([replace(FEATURE, **changes)], width, heads, num_layers=2)


KINDS = ["attention", "mean", "sum", "none", "encoded", "deep"]


def of_kind(kind):
    """A model of a kind of pooling; "deep" has two features, two layers of attention and a cross network."""
    if kind == "encoded":
        return build(encoder=encoder())
    if kind == "deep":
        recent = replace(FEATURE, name="recent", bias=PositionBias(4))
        return build(features=[FEATURE, recent], attention={"layers": 2}, cross_layers=2)
    return build(pooling=kind)


def entries(model, inputs):
    """What enters InteractionArch beside the dense features, [B, F, D]."""
    seen = []
    model.inter_arch.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    model(*inputs)
    return seen[0]


def sums(collection, inputs, key):
    """Sum of a sample's embeddings under a key, [B, D]."""
    tensor = collection(inputs.sparse_features)[key]
    return torch.stack([rows.sum(0) for rows in tensor.values().split(tensor.lengths().tolist())])


def test_entries_of_the_interaction():
    model, inputs = build(), batch()
    user, item, genre, taste = entries(model, inputs).unbind(1)
    torch.testing.assert_close(user, model.embedding_bag_collection(inputs.sparse_features)["user"])
    torch.testing.assert_close(item, sums(model.embedding_collection, inputs, "item"))
    torch.testing.assert_close(genre, sums(model.embedding_collection, inputs, "genre"))
    layer = JaggedFeatureInteraction([FEATURE], DIM, 2)
    layer.load_state_dict(model.sequence_arch.pooling.state_dict())
    sequences = dict(model.embedding_collection(inputs.sparse_features))
    sequences["history_age"] = inputs.sparse_features["history_age"]
    torch.testing.assert_close(taste, layer(sequences, {"item": item, "genre": genre})["taste"])


def test_a_further_layer_asks_with_what_the_first_has_found():
    model, inputs = build(attention={"layers": 2}), batch()
    _, item, genre, taste, total = entries(model, inputs).unbind(1)
    arch = model.sequence_arch
    sequences = dict(model.embedding_collection(inputs.sparse_features))
    sequences["history_age"] = inputs.sparse_features["history_age"]
    second, refine = arch.further["layers"][0], arch.further["refine"][0]
    found = second(sequences, {"item": item + refine(taste), "genre": genre})["taste"]
    torch.testing.assert_close(total, taste + found)
    assert not torch.allclose(found, second(sequences, {"item": item, "genre": genre})["taste"], atol=1e-3)


def test_the_cross_network_multiplies_elements_of_all_entries():
    model, inputs = build(cross_layers=1), batch()
    seen = []
    model.over_arch.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    flat = entries(model, inputs).flatten(1)
    x = torch.cat([model.dense_arch(inputs.dense_features), flat], dim=1)
    down, up = model.cross_net.V_kernels[0], model.cross_net.W_kernels[0]
    crossed = x * (x @ down.T @ up.T + model.cross_net.bias[0]) + x
    torch.testing.assert_close(seen[0][:, -x.shape[1] :], crossed)
    assert down.shape == (DIM, x.shape[1])


@pytest.mark.parametrize("pooling", ["attention", "mean"])
@pytest.mark.parametrize("combine", ["sum", "concat"])
def test_an_encoder_stands_before_the_pooling(pooling, combine):
    feature, inputs = replace(FEATURE, combine=combine), batch()
    first = encoder(combine=combine, bias=PositionBias())
    model = build(features=[feature], pooling=pooling, encoder=first)
    _, item, genre, taste = entries(model, inputs).unbind(1)
    sequences = first(model.embedding_collection(inputs.sparse_features))
    sequences["history_age"] = inputs.sparse_features["history_age"]
    targets = {"item": item, "genre": genre}
    torch.testing.assert_close(taste, model.sequence_arch.pooling(sequences, targets)["taste"])
    if pooling == "attention":
        want = model.sequence_arch.pooling.attention_weights(sequences, targets)["taste"].values()
        torch.testing.assert_close(model.attention_weights(*inputs)["taste"].values(), want)


def test_an_encoder_reads_its_own_bias():
    """The pooling's bias is none, so only the encoder asks for the ages."""
    model, inputs = build(features=[replace(FEATURE, bias=None)], encoder=encoder()), batch()
    model(*inputs).sum().backward()
    assert all(block.bucket_bias.grad.any() for block in model.sequence_arch.encoder.stacks.taste.blocks)
    without = {key: lengths for key, lengths in LENGTHS.items() if key != "history_age"}
    with pytest.raises(ValueError, match="sparse_features must hold the key 'history_age'"):
        model(*batch(without))


@pytest.mark.parametrize("combine", ["sum", "concat"])
@pytest.mark.parametrize("pooling", ["mean", "sum"])
def test_pooling_is_the_mean_or_the_sum_of_the_history(pooling, combine):
    feature = SequenceFeatureConfig("taste", ["history_item", "history_genre"], ["item"], combine=combine)
    model, inputs = build(features=[feature], pooling=pooling), batch()
    lengths = torch.tensor(LENGTHS["history_item"]).clamp(min=1).unsqueeze(1) if pooling == "mean" else 1
    fields = [sums(model.embedding_collection, inputs, key) / lengths for key in feature.sequence_keys]
    want = [fields[0] + fields[1]] if combine == "sum" else fields
    torch.testing.assert_close(entries(model, inputs)[:, 3:], torch.stack(want, dim=1))


def test_without_pooling_the_history_does_not_enter():
    model = build(pooling="none")
    other = LENGTHS | {key: [1, 2, 0, 0] for key in LENGTHS if key.startswith("history_")}
    assert not any("sequence_arch.pooling" in name for name in model.state_dict())
    assert entries(model, batch()).size(1) == 3
    torch.testing.assert_close(model(*batch(other)), model(*batch()), rtol=0, atol=0)


def test_with_pooling_the_history_does_enter():
    other = LENGTHS | {key: [1, 2, 0, 0] for key in LENGTHS if key.startswith("history_")}
    for pooling in ("mean", "attention"):
        model = build(pooling=pooling)
        assert (model(*batch(other)) != model(*batch())).all()


@pytest.mark.parametrize("which", ["bags", "embeddings"])
def test_a_target_may_stand_in_either_collection(which):
    table = EmbeddingConfig(name="history", embedding_dim=DIM, num_embeddings=10, feature_names=["history_item"])
    if which == "bags":
        ebc, ec = bags(("user", "item")), EmbeddingCollection(tables=[table])
    else:
        ebc, ec = None, embeddings()
    model = build(ebc, ec, [SequenceFeatureConfig("taste", ["history_item"], ["item"])])
    assert model(*batch()).shape == (4, 1)


def test_bags_alone_make_a_plain_dlrm():
    model = build(bags(("user", "item")), None, [])
    assert entries(model, batch()).shape == (4, 2, DIM)


def test_weights_of_the_ids_reach_the_layer():
    inputs = batch()
    ids = inputs.sparse_features
    model = build(features=[SequenceFeatureConfig("taste", ["history_item"], ["item"], bias=WeightBias())])
    weights = torch.ones(ids.values().numel())
    weights[ids.values().numel() - 3 * 9 : ids.values().numel() - 3 * 9 + 3] = torch.tensor([0.0, 1.0, 0.0])
    weighted = KeyedJaggedTensor(ids.keys(), ids.values(), lengths=ids.lengths(), weights=weights)
    attended = model.attention_weights(inputs.dense_features, weighted)["taste"].values()
    torch.testing.assert_close(attended[:3, 0, 0], torch.tensor([0.0, 1.0, 0.0]))


def by_genre(key, encoded):
    """A model with a bias by the ids of `key`; encoded with one by times there, and a feature named like a bias key."""
    torch.manual_seed(0)
    genres = SequenceFeatureConfig("history_age", ["history_genre"], ["genre"])
    bias = KeyBias("history_age" if encoded else key, 4)
    taste = SequenceFeatureConfig("taste", ["history_item"], ["item"], bias=bias)
    times, encoder = TimeBias(key), None
    if encoded:
        encoder = JaggedEncoder([replace(taste, relative_bias=times), genres], DIM, causal=True)
    model = build(features=[taste, genres], encoder=encoder)
    for name, x in model.named_parameters():
        if name.endswith("_bias"):
            torch.nn.init.normal_(x)
    return model


@pytest.mark.parametrize("encoded", [False, True], ids=["plain", "encoded"])
def test_a_bias_may_read_ids_that_another_feature_embeds(encoded):
    inputs = batch()
    of_key = inputs.sparse_features.to_dict()
    genres = torch.tensor([0, 1, 3, 2, 0, 1, 1, 2, 3])  # as times they do not decrease
    of_key["history_genre"] = JaggedTensor(genres, lengths=of_key["history_genre"].lengths())
    ids = KeyedJaggedTensor.from_jt_dict({**of_key, "copied": of_key["history_genre"]})
    got, want = (by_genre(key, encoded)(inputs.dense_features, ids) for key in ("history_genre", "copied"))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("encoded", [False, True], ids=["plain", "encoded"])
def test_weights_of_the_ids_scale_the_values(encoded):
    feature = SequenceFeatureConfig("taste", ["history_item", "history_genre"], ["item"], weighted_values=True)
    first = JaggedEncoder([replace(feature, weighted_values=False)], DIM, 2) if encoded else None
    model, inputs = build(features=[feature], encoder=first), batch()
    ids = inputs.sparse_features

    def pooled(weight):
        weights = torch.full((ids.values().numel(),), weight)
        weighted = KeyedJaggedTensor(ids.keys(), ids.values(), lengths=ids.lengths(), weights=weights)
        return entries(model, Inputs(inputs.dense_features, weighted))[:, -1]

    # The output's bias is zero at the start, so the entry is linear in the values.
    assert pooled(1.0).any()
    torch.testing.assert_close(pooled(-2.0), -2 * pooled(1.0))


def test_attention_weights_are_those_of_the_forward_pass():
    model, inputs = build(), batch()
    weights = model.attention_weights(*inputs)["taste"]
    assert weights.values().shape == (9, 1, 2) and weights.lengths().tolist() == LENGTHS["history_item"]
    first = weights.values()[:3].sum(0)
    torch.testing.assert_close(first, torch.ones_like(first))


@pytest.mark.parametrize("kind", ["attention", "encoded", "deep"])
@pytest.mark.parametrize("lengths", [LENGTHS, {key: [0] * 4 for key in LENGTHS}], ids=["events", "all empty"])
def test_every_parameter_gets_a_finite_gradient(lengths, kind):
    model, inputs = of_kind(kind), batch(lengths)
    torch.nn.functional.binary_cross_entropy_with_logits(model(*inputs).squeeze(-1), LABELS).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_no_samples(kind):
    """What a rank gets where samples are fewer than ranks: it must still take part in the gradients' all-reduce."""
    model = of_kind(kind)
    none = torch.empty(0, dtype=torch.long)
    ids = KeyedJaggedTensor(keys=list(LENGTHS), values=none, lengths=none)
    logits = model(torch.empty(0, 3), ids)
    assert logits.shape == (0, 1)
    logits.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_dropout_acts_in_training_alone():
    model, inputs = build(dropout=0.5), batch()
    model.train()
    assert not torch.equal(model(*inputs), model(*inputs))
    model.eval()
    torch.testing.assert_close(model(*inputs), model(*inputs), rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_steps_lower_the_loss(kind):
    model, inputs = of_kind(kind), batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    losses = []
    for _ in range(40):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(*inputs).squeeze(-1), LABELS)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_attention_finds_the_target_in_the_history_where_the_mean_cannot():
    """The label says whether the newest event equals the target, while every history holds every item."""
    generator = torch.Generator().manual_seed(1)
    count, items = 256, 4
    history = torch.stack([torch.randperm(items, generator=generator) for _ in range(count)])
    item = torch.randint(items, (count,), generator=generator)
    ids = KeyedJaggedTensor(
        keys=["item", "history_item"],
        values=torch.cat([item, history.flatten()]),
        lengths=torch.cat([torch.ones(count, dtype=torch.long), torch.full((count,), items)]),
    )
    labels = (history[:, -1] == item).float()
    inputs = torch.zeros(count, 3), ids
    losses = {}
    for pooling in ("mean", "attention"):
        torch.manual_seed(0)
        table = EmbeddingConfig(
            name="table", embedding_dim=DIM, num_embeddings=items, feature_names=["item", "history_item"]
        )
        feature = SequenceFeatureConfig("taste", ["history_item"], ["item"], bias=PositionBias())
        model = build(None, EmbeddingCollection(tables=[table]), [feature], pooling=pooling)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(150):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(*inputs).squeeze(-1), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[pooling] = loss.item()
    assert losses["attention"] < 0.2 * losses["mean"], losses


@pytest.mark.parametrize("kind", KINDS)
def test_torchrecs_tracer_goes_all_the_way_through(kind):
    model, inputs = of_kind(kind), batch()
    torch.testing.assert_close(symbolic_trace(model)(*inputs), model(*inputs), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["attention", "encoded", "deep"])
def test_the_train_pipelines_tracer_finds_both_collections_fed_by_the_ids_alone(kind):
    model = of_kind(kind)
    leaves = [name for name, _ in model.named_children()]
    graph = PipelineTracer(leaf_modules=leaves).trace(model)
    calls = {node.target: node for node in graph.nodes if node.op == "call_module"}
    assert set(calls) == set(leaves)
    for name in ("embedding_collection", "embedding_bag_collection"):
        (argument,) = calls[name].args
        assert argument.op == "placeholder" and argument.target == "sparse_features"


def test_names_in_state_dict():
    names = set(build(encoder=encoder()).state_dict())
    assert {
        "embedding_bag_collection.embedding_bags.bag_user.weight",
        "embedding_collection.embeddings.table_item.weight",
        "sequence_arch.pooling.attention.taste.query_weight",
        "sequence_arch.pooling.attention.taste.bucket_bias",
        "sequence_arch.encoder.stacks.taste.blocks.1.bucket_bias",
    } <= names
    assert not any("encoder" in name for name in build().state_dict())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pooling": "max"}, "pooling must be 'attention', 'mean', 'sum' or 'none', got 'max'"),
        ({"attention": {"layers": 0}}, "layers must be at least 1, got 0"),
        ({"cross_layers": -1}, "cross_layers must be at least 0, got -1"),
        ({"over_arch_layer_sizes": [6, 2]}, "at least two sizes and end in 1, the logit, got [6, 2]"),
        ({"over_arch_layer_sizes": [1]}, "over_arch_layer_sizes must hold at least two sizes and end in 1"),
        ({"over_arch_layer_sizes": []}, "over_arch_layer_sizes must hold at least two sizes and end in 1"),
        ({"dense_arch_layer_sizes": []}, "dense_arch_layer_sizes must hold at least one size, got []"),
        ({"features": [FEATURE, FEATURE], "pooling": "none"}, "sequence_features must have distinct names, got ['tas"),
        ({"attention": {"num_heads": 3}}, "num_heads must divide embedding_dim=8, got 3"),
        ({"encoder": encoder(16)}, "encoder must be as wide as embedding_collection, 8, got 16"),
        (
            {"encoder": encoder(name="tste")},
            "encoder must encode the sequence features that are pooled, ['taste'], got ['tste']",
        ),
        ({"encoder": encoder(), "pooling": "none"}, "the sequence features that are pooled, [], got ['taste']"),
        (
            {"encoder": encoder(sequence_keys=["history_itme"])},
            "embedding_collection must hold the key 'history_itme', got none of that name",
        ),
        (
            {"encoder": encoder(sequence_keys=["history_item"])},
            "encoder must read the sequence_keys ['history_item', 'history_genre'] of feature 'taste', got "
            "['history_item']",
        ),
        ({"ebc": bags(("user", "item"))}, "a feature must belong to one collection, got ['item'] in both"),
        (
            {"ebc": None, "ec": None, "features": []},
            "the collections must have a feature that is not a history, got none",
        ),
        (
            {"features": [SequenceFeatureConfig("taste", ["history_itme"], ["item"])]},
            "embedding_collection must hold the key 'history_itme', got none of that name; "
            "nearest: ['history_item', 'history_genre']",
        ),
        (
            {"features": [SequenceFeatureConfig("taste", ["history_item"], ["itme"])]},
            "the collections must hold the key 'itme', got none of that name; nearest: ['item']",
        ),
    ],
)
def test_construction_errors(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(**arguments)


def test_sequence_features_of_another_type():
    message = "sequence_features must be a list of SequenceFeatureConfig, got None"
    with pytest.raises(TypeError, match=message):
        SequenceDLRM(bags(), embeddings(), None, 3, [6, DIM], [6, 1])


@pytest.mark.parametrize("key", ["user", "item", "history_genre", "history_age"])
def test_a_key_absent_from_the_batch(key):
    lengths = {name: count for name, count in LENGTHS.items() if name != key}
    with pytest.raises(ValueError, match=f"sparse_features must hold the key '{key}', got none of that name; "):
        build()(*batch(lengths))


def test_attention_weights_without_attention():
    with pytest.raises(ValueError, match="attention_weights needs a model with pooling='attention'"):
        build(pooling="mean").attention_weights(*batch())
