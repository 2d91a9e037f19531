"""The calibration of runs: the best epoch's, after an interruption too; none in a run of an earlier version."""

import dataclasses
from pathlib import Path

import commands
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
import torch
from data_configs import replace_data
from own_table import config_of, row, write_table
from worker import without_pictures

import jfi
from jfi.data import DataError
from jfi.data.config import LabelConfig
from jfi.training import Config, resume, train
from jfi.training.checkpoints.checkpoint import save_checkpoint
from jfi.training.loop.trainer import Trainer
from jfi.training.metrics.calibration import fit_platt
from jfi.training.run import state
from jfi.training.run.run_position import RunPosition
from jfi.training.run.saved_run import SavedRun

ROOT = Path(__file__).parents[2]
ROWS = 1500
VALIDATION = slice(int(0.8 * ROWS), int(0.9 * ROWS))  # of rows in the order of time
LABELS = [LabelConfig("long", "seconds >= 25"), LabelConfig("clicked", "clicked")]


def made(folder: Path, name: str, **data) -> Config:
    own = config_of(folder / "table.csv", folder / name, epochs=3)
    own.optimizer.embeddings.learning_rate = 0.02  # with larger rates the scores separate the labels
    return dataclasses.replace(own, data=replace_data(own.data, event_dense=[], **data))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("calibrations")
    write_table(path / "table.csv", [row(i) for i in range(ROWS)])
    return path


def fitted(run: SavedRun, score: str = "score", label: str = "clicked") -> tuple[float, float] | str:
    """a and b, or why not, of the validation rows, of the scores that `predict` gives of the best epoch."""
    table, known = run.predict(run.config.data.interactions), pa.csv.read_csv(run.config.data.interactions)
    labels = torch.tensor(known[label].to_numpy()[VALIDATION])
    return fit_platt(torch.tensor(table[score].to_numpy()[VALIDATION]), labels >= 25 if label == "seconds" else labels)


def stop(method: str, count: int, config: Config) -> None:
    """Trains until the method of the trainer has been called so many times; then its process dies."""
    old, calls = getattr(Trainer, method), []

    def stopping(self, *arguments):
        result = old(self, *arguments)
        calls.append(1)
        if len(calls) == count:
            raise KeyboardInterrupt
        return result

    with pytest.MonkeyPatch.context() as patch, without_pictures():
        patch.setattr(Trainer, method, stopping)
        with pytest.raises(KeyboardInterrupt):
            train(config)


