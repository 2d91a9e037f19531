"""Runs with columns that are known when an item is shown: the model, prediction, resume, warm start."""

import dataclasses
import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from data_configs import data_config
from worker import without_pictures

import jfi
from jfi.data import DataError, load_dataset
from jfi.data.io import blocks as table_blocks
from jfi.data.prepared.manifest import prepared_config
from jfi.data.prepared.prepare import prepare_dataset
from jfi.data.schema import columns as coded
from jfi.training import (
    Config,
    ConfigError,
    ModelConfig,
    OptimizerConfig,
    OptimizerGroup,
    TrainingConfig,
    resume,
    train,
)
from jfi.training.model.build_model import build_model, table_configs
from jfi.training.model_config import PretrainedConfig

HEADER = ["user_id", "item_id", "timestamp", "clicked", "device", "place", "tags", "price"]
ROUNDING = 2e-6
COUNT = 300


@pytest.fixture(autouse=True)
def _no_pictures():
    with without_pictures():
        yield


def row(i: int) -> list[object]:
    device, place = ["tv", "web", "app"][i * i % 7 % 3], f"p{i * 3 % 11}"
    return [f"u{i % 6}", f"i{i * 7 % 11}", 60 * i, i * i // 5 % 2, device, place, "a|b"[: i % 4], i * 31 % 50 / 2]


def write(path: Path, rows: list[list], without: tuple[str, ...] = ()) -> Path:
    kept = [i for i, name in enumerate(HEADER) if name not in without]
    lines = [",".join(str(line[i]) for i in kept) for line in [HEADER, *rows]]
    path.write_text("\n".join(lines) + "\n")
    return path


def config_of(table: Path, run: Path, **settings: object) -> Config:
    data = data_config(
        interactions=str(table),
        **{
            "label": "clicked",
            "event_categorical": ["device"],
            "context_categorical": ["device", "place", "tags"],
            "context_dense": ["price"],
            "separators": {"tags": "|"},
            "max_history": 9,
        }
        | settings,
    )
    model = ModelConfig(8, num_heads=2, bias="history_age", dense_arch=[8], over_arch=[8], cross_layers=0, dropout=0.0)
    optimizer = OptimizerConfig(embeddings=OptimizerGroup("adagrad", 0.05))  # few samples would decay the tables to 0
    training = TrainingConfig(str(run), epochs=1, batch_size=32, device="cpu")
    return Config(data, model, optimizer=optimizer, training=training)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("contexts")
    table = write(path / "table.csv", [row(i) for i in range(COUNT)])
    with without_pictures():
        train(config_of(table, path / "run"))
    return path


@pytest.fixture(scope="module")
def run(folder):
    return jfi.load_run(folder / "run")


@pytest.fixture(scope="module")
def wanted(run) -> np.ndarray:
    """The logits that the trainer's batches give, of all splits, in the order of the table."""
    dataset, logits = load_dataset(run.config.data, run.schema), []
    for split in ("train", "validation", "test"):
        for batch in dataset.batches(split, 32):
            with torch.no_grad():
                logits += run.model(batch.dense_features, batch.sparse_features).squeeze(-1).tolist()
    return np.array(logits)


def scores(table: pa.Table) -> np.ndarray:
    return table.column("score").to_numpy()


def test_a_column_of_events_too_shares_their_table_and_no_context_is_attended_with(run):
    names = {table.name: table.feature_names for table in table_configs(run.model).values()}
    assert names["device"] == ["device", "history_device"]
    assert names["place"] == ["place"] and names["tags"] == ["tags"]
    in_collection = {name.split(".")[-2] for name in table_configs(run.model) if "embedding_collection" in name}
    assert in_collection == {"item_id", "device"}
    assert run.model.sequence_arch.features[0].target_keys == ["item_id"]
    plain = build_model(dataclasses.replace(run.config.model, pooling="none"), run.config.encoder, run.schema)
    assert {table.name: table.feature_names for table in table_configs(plain).values()} == {
        name: [name] for name in ("item_id", "device", "place", "tags")
    }


def test_predict_and_evaluate_give_what_the_trainer_gives(run, folder, wanted, tmp_path, monkeypatch):
    assert wanted.std() > 0.01
    np.testing.assert_allclose(scores(run.predict(folder / "table.csv")), wanted, atol=ROUNDING)
    log = write(tmp_path / "log.csv", [row(i) for i in range(270)], without=("place", "tags", "price"))
    test = write(tmp_path / "test.csv", [row(i) for i in range(270, COUNT)])
    monkeypatch.setattr(table_blocks, "BLOCK", 7)
    monkeypatch.setattr(coded.blocks, "__defaults__", (30,))
    np.testing.assert_allclose(scores(run.predict(test, history=log)), wanted[270:], atol=ROUNDING)
    metrics = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()][-1]
    overall = run.evaluate(test, history=log)["overall"]
    for name in ("loss", "ne", "auc", "user_auc"):
        assert overall[name] == pytest.approx(metrics[name], abs=1e-5), name


