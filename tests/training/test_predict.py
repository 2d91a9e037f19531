"""Scores of the rows of a table by a run, and their metrics."""

import csv
import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from data_configs import data_config, replace_data
from own_table import HEADER, config_of, new_row, row, write_table
from worker import without_pictures

import jfi
from jfi.data import DataError, load_dataset
from jfi.data.io import blocks as table_blocks
from jfi.data.prepared.scoring import ScoringRows, Sources
from jfi.data.prepared.stages import sort as external_sort
from jfi.data.prepared.stages.read import RowReader
from jfi.data.schema import columns as coded
from jfi.training import Config, ConfigError, ModelConfig, TrainingConfig, train
from jfi.training.config_parser import save_config
from jfi.training.metrics.label_metrics import Predictions
from jfi.training.metrics.unknown_values import UnknownShares

KEYS = ["user_id", "item_id", "timestamp"]
#: Of logits around 1 in batches of other sizes.
ROUNDING = 2e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("predict")
    write_table(path / "table.csv", [row(i) for i in range(300)])
    with without_pictures():
        train(config_of(path / "table.csv", path / "run"))
    return path


@pytest.fixture(scope="module")
def run(folder):
    return jfi.load_run(folder / "run")


@pytest.fixture(scope="module")
def wanted(run) -> dict[tuple, float]:
    """By user, item and time the logit that the trainer's batches give, of all splits."""
    dataset, logits = load_dataset(run.config.data, run.schema), []
    for split in ("train", "validation", "test"):
        for batch in dataset.batches(split, 32):
            with torch.no_grad():
                logits += run.model(batch.dense_features, batch.sparse_features).squeeze(-1).tolist()
    # Times are unique, and the splits are in their order.
    rows = [row(i) for i in range(300)]
    return {tuple(line[:3]): logit for line, logit in zip(rows, logits, strict=True)}


def by_key(table: pa.Table) -> dict[tuple, float]:
    user, item, time = (table.column(name).to_pylist() for name in KEYS)
    return {(u, i, int(t)): s for u, i, t, s in zip(user, item, time, table.column("score").to_pylist(), strict=True)}


def assert_scores(found: pa.Table, wanted: dict[tuple, float]) -> None:
    found = by_key(found)
    assert found.keys() <= wanted.keys()
    keys = list(found)
    np.testing.assert_allclose([found[key] for key in keys], [wanted[key] for key in keys], atol=ROUNDING, rtol=0)


def test_rows_of_a_user_share_a_timeline(run, folder, wanted, tmp_path):
    """A run by user scores by user: shuffled rows, a part of them history, a few to a batch."""
    config = dataclasses.replace(run.config, data=dataclasses.replace(run.config.data, batching="user"))
    shutil.copytree(folder / "run", tmp_path / "run")
    save_config(config, tmp_path / "run" / "config.yaml")  # scores do not depend on it, so the change is no fault
    run = jfi.load_run(tmp_path / "run")
    assert run.config.data.batching == "user"
    table = pa.csv.read_csv(folder / "table.csv")
    order = np.random.default_rng(0).permutation(300)
    for chosen in (order, order[:1], np.flatnonzero(np.arange(300) > 200)):
        rest = np.setdiff1d(np.arange(300), chosen)
        found = run.predict(table.take(chosen), history=table.take(rest) if len(rest) else None, batch_size=7)
        assert found.column("timestamp").to_pylist() == table.take(chosen).column("timestamp").to_pylist()
        assert_scores(found, wanted)


def test_predict_gives_the_logits_of_the_trainer(run, folder, wanted):
    scores = run.predict(folder / "table.csv")
    assert scores.column_names == [*KEYS, "score", "probability"]
    assert scores.num_rows == 300 and np.std(list(wanted.values())) > 0.01
    assert_scores(scores, wanted)
    # In the order of the table.
    assert scores.column("timestamp").to_pylist() == [str(60 * i) for i in range(300)]
    probability = 1 / (1 + np.exp(-scores.column("score").to_numpy()))
    np.testing.assert_allclose(scores.column("probability").to_numpy(), probability, rtol=1e-6)


