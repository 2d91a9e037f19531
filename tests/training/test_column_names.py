"""Columns with names that a module cannot have, in every role of a run, with tables of several widths."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import jfi
from jfi.data import DataConfig, FeatureConfig, load_dataset
from jfi.serving.dataset_schema import schema_of
from jfi.serving.export import Export
from jfi.serving.schema import Limits
from jfi.serving.scorer import Scorer
from jfi.training import Config, ConfigError, ModelConfig, TrainingConfig, resume, train
from jfi.training.model.build_model import build_model
from jfi.utils.arguments import module_name

NAMES = ["type", "items", "values", "keys", "update", "to", "pop", "training", "a.b", "forward", "50%", "_modules", "T"]
ROLES = [
    "user_id",
    "item_id",
    "time",
    "label",
    "weight",
    "group",
    ("user", "category"),
    ("item", "category"),
    ("item", "number"),
    ("event", "category"),
    ("event", "number"),
    ("context", "category"),
    ("context", "number"),
]
#: The tables that events have share a width; those of the user and of the context have their own.
WIDTHS = {("user", "category"): 4, ("context", "category"): 6}
EVENTS = 12


def values(role: object, i: int) -> object:
    item, user = i * 7 % 11, i % 6
    given = {"user_id": f"u{user}", "item_id": f"i{item}", "time": 60 * i, "label": (i + item) % 3 % 2, "weight": 1.5}
    given |= {"group": f"g{i}", ("user", "category"): f"c{user % 2}", ("item", "category"): f"k{item % 3}"}
    given |= {("item", "number"): item / 2, ("event", "number"): i % 50, ("context", "number"): i % 9}
    return given.get(role, f"v{i % 4}")


def config_of(folder: Path, names: dict) -> Config:
    with open(folder / "table.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names.values())
        writer.writerows([values(role, i) for role in names] for i in range(120))
    features = [FeatureConfig(names["item_id"], "item", width=EVENTS, max_values=7)]
    features.append(FeatureConfig("get", "event", width=EVENTS, cross=[names["item_id"], names["event", "category"]]))
    for role, name in names.items():
        if isinstance(role, tuple):
            has_table = role[1] == "category" or role[0] == "event"
            features.append(FeatureConfig(name, *role, width=WIDTHS.get(role, EVENTS) if has_table else None))
    data = DataConfig(
        interactions=str(folder / "table.csv"),
        user=names["user_id"],
        item=names["item_id"],
        timestamp=names["time"],
        label=f"'{names['label']}'",
        weight=names["weight"],
        request_id=names["group"],
        features=features,
    )
    model = ModelConfig(
        embedding_dim=8, num_heads=2, dense_arch=[8], over_arch=[8], bias="history_age", cross_layers=0, dropout=0.0
    )
    training = TrainingConfig(run_dir=str(folder / "run"), epochs=1, batch_size=32, device="cpu", patience=None)
    return Config(data=data, model=model, training=training)


@pytest.mark.parametrize(
    "shift", [0, 5, *(pytest.param(i, marks=pytest.mark.slow) for i in range(len(ROLES)) if i not in (0, 5))]
)
def test_a_run_with_columns_named_like_attributes_of_a_module(tmp_path, shift):
    names = {role: NAMES[(i + shift) % len(NAMES)] for i, role in enumerate(ROLES)}
    config = config_of(tmp_path, names)
    train(config)
    run = jfi.load_run(tmp_path / "run")
    scores = run.predict(tmp_path / "table.csv")
    assert scores.num_rows == 120 and {names["user_id"], names["item_id"], names["time"]} < {*scores.column_names}
    result = resume(tmp_path / "run")
    assert resume(tmp_path / "run").test == result.test
    tables = {name: tuple(value.shape)[1] for name, value in run.model.state_dict().items() if "embedding" in name}
    assert sorted({*tables.values()}) == [4, 6, EVENTS]


@pytest.mark.slow  # compiling takes half a minute
def test_the_server_scores_it_as_predict_does(tmp_path):
    names = dict(zip(ROLES, NAMES, strict=True))
    config = config_of(tmp_path, names)
    config.data.statistics = []  # requests have none
    train(config)
    run = jfi.load_run(tmp_path / "run")
    schema = schema_of(run.config.data, run.schema, reads_history=True, reads_age=True)
    Export(run.model, schema, Limits(10, 30)).write(tmp_path / "artifact")
    requests, chosen = [], []
    for i in range(6, 120):
        past = [j for j in range(i) if values("user_id", j) == values("user_id", i)]
        history = [
            fields(names, j, "item_id", ("item", "category"), ("event", "category"), ("event", "number"))
            | {"age": 60 * (i - j)}
            for j in past
        ]
        roles = "item_id", ("item", "category"), ("item", "number"), ("context", "category"), ("context", "number")
        user = fields(names, i, ("user", "category"))
        requests.append({"user": user, "history": history, "candidates": [fields(names, i, *roles)]})
        chosen.append(i)
    scorer = Scorer(tmp_path / "artifact")
    found = [scores[0] for scores in scorer.score([scorer.reader.read(json.dumps(one).encode()) for one in requests])]
    wanted = run.predict(tmp_path / "table.csv").column("score").to_numpy()[chosen]
    assert np.std(wanted) > 1e-3
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def fields(names: dict, i: int, *roles: object) -> dict:
    return {names[role]: values(role, i) for role in roles}


def test_events_have_tables_of_one_width(tmp_path):
    names = dict(zip(ROLES, NAMES, strict=True))
    config = config_of(tmp_path, names)
    config.data.features[1].width = 16
    message = r"data\.features 'get': width is 16, must be that of 'items', 12, since the tables that events have"
    with pytest.raises(ConfigError, match=message):
        Config(config.data, config.model, training=config.training)
    Config(config.data, ModelConfig(pooling="none"))
    schema = load_dataset(config.data).schema
    with pytest.raises(ConfigError, match=r"width is 1., must be that of"):
        build_model(config.model, config.encoder, schema)


def test_tables_of_different_columns_have_different_names():
    columns = [*dir(nn.ModuleDict()), *NAMES, *(module_name(name) for name in NAMES)]
    assert len({*map(module_name, columns)}) == len({*columns})
    for column in columns:
        nn.ModuleDict().add_module(module_name(column), nn.Identity())