def test_each_column_of_the_context_changes_the_score_of_its_row_alone(run, wanted, tmp_path):
    for column, value in (("place", "p1"), ("tags", "b"), ("price", 24.5)):
        rows = [row(i) for i in range(COUNT)]
        rows[200][HEADER.index(column)] = value
        found = scores(run.predict(write(tmp_path / "changed.csv", rows)))
        others = np.arange(COUNT) != 200
        assert abs(found[200] - wanted[200]) > 10 * ROUNDING, column
        np.testing.assert_allclose(found[others], wanted[others], atol=ROUNDING)


@pytest.mark.parametrize("column", ["device", "place", "tags", "price"])
def test_rows_to_score_need_the_columns(run, tmp_path, column):
    new = write(tmp_path / "new.csv", [row(i) for i in range(290, COUNT)], without=(column, "clicked"))
    with pytest.raises(DataError, match=rf"new\.csv: no column '{column}'"):
        run.predict(new)


def test_the_log_needs_the_columns_of_events_alone(run, tmp_path):
    log = write(tmp_path / "log.csv", [row(i) for i in range(290)], without=("device",))
    with pytest.raises(DataError, match=r"log\.csv: no column 'device'"):
        run.predict(write(tmp_path / "new.csv", [row(i) for i in range(290, COUNT)]), history=log)


def test_a_run_on_prepared_data_is_the_run_on_the_table(run, folder, tmp_path):
    data = config_of(folder / "table.csv", tmp_path / "run").data
    prepare_dataset(data, tmp_path / "prepared", show=False)
    config = config_of(folder / "table.csv", tmp_path / "run")
    train(dataclasses.replace(config, data=prepared_config(tmp_path / "prepared")))
    again = jfi.load_run(tmp_path / "run").model.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in run.model.state_dict().items())


def test_positives_are_evaluated_against_negatives_of_the_same_context(tmp_path):
    rows = [[f"u{i % 30}", f"i{(i * 7 + i // 30) % 40}", *row(i)[2:]] for i in range(COUNT)]
    table = write(tmp_path / "table.csv", rows)
    config = config_of(table, tmp_path / "run", label=None, negatives=3)
    config.training.ranking = "full"
    metrics = train(config).test
    log, test = write(tmp_path / "log.csv", rows[:270]), write(tmp_path / "test.csv", rows[270:])
    overall = jfi.load_run(tmp_path / "run").evaluate(test, history=log)["overall"]
    assert 0 < metrics["hr@10_full"] < 1
    for name in ("loss", "hr@10_full", "ndcg@10_full"):
        assert overall[name] == pytest.approx(metrics[name], abs=1e-5), name
    # A tie of one of the 30 positives with one of the 90 negatives may be broken by rounding.
    assert overall["auc"] == pytest.approx(metrics["auc"], abs=2 / (30 * 90))