def test_the_metrics_of_the_test_split_are_those_of_the_run(run, folder, tmp_path):
    log = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    write_table(tmp_path / "log.csv", [row(i) for i in range(270)])
    write_table(tmp_path / "test.csv", [row(i) for i in range(270, 300)])
    overall = run.evaluate(tmp_path / "test.csv", history=tmp_path / "log.csv")["overall"]
    for name in ("loss", "ne", "auc", "user_auc"):
        assert overall[name] == pytest.approx(log[-1][name], abs=1e-5), name


def test_histories_come_from_the_log_before_the_table(run, folder, tmp_path, wanted):
    write_table(tmp_path / "log.csv", [row(i) for i in range(200)][::-1])
    write_table(tmp_path / "new.csv", [row(i) for i in range(200, 300)])
    scores = run.predict(tmp_path / "new.csv", history=tmp_path / "log.csv")
    assert scores.num_rows == 100
    assert_scores(scores, wanted)
    alone = by_key(run.predict(tmp_path / "new.csv"))
    assert max(abs(score - wanted[key]) for key, score in alone.items()) > 100 * ROUNDING


def test_rows_that_the_history_has_too_are_one_event(run, folder, tmp_path, wanted, caplog, monkeypatch):
    """They keep what the history knows of them; the same event twice in the history alone is two."""
    assert_scores(run.predict(folder / "table.csv", history=folder / "table.csv"), wanted)
    message = "300 rows to score are in the history too; each counts as one event"
    assert caplog.messages == [message]
    write_table(tmp_path / "bare.csv", [[*row(i)[:6], "", ""] for i in range(300)])
    monkeypatch.setattr(coded.blocks, "__defaults__", (100,))
    assert_scores(run.predict(tmp_path / "bare.csv", history=folder / "table.csv"), wanted)
    assert caplog.messages == [message, message]
    write_table(tmp_path / "log.csv", [row(i) for i in range(200)] * 2)
    write_table(tmp_path / "new.csv", [row(i) for i in range(190, 300)])
    write_table(tmp_path / "rest.csv", [row(i) for i in range(200, 300)])
    twice = [run.predict(tmp_path / name, history=tmp_path / "log.csv") for name in ("rest.csv", "new.csv")]
    assert_scores(twice[0], by_key(twice[1]))
    assert caplog.messages[2:] == ["10 rows to score are in the history too; each counts as one event"]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_parts_and_blocks_of_any_size_give_the_same(run, folder, tmp_path, wanted, monkeypatch, kind):
    """The rows are read 7 at a time, and spread over as many files as there can be."""
    path = folder / "table.csv"
    if kind == "parquet":
        table = pa.csv.read_csv(path)
        pa.parquet.write_table(table, tmp_path / "table.parquet", row_group_size=11)
        path = tmp_path / "table.parquet"
    monkeypatch.setattr(table_blocks, "BLOCK", 7)
    monkeypatch.setattr(coded.blocks, "__defaults__", (1,))
    out = tmp_path / "scores.parquet"
    assert run.predict(path, out=out, batch_size=5).rows == 300
    scores = pa.parquet.read_table(out)
    assert [int(time) for time in scores.column("timestamp").to_pylist()] == [60 * i for i in range(300)]
    assert_scores(scores, wanted)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_users_are_the_same_in_parts_of_any_size(run, folder, monkeypatch):
    whole = run.evaluate(folder / "table.csv")["overall"]
    monkeypatch.setattr(coded.blocks, "__defaults__", (1,))
    parts = run.evaluate(folder / "table.csv")["overall"]
    assert parts["user_auc"] == pytest.approx(whole["user_auc"], abs=1e-6)


