"""HR@k and NDCG@k against a plain loop."""

import dataclasses
import math
import re

import pytest
import torch

from jfi.data import DataConfig, load_dataset
from jfi.training import Config, ConfigError, EncoderConfig, ModelConfig, TrainingConfig, train
from jfi.training.distributed.processes import World
from jfi.training.metrics.ranking import own_numbers, rank_positives, ranking_metrics
from jfi.training.model.build_model import build_model
from jfi.training.run.recorder import read_metrics

ITEMS = 23


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("implicit") / "r.csv"
    rows = [f"{t % 6},{(t * t + t // 6) % ITEMS},{t}" for t in range(300)]
    path.write_text("\n".join(["user_id,item_id,timestamp", *rows]) + "\n")
    return load_dataset(DataConfig(interactions=str(path)))


def by_loop(dataset, split: str, score, limit: int, sampled: int | None) -> list[float]:
    """Ranks by the definition, one positive and one candidate at a time."""
    arrays = dataset.arrays()
    events, rows = arrays.events, arrays.samples[split]
    rows = [rows[i * len(rows) // limit] for i in range(limit)] if limit < len(rows) else rows
    known_items = sorted({int(events.item[row]) for row in arrays.samples["train"]})
    ranks = []
    for i, row in enumerate(rows):
        user, target, now = events.user[row], int(events.item[row]), events.time[row]
        known = {
            int(events.item[e]) for e in range(len(events.user)) if events.user[e] == user and events.time[e] <= now
        }
        others = [item for item in known_items if item not in known]
        if sampled is not None:
            pairs = dataset.candidates(split, "sampled", limit, sampled)
            _, drawn, _ = pairs.pairs(torch.arange(i * sampled, (i + 1) * sampled).numpy())
            assert set(drawn.tolist()) <= set(others)
            others = drawn.tolist()
        own = score(user, target)
        scores = [score(user, item) for item in others]
        ranks.append(1 + sum(s > own for s in scores) + 0.5 * sum(s == own for s in scores))
    return ranks


def toy_score(user: int, item: int) -> float:
    return float((int(item) * 7 + int(user) * 3) % 6)  # many ties


def toy_model(assemble, parts):
    """The same for batches: an item's index is its id less one, since training has all items."""
    for batch in map(assemble, parts):
        items = batch.sparse_features["item_id"].values() - 1
        yield torch.tensor([toy_score(u, i) for u, i in zip(batch.users.tolist(), items.tolist(), strict=True)])


@pytest.mark.parametrize(("kind", "sampled"), [("full", None), ("sampled", 5)])
@pytest.mark.parametrize("limit", [7, 1000])
def test_ranks_are_those_of_a_loop(dataset, kind, sampled, limit):
    candidates = dataset.candidates("test", kind, limit, 5)
    expected = by_loop(dataset, "test", toy_score, limit, sampled)
    for batch_size in (8, 1000):
        ranks = rank_positives(dataset, candidates, batch_size, toy_model, World())
        assert ranks.tolist() == expected
    assert len(expected) == min(limit, dataset.num_samples("test") // 5)


@pytest.mark.parametrize("kind", ["full", "sampled"])
def test_candidates_share_the_history_of_their_positive(dataset, kind, monkeypatch):
    """By user a model gives the same ranks, and each positive's history is read once for all its candidates."""
    torch.manual_seed(0)
    config = ModelConfig(
        embedding_dim=8, num_heads=2, dense_arch=[8], over_arch=[8], bias="history_age", cross_layers=0, dropout=0.0
    )
    model, events = build_model(config, EncoderConfig(), dataset.schema), dict.fromkeys(("sample", "user"), 0)

    def score(assemble, parts):
        for batch in map(assemble, parts):
            events[dataset.batching] += batch.sparse_features["history_item_id"].values().numel()
            yield model(batch.dense_features, batch.sparse_features, batch.timelines).detach().squeeze(-1)

    ranks = {}
    for batching in events:
        monkeypatch.setattr(dataset, "batching", batching)
        ranks[batching] = rank_positives(dataset, dataset.candidates("test", kind, 7, 5), 1000, score, World())
    assert ranks["user"].tolist() == ranks["sample"].tolist()
    count = 1 + dataset.candidates("test", kind, 7, 5).per_positive
    assert events["user"] * count == events["sample"] * 2  # the positives alone, and with their candidates


def config_of(dataset_path: str, run_dir, **training: object) -> Config:
    return Config(
        data=DataConfig(interactions=dataset_path),
        model=ModelConfig(embedding_dim=8, num_heads=2, dense_arch=[8], over_arch=[8], cross_layers=0, dropout=0.0),
        training=TrainingConfig(run_dir=str(run_dir), epochs=1, batch_size=64, device="cpu", **training),
    )


def test_a_run_on_implicit_feedback_reports_them(tmp_path, monkeypatch):
    for name in ("draw_curves", "draw_attention"):
        monkeypatch.setattr(f"jfi.training.run.plots.{name}", lambda *_: None)
    # Every user takes the items in a fixed order, so that what comes next is easy.
    rows = [f"{t % 9},{(t // 9 + t % 9) % 40},{t}" for t in range(900)]
    (tmp_path / "r.csv").write_text("\n".join(["user_id,item_id,timestamp", *rows]) + "\n")
    monkeypatch.setattr(TrainingConfig, "ranking_positives", 30)
    config = config_of(str(tmp_path / "r.csv"), tmp_path / "run", ranking="full")
    test = train(config).test
    names = ["hr@10", "ndcg@10", "hr@10_full", "ndcg@10_full"]
    assert list(test)[-4:] == names and all(0 <= test[name] <= 1 for name in names)
    validation = next(r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["split"] == "validation")
    assert set(names) <= validation.keys()

    config = dataclasses.replace(config, training=dataclasses.replace(config.training, ranking="none"))
    assert not [name for name in train(config.with_training(run_dir=str(tmp_path / "none"))).test if "@" in name]


def test_metrics_are_those_of_the_definition():
    ranks = [1.0, 2.5, 10.0, 10.5, 40.0]
    found = ranking_metrics(torch.tensor(ranks), 10, "_full")
    assert found["hr@10_full"] == 3 / 5
    assert found["ndcg@10_full"] == pytest.approx(sum(1 / math.log2(r + 1) for r in ranks if r <= 10) / 5)


def test_two_processes_share_every_batch(dataset):
    candidates = dataset.candidates("test", "full", 7, 5)
    parts = [list(own_numbers(len(candidates), 16, World(rank=rank, size=2))()) for rank in range(2)]
    joined = [number for both in zip(*parts, strict=True) for part in both for number in part.tolist()]
    assert joined == list(range(len(candidates)))


@pytest.mark.parametrize(("monitor", "best"), [("ndcg@10", 2), ("hr@10_full", 1), ("auc", 3)])
def test_the_best_epoch_has_the_highest_ranking_metric(tmp_path, monkeypatch, monitor, best):
    for name in ("draw_curves", "draw_attention"):
        monkeypatch.setattr(f"jfi.training.run.plots.{name}", lambda *_: None)
    given = {"ndcg@10": iter([0.1, 0.3, 0.2, 0]), "hr@10_full": iter([0.5, 0.5, 0.4, 0])}
    monkeypatch.setattr(
        "jfi.training.loop.trainer.rank_split", lambda *_: {name: next(one) for name, one in given.items()}
    )
    areas = iter([0.5, 0.6, 0.7, 0])
    monkeypatch.setattr("jfi.training.metrics.label_metrics.auc", lambda *_: next(areas))
    rows = [f"{t % 9},{(t // 9 + t % 9) % 40},{t}" for t in range(300)]
    (tmp_path / "r.csv").write_text("\n".join(["user_id,item_id,timestamp", *rows]) + "\n")
    config = config_of(str(tmp_path / "r.csv"), tmp_path / "run", ranking="full")
    config = config.with_training(monitor=monitor, epochs=3, patience=None)
    assert train(config).best_epoch == best


@pytest.mark.parametrize(
    ("label", "training", "expected"),
    [
        (
            None,
            {"monitor": "hr@10_full"},
            "must be auc, ne, user_auc, hr@10 or ndcg@10; see training.ranking",
        ),
        (
            None,
            {"monitor": "ndcg@5"},
            "must be auc, ne, user_auc, hr@10 or ndcg@10; see training.ranking",
        ),
        (
            None,
            {"monitor": "hr@10", "ranking": "none"},
            "must be auc, ne or user_auc; see training.ranking",
        ),
        ("clicked", {"monitor": "hr@10"}, "metrics of implicit feedback, and the data has labels"),
        (None, {"monitor": "acc"}, "training.monitor: got 'acc', must be auc, ne, user_auc, hr@10 or ndcg@10"),
    ],
)
def test_a_metric_that_is_not_computed_is_no_monitor(label, training, expected):
    with pytest.raises(ConfigError, match=re.escape(expected) + "$"):
        Config(data=DataConfig(interactions="r.csv", label=label), training=TrainingConfig(**training))
    Config(data=DataConfig(interactions="r.csv"), training=TrainingConfig(monitor="ndcg@10"))
