"""The comparison at its smallest, and the configs that the repository ships."""

import json
import math
from pathlib import Path
from typing import NamedTuple

import commands
import numpy as np
import pyarrow as pa
import pytest
from data_configs import regression
from synthetic_data import options
from worker import without_pictures

from jfi.cli.compare import compare, summarize, table, write_record
from jfi.data import DataConfig
from jfi.data.config import LabelConfig
from jfi.data.config_checks import check_data_config
from jfi.training import Config, ModelConfig, TrainingConfig
from jfi.training.config_parser import parse_config

ROOT = Path(__file__).parents[2]


class Run(NamedTuple):
    validation: dict[str, float]
    test: dict[str, float]
    train_seconds: float


def test_compare_pooling(tmp_path, monkeypatch, capsys):
    arguments = [
        *["--config", ROOT / "configs/quickstart.yaml", "--seeds", "0", "1", "--training.run_dir", "out"],
        *[*options(num_users=60), "--training.epochs", "1", "--training.batch_size", "256"],
    ]
    monkeypatch.chdir(tmp_path)
    assert commands.call("compare", *map(str, arguments)) == 0
    lines = capsys.readouterr().out.splitlines()
    (head,) = (i for i, line in enumerate(lines) if line.startswith("test split"))
    names = [line.split("  ")[0] for line in lines[head + 1 : lines.index("", head)]]
    assert (names[0], names[-5:]) == ("item mean", ["gradient boosting", "none", "mean", "sum", "attention"])

    record = json.loads((tmp_path / "out/comparison.json").read_text())
    assert list(record["summary"]) == [*record["baselines"], *record["runs"]] == names
    boosting = record["baselines"]["gradient boosting"]
    assert len(boosting) == 2 and record["summary"]["gradient boosting"]["test_ne"]["mean"] == boosting[0]["test"]["ne"]
    assert record["seeds"] == [0, 1]
    for pooling, runs in record["runs"].items():
        assert [Path(run["run_dir"]).name for run in runs] == [f"{pooling}-seed0", f"{pooling}-seed1"]
        mean = record["summary"][pooling]["test_auc"]["mean"]
        assert mean == pytest.approx((runs[0]["test"]["auc"] + runs[1]["test"]["auc"]) / 2)
        assert (tmp_path / "out" / f"{pooling}-seed0" / "curves.png").exists()
    assert f"{record['summary']['attention']['test_auc']['mean']:.4f}" in lines[head + len(names)]


def test_a_metric_that_is_not_defined_is_nan_in_the_table_and_null_in_the_file(tmp_path):
    # With leave_one_out every user has one row in a split, so no user has both labels.
    runs = [{"auc": 0.5 + seed / 10, "ne": 1.0, "user_auc": math.nan} for seed in range(2)]
    summary = summarize([Run(metrics, metrics, 3.0) for metrics in runs], ("auc", "ne", "user_auc"))
    assert summary["test_auc"] == {"mean": pytest.approx(0.55), "std": pytest.approx(0.05)}
    line = table({"one": summary}, 2).splitlines()[1]
    assert " ".join(line.split()) == "one 0.5500 ± 0.0500 1.0000 ± 0.0000 nan ± nan 3 s"
    write_record(tmp_path / "record.json", {"summary": summary, "runs": [summary]})
    record = json.loads((tmp_path / "record.json").read_text(), parse_constant=pytest.fail)
    assert record["summary"]["test_user_auc"] == record["runs"][0]["test_user_auc"] == {"mean": None, "std": None}


@pytest.mark.parametrize("task", ["several labels", "regression"])
def test_the_table_is_of_the_first_label_and_its_task(tmp_path, capsys, task):
    rng, size = np.random.default_rng(0), 400
    columns = {"user_id": rng.integers(0, 20, size), "item_id": rng.integers(0, 9, size), "timestamp": np.arange(size)}
    columns |= {"like": rng.integers(0, 2, size), "share": rng.integers(0, 2, size), "dwell": rng.random(size)}
    labels = {"labels": [LabelConfig("share", "share"), LabelConfig("like", "like")], "label": None}
    given = labels if task == "several labels" else {"label": None, "labels": regression("dwell")}
    data = DataConfig(interactions=pa.table(columns), features=[], statistics=[], **given)
    training = TrainingConfig(run_dir=str(tmp_path / "out"), epochs=1, device="cpu", batch_size=128)
    with without_pictures():
        models = ["mean", "baselines"] if "label" in task else ["mean"]
        found = compare(Config(data, ModelConfig(embedding_dim=4), training=training), [0], models)
    record = json.loads((tmp_path / "out/comparison.json").read_text())
    ((run,),) = record["runs"].values()
    shown = capsys.readouterr().out
    if task == "regression":
        assert {name for name in found["mean"] if name.startswith("test_")} == {"test_r2", "test_rmse", "test_mae"}
        assert found["mean"]["test_rmse"]["mean"] == run["test"]["rmse"] and "RMSE" in shown
        return
    assert "test split, share" in shown and {"mean", "gradient boosting"} <= found.keys()
    assert found["mean"]["test_auc"]["mean"] == run["test"]["auc_share"] != run["test"]["auc"]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_are_valid(path):
    config = parse_config(["--config", str(path)])[0]
    check_data_config(config.data)
    assert not any(str(value).startswith("/") for value in vars(config.data).values())