def test_a_changed_value_is_seen_on_resume(folder, tmp_path):
    table = write(tmp_path / "table.csv", [row(i) for i in range(COUNT)])
    config = config_of(table, tmp_path / "run")
    train(config)
    rows = [row(i) for i in range(COUNT)]
    rows[3][HEADER.index("price")] = 1
    write(table, rows)
    with pytest.raises(ConfigError, match=r"table\.csv has changed; restore it"):
        resume(tmp_path / "run")


def test_a_warm_start_keeps_the_rows_of_known_values_and_refuses_other_columns(run, folder, tmp_path):
    rows = [[*row(i)[:5], "a new place" if i % 11 == 5 else row(i)[5], *row(i)[6:]] for i in range(COUNT)]
    config = config_of(write(tmp_path / "new.csv", rows), tmp_path / "run")
    config.training.warm_start, config.training.rows_after = str(folder / "run"), None
    config.optimizer.dense.learning_rate = config.optimizer.embeddings.learning_rate = 1e-12
    config.optimizer.ema_decay = None
    train(config)
    new = jfi.load_run(tmp_path / "run")
    name = "embedding_bag_collection.embedding_bags.place.weight"
    before, after = (
        dict(zip(one.schema.encodings.vocabularies["place"].values, one.model.state_dict()[name][1:], strict=True))
        for one in (run, new)
    )
    assert "a new place" in after and len(before.keys() & after.keys()) > 8
    for value in before.keys() & after.keys():
        torch.testing.assert_close(after[value], before[value], atol=1e-6, rtol=0)
    for change, message in (
        ({"context_categorical": ["device", "tags"]}, "'place' is an input that this run lacks"),
        ({"context_dense": []}, "'number price' is an input that this run lacks"),
    ):
        config = config_of(folder / "table.csv", tmp_path / "other", **change)
        config.training.warm_start, config.training.rows_after = str(folder / "run"), None
        with pytest.raises(ConfigError, match=message):
            train(config)


def test_embeddings_from_a_file_fill_the_table(folder, tmp_path):
    vectors = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    pyarrow.parquet.write_table(pa.table({"id": ["p0", "p10"], "vector": list(vectors)}), tmp_path / "places.parquet")
    config = config_of(folder / "table.csv", tmp_path / "run")
    config.model.pretrained = {"place": PretrainedConfig(str(tmp_path / "places.parquet"))}
    train(config)
    saved = jfi.load_run(tmp_path / "run")
    values = list(saved.schema.encodings.vocabularies["place"].values)
    rows = saved.model.state_dict()["embedding_bag_collection.embedding_bags.place.weight"]
    for value, vector in zip(("p0", "p10"), vectors, strict=True):
        assert rows[values.index(value) + 1].tolist() == vector.tolist()


@pytest.mark.parametrize(
    ("kind", "batching"), [("context_categorical", "sample"), ("context_dense", "sample"), (None, "user")]
)
def test_a_signal_that_only_the_context_has_is_learnt(tmp_path, kind, batching):
    """The label depends on the row's own value alone, which no earlier row tells."""
    draw = random.Random(0)
    rows = []
    for i in range(3000):
        shown = draw.randrange(2)
        clicked = int(draw.random() < (0.85 if shown else 0.15))
        rows.append([f"u{draw.randrange(40)}", f"i{draw.randrange(30)}", 60 * i, clicked, shown, "p", "", shown])
    table = write(tmp_path / "table.csv", rows)
    none = {"event_categorical": ["device", "clicked"], "context_categorical": [], "context_dense": []}
    none |= {"batching": batching, "user_categorical": ["user_id"]}
    every = {"context_categorical": ["device"], "context_dense": ["price"]}
    auc = {}
    for name, settings in (("without", none), ("with", none | ({kind: every[kind]} if kind else every))):
        config = config_of(table, tmp_path / name, separators={}, **settings)
        config.optimizer = OptimizerConfig(OptimizerGroup("adam", 3e-3), OptimizerGroup("adagrad", 0.05))
        config.training.epochs = 2
        auc[name] = train(config).test["auc"]
    # The best AUC that is possible is 0.85.
    assert auc["with"] > 0.8
    assert 0.4 < auc["without"] < 0.6
