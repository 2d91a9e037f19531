"""Embeddings from a file: where they go, what stays frozen, and runs that go on without the file."""

import dataclasses
from pathlib import Path

import numpy as np
import own_table
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from test_run import assert_same_run, killed_after, tiny

import jfi.training.model.build_model
from jfi.data import load_dataset
from jfi.training import Config, ConfigError, resume, train
from jfi.training.model.pretrained import read_pretrained
from jfi.training.model_config import PretrainedConfig
from jfi.training.run.saved_run import load_run

LOG_EVERY = 4

# Items 0 to 29 of the 40 of the table, in another order, and one that it lacks.
IDS = [*map(str, range(29, -1, -1)), "nobody"]
VECTORS = np.random.default_rng(0).normal(size=(31, 8)).astype(np.float32)


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    for name in ("draw_curves", "draw_attention"):
        monkeypatch.setattr(f"jfi.training.run.plots.{name}", lambda *_: None)


def parquet(folder: Path, vectors: np.ndarray = VECTORS, ids: list | None = None) -> str:
    path = folder / "items.parquet"
    pyarrow.parquet.write_table(pa.table({"id": IDS if ids is None else ids, "vector": list(vectors)}), path)
    return str(path)


def config_of(folder: Path, name: str, path: str, frozen: bool = True, **training: object) -> Config:
    config = tiny(folder / name, **{"epochs": 2, **training})
    model = dataclasses.replace(config.model, pretrained={"item": PretrainedConfig(path, frozen=frozen)})
    return dataclasses.replace(config, model=model)


def item_rows(run: Path, column: str = "item") -> tuple[torch.Tensor, list[str]]:
    """The trained table of the items, without row 0, and the value of each row."""
    saved = load_run(run)
    (name,) = (name for name in saved.model.state_dict() if f".{column}." in name)
    return saved.model.state_dict()[name][1:], list(saved.schema.encodings.vocabularies[column].values)


def test_frozen_rows_stay_and_others_are_trained(tmp_path, monkeypatch):
    config = config_of(tmp_path, "run", parquet(tmp_path), epochs=1)
    config.optimizer.ema_decay = None
    fresh = jfi.training.model.build_model.draw_tables
    drawn = {}

    def noting(state, tables, seed):
        fresh(state, tables, seed)
        drawn.update({name: value.clone() for name, value in state.items() if ".item." in name})

    monkeypatch.setattr("jfi.training.run.state.draw_tables", noting)
    train(config)
    rows, values = item_rows(tmp_path / "run")
    (initial,) = (value[1:] for value in drawn.values())
    given = dict(zip(IDS, torch.from_numpy(VECTORS), strict=True))
    assert {"30", "5"} <= set(values)
    for row, start, value in zip(rows, initial, values, strict=True):
        if value in given:
            assert torch.equal(row, given[value])
        else:
            assert not torch.equal(row, start)


def test_rows_that_are_not_frozen_are_trained_from_the_file_on(tmp_path):
    train(config_of(tmp_path, "run", parquet(tmp_path), frozen=False, epochs=1))
    rows, values = item_rows(tmp_path / "run")
    given = torch.from_numpy(np.stack([VECTORS[IDS.index(v)] for v in values if v in IDS]))
    trained = rows[[v in IDS for v in values]]
    assert not torch.equal(trained, given)
    assert torch.nn.functional.cosine_similarity(trained, given).mean() > 0.9


@pytest.mark.parametrize("frozen", [True, False])
def test_what_a_warm_run_knew_keeps_its_row_and_the_file_fills_the_new_ones(tmp_path, frozen):
    rows = [own_table.row(i) for i in range(200)]
    own_table.write_table(tmp_path / "old.csv", [row for row in rows if row[1] not in ("i3", "i7")])
    own_table.write_table(tmp_path / "new.csv", rows)
    train(own_table.config_of(tmp_path / "old.csv", tmp_path / "old", epochs=1))
    config = own_table.config_of(
        tmp_path / "new.csv", tmp_path / "run", epochs=1, warm_start=str(tmp_path / "old"), rows_after=None
    )
    given = {item: torch.randn(8) for item in ("i3", "i2", "i9", "other")}  # i7 is new too, but not in the file
    path = parquet(tmp_path, np.stack([x.numpy() for x in given.values()]), list(given))
    config.model.pretrained = {"item_id": PretrainedConfig(path, frozen=frozen)}
    train(config)
    (before, known), (after, values) = (item_rows(tmp_path / name, "item_id") for name in ("old", "run"))
    before = dict(zip(known, before, strict=True))
    assert set(values) - set(known) == {"i3", "i7"}
    for row, value in zip(after, values, strict=True):
        start = before.get(value, given.get(value))
        # Frozen are the rows of all values of the file, wherever they come from.
        kept = frozen and value in given
        assert start is None or torch.equal(row, start) == kept, value
        if value == "i3":
            assert (row - start).abs().max() < 0.5  # an unfrozen row begins at the file's


