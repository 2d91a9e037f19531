import torch
from synthetic_data import synthetic_data
from torchmetrics.functional.classification import binary_auroc

from jfi.data import load_dataset


def test_the_taste_is_in_the_events_of_the_targets_category_and_not_in_their_mean():
    dataset = load_dataset(synthetic_data())
    batch = dataset.batches("test", dataset.num_samples("test"))[0]
    sparse = batch.sparse_features
    lengths = sparse["history_rating"].lengths()
    sample = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    liking = sparse["history_rating"].values().float() - 3.0
    same = sparse["category"].values()[sample] == sparse["history_category"].values()

    def score(weights: torch.Tensor) -> float:
        total = torch.zeros(len(lengths)).index_add(0, sample, liking * weights)
        count = torch.zeros(len(lengths)).index_add(0, sample, weights).clamp(min=1)
        return binary_auroc(total / count, batch.labels.long()).item()

    assert score(same.float()) > 0.85
    assert score(torch.ones_like(liking)) < 0.7
    assert 0.4 < batch.labels.mean() < 0.6


def test_histories_and_items_are_long_tailed():
    dataset = load_dataset(synthetic_data(max_history=10_000))
    batch = dataset.batches("train", dataset.num_samples("train"))[0]
    lengths = batch.sparse_features["history_item"].lengths()
    assert (lengths == 0).sum() > 100
    assert lengths.max() > 4 * lengths.float().mean()
    counts = batch.sparse_features["item"].values().bincount().sort(descending=True).values
    assert counts[:50].sum() > 0.5 * counts.sum()


def test_it_depends_on_its_seed_alone():
    def values(seed: int) -> torch.Tensor:
        dataset = load_dataset(synthetic_data(num_users=50, seed=seed))
        return dataset.batches("train", 500)[0].sparse_features.values()

    assert torch.equal(values(1), values(1))
    assert values(1).numel() != values(2).numel() or not torch.equal(values(1), values(2))
