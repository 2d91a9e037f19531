"""Metrics read back from Weights & Biases and MLflow themselves, where Lightning and they are installed; offline."""

import importlib.metadata
import json
import struct
import sys
from pathlib import Path

import pytest
import yaml
from own_table import config_of, row, write_table
from worker import without_pictures

from jfi.training import resume, train
from jfi.training.run.recorder import read_metrics

LOG_EVERY = 1

pytest.importorskip("lightning.pytorch.loggers")


def run(folder: Path, **training) -> None:
    write_table(folder / "table.csv", [row(i) for i in range(120)])
    with without_pictures():
        train(config_of(folder / "table.csv", folder / "run", **{"epochs": 1, **training}))


def lines(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Step and metrics of each line of metrics.jsonl, under the names that trackers get."""
    skipped = ("split", "epoch", "step", "data")
    found = []
    for line in read_metrics(folder / "run" / "metrics.jsonl"):
        named = {f"{line['split']}/{name}": v for name, v in line.items() if name not in skipped and v is not None}
        found.append((line["step"], named))
    return found


def check(found: list[tuple[int, dict[str, float]]], folder: Path) -> None:
    """The steps and metrics that a tracker has are those of metrics.jsonl, which rounds the speeds."""
    wanted = lines(folder)
    assert len(found) == len(wanted) > 3
    for (step, metrics), (own_step, own) in zip(found, wanted, strict=True):
        assert step == own_step and metrics == pytest.approx(own, rel=1e-3, abs=0.06)


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    """A function that reads a run back: status, params, steps with their metrics."""
    pytest.importorskip("mlflow")
    try:
        importlib.metadata.version("mlflow")
        uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    except importlib.metadata.PackageNotFoundError:  # mlflow-skinny has no database
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        uri = f"file:{tmp_path / 'mlruns'}"
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)

    def read() -> tuple[str, str, dict, list]:
        (one,) = client.search_runs([client.get_experiment_by_name("clicks").experiment_id])
        by_line: dict[tuple[int, str], dict[str, float]] = {}
        for name in one.data.metrics:
            for point in client.get_metric_history(one.info.run_id, name):
                by_line.setdefault((point.step, name.split("/")[0]), {})[name] = point.value
        order = ("train", "validation", "test")
        found = [(key[0], by_line[key]) for key in sorted(by_line, key=lambda key: (key[0], order.index(key[1])))]
        return one.info.run_id, one.info.status, one.data.params, found

    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "clicks")
    return read


def test_mlflow_has_the_config_and_every_line(mlflow, tmp_path):
    run(tmp_path, logger="mlflow")
    _, status, params, found = mlflow()
    assert status == "FINISHED"
    assert params["data/label"] == "clicked" and params["training/batch_size"] == "32"
    check(found, tmp_path)


def test_a_resumed_run_goes_on_with_its_record_of_mlflow_though_its_config_has_changed(mlflow, tmp_path, monkeypatch):
    run(tmp_path, logger="mlflow")
    own = tmp_path / "run" / "config.yaml"
    config = yaml.safe_load(own.read_text())
    config["training"]["epochs"] = 2
    monkeypatch.setenv("MLFLOW_RUN_ID", mlflow()[0])
    own.write_text(yaml.safe_dump(config))
    tests = [one for one in lines(tmp_path) if "test/auc" in one[1]]  # a resumed run tests anew
    with without_pictures():
        resume(tmp_path / "run", config_changed="accept")
    _, status, _, found = mlflow()
    assert status == "FINISHED"
    found = [one for one in found if one[0] != tests[0][0] or "test/auc" not in one[1]]
    check(found, tmp_path)


def test_mlflow_says_that_a_run_has_failed(mlflow, tmp_path, monkeypatch):
    monkeypatch.setattr("jfi.training.loop.trainer.Trainer.load_best", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, logger="mlflow")
    assert mlflow()[1] == "FAILED"


def records(path: Path) -> list:
    """The records of a .wandb file, a log of LevelDB: blocks of 32 KiB, of chunks with CRC, length and kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    body, at, parts, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(body):
        if (left := -at % 2**15) and left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", body, at)
        parts += body[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(parts))
            parts = b""
    return found


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """A function that reads runs back, by their names: exit code, config, steps with their metrics."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)

    def read() -> dict[str, tuple[int | None, dict, list]]:
        runs = {}
        for path in tmp_path.glob("wandb/offline-run-*/*.wandb"):
            name, code, config, found = "", None, {}, []
            for one in records(path):
                kind = one.WhichOneof("record_type")
                if kind == "run":
                    name = one.run.display_name
                elif kind == "config":
                    config |= {item.key: json.loads(item.value_json) for item in one.config.update}
                elif kind == "exit":
                    code = one.exit.exit_code
                elif kind == "history":
                    row = {item.key or ".".join(item.nested_key): item.value_json for item in one.history.item}
                    row = {key: json.loads(value) for key, value in row.items()}
                    metrics = {key: value for key, value in row.items() if "/" in key and "global_step" not in key}
                    found.append((row["trainer/global_step"], metrics))
            runs[name] = code, config, found
        return runs

    yield read
    wandb.finish()


def test_each_training_of_a_process_is_a_run_of_wandb_of_its_own(wandb, tmp_path, monkeypatch):
    for epochs, name in enumerate(("one", "two"), start=1):
        (tmp_path / name).mkdir()
        monkeypatch.setenv("WANDB_NAME", name)
        run(tmp_path / name, logger="wandb", epochs=epochs)
    monkeypatch.setattr("jfi.training.loop.trainer.Trainer.load_best", lambda *_: 1 / 0)
    (tmp_path / "three").mkdir()
    with pytest.raises(ZeroDivisionError):
        monkeypatch.setenv("WANDB_NAME", "three")
        run(tmp_path / "three", logger="wandb")
    assert sys.modules["wandb"].run is None
    found = wandb()
    assert {name: code for name, (code, *_) in found.items()} == {"one": 0, "two": 0, "three": 1}
    for name in ("one", "two"):
        _, config, metrics = found[name]
        assert config["data"]["label"] == "clicked" and config["training"]["run_dir"] == str(tmp_path / name / "run")
        check(metrics, tmp_path / name)


def test_a_run_of_wandb_that_was_open_before_stays_open(wandb, tmp_path):
    own = sys.modules["wandb"].init(project="clicks", name="sweep", dir=tmp_path)
    run(tmp_path, logger="wandb")
    assert sys.modules["wandb"].run is own
    own.finish()
    ((name, (_, _, metrics)),) = wandb().items()
    assert name == "sweep"
    check(metrics, tmp_path)
