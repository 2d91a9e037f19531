"""Columns with names that a module cannot have, in every role of a run."""

import csv
from pathlib import Path

import pytest
from torch import nn

import jfi
from jfi.data import DataConfig, FeatureConfig
from jfi.data.schema.schema import table_name
from jfi.training import Config, ModelConfig, TrainingConfig, resume, train

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
    features = [FeatureConfig(name, *role) for role, name in names.items() if isinstance(role, tuple)]
    features.append(FeatureConfig("get", "event", cross=[names["item_id"], names["event", "category"]]))
    data = DataConfig(
        interactions=str(folder / "table.csv"),
        user=names["user_id"],
        item=names["item_id"],
        timestamp=names["time"],
        label=f"'{names['label']}'",
        weight=names["weight"],
        group=names["group"],
        features=features,
        num_quantiles=4,
    )
    model = ModelConfig(embedding_dim=8, num_heads=2, dense_arch=[8], over_arch=[8], bias="history_age")
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
    resume(tmp_path / "run")


def test_tables_of_different_columns_have_different_names():
    columns = [*dir(nn.ModuleDict()), *NAMES, *(table_name(name) for name in NAMES)]
    assert len({*map(table_name, columns)}) == len({*columns})
    for column in columns:
        nn.ModuleDict().add_module(table_name(column), nn.Identity())
