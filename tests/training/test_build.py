"""The model that is built from a config, and the initial values of its tables."""

from dataclasses import replace

import pytest
import torch
from synthetic_data import synthetic_data
from torchrec import EmbeddingConfig

from jfi.data import load_dataset
from jfi.modules import PositionBias, TimeBias, WeightBias, stacked_attention
from jfi.training import EncoderConfig, ModelConfig, OptimizerConfig, OptimizerGroup
from jfi.training.model import build_model as build


@pytest.mark.parametrize("num_layers", [0, 1])
def test_the_longest_history_of_the_data_is_the_max_seqlen_of_the_features(num_layers, monkeypatch):
    dataset = load_dataset(synthetic_data(num_users=20, num_items=10, max_history=7))
    batch = dataset.batches("train", dataset.num_samples("train"))[0]
    assert batch.sparse_features["history_item"].lengths().max() == 7  # the data has longer histories and cuts them
    model = build.build_model(ModelConfig(), EncoderConfig(num_layers=num_layers), dataset.schema)
    arch = model.sequence_arch
    features = arch.pooling.features + ([] if arch.encoder is None else arch.encoder.features)
    assert [feature.max_seqlen for feature in features] == [7] * (1 + num_layers)
    attend, seen = stacked_attention.attend_absorbed, []
    monkeypatch.setattr(
        stacked_attention,
        "attend_absorbed",
        lambda *x, **y: seen.append(y["max_seqlen"]) or attend(*x, **y),
    )
    model(batch.dense_features, batch.sparse_features)
    assert seen == [7]


def test_every_option_of_the_model_reaches_it():
    schema = load_dataset(synthetic_data(num_users=20, num_items=10)).schema
    ages = next(spec.num_embeddings for spec in schema.features if spec.key == "history_age")
    for bias, expected in (
        (None, None),
        ("position", PositionBias(32)),
        ("weights", WeightBias()),
        ("history_age", TimeBias("history_age", ages)),
    ):
        options = {"num_heads": 2, "bias": bias}
        config = ModelConfig(8, dense_arch=[7, 6], over_arch=[5], dropout=0.25, **options)
        model = build.build_model(config, EncoderConfig(), schema)
        pooling = model.sequence_arch.pooling
        assert (pooling.num_heads, pooling.embedding_dim) == (2, 8)
        assert pooling.features[0].bias == expected
        assert (model.dropout.p, model.sequence_arch.encoder) == (0.25, None)
        sizes = [
            [one.out_features for one in part.modules() if isinstance(one, torch.nn.Linear)]
            for part in (model.dense_arch, model.over_arch)
        ]
        assert sizes == [[7, 6, 8], [5, 1]]
        encoder = EncoderConfig(2, 0.5, True)
        stack = build.build_model(config, encoder, schema).sequence_arch.encoder
        assert (stack.num_layers, stack.num_heads, stack.causal) == (2, config.num_heads, True)
        assert stack.features[0].relative_bias is None
        encoder = replace(encoder, relative_bias="distance")
        related = build.build_model(config, encoder, schema).sequence_arch.encoder
        assert related.features[0].relative_bias == PositionBias(32)
        block = stack.stacks["history"].blocks[0]
        assert 32 in {one.out_features for one in block.feedforward if isinstance(one, torch.nn.Linear)}
        assert 0.5 in {one.p for one in block.modules() if isinstance(one, torch.nn.Dropout)}
    for pooling in ("mean", "none"):
        model = build.build_model(ModelConfig(pooling=pooling), EncoderConfig(), schema)
        assert model.sequence_arch.pooling is None or not hasattr(model.sequence_arch.pooling, "num_heads")


@pytest.mark.parametrize(("row", "column"), [(0, 0), (3, 0), (4, 4), (7, 4), (10, 0), (11, 0)])
def test_a_shard_has_the_initial_values_of_the_whole_table(monkeypatch, row, column):
    monkeypatch.setattr(build, "_ROWS_DRAWN", 4)
    table = EmbeddingConfig(name="item", num_embeddings=11, embedding_dim=8, feature_names=["item"])
    whole = torch.full((11, 8), torch.nan)
    build._draw_shard(whole, 0, 0, table, seed=3)
    shard = torch.full_like(whole[row:, column : column + 4], torch.nan)
    build._draw_shard(shard, row, column, table, seed=3)
    assert torch.equal(shard, whole[row:, column : column + 4])


def test_initial_values_are_uniform_and_differ_by_row_table_and_seed():
    drawn = []
    for name, seed in (("item", 0), ("item", 1), ("user", 0)):
        table = EmbeddingConfig(name=name, num_embeddings=100_000, embedding_dim=4, feature_names=["key"])
        drawn.append(torch.empty(100_000, 4))
        build._draw_shard(drawn[-1], 0, 0, table, seed)
    values = torch.cat(drawn)
    assert values.unique(dim=0).shape[0] == 300_000
    bound = 100_000**-0.5
    assert values.abs().max() <= bound and values.abs().max() > 0.999 * bound
    assert abs(values.mean()) < 0.01 * bound
    assert values.std().item() == pytest.approx(bound / 3**0.5, rel=0.01)


@pytest.mark.parametrize(("name", "shrinks"), [("adamw", True), ("adam", False), ("adagrad", False)])
def test_the_weight_decay_of_each_group_reaches_its_parameters(name, shrinks):
    """With gradients of zero nothing but weight decay moves a parameter; of a table with AdamW the rows of the batch.

    Adam and Adagrad divide the penalty of a row by the scale of its gradients, and have none without any.
    """
    dataset = load_dataset(synthetic_data(num_users=20, num_items=10))
    batch = dataset.batches("train", 8)[0]
    for tables, dense in ((0.5, 0.0), (0.0, 0.5)):
        config = OptimizerConfig(OptimizerGroup(name, 0.1, dense), OptimizerGroup(name, 0.1, tables))
        model = build.build_model(ModelConfig(), EncoderConfig(), dataset.schema, optimizer=config)
        optimizer = build.build_optimizer(config, model)
        before = {key: value.detach().clone() for key, value in model.named_parameters()}
        (model(batch.dense_features, batch.sparse_features).sum() * 0).backward()
        optimizer.step()
        in_tables = build.table_configs(model)
        for key, value in model.named_parameters():
            decayed = tables > 0 and shrinks if key in in_tables else dense > 0
            read = torch.ones(len(value), dtype=torch.bool)
            if key in in_tables:
                ids = [batch.sparse_features[feature].values() for feature in in_tables[key].feature_names]
                read = torch.zeros(len(value), dtype=torch.bool).index_fill(0, torch.cat(ids), True)
            assert torch.equal(value[~read], before[key][~read])
            nonzero = before[key][read].abs() > 1e-4
            moved = not torch.equal(value[read], before[key][read])
            assert moved == (decayed and bool(nonzero.any())), key
            if decayed and shrinks:
                factor = 1 / 1.05 if key in in_tables else 0.95
                torch.testing.assert_close(value[read], before[key][read] * factor)
