"""Permutation importance of a run's inputs, attention weights of rows, and tables of pandas."""

import json
from pathlib import Path

import commands
import numpy as np
import pyarrow as pa
import pytest
import torch
from own_table import HEADER, config_of, row, write_table
from worker import without_pictures

import jfi
from jfi.data import DataError
from jfi.training import ConfigError, resume, train

COUNT = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("inspection")
    rows = [row(i) for i in range(COUNT)]
    for i, line in enumerate(rows):  # the label follows from the genre, which no other column tells
        line[4] = f"g{i * i % 7 % 2}"
        line[3] = int(line[4] == "g1")
    write_table(path / "table.csv", rows)
    write_table(path / "new.csv", rows[-60:])
    config = config_of(path / "table.csv", path / "run", epochs=6)
    # Of the context, since an item has the genre of its first row.
    config.data.features = [one for one in config.data.features if one.name != "genre"]
    config.data.features.append(jfi.data.FeatureConfig("genre", "context"))
    config.optimizer.embeddings.learning_rate = 0.5
    with without_pictures():
        train(config)
    return path


@pytest.fixture(scope="module")
def run(folder):
    return jfi.load_run(folder / "run")


def test_the_input_that_tells_the_label_matters_most(run, folder):
    found = run.evaluate(folder / "table.csv", importance=True)["importance"]
    assert found["metric"] == "auc" and found["samples"] == COUNT
    own = run.evaluate(folder / "table.csv")["overall"]["auc"]
    assert found["value"] == pytest.approx(own, abs=1e-9) and own > 0.9
    drops = found["drops"]
    assert next(iter(drops)) == "context genre" and drops["context genre"] > 0.3
    assert list(drops.values()) == sorted(drops.values(), reverse=True)
    assert {*drops} == {
        "context genre",
        "history",
        "history timestamp",
        "history item_id",
        "history seconds",
        "history tags",
        "item item_id",
        "number price",
        "user user_id",
    }
    assert run.evaluate(folder / "table.csv", importance=True)["importance"] == found


def test_an_input_that_the_model_does_not_read_has_no_importance(run, folder):
    with torch.no_grad():
        table = next(p for name, p in run.model.named_parameters() if "user_id" in name)
        kept, table.data = table.data.clone(), torch.zeros_like(table)
        found = run.evaluate(folder / "table.csv", importance=True)["importance"]
        table.data = kept
    assert found["drops"]["user user_id"] == 0


def test_evaluate_prints_and_writes_the_importance(run, folder, tmp_path, capsys):
    options = [
        "--run",
        folder / "run",
        "--interactions",
        folder / "table.csv",
        "--importance",
        "--out",
        tmp_path / "m.json",
    ]
    assert commands.call("evaluate", *options) == 0
    found = json.loads((tmp_path / "m.json").read_text())["importance"]
    assert found == run.evaluate(folder / "table.csv", importance=True)["importance"]
    drops = found["drops"]
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.endswith("falls where an input is shuffled"))
    assert [line.rsplit(maxsplit=1)[0].strip() for line in lines[at + 1 :][: len(drops)]] == list(drops)


def test_importance_needs_labels(run, folder):
    lines = (folder / "new.csv").read_text().splitlines()
    rows = [dict(zip(HEADER.split(","), line.split(","), strict=True)) for line in lines[1:]]
    for one in rows:
        one["clicked"] = None
    with pytest.raises(DataError, match="no row to evaluate has a label"):
        run.evaluate(pa.Table.from_pylist(rows), importance=True)


def test_attention_has_the_weights_of_the_events(run, folder):
    found = run.attention(folder / "new.csv", history=folder / "table.csv").to_pydict()
    heads = [name for name in found if name.startswith("weight_")]
    assert heads == ["weight_1", "weight_2"]
    rows, events = np.array(found["row"]), np.array(found["event"])
    lines = [line.split(",") for line in (folder / "new.csv").read_text().splitlines()[1:]]
    log = [line.split(",") for line in (folder / "table.csv").read_text().splitlines()[1:]]
    for number, line in enumerate(lines):
        own = rows == number
        before = [other for other in log if other[0] == line[0] and int(other[2]) < int(line[2])]
        assert events[own].tolist() == list(range(len(before)))
        assert np.array(found["item"])[own].tolist() == [other[1] for other in before]
        assert np.array(found["time"])[own].tolist() == [float(other[2]) for other in before]
        for name in heads:
            assert np.array(found[name])[own].sum() == pytest.approx(1, abs=1e-5)
    small = run.attention(folder / "new.csv", history=folder / "table.csv", batch_size=7).to_pydict()
    assert small["item"] == found["item"] and small["weight_1"] == pytest.approx(found["weight_1"], abs=1e-6)


def test_a_data_frame_gives_a_data_frame(run, folder):
    pandas = pytest.importorskip("pandas")
    scores = run.predict(pandas.read_csv(folder / "new.csv"), history=folder / "table.csv")
    assert isinstance(scores, pandas.DataFrame)
    assert (
        scores["score"].tolist() == run.predict(folder / "new.csv", history=folder / "table.csv")["score"].to_pylist()
    )


def test_a_run_prints_in_five_lines(run, folder):
    lines = repr(run).splitlines()
    assert len(lines) == 5 and str(folder / "run") in lines[0] and "context" not in lines[0]
    assert "label (binary)" in lines[3] and "parameters, width 8, attention over at most" in lines[4]


def test_a_parent_folder_names_its_newest_run(folder):
    with pytest.raises(ConfigError, match=f"not a run folder, .* is missing; the newest run in it is {folder / 'run'}"):
        resume(folder)


def test_groups_by_a_column_of_a_table_of_items_are_refused(tmp_path, folder):
    (tmp_path / "items.csv").write_text("item_id,price,shelf\n" + "".join(f"i{i},{i},s\n" for i in range(11)))
    run = jfi.load_run(folder / "run")
    with pytest.raises(
        DataError, match=r"no column 'shelf'; groups are by columns of the interactions, and it is one of"
    ):
        run.evaluate(folder / "new.csv", by=["shelf"], items=tmp_path / "items.csv")
