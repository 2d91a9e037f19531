"""The model that is built from a config, and the initial values of its tables."""

import pytest
import torch
from torchrec import EmbeddingConfig

from jfi.data import DataConfig, SyntheticConfig, load_dataset
from jfi.modules import stacked_attention
from jfi.training import EncoderConfig, ModelConfig, build


@pytest.mark.parametrize("num_layers", [0, 1])
def test_the_longest_history_of_the_data_is_the_max_seqlen_of_the_features(num_layers, monkeypatch):
    synthetic = SyntheticConfig(num_users=20, num_items=10)
    dataset = load_dataset(DataConfig(source="synthetic", synthetic=synthetic, max_history=7))
    batch = next(dataset.batches("train", dataset.num_samples("train")))
    assert batch.sparse_features["history_item"].lengths().max() == 7  # the data has longer histories and cuts them
    model = build.build_model(ModelConfig(), EncoderConfig(num_layers=num_layers), dataset.schema)
    arch = model.sequence_arch
    features = arch.pooling.features + ([] if arch.encoder is None else arch.encoder.features)
    assert [feature.max_seqlen for feature in features] == [7] * (1 + num_layers)
    attend, seen = stacked_attention.absorbed_target_attention, []
    monkeypatch.setattr(
        stacked_attention,
        "absorbed_target_attention",
        lambda *x, **y: seen.append(y["max_seqlen"]) or attend(*x, **y),
    )
    model(batch.dense_features, batch.sparse_features)
    assert seen == [7]


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
