"""Runs with the statistics of the past that the defaults choose: nothing but a table is given, nor later a history."""

import dataclasses
import logging
from pathlib import Path

import commands
import pandas as pd
import pytest
from data_configs import regression
from own_table import config_of, ends_after_the_first_checkpoint, row, write_table
from worker import without_pictures

import jfi
from jfi.data import DataConfig, DataError
from jfi.data.prepared.prepare import prepare_dataset
from jfi.events.groups import GROUPS
from jfi.training import Config, ConfigError, resume, train
from jfi.training.config_parser import load_config
from jfi.training.run.saved_run import SavedRun

ROWS = [row(i) for i in range(240)]
#: The first row of the test split.
TEST = 216


@pytest.fixture(autouse=True)
def _no_pictures():
    with without_pictures():
        yield


def default_run(folder: Path, name: str = "run", data: dict | None = None, **training: object) -> Config:
    """The config of a run on all rows, whose file is in the folder."""
    write_table(folder / "all.csv", ROWS)
    config = config_of(folder / "all.csv", folder / name, **training)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **{"statistics": "auto", **(data or {})}))


def check_test_metrics(run: SavedRun, test: dict[str, float], rows: object, **tables: object) -> None:
    """The rows of the test split have the metrics that training reports."""
    overall = run.evaluate(rows, **tables)["overall"]
    assert overall["samples"] == len(ROWS) - TEST
    for name in ("loss", "auc"):
        assert overall[name] == pytest.approx(test[name], abs=1e-5), name


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run, and what training returned."""
    folder = tmp_path_factory.mktemp("defaults")
    with without_pictures():
        result = train(default_run(folder))
    write_table(folder / "log.csv", ROWS[:TEST])
    write_table(folder / "test.csv", ROWS[TEST:])
    return folder, result


def test_the_log_and_the_config_name_the_groups(tmp_path, capsys):
    train(default_run(tmp_path, epochs=1))
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("defaults: "))
    assert line.startswith(f"defaults: data.statistics: {list(GROUPS)}, optimizer.embeddings.weight_decay: ")
    config = load_config(tmp_path / "run/config.yaml")
    assert config.data.statistics == list(GROUPS)
    assert jfi.load_run(tmp_path / "run").schema.dense_names == ["price", *config.data.statistics_columns()]
    train(
        default_run(tmp_path, "regression", {"label": None, "labels": regression("seconds"), "features": []}, epochs=1)
    )
    assert "defaults: data.statistics: []" in capsys.readouterr().out
    assert jfi.load_run(tmp_path / "regression").schema.dense_names == []


def test_prediction_needs_no_history(trained, caplog):
    """The run's own interactions are the history; the rows to score are in it too, and count once."""
    folder, result = trained
    run = jfi.load_run(folder / "run")
    with caplog.at_level(logging.WARNING):
        check_test_metrics(run, result.test, folder / "test.csv")
    note = f"statistics are made of the run's own interactions, since no history is given: {folder / 'all.csv'}"
    assert note in caplog.text
    write_table(folder / "new.csv", [["new", *ROWS[-1][1:]]])
    run.predict(folder / "new.csv")
    assert "no history: is the log" not in caplog.text
    check_test_metrics(run, result.test, folder / "test.csv", history=folder / "log.csv")
    scores = run.predict(folder / "test.csv")["score"].to_numpy()
    assert scores == pytest.approx(
        run.predict(folder / "test.csv", history=folder / "log.csv")["score"].to_numpy(), abs=1e-5
    )
    assert "number past_item_rate" in run.evaluate(folder / "test.csv", importance=True)["importance"]["drops"]
    assert set(run.attention(folder / "test.csv")["row"].to_pylist()) == set(range(len(ROWS) - TEST))
    out = folder / "scores.csv"
    commands.run("predict", "--run", folder / "run", "--interactions", folder / "test.csv", "--out", out)
    assert pd.read_csv(out)["score"].to_numpy() == pytest.approx(scores, abs=1e-5)
    with pytest.raises(ConfigError, match=r"--out .*all.csv: data.interactions names this file too"):
        run.predict(folder / "test.csv", out=folder / "all.csv")


def test_files_that_moved_cannot_be_the_history(tmp_path):
    train(default_run(tmp_path, epochs=1))
    run = jfi.load_run(tmp_path / "run")
    moved, few = (tmp_path / "all.csv").rename(tmp_path / "moved.csv"), tmp_path / "few.csv"
    write_table(few, ROWS[TEST:])
    advice = (
        r"no history is given for data.statistics, and the run's own interactions are not there; give a "
        r"table with the past of all users as the history \(`history`, --history\), or train the run with "
        r"data.statistics: \[\]"
    )
    for call in (run.predict, run.evaluate, run.attention):
        with pytest.raises(DataError, match=advice):
            call(few)
    assert run.predict(few, history=moved).num_rows == len(ROWS) - TEST