@pytest.mark.parametrize(
    ("best", "method", "count"),
    [
        *((1, "_evaluate", 2), (2, "load_best", 1)),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, "save", 1), (2, "save", 1), (2, "_evaluate", 2))),
        pytest.param(1, "load_best", 1, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_has_the_calibration_of_the_best_epoch(folder, tmp_path, monkeypatch, best, method, count):
    """It dies after an epoch is saved, between its evaluation and that, or before the test."""
    # All epochs have other logits, and AUCs that are set here.
    chosen = {epoch: 0.5 + 0.1 * (epoch == best) for epoch in (1, 2, 3)}
    old = RunPosition.end_evaluation

    def end_evaluation(self, epoch, metrics, *arguments):
        return old(self, epoch, metrics | {"auc": chosen[epoch]}, *arguments)

    monkeypatch.setattr(RunPosition, "end_evaluation", end_evaluation)
    whole = folder / f"best{best}"
    if not whole.exists():
        with without_pictures():
            train(made(folder, whole.name))
    config = made(folder, "run").with_training(run_dir=str(tmp_path / "run"))
    stop(method, count, config)
    with without_pictures():
        assert resume(tmp_path / "run").best_epoch == best
    run = jfi.load_run(tmp_path / "run")
    assert run.calibration == jfi.load_run(whole).calibration
    found = run.calibration["label"]
    assert found["identity"] == "" and (found["a"], found["b"]) == pytest.approx(fitted(run), rel=1e-3, abs=1e-4)


def predict(capsys, *options: object) -> tuple[int, str]:
    return commands.call("predict", *options), capsys.readouterr().err


def test_a_run_of_an_earlier_version_has_all_but_calibrated_probabilities(folder, tmp_path, monkeypatch, capsys):
    old = folder / "old"
    with without_pictures(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "save_checkpoint", save_without_calibration)
        train(made(folder, "old"))
    options = ["--run", old, "--interactions", folder / "table.csv", "--out"]
    code, said = predict(capsys, *options, tmp_path / "a.csv", "--output", "calibrated")
    why = f"run {old} has no calibration; train it again, or choose probabilities"
    assert (code, said) == (2, f"error: output is calibrated, but {why}\n") and not list(tmp_path.iterdir())
    assert predict(capsys, *options, tmp_path / "b.csv") == (0, "")
    assert predict(capsys, *options, tmp_path / "c.csv", "--output", "probabilities") == (0, "")
    assert (tmp_path / "b.csv").read_bytes() == (tmp_path / "c.csv").read_bytes()
    # Trained further, it has one where a new epoch is the best.
    monkeypatch.setattr(Trainer, "_evaluate", better(Trainer._evaluate))
    config = old / "config.yaml"
    config.write_text(config.read_text().replace("epochs: 3", "epochs: 4"))
    with without_pictures():
        assert resume(old, config_changed="accept").best_epoch == 4
    found, wanted = jfi.load_run(old).calibration["label"], fitted(jfi.load_run(old))
    assert found["identity"] == wanted if isinstance(wanted, str) else found["a"] == pytest.approx(wanted[0], rel=1e-3)


def save_without_calibration(folder, name, tensors, progress, world) -> None:
    """Writes progress.json as a version without calibration."""
    assert progress["calibration"]
    known = {key: value for key, value in progress.items() if key != "calibration"}
    save_checkpoint(folder, name, tensors, known, world)


def better(evaluate):
    """An evaluation that finds an AUC of 1."""

    def evaluate_better(self, *arguments):
        metrics, speed = evaluate(self, *arguments)
        return metrics | {"auc": 1.0}, speed

    return evaluate_better


def test_each_of_several_labels_has_its_own(folder, tmp_path):
    """The second has too few labels in the validation split, and keeps its logits."""
    rows = [row(i) for i in range(ROWS)]
    for line in rows[VALIDATION][:60]:
        line[3] = ""
    write_table(tmp_path / "table.csv", rows)
    # With this seed the scores of three epochs rise with both labels.
    config = made(tmp_path, "run", label=None, labels=LABELS).with_training(seed=1)
    with without_pictures():
        train(config)
    run = jfi.load_run(tmp_path / "run")
    found = run.calibration
    assert list(found) == ["long", "clicked"]
    long = found["long"]["a"], found["long"]["b"]
    assert found["long"]["identity"] == ""
    assert long == pytest.approx(fitted(run, "score_long", "seconds"), rel=1e-3, abs=1e-4)
    assert found["clicked"] == {"a": 1.0, "b": 0.0, "identity": "90 samples, fewer than 100"}
    table = run.predict(str(tmp_path / "table.csv"), output="calibrated")
    for name, (a, b) in {"long": long, "clicked": (1.0, 0.0)}.items():
        wanted = 1 / (1 + np.exp(-(a * table[f"score_{name}"].to_numpy().astype(np.float64) + b)))
        np.testing.assert_allclose(table[f"probability_{name}"].to_numpy(), wanted, rtol=1e-5)


@pytest.mark.parametrize("labels", [{}, {"label": None, "labels": LABELS}])
def test_a_validation_split_of_one_class_is_refused_before_training(tmp_path, labels):
    """Of one label, and of one of several."""
    rows = [row(i) for i in range(ROWS)]
    for line in rows[VALIDATION]:
        line[3] = 0
    write_table(tmp_path / "table.csv", rows)
    with pytest.raises(DataError, match="label 'clicked': all 150 labels of the validation split are 0"):
        train(made(tmp_path, "run", **labels))
    assert not (tmp_path / "run").exists()
