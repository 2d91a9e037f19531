"""Metrics of a table's positives against sampled negatives, by a run of implicit feedback."""

import dataclasses
import json
import logging
from pathlib import Path

import commands
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from data_configs import data_config
from worker import without_pictures

import jfi
from jfi.data import DataError
from jfi.data.io import blocks as table_blocks
from jfi.data.prepared import scoring
from jfi.data.schema import columns as coded
from jfi.events.groups import GROUPS
from jfi.training import Config, ModelConfig, TrainingConfig, train
from jfi.training.run.saved_run import SavedRun

ROOT = Path(__file__).parents[2]
USERS, ITEMS, ROWS, NEGATIVES = 15, 60, 900, 3
TEST = 810  # the first row of the test split
HEADER = ["user_id", "item_id", "timestamp"]


def rows() -> list[list[int]]:
    """Each user takes the items in a fixed order; times are unique. Three test rows have a new item."""
    found = [[i % USERS, (i // USERS * 7 + i % USERS * 11) % ITEMS, 60 * i] for i in range(ROWS)]
    for i in (TEST + 5, TEST + 40, ROWS - 1):
        found[i][1] = ITEMS
    return found


def write(path: Path, lines: list[list]) -> Path:
    """Writes a table with a kind of each item, and a device of each row."""
    lines = [[*line, f"k{line[1] % 3}", "ab"[line[2] // 60 % 5 == 0]] for line in lines]
    path.write_text("\n".join(",".join(map(str, line)) for line in [[*HEADER, "kind", "device"], *lines]) + "\n")
    return path


def run_on(folder: Path, **changes: object) -> tuple[SavedRun, dict[str, float]]:
    """A run on all rows, and the test metrics that training reports."""
    data = data_config(
        interactions=str(write(folder / "all.csv", rows())),
        item_categorical=["kind"],
        negatives=NEGATIVES,
        max_history=8,
        **changes,
    )
    write(folder / "log.csv", rows()[:TEST])
    write(folder / "test.csv", rows()[TEST:])
    training = TrainingConfig(str(folder / "run"), epochs=1, batch_size=64, device="cpu", ranking="full")
    config = Config(data, ModelConfig(8, dense_arch=[8], over_arch=[8], cross_layers=0, dropout=0.0), training=training)
    config.optimizer.embeddings.learning_rate = 0.02  # so small a table is soon learned by heart
    with without_pictures():
        test = train(config).test
    return jfi.load_run(folder / "run"), test


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, SavedRun, dict[str, float]]:
    folder = tmp_path_factory.mktemp("positives")
    return folder, *run_on(folder)


@pytest.mark.parametrize("statistics", [[], list(GROUPS), "auto"], ids=["", "statistics", "auto"])
def test_the_test_split_as_a_table_has_the_metrics_that_training_reports(trained, caplog, tmp_path, statistics):
    """AUC and the ranks among all items to rounding; the ranks among sampled items within the sampling."""
    folder, run, test = (tmp_path, *run_on(tmp_path, statistics=statistics)) if statistics else trained
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        # With "auto" the run's own interactions are the history.
        metrics = run.evaluate(folder / "test.csv", history=None if statistics == "auto" else folder / "log.csv")
    assert "left out 3 of 90 rows, whose items training does not know" in caplog.text
    assert (metrics["rows"], metrics["labeled"]) == (90, 87)
    overall = metrics["overall"]
    assert (overall["samples"], overall["ranked"]) == (87 * (1 + NEGATIVES), 87)
    for name in ("loss", "ne", "auc", "user_auc", "hr@10_full", "ndcg@10_full"):
        assert overall[name] == pytest.approx(test[name], abs=1e-5), name
    assert overall["mean_label"] == 1 / (1 + NEGATIVES)
    assert 0 < test["hr@10"] < 1
    for name in ("hr@10", "ndcg@10"):
        assert overall[name] == pytest.approx(test[name], abs=0.15), name
    assert sum(tenth["samples"] for tenth in metrics["deciles"]) == overall["samples"]
    if statistics:
        (folder / "all.csv").unlink()
        with pytest.raises(DataError, match=r"no history is given .* own interactions are not there; give a"):
            run.evaluate(folder / "test.csv")


def test_blocks_and_batches_do_not_change_the_metrics(trained, monkeypatch):
    folder, run, _ = trained
    tables = {"history": folder / "log.csv", "by": ["device"]}
    whole = run.evaluate(folder / "test.csv", **tables)
    monkeypatch.setattr(table_blocks, "BLOCK", 13)
    monkeypatch.setattr(coded.blocks, "__defaults__", (50,))
    parts = run.evaluate(folder / "test.csv", batch_size=50, **tables)
    for one, other in zip(everything(whole), everything(parts), strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def everything(metrics: dict) -> list[dict]:
    return [metrics["overall"], *({**group, "value": ord(group["value"])} for group in metrics["by"]["device"])]


def test_a_loop_over_the_rows_gives_the_same_ranks(trained, monkeypatch):
    """Against all items of training that the user has not taken by then, each scored as a row of its own."""
    folder, run, _ = trained
    monkeypatch.setattr(TrainingConfig, "ranking_positives", 4)
    found = run.evaluate(folder / "test.csv", history=folder / "log.csv")
    test = [line for line in rows()[TEST:] if line[1] != ITEMS]
    hits = 0
    for i in range(4):
        user, item, time = test[i * len(test) // 4]
        taken = {line[1] for line in rows() if line[0] == user and line[2] <= time} - {item}
        candidates = [one for one in range(ITEMS) if one not in taken]
        table = pa.table([[user] * len(candidates), candidates, [time] * len(candidates)], HEADER)
        kinds = pa.array([f"k{one % 3}" for one in candidates])
        before = write(folder / "before.csv", [line for line in rows() if line[2] < time])
        score = run.predict(table.append_column("kind", kinds), history=before).column("score").to_numpy()
        own = score[candidates.index(item)]
        hits += (score > own).sum() + ((score == own).sum() - 1) / 2 < 10
    assert found["overall"]["ranked"] == 4
    assert found["overall"]["hr@10_full"] == hits / 4


def test_negatives_are_in_the_group_of_their_positive(trained):
    folder, run, _ = trained
    metrics = run.evaluate(folder / "test.csv", history=folder / "log.csv", by="device")
    groups, overall = metrics["by"]["device"], metrics["overall"]
    known = ["ab"[line[2] // 60 % 5 == 0] for line in rows()[TEST:] if line[1] != ITEMS]
    counts = {group["value"]: (group["samples"], group["ranked"]) for group in groups}
    assert counts == {name: (known.count(name) * (1 + NEGATIVES), known.count(name)) for name in "ab"}
    assert {group["mean_label"] for group in groups} == {1 / (1 + NEGATIVES)}
    for name in ("hr@10", "ndcg@10_full"):
        mean = sum(group[name] * group["ranked"] for group in groups) / overall["ranked"]
        assert overall[name] == pytest.approx(mean), name


def test_a_group_has_the_ranks_of_its_rows_alone(trained, tmp_path):
    folder, run, _ = trained
    groups = run.evaluate(folder / "test.csv", history=folder / "log.csv", by="device")["by"]["device"]
    for group in groups:
        mine = [line for line in rows()[TEST:] if "ab"[line[2] // 60 % 5 == 0] == group["value"]]
        others = write(tmp_path / "others.csv", [line for line in rows() if line not in mine])
        alone = run.evaluate(write(tmp_path / "mine.csv", mine), history=others)["overall"]
        for name in ("hr@10_full", "ndcg@10_full"):
            assert group[name] == pytest.approx(alone[name], abs=1e-6)
    assert groups[0]["ndcg@10_full"] != groups[1]["ndcg@10_full"]


@pytest.mark.parametrize(("is_table", "wanted"), [(False, ["5", "13"]), (True, [str(i) for i in range(ITEMS)])])
def test_negatives_are_items_of_training_that_have_columns(trained, is_table, wanted):
    items, candidates, known = scoring._with_candidates(pa.array(["5", "13", "new"]), trained[1].schema, is_table)
    assert items.take(pa.array(candidates)).to_pylist() == wanted
    assert known.tolist()[:3] == [True, True, False]
    assert items.to_pylist()[:3] == ["5", "13", "new"] and len(items) == len(known) == len(wanted) + 1


def test_a_group_without_ranked_positives_has_no_ranking_metrics(trained, monkeypatch):
    folder, run, _ = trained
    monkeypatch.setattr(TrainingConfig, "ranking_positives", 1)
    groups = run.evaluate(folder / "test.csv", by="device")["by"]["device"]
    assert sorted((group["ranked"], group["hr@10"] is None) for group in groups) == [(0, True), (1, False)]
    training = dataclasses.replace(run.config.training, ranking="none")
    none = dataclasses.replace(run, config=dataclasses.replace(run.config, training=training))
    overall = none.evaluate(folder / "test.csv")["overall"]
    assert not [name for name in overall if "@" in name or name == "ranked"] and overall["auc"] > 0


@pytest.mark.parametrize("hashed", [False, True])
def test_items_without_columns_in_the_interactions(tmp_path, hashed):
    """With a vocabulary negatives need no log; with hashed ids all items of the tables count as known."""
    changes = {"hash_buckets": {"item_id": 1000}} if hashed else {"items": str(tmp_path / "items.csv")}
    lines = [f"{item},k{item % 3}" for item in range(ITEMS + 1)]
    (tmp_path / "items.csv").write_text("\n".join(["item_id,kind", *lines]) + "\n")
    run, test = run_on(tmp_path, **changes)
    metrics = run.evaluate(tmp_path / "test.csv", history=tmp_path / "log.csv")
    assert metrics["labeled"] == (90 if hashed else 87)
    if not hashed:
        assert metrics["overall"]["auc"] == pytest.approx(test["auc"], abs=1e-5)
        few = run.evaluate(write(tmp_path / "few.csv", rows()[TEST : TEST + 4]))["overall"]
        assert few["samples"] == 4 * (1 + NEGATIVES) and few["auc"] is not None
    else:
        assert metrics["overall"]["auc"] == pytest.approx(test["auc"], abs=0.1)


def test_a_table_of_unknown_items_is_refused_before_rows_are_scored(trained, tmp_path, monkeypatch):
    _, run, _ = trained
    table = write(tmp_path / "new.csv", [[1, ITEMS + 5, 10**6], [2, ITEMS + 6, 10**6]])
    assert run.predict(table).num_rows == 2
    monkeypatch.setattr(run.model, "forward", None)
    with pytest.raises(DataError, match="no row to evaluate has an item that training knows"):
        run.evaluate(table)


def test_the_command_prints_and_writes_them(trained, tmp_path, monkeypatch, capsys):
    folder, run, _ = trained
    out, scores = tmp_path / "metrics.json", tmp_path / "scores.parquet"
    paths = ["--run", folder / "run", "--interactions", folder / "test.csv", "--history", folder / "log.csv"]
    commands.run("evaluate", *paths, "--out", out, "--scores", scores, "--by", "device")
    first, line = capsys.readouterr().out.splitlines()[:2]
    assert first.split()[-4:] == ["hr@10", "ndcg@10", "hr@10_full", "ndcg@10_full"]
    overall = json.loads(out.read_text())["overall"]
    assert line.split()[-1] == f"{overall['ndcg@10_full']:.4f}"
    wanted = run.predict(folder / "test.csv", history=folder / "log.csv")
    assert pa.parquet.read_table(scores).select(wanted.column_names).equals(wanted)