def test_an_item_has_the_columns_of_its_first_row_in_time(tmp_path, monkeypatch):
    """As in training, whichever part, block or table that row is in; of two rows at once that of the first user."""
    rows = [[*row(i)[:2], 60 * (i // 2 * 2), row(i)[3], f"g{i % 4}", i, *row(i)[6:]] for i in range(200)]
    rows[1][1] = rows[0][1]
    write_table(tmp_path / "table.csv", rows)
    with without_pictures():
        train(config_of(tmp_path / "table.csv", tmp_path / "run", epochs=1))
    run = jfi.load_run(tmp_path / "run")
    dataset = load_dataset(run.config.data, run.schema)
    batch = dataset.batches("test", 1000)[0]
    with torch.no_grad():
        wanted = run.model(batch.dense_features, batch.sparse_features).squeeze(-1).sort().values
    # The test split is the last 20 rows in time; the first rows of the items are at the end of the log.
    write_table(tmp_path / "log.csv", rows[:180][::-1])
    write_table(tmp_path / "test.csv", rows[180:])
    monkeypatch.setattr(table_blocks, "BLOCK", 7)
    monkeypatch.setattr(coded.blocks, "__defaults__", (30,))
    scores = run.predict(tmp_path / "test.csv", history=tmp_path / "log.csv").column("score").to_numpy()
    np.testing.assert_allclose(np.sort(scores), wanted, atol=ROUNDING, rtol=0)


def test_memory_is_bounded_by_the_blocks(run, tmp_path, monkeypatch):
    """No more than a block is read from Parquet at once, and the rows are sorted by the engine."""
    write_table(tmp_path / "table.csv", [[f"u{i % 97}", *row(i)[1:]] for i in range(2000)])
    pa.parquet.write_table(pa.csv.read_csv(tmp_path / "table.csv"), tmp_path / "table.parquet")
    monkeypatch.setattr(table_blocks, "BLOCK", 100)
    wanted = run.predict(tmp_path / "table.parquet")
    monkeypatch.setattr(coded.blocks, "__defaults__", (200,))
    sizes, append, connects, connect = [], RowReader.append, [], external_sort._connect
    monkeypatch.setattr(RowReader, "append", lambda s, table, *a: sizes.append(len(table)) or append(s, table, *a))
    monkeypatch.setattr(external_sort, "_connect", lambda *a: connects.append(a) or connect(*a))
    assert run.predict(tmp_path / "table.parquet").equals(wanted)
    assert sizes == [100] * 20 and len(connects) == 1


def test_a_table_without_labels_is_scored(run, folder, tmp_path, wanted):
    rows = [[value for i, value in enumerate(row(i)) if i != 3] for i in range(300)]
    path = tmp_path / "unlabeled.csv"
    lines = [HEADER.replace("clicked,", ""), *(",".join(map(str, line)) for line in rows)]
    path.write_text("\n".join(lines) + "\n")
    assert_scores(run.predict(path), wanted)
    unscored = dataclasses.replace(run, model=torch.nn.Linear(1, 1))  # the labels are looked at before the model runs
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}: no column 'clicked', which the label needs$"):
        unscored.evaluate(path)
    write_table(path, [["" if i == 3 else value for i, value in enumerate(row(j))] for j in range(300)])
    with pytest.raises(DataError, match="no row to evaluate has a label: label 'clicked'"):
        unscored.evaluate(path)


def test_the_label_may_be_missing_where_histories_show_it(tmp_path):
    """What happened in the events of a table without labels is unknown; in the log before it is known."""
    write_table(tmp_path / "table.csv", [row(i) for i in range(200)])
    config = config_of(tmp_path / "table.csv", tmp_path / "run", epochs=1)
    config.data = replace_data(config.data, event_categorical=["clicked", "tags"])
    with without_pictures():
        train(config)
    run = jfi.load_run(tmp_path / "run")
    full = by_key(run.predict(tmp_path / "table.csv"))
    last = {user: max(key for key in full if key[0] == user and key[2] >= 60 * 190) for user in ("u0", "u1")}
    lines = [HEADER.replace("clicked,", "")]
    lines += [",".join(map(str, [*row(key[2] // 60)[:3], *row(key[2] // 60)[4:]])) for key in last.values()]
    (tmp_path / "new.csv").write_text("\n".join(lines) + "\n")
    write_table(tmp_path / "log.csv", [row(i) for i in range(200) if tuple(row(i)[:3]) not in last.values()])
    assert_scores(run.predict(tmp_path / "new.csv", history=tmp_path / "log.csv"), full)


def test_candidates_need_no_columns_of_events(run, tmp_path, wanted, caplog):
    """What will happen is unknown; in the log it is known, and must be."""
    lines = [",".join(map(str, line[:3] + line[4:6])) for line in map(row, range(294, 300))]  # one of each user
    (tmp_path / "new.csv").write_text("\n".join(["user_id,item_id,timestamp,genre,price", *lines]) + "\n")
    write_table(tmp_path / "log.csv", [row(i) for i in range(294)])
    assert_scores(run.predict(tmp_path / "new.csv", history=tmp_path / "log.csv"), wanted)
    assert caplog.messages == [
        f"{tmp_path}/new.csv: no column 'seconds', 'tags'; it counts as missing in the rows' events"
    ]
    with pytest.raises(DataError, match=r"new\.csv: no column 'tags'"):
        run.predict(tmp_path / "log.csv", history=tmp_path / "new.csv")
    # An event without the columns has the values of one whose fields are empty.
    lines = [",".join(map(str, line[:3] + line[4:6])) for line in map(row, range(200, 300))]
    (tmp_path / "new.csv").write_text("\n".join(["user_id,item_id,timestamp,genre,price", *lines]) + "\n")
    write_table(tmp_path / "empty.csv", [[*line[:6], "", ""] for line in map(row, range(200, 300))])
    scores = [run.predict(tmp_path / name).column("score").to_pylist() for name in ("new.csv", "empty.csv")]
    assert scores[0] == scores[1]


def test_users_and_items_never_seen_are_scored(run, folder, tmp_path, wanted):
    write_table(tmp_path / "new.csv", [row(i) for i in range(300)] + [new_row(i) for i in range(3)])
    scores = run.predict(tmp_path / "new.csv")
    found = by_key(scores)
    new = [found["new", "a", 90_000 + i] for i in range(3)]
    assert np.isfinite(new).all() and new[0] != new[1]  # the second has a history
    known = by_key(scores.slice(0, 300))
    for key in known:
        assert known[key] == pytest.approx(wanted[key], abs=ROUNDING)


def test_rows_without_the_log_before_them_are_warned_of(run, tmp_path, caplog):
    write_table(tmp_path / "log.csv", [row(i) for i in range(294)])
    write_table(tmp_path / "new.csv", [row(i) for i in range(294, 300)])  # one of each user
    run.predict(tmp_path / "new.csv", history=tmp_path / "log.csv")
    assert not caplog.records
    run.predict(tmp_path / "new.csv")
    assert caplog.messages == ["100.0% of the rows have no history: is the log before them missing?"]


def renamed(i: int, column: int) -> list[object]:
    """A row whose user or item is written otherwise than in training."""
    return [f"{value}.0" if place == column else value for place, value in enumerate(row(i))]


def test_shares_of_unknown_values_are_reported_and_warned_of(run, folder, tmp_path, caplog):
    same = run.predict(folder / "table.csv")
    shares = json.loads(same.schema.metadata[b"unknown"])
    assert shares.keys() == {"user_id", "item_id", "genre"} and set(shares.values()) == {0.0}
    assert run.unknown == shares  # those of the test split
    write_table(tmp_path / "items.csv", [renamed(i, 1) for i in range(300)])
    write_table(tmp_path / "users.csv", [renamed(i, 0) if i >= 140 else row(i) for i in range(300)])
    write_table(tmp_path / "few.csv", [renamed(i, 0) if i >= 160 else row(i) for i in range(300)])
    assert not caplog.records
    found = run.predict(tmp_path / "items.csv", out=tmp_path / "scores.parquet")
    assert found == UnknownShares(300, {**shares, "item_id": 1.0})
    assert json.loads(pa.parquet.read_schema(tmp_path / "scores.parquet").metadata[b"unknown"]) == found.shares
    (line,) = caplog.messages
    assert line.startswith("'item_id' is unknown or missing in 100.0% of the rows, and in 0.0% of the run's test split")
    caplog.clear()
    assert run.evaluate(tmp_path / "users.csv")["unknown"] == pytest.approx({**shares, "user_id": 160 / 300})
    assert "'user_id' is unknown or missing in 53.3%" in caplog.text
    caplog.clear()
    run.predict(tmp_path / "few.csv", out=tmp_path / "scores.csv")
    assert not caplog.records


def test_values_that_the_test_split_has_not_either_are_not_warned_of(tmp_path, caplog):
    """New items in 80% of the rows are usual there; a value that is missing, and one of a few parts, count too."""
    rows = [row(i) for i in range(300)]
    for i in range(240, 300):
        rows[i][1] = f"new{i}" if i % 5 else "i1"
    write_table(tmp_path / "table.csv", rows)
    with without_pictures():
        train(config_of(tmp_path / "table.csv", tmp_path / "run", epochs=1))
    run = jfi.load_run(tmp_path / "run")
    caplog.clear()
    assert run.unknown["item_id"] == pytest.approx(0.8, abs=0.05) and run.unknown["user_id"] == 0
    write_table(tmp_path / "new.csv", [[line[0], line[1], *line[2:4], "", *line[5:]] for line in rows[240:]])
    found = json.loads(run.predict(tmp_path / "new.csv").schema.metadata[b"unknown"])
    assert found == {"user_id": 0.0, "item_id": 0.8, "genre": 1.0}
    assert [line.split()[0] for line in caplog.messages] == ["'genre'"]


def test_columns_of_items_come_from_a_table_of_items(tmp_path):
    """Of the run's config, or as given; an item that it lacks is unknown."""
    write_table(tmp_path / "table.csv", [row(i) for i in range(200)])
    items = "item_id,genre,price\n" + "".join(f"i{i},g{i % 3},{i}\n" for i in range(10))
    (tmp_path / "items.csv").write_text(items)
    config = config_of(tmp_path / "table.csv", tmp_path / "run", epochs=1)
    config.data.items = str(tmp_path / "items.csv")
    with without_pictures():
        train(config)
    run = jfi.load_run(tmp_path / "run")
    first = run.predict(tmp_path / "table.csv").column("score").to_numpy()
    (tmp_path / "items.csv").rename(tmp_path / "moved.csv")
    with pytest.raises(DataError, match=r"items\.csv: no such file"):
        run.predict(tmp_path / "table.csv")
    moved = run.predict(tmp_path / "table.csv", items=tmp_path / "moved.csv").column("score").to_numpy()
    assert (first == moved).all()
    write_table(tmp_path / "unknown.csv", [new_row(i) for i in range(3)])
    assert run.predict(tmp_path / "unknown.csv", items=tmp_path / "moved.csv").num_rows == 3


def test_an_arrow_table_is_scored_as_its_file(run, folder):
    table = pa.csv.read_csv(folder / "table.csv")
    scores = run.predict(table, history=table.slice(0, 0))
    assert (scores.column("score").to_numpy() == run.predict(folder / "table.csv").column("score").to_numpy()).all()
    assert scores.column("timestamp").type == pa.int64()  # as the table has it


def test_evaluate_by_group_and_calibration(run, folder):
    metrics = run.evaluate(folder / "table.csv", by=["genre", "user_id"])
    scores = run.predict(folder / "table.csv")
    logits = torch.from_numpy(scores.column("score").to_numpy().copy())
    rows = [row(i) for i in range(300)]
    labels = torch.tensor([float(line[3]) for line in rows])
    users = torch.tensor([int(line[0][1:]) for line in rows])
    assert (metrics["rows"], metrics["labeled"], metrics["overall"]["samples"]) == (300, 300, 300)
    for group, records in (("all", [metrics["overall"]]), ("genre", metrics["by"]["genre"])):
        for record in records:
            chosen = torch.tensor([group == "all" or line[4] == record["value"] for line in rows])
            assert record["samples"] == chosen.sum()
            for name, value in Predictions([logits[chosen]], [labels[chosen]], [users[chosen]]).metrics().items():
                assert record[name] == (None if np.isnan(value) else pytest.approx(value, abs=1e-9)), (group, name)
            mean = logits[chosen].double().sigmoid().mean().item()
            assert record["mean_prediction"] == pytest.approx(mean)
            assert record["calibration"] == pytest.approx(mean / labels[chosen].mean().item())
    assert {record["value"] for record in metrics["by"]["genre"]} == {"g0", "g1", "g2"}
    assert len(metrics["by"]["user_id"]) == 6
    sizes = [record["samples"] for record in metrics["by"]["genre"]]
    assert sizes == sorted(sizes, reverse=True) and sum(sizes) == 300
    deciles = metrics["deciles"]
    assert [tenth["samples"] for tenth in deciles] == [30] * 10
    means = [tenth["mean_prediction"] for tenth in deciles]
    assert means == sorted(means)
    lowest = logits.argsort()[:30]
    assert deciles[0]["mean_label"] == pytest.approx(labels[lowest].mean().item())


def test_a_group_without_text_is_refused_before_rows_are_scored(run, folder, monkeypatch):
    table = pa.csv.read_csv(folder / "table.csv")
    names = pa.array([b"a", b"\xff", *[b"b"] * 298])
    monkeypatch.setattr(run.model, "forward", None)
    with pytest.raises(DataError, match=r"the table:2: 'name' has type binary, and this value is not UTF-8 text"):
        run.evaluate(table.append_column("name", names), by="name")
    monkeypatch.undo()
    groups = run.evaluate(table.append_column("name", names.slice(2).take([0] * 300)), by="name")["by"]["name"]
    assert [(group["value"], group["samples"]) for group in groups] == [("b", 300)]


def test_a_result_of_predict_in_python_replaces_no_table(tmp_path):
    config = small_table(tmp_path)
    with without_pictures():
        train(config)
    run = jfi.load_run(tmp_path / "run")
    for name, option in (("log.csv", "--interactions"), ("items.csv", "--items")):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(ConfigError, match=f"{option} names this file too"):
            run.predict(tmp_path / "log.csv", out=tmp_path / name)
        assert (tmp_path / name).read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda line: [*line[:2], "soon", *line[3:]],
            r"new\.csv:12: 'timestamp' is 'soon', neither a number nor a date",
        ),
        (lambda line: ["", *line[1:]], r"new\.csv:12: empty 'user_id'"),
        (lambda line: [*line[:5], "cheap", *line[6:]], r"new\.csv:12: 'price' is 'cheap', not a number"),
        (lambda line: [*line[:3], 7, *line[4:]], r"new\.csv:12: label 'clicked' is 7, not 0 or 1"),
    ],
)
def test_a_malformed_row_is_named_by_its_line_and_nothing_is_written(run, tmp_path, monkeypatch, change, message):
    monkeypatch.setattr(table_blocks, "BLOCK", 4)
    write_table(tmp_path / "new.csv", [change(row(i)) if i == 10 else row(i) for i in range(20)])
    before = (tmp_path / "new.csv").read_bytes()
    with pytest.raises(DataError, match=message):
        run.predict(tmp_path / "new.csv", out=tmp_path / "scores.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["new.csv"]
    assert (tmp_path / "new.csv").read_bytes() == before


def test_rows_without_ids_are_left_out_of_scores(tmp_path, caplog):
    table, gaps = [row(i) for i in range(300)], new_row(301)
    gaps[1] = ""
    write_table(tmp_path / "table.csv", [*table[:150], gaps, *table[150:]])
    config = config_of(tmp_path / "table.csv", tmp_path / "run")
    with without_pictures():
        train(dataclasses.replace(config, data=replace_data(config.data, null_ids="drop")))
    run = jfi.load_run(tmp_path / "run")
    write_table(tmp_path / "new.csv", [new_row(302), gaps, new_row(303)])
    scores = run.predict(tmp_path / "new.csv", history=tmp_path / "table.csv")
    assert scores.num_rows == 2
    for left_out in ("the history: left out 1 of 301", "the rows to score: left out 1 of 3"):
        assert f"{left_out} rows without a user or an item (data.null_ids: drop)" in caplog.text


def test_out_is_written_whole_or_not_at_all(run, folder, tmp_path, monkeypatch):
    out = tmp_path / "scores.parquet"
    out.write_bytes(b"before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pyarrow.parquet.ParquetWriter.write_batch", full)
        with pytest.raises(OSError, match="No space"):
            run.predict(folder / "table.csv", out=out)
    assert out.read_bytes() == b"before" and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ConfigError):
        run.predict(folder / "table.csv", out=tmp_path / "scores")


def test_scores_take_their_space_before_rows_are_scored(run, folder, tmp_path, monkeypatch):
    """A write to the map of a file that has no space would end the process with SIGBUS."""
    taken = []
    monkeypatch.setattr(os, "posix_fallocate", lambda descriptor, start, size: taken.append((start, size)))
    run.predict(folder / "table.csv", out=tmp_path / "out.csv")
    assert {(0, 128 + 4 * 300), (0, 128 + 8 * 300)} <= set(taken)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_number_too_large_for_the_model_counts_as_missing(run, tmp_path):
    """A finite one, which the item's later rows share with its first."""

    def scores(price: str) -> list[float]:
        first = row(0)
        first[HEADER.split(",").index("price")] = price
        write_table(tmp_path / "table.csv", [first, *(row(i) for i in range(1, 50))])
        return run.predict(tmp_path / "table.csv").column("score").to_pylist()

    assert scores("1e300") == scores("3.4e38") == scores("") != scores("7")
    scores("1e300")
    metrics = run.evaluate(tmp_path / "table.csv", by=["user_id"])
    assert np.isfinite(metrics["overall"]["mean_prediction"])
    json.dumps(metrics, allow_nan=False)


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_number_too_large_is_missing_in_training_too(tmp_path):
    rows = [row(i) for i in range(200)]
    write_table(tmp_path / "table.csv", rows)
    without = load_dataset(config_of(tmp_path / "table.csv", tmp_path / "run").data).schema.encodings.moments
    rows[0][5] = "1e300"  # the first row of item 0, whose price is 0 in all others
    write_table(tmp_path / "table.csv", rows)
    mean, deviation = load_dataset(config_of(tmp_path / "table.csv", tmp_path / "run").data).schema.encodings.moments[
        "price"
    ]
    assert 2 < without["price"][0] < mean < 4 and 1 < deviation < 2


def small_table(folder: Path, **changes: object):
    """A log of 8 users and 13 items with numeric ids, and items of a table of their own; the config of a run on it."""
    rows = [[f"u{i % 8}", 5 + i * 7 % 13, 1_600_000_000_000 + i * 7_000_000, i % 2, i % 5] for i in range(200)]
    rows[190][1] = "new"  # of the test split alone: all ids of training are integers
    with (folder / "log.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["user", "item", "time", "clicked", "place"], *rows])
    with (folder / "items.csv").open("w", newline="") as file:
        items = [*([i, f"g{i % 2}|g{i % 3}", f"title {i}"] for i in range(5, 18)), ["new", "g0", "a new one"]]
        csv.writer(file).writerows([["item", "genre", "name"], *items])
    data = data_config(
        interactions=str(folder / "log.csv"),
        items=[str(folder / "items.csv")],
        user="user",
        item="item",
        timestamp="time",
        timestamp_unit="ms",
        label="clicked",
        item_categorical=["genre"],
        separators={"genre": "|"},
        title="name",
        max_history=10,
        **changes,
    )
    model = ModelConfig(embedding_dim=4, dense_arch=[4], over_arch=[4], cross_layers=0, dropout=0.0)
    return Config(data=data, model=model, training=TrainingConfig(run_dir=str(folder / "run"), epochs=1, device="cpu"))


def test_what_training_takes_prediction_takes(tmp_path):
    """Lists of files, separators of the items' table, the time as a feature, and a history rule over the label."""
    config = small_table(tmp_path, event_dense=["time"], history="clicked == 1 or place in [0, 1]")
    with without_pictures():
        train(config)
    run = jfi.load_run(tmp_path / "run")
    titles, items = run.schema.titles, run.schema.encodings.vocabularies["item"].values
    assert [f"title {item}" for item in items] == list(titles)[1:]
    dataset = load_dataset(run.config.data, run.schema)
    batch = dataset.batches("test", 1000)[0]
    with torch.no_grad():
        wanted = run.model(batch.dense_features, batch.sparse_features).squeeze(-1).sort().values
    with (tmp_path / "log.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    for name, part in (("before", rows[:180]), ("test", rows[180:])):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([header, *part])
    scores = run.predict([tmp_path / "test.csv"], history=str(tmp_path / "before.csv")).column("score").to_numpy()
    np.testing.assert_allclose(np.sort(scores), wanted, atol=ROUNDING, rtol=0)
    # Without labels `clicked == 1` holds in no row.
    with (tmp_path / "bare.csv").open("w", newline="") as file:
        csv.writer(file).writerows([[*header[:3], "place"], *([*row[:3], row[4]] for row in rows[180:])])
    assert run.predict(tmp_path / "bare.csv").num_rows == 20
    # Nor does the rule need its other columns.
    with (tmp_path / "bare.csv").open("w", newline="") as file:
        csv.writer(file).writerows([header[:3], *(row[:3] for row in rows[180:])])
    assert run.predict(tmp_path / "bare.csv").num_rows == 20


def test_faults_of_the_table_to_score_are_one_line(run, tmp_path):
    with pytest.raises(DataError, match=r"absent\.parquet: no such file"):
        run.predict(tmp_path / "absent.parquet")


def test_ids_of_several_types_are_scored_together(run, folder, tmp_path):
    """Integers in one file and texts in another have one type in the result, in which no value is another one."""
    place, numbers = HEADER.split(",").index("user_id"), pa.array(range(300))

    def table(users: pa.Array) -> pa.Table:
        return pa.csv.read_csv(folder / "table.csv").set_column(place, "user_id", users)

    other = pa.array([f"0{one}" for one in range(300)])
    found = run.predict([table(numbers), table(other)])
    assert found["user_id"].to_pylist() == [*map(str, range(300)), *other.to_pylist()]
    run.predict([table(numbers), table(numbers.cast(pa.string()))], out=tmp_path / "scores.parquet")
    found = pa.parquet.read_table(tmp_path / "scores.parquet")
    assert found["user_id"].to_pylist() == [*range(300), *range(300)]


def test_a_table_whose_lists_are_all_empty_is_scored(tmp_path):
    """JSON Lines with null alone do not show that a column has lists."""
    rows = [
        {"user_id": i % 5, "item_id": i % 7, "timestamp": i, "clicked": i % 2, "tags": ["a", "b"]} for i in range(99)
    ]
    for name, tags in (("log", ["a", "b"]), ("new", None), ("none", [])):
        lines = [json.dumps({**line, "tags": tags}) for line in rows]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    config = config_of(tmp_path / "log.jsonl", tmp_path / "run", epochs=1)
    data = data_config(interactions=config.data.interactions, label="clicked", item_categorical=["tags"])
    with without_pictures():
        train(dataclasses.replace(config, data=data))
    run = jfi.load_run(tmp_path / "run")
    nulls, empty = (run.predict(tmp_path / f"{name}.jsonl").column("score").to_numpy() for name in ("new", "none"))
    assert (nulls == empty).all()
    assert (nulls != run.predict(tmp_path / "log.jsonl").column("score").to_numpy()).all()


@pytest.mark.parametrize("tags", [pa.array([], pa.list_(pa.string())), pa.nulls(5), pa.nulls(5, pa.string())])
def test_a_table_of_users_whose_lists_have_no_value(tmp_path, tags):
    lists = pa.table({"user_id": range(5), "tags": [["a"], ["b", "a"], None, [], ["b"]]})
    table = pa.table({name: [i % n for i in range(99)] for name, n in (("user_id", 5), ("item_id", 7), ("clicked", 2))})
    table = table.append_column("timestamp", pa.array(range(99)))
    config = data_config(interactions=table, users=lists, label="clicked", user_categorical=["tags"])
    schema = load_dataset(config).schema
    users = pa.table({"user_id": pa.array(range(len(tags)), pa.int64()), "tags": tags})
    rows = ScoringRows(Sources(table, users=users), tmp_path, schema, config)
    batch = rows.dataset.batches("rows", 99)[0]
    assert batch.sparse_features["tags"].lengths().tolist() == [0] * 99