def test_a_run_goes_on_to_the_same_bits_without_the_file(tmp_path, monkeypatch):
    path = parquet(tmp_path)
    train(config_of(tmp_path, "whole", path))
    killed_after(5, config_of(tmp_path, "run", path), monkeypatch)
    Path(path).unlink()
    resume(tmp_path / "run")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def schema():
    return load_dataset(tiny(None).data).schema


def test_rows_are_those_of_the_values_that_the_file_has(tmp_path):
    data = schema()
    values = list(data.encodings.vocabularies["item"].values)
    rows, vectors = read_pretrained("item", PretrainedConfig(parquet(tmp_path)), data, 8)
    assert [values[row - 1] for row in rows] == [value for value in values if value in IDS]
    assert torch.equal(vectors, torch.stack([torch.from_numpy(VECTORS[IDS.index(values[row - 1])]) for row in rows]))


def test_another_width_is_projected(tmp_path):
    data = schema()
    rows, wide = read_pretrained("item", PretrainedConfig(parquet(tmp_path)), data, 11)
    assert wide.shape == (len(rows), 11) and not wide[:, 8:].any()
    # Vectors in a plane keep their distances when they are projected to two components.
    plane = VECTORS[:, :2] @ np.random.default_rng(1).normal(size=(2, 8)).astype(np.float32)
    _, narrow = read_pretrained("item", PretrainedConfig(parquet(tmp_path, plane)), data, 2)
    _, whole = read_pretrained("item", PretrainedConfig(parquet(tmp_path, plane)), data, 8)
    assert torch.allclose(torch.pdist(narrow), torch.pdist(whole), atol=1e-4)


@pytest.mark.parametrize(
    ("column", "change", "message"),
    [
        ("item", {"path": "no.parquet"}, r"model.pretrained.item: \S*no.parquet: "),
        ("brand", {}, "model.pretrained.brand: no such column with a vocabulary; known: item, category, rating"),
        ("category", {"ids": ["x", "y"]}, "has none of the values of 'category'"),
        ("item", {"ids": ["1", "1"]}, r"items\.parquet:2: 'id' 1 is already in"),
    ],
)
def test_a_wrong_file_is_refused_with_the_setting(tmp_path, column, change, message):
    ids = change.pop("ids", None)
    path = parquet(tmp_path, VECTORS if ids is None else VECTORS[:2], ids)
    with pytest.raises(ConfigError, match=message):
        read_pretrained(column, PretrainedConfig(**{"path": path, **change}), schema(), 8)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"id": ["1"], "name": ["a"]}, "has the columns id, name; it must have two, the values of 'item' and lists"),
        ({"id": ["1"], "a": [[1.0]], "b": [[1.0]]}, "has the columns id, a, b; it must have two"),
        ({"vector": [[1.0]], "key": pa.array([None], pa.string())}, r"x\.parquet:1: empty 'key'"),
        ({"vector": [[1.0], None], "key": ["1", "2"]}, r"x\.parquet:2: has no vector"),
        ({"vector": [[1.0], [1.0, 2.0]], "key": ["1", "2"]}, r"x\.parquet:2: 'vector' has 2 numbers, and that of"),
        ({"vector": [[1.0], [float("nan")]], "key": ["1", "2"]}, "holds a number that is missing or not finite"),
    ],
)
def test_a_parquet_file_has_a_column_of_values_and_one_of_vectors(tmp_path, columns, message):
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "x.parquet")
    with pytest.raises(ConfigError, match=message):
        read_pretrained("item", PretrainedConfig(str(tmp_path / "x.parquet")), schema(), 8)


def test_nothing_is_written_for_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        train(config_of(tmp_path, "run", str(tmp_path / "no.parquet")))
    assert not (tmp_path / "run").exists()
