"""Runs with several named histories: training, resume, scores of tables, importance, attention, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from commands import run as command
from data_configs import data_config
from worker import without_pictures

import jfi
from jfi.data import HistoryConfig
from jfi.data.prepared.prepare import prepare_dataset
from jfi.serving.artifact import ArtifactError
from jfi.training import Config, ConfigError, EncoderConfig, ModelConfig, TrainingConfig, train

HISTORIES = {
    "clicks": "kind == click",
    "orders": HistoryConfig("kind == buy", max_history=3),
    "searches": HistoryConfig("kind == search", features=["query"]),
}


def log(count: int = 900, seed: int = 0) -> pa.Table:
    """Views whose label is whether the user has bought the item's shelf before; clicks and searches in between."""
    draw, bought, rows = np.random.default_rng(seed), [set() for _ in range(20)], []
    for time in range(count):
        user, item = int(draw.integers(20)), int(draw.integers(12))
        kind = str(draw.choice(["view", "view", "click", "buy", "search"]))
        label = float(item // 3 in bought[user]) if kind == "view" else None
        if kind == "buy":
            bought[user].add(item // 3)
        rows.append((f"u{user}", item, 60 * time, kind, label, f"q{draw.integers(5)}" if kind == "search" else None))
    names = ("user_id", "item_id", "timestamp", "kind", "label", "query")
    return pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))


def config_of(folder: Path, name: str = "run", **changes) -> Config:
    data = {
        "interactions": str(folder / "log.parquet"),
        "label": "label",
        "event_categorical": ["query"],
        "histories": HISTORIES,
        "max_history": 8,
    }
    sections = {key: changes.pop(key) for key in ("model", "encoder") if key in changes}
    training = TrainingConfig(run_dir=str(folder / name), epochs=2, batch_size=64, device="cpu", **changes)
    model = sections.get("model", ModelConfig(embedding_dim=8, num_heads=2, dense_arch=[8], over_arch=[8]))
    return Config(data_config(**data), model, encoder=sections.get("encoder", EncoderConfig()), training=training)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("histories")
    pq.write_table(log(), folder / "log.parquet")
    train(config_of(folder))
    return folder


@pytest.fixture(scope="module")
def run(folder):
    return jfi.load_run(folder / "run")


def test_each_history_is_a_feature_of_the_model(run, folder):
    features = {one.name: one for one in run.model.sequence_arch.features}
    assert list(features) == [f"{name}{by}" for name in HISTORIES for by in ("", "_by_recency")]
    assert [one.max_seqlen for one in features.values()] == [8, 8, 3, 3, 8, 8]
    assert [one.bias_key for one in features.values()][::2] == ["clicks_age", "orders_age", "searches_age"]
    assert features["clicks"].sequence_keys == ["clicks_item_id", "clicks_query"]
    assert features["searches"].sequence_keys == ["searches_query"]
    assert (folder / "run/attention.png").is_file()


def newest_views(count: int) -> pa.Table:
    table = log()
    views = table.filter(pa.array([kind == "view" for kind in table["kind"].to_pylist()]))
    return views.slice(len(views) - count)


def test_rows_of_a_table_are_scored_as_in_training(run, folder):
    (*_, last) = (folder / "run/metrics.jsonl").read_text().splitlines()
    count, expected = json.loads((folder / "run/summary.json").read_text())["samples"]["test"], json.loads(last)
    found = run.evaluate(newest_views(count), history=log())["overall"]
    assert [found[name] for name in ("auc", "ne")] == pytest.approx([expected["auc"], expected["ne"]], abs=1e-6)


def test_a_score_reads_each_history(run):
    """A row's score changes with the last event of a history, and with the kind of that event."""
    views, table = newest_views(20), log()
    kinds = table["kind"].to_pylist()
    before = run.predict(views, history=table)["score"]
    for kind in ("click", "buy", "search"):
        without = table.filter(pa.array([one != kind for one in kinds]))
        assert run.predict(views, history=without)["score"] != before
    without = table.filter(pa.array([one != "view" for one in kinds]))  # which is no event of any history
    assert run.predict(views, history=without)["score"] == before


def test_importance_and_attention_have_each_history(run, folder):
    drops = run.evaluate(newest_views(60), history=log(), importance=True)["importance"]["drops"]
    own = {f"{name}{column}" for name in HISTORIES for column in ("", " query", " timestamp")}
    assert own | {"clicks item_id", "orders item_id", "item item_id"} == {*drops}
    table = run.attention(newest_views(10), history=log())
    assert {*table["history"].to_pylist()} <= {*HISTORIES}
    columns = [name for name in table.column_names if name.startswith("weight")]
    assert columns == [
        "weight_history_1",
        "weight_history_2",
        "weight_history_by_recency_1",
        "weight_history_by_recency_2",
    ]
    sums = table.group_by(["row", "history"]).aggregate([(name, "sum") for name in columns])
    for name in columns:
        np.testing.assert_allclose(sums[f"{name}_sum"].to_numpy(), 1, atol=1e-5)
    longest = table.group_by("history").aggregate([("event", "max")]).to_pydict()
    assert dict(zip(longest["history"], longest["event_max"], strict=True))["orders"] < 3


def test_a_prepared_dataset_trains_the_same_run(run, folder):
    config = config_of(folder, "second")
    prepare_dataset(config.data, folder / "prepared")
    config.data.prepared, config.data.interactions = str(folder / "prepared"), None
    with without_pictures():
        train(config)
    again = jfi.load_run(folder / "second")
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name


def test_an_encoder_reads_each_history(folder):
    model = ModelConfig(embedding_dim=8, num_heads=2, dense_arch=[8], over_arch=[8])
    with without_pictures():
        train(config_of(folder, "encoded", model=model, encoder=EncoderConfig(num_layers=1)))
    scores = jfi.load_run(folder / "encoded").predict(newest_views(10), history=log())["score"]
    assert np.isfinite(scores.to_numpy()).all()


def test_what_has_one_history_refuses_several(folder, tmp_path):
    several = r"data\.histories has several, and requests and a state of users have one; score tables by `jfi predict`"
    with pytest.raises(ArtifactError, match=several):
        command("export", "--run", folder / "run", "--out", tmp_path / "artifact")
    with pytest.raises(ArtifactError, match=several):
        command("state", "load", "--run", folder / "run", "--state", tmp_path / "state")
    assert not (tmp_path / "state").exists()
    (parts := tmp_path / "parts").mkdir()
    with pytest.raises(ConfigError, match=r"data\.histories has several, and the state of --follow has one"):
        command("train", "--resume", folder / "run", "--follow", parts)