def test_a_data_frame_is_given_again(tmp_path):
    write_table(tmp_path / "all.csv", ROWS)
    frame = pd.read_csv(tmp_path / "all.csv")
    result = train(default_run(tmp_path, data={"interactions": frame}))
    run = jfi.load_run(tmp_path / "run")
    with pytest.raises(DataError, match=r"own interactions are not there; .* \(`history`, --history\), or train"):
        run.predict(frame[TEST:])
    check_test_metrics(run, result.test, frame[TEST:], history=frame)
    assert len(run.predict(frame[TEST:], history=frame)) == len(ROWS) - TEST


def test_a_run_goes_on_as_if_it_had_not_ended(trained):
    folder, result = trained
    with ends_after_the_first_checkpoint():
        train(default_run(folder, "ended"))
    assert resume(folder / "ended").test == result.test
    # With the tables prepared by the run's schema too.
    with ends_after_the_first_checkpoint():
        train(default_run(folder, "again"))
    commands.run("prepare", "--run", folder / "again", "--out", folder / "prepared")
    assert resume(folder / "again", prepared=folder / "prepared").test == result.test


def test_a_warm_start_has_the_same_statistics(trained, tmp_path):
    folder, _ = trained
    train(default_run(tmp_path, "warm", warm_start=str(folder / "run"), rows_after=None, epochs=1))
    assert jfi.load_run(tmp_path / "warm").schema.dense_names == jfi.load_run(folder / "run").schema.dense_names
    without = default_run(tmp_path, "plain", {"statistics": []}, epochs=1)
    train(without)
    message = (
        r"'number past_item_rate' is an input that this run has, but not .*; use the same columns and data.statist"
    )
    with pytest.raises(ConfigError, match=message):
        train(default_run(tmp_path, "again", warm_start=str(tmp_path / "plain"), rows_after=None))


def test_files_of_all_splits_are_the_history(trained, tmp_path):
    """Of `split: files` and of a prepared dataset of such files, whose manifest names them."""
    for name, rows in (("train", ROWS[:192]), ("validation", ROWS[192:TEST]), ("test", ROWS[TEST:])):
        write_table(tmp_path / f"{name}.csv", rows)
    names = {"interactions": "train", "validation": "validation", "test": "test"}
    files = {setting: str(tmp_path / f"{name}.csv") for setting, name in names.items()}
    config = default_run(tmp_path, "files", {**files, "split": "files"})
    result = train(config)
    check_test_metrics(jfi.load_run(tmp_path / "files"), result.test, tmp_path / "test.csv")
    prepare_dataset(config.data, tmp_path / "prepared", show=False)
    data = DataConfig(prepared=str(tmp_path / "prepared"))
    config = dataclasses.replace(config.with_training(run_dir=str(tmp_path / "run")), data=data)
    assert train(config).test == pytest.approx(result.test)
    check_test_metrics(jfi.load_run(tmp_path / "run"), result.test, tmp_path / "test.csv")
    resume(tmp_path / "run")


def test_nothing_changes_without_statistics(tmp_path, caplog):
    """No history is read: users have no events but those of the rows themselves."""
    train(default_run(tmp_path, data={"statistics": []}, epochs=1))
    run = jfi.load_run(tmp_path / "run")
    write_table(tmp_path / "one.csv", ROWS[TEST : TEST + 1])
    with caplog.at_level(logging.WARNING):
        assert run.attention(tmp_path / "one.csv").num_rows == 0
    assert "the history" not in caplog.text.replace("no history", "") and "own interactions" not in caplog.text


def test_a_log_that_statistics_are_made_of_has_the_label(trained, tmp_path):
    folder, _ = trained
    run = jfi.load_run(folder / "run")
    log = pd.read_csv(folder / "log.csv")
    label = run.config.data.label_columns()[0]
    with pytest.raises(DataError, match=f"no column '{label}'"):
        run.predict(str(folder / "test.csv"), history=log.drop(columns=label))


def test_prepare_names_the_groups_of_auto(trained, tmp_path, capsys):
    folder, _ = trained
    commands.run(
        "prepare", "--config", folder / "run/config.yaml", "--data.statistics", "auto", "--out", tmp_path / "out"
    )
    assert f"defaults: data.statistics: {list(GROUPS)}" in capsys.readouterr().out
