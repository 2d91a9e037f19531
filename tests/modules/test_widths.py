"""Targets, events and outputs of different widths."""

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

from jfi import JaggedFeatureInteraction, PositionBias, SequenceFeatureConfig
from jfi.models import AttentionPooling, SequenceDLRM
from jfi.modules import JaggedEncoder

LENGTHS = torch.tensor([2, 0, 3])


@pytest.mark.parametrize("combine", ["sum", "concat"])
def test_the_layer_is_multihead_attention_of_those_widths(combine):
    """Events 6 wide, targets 16 wide, outputs 8 wide: against softmax(W_q t (W_k x)ᵀ) W_v x, and every gradient."""
    keys = ["history_item", "history_rating"]
    feature = SequenceFeatureConfig("taste", keys, ["item"], combine=combine)
    layer = JaggedFeatureInteraction([feature], 8, num_heads=2, sequence_dim=6, target_dim=16)
    assert "sequence_dim=6, target_dim=16" in repr(layer)
    fields = [torch.randn(5, 6, requires_grad=True) for _ in keys]
    target = torch.randn(3, 16, requires_grad=True)
    out = layer({key: JaggedTensor(x, lengths=LENGTHS) for key, x in zip(keys, fields, strict=True)}, {"item": target})[
        "taste"
    ]
    own = layer.attention["taste"]
    x = sum(fields) if combine == "sum" else torch.cat(fields, dim=1)
    expected = []
    for sample, rows in zip(target, x.split(LENGTHS.tolist()), strict=True):
        heads = []
        query, key, value = (
            own.query_weight @ sample + own.query_bias,
            rows @ own.key_weight.T,
            rows @ own.value_weight.T,
        )
        for q, k, v in zip(query.chunk(2), key.chunk(2, 1), value.chunk(2, 1), strict=True):
            heads.append((k @ q / 2).softmax(0) @ v)
        expected.append(own.output_weight @ torch.cat(heads) + own.output_bias)
    torch.testing.assert_close(out, torch.stack(expected))
    out.square().sum().backward()
    assert all(one.grad.abs().sum() > 0 for one in (*fields, target))


def test_a_wrong_width_is_refused_by_key():
    layer = JaggedFeatureInteraction(
        [SequenceFeatureConfig("taste", ["h"], ["item"])], 8, sequence_dim=6, target_dim=16
    )
    events, right = {"h": JaggedTensor(torch.randn(5, 6), lengths=LENGTHS)}, {"item": torch.randn(3, 16)}
    with pytest.raises(ValueError, match=r"targets\['item'\] must have shape \[3, 16\].* got \[3, 6\]"):
        layer(events, {"item": torch.randn(3, 6)})
    with pytest.raises(ValueError, match=r"sequences\['h'\] must hold embeddings of shape \[S, 6\]"):
        layer({"h": JaggedTensor(torch.randn(5, 16), lengths=LENGTHS)}, right)
    with pytest.raises(ValueError, match="target_dim must be at least 1, got 0"):
        JaggedFeatureInteraction([SequenceFeatureConfig("taste", ["h"], ["item"])], 8, target_dim=0)


def dlrm(pooling="attention", encoder=None, **options):
    """Tables 4, 6 and 12 wide beside those of the histories, 6 wide; entries are 8 wide."""
    bags = [
        EmbeddingBagConfig(name=name, embedding_dim=width, num_embeddings=9, feature_names=[name])
        for name, width in (("user", 4), ("item", 12), ("device", 8))
    ]
    events = [
        EmbeddingConfig(name="rating", embedding_dim=6, num_embeddings=9, feature_names=["history_rating", "mine"])
    ]
    return SequenceDLRM(
        EmbeddingBagCollection(tables=bags),
        EmbeddingCollection(tables=events),
        [SequenceFeatureConfig("taste", ["history_rating"], ["item"])],
        dense_in_features=2,
        dense_arch_layer_sizes=[8],
        over_arch_layer_sizes=[8, 1],
        pooling=AttentionPooling(2) if pooling == "attention" else pooling,
        encoder=encoder,
        user_keys=["user"],
        **options,
    )


def batch():
    keys = ["user", "item", "device", "mine", "history_rating"]
    lengths = torch.cat([torch.ones(12, dtype=torch.int64), LENGTHS])
    return torch.randn(3, 2), KeyedJaggedTensor(keys, torch.randint(0, 9, (17,)), lengths=lengths)


@pytest.mark.parametrize(
    "options",
    [{}, {"cross_layers": 1, "pooling": AttentionPooling(2, layers=2)}, {"pooling": "mean"}, {"encoder": True}],
    ids=["attention", "refined", "mean", "encoder"],
)
def test_dlrm_projects_tables_of_other_widths_at_the_interaction(options):
    if options.get("encoder"):
        config = SequenceFeatureConfig("taste", ["history_rating"], ["item"], bias=PositionBias(4))
        options = {"encoder": JaggedEncoder([config], 6, num_heads=2, num_layers=1)}
    model = dlrm(**options)
    dense, ids = batch()
    assert model(dense, ids).shape == (3, 1)
    model(dense, ids).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    arch = model.sequence_arch
    entries = arch(ids, model.embedding_bag_collection(ids), model.embedding_collection(ids))
    user = model.embedding_bag_collection(ids)["user"]
    torch.testing.assert_close(entries[:, 0], arch.projections["user"](user))
    torch.testing.assert_close(entries[:, 2], model.embedding_bag_collection(ids)["device"])
    again = dlrm(**options)
    again.load_state_dict(model.state_dict())
    traced = torch.fx.symbolic_trace(arch)
    torch.testing.assert_close(
        traced(ids, model.embedding_bag_collection(ids), model.embedding_collection(ids)), entries
    )


def test_an_encoder_of_another_width_is_refused():
    config = SequenceFeatureConfig("taste", ["history_rating"], ["item"])
    with pytest.raises(ValueError, match="encoder must be as wide as embedding_collection, 6, got 8"):
        dlrm(encoder=JaggedEncoder([config], 8, num_heads=2, num_layers=1))
