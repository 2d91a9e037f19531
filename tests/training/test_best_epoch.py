"""Which epoch is the best, also after a resume, and what a line of the log averages."""

import math

import pytest
from test_run import killed_after, tiny

from jfi.training import TrainingConfig, resume, train
from jfi.training.run.recorder import read_metrics
from jfi.training.run.run_position import RunPosition

LOG_EVERY = 4


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    for name in ("draw_curves", "draw_attention"):
        monkeypatch.setattr(f"jfi.training.run.plots.{name}", lambda *_: None)


def score(monkeypatch: pytest.MonkeyPatch, metric: str, values: list[float]) -> None:
    """Replaces a metric of the evaluations to come: validation after each epoch, and the test."""
    given = iter(values)
    function = {"ne": "normalized_entropy"}.get(metric, metric)
    monkeypatch.setattr(f"jfi.training.metrics.label_metrics.{function}", lambda *_: next(given))


@pytest.mark.parametrize("metric", ["auc", "ne"])
def test_of_epochs_that_tie_the_earlier_is_best(tmp_path, monkeypatch, metric):
    score(monkeypatch, metric, [0.6, 0.6, 0.6])
    result = train(tiny(tmp_path / "run", monitor=metric, epochs=2, patience=None, checkpoint_every=0))
    assert result.best_epoch == 1


@pytest.mark.parametrize(("metric", "best"), [("auc", 2), ("user_auc", 2), ("ne", 1)])
def test_auc_is_best_at_its_highest_and_ne_at_its_lowest(tmp_path, monkeypatch, metric, best):
    score(monkeypatch, metric, [0.6, 0.7, 0.5])
    assert train(tiny(tmp_path / "run", monitor=metric, epochs=2, checkpoint_every=0)).best_epoch == best


@pytest.mark.parametrize(
    ("ne", "best", "warnings"),
    [
        ([0.9, 0.8], 2, []),
        ([1.2, 1.1], 2, ["the validation NE of epoch 2, the best by ne, is 1.1000: above 1 "]),
        ([0.8, 0.9], 1, ["the best of 2 epochs is epoch 1: try lower learning rates, "]),
        ([0.8], 1, []),
    ],
)
def test_the_end_warns_of_a_doubtful_best_epoch(tmp_path, monkeypatch, capsys, ne, best, warnings):
    score(monkeypatch, "ne", [*ne, 0.5])
    result = train(tiny(tmp_path / "run", monitor="ne", epochs=len(ne), patience=None, checkpoint_every=0))
    assert result.best_epoch == best
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(found) == len(warnings)
    assert all(line.startswith(f"warning: {start}") for line, start in zip(found, warnings, strict=True))


@pytest.mark.parametrize(("name", "warns"), [("ne_click", False), ("auc", True)])
def test_the_mean_ne_of_several_labels_is_not_warned_of(name, warns):
    assert bool(RunPosition(epoch=1, best_epoch=1).warn_of_best_epoch({"ne": 1.2, name: 1.2}, "auc")) == warns


@pytest.mark.parametrize(
    ("metrics", "is_implicit", "warns"),
    [
        ({"auc": 0.981}, False, "auc of epoch 1 is 0.9810: above 0.98 an input"),
        ({"auc": 0.7, "auc_buy": 0.99}, False, "auc_buy of epoch 1 is 0.9900"),
        ({"auc": 0.98, "user_auc": 1.0}, False, None),
        ({"auc": 0.999}, True, None),
        ({"auc": float("nan")}, False, "auc is NaN"),
    ],
)
def test_an_auc_near_1_or_none_is_warned_of(metrics, is_implicit, warns):
    found = RunPosition(epoch=1, best_epoch=1, best=0.5).warn_of_best_epoch(metrics, "auc", is_implicit)
    assert [line.startswith(f"warning: the validation {warns}") for line in found] == [True] * (warns is not None)


def test_a_label_without_an_auc_hides_no_other_one():
    metrics = {"auc": math.nan, "auc_like": math.nan, "auc_buy": 0.99}
    found = RunPosition(epoch=1, best_epoch=1, best=0.5).warn_of_best_epoch(metrics, "auc")
    assert "auc is NaN" in found[0] and "auc_buy of epoch 1 is 0.9900" in found[1]


@pytest.mark.parametrize(
    ("auc", "user_auc", "epochs"),
    [
        ([0.73, 0.71, 0.68], [0.65, 0.69, 0.70], "1, 2, 3"),
        ([0.60, 0.65, 0.66, 0.67, 0.66], [0.70, 0.71, 0.70, 0.69, 0.68], "2, 3, 4"),
        ([0.73, 0.71], [0.65, 0.69], None),
        ([0.73, 0.71, 0.72], [0.65, 0.69, 0.68], None),  # to and fro
        ([0.73, 0.71, 0.68], [0.65, 0.6501, 0.6502], None),
        ([0.73, 0.71, 0.68], [0.65, 0.69, None], None),
        ([0.73, 0.71, 0.71], [0.65, 0.69, 0.70], None),
        ([None, None], [None, None], None),
    ],
)
def test_auc_and_auc_per_user_that_disagree_are_warned_of(auc, user_auc, epochs):
    lines = [(n, a, b, "new") for n, (a, b) in enumerate(zip(auc, user_auc, strict=True), 1)]
    lines = [(0, 0.9, 0.1, "old"), *lines]  # of the data before
    log = [
        {"split": split, "epoch": n, "auc": a, "user_auc": b, "data": data}
        for n, a, b, data in lines
        for split in ("train", "validation")
    ]
    found = RunPosition(best_epoch=1).warn_of_opposite_metrics(log, "new", "ne")
    assert [line.partition(" validation")[0] for line in found] == [f"warning: over epochs {epochs}"] * bool(epochs)
    assert all("the run keeps epoch 1, the best by ne; to rank the items of a user, set" in line for line in found)
    found = RunPosition(best_epoch=1).warn_of_opposite_metrics(log, "new", "user_auc")
    assert all(line.endswith("set training.monitor: auc") for line in found)


def test_a_label_whose_metrics_disagree_is_named():
    """Beside another one that moves the other way, and one without an AUC per user: the means tell neither."""
    moves = {"like": ([0.73, 0.71, 0.68], [0.65, 0.69, 0.70]), "buy": ([0.5, 0.5, 0.5], [math.nan] * 3)}
    log = [{"split": "validation", "epoch": n, "auc": 0.6, "user_auc": math.nan} for n in (1, 2, 3)]
    for label, metrics in moves.items():
        for line, auc, user_auc in zip(log, *metrics, strict=True):
            line |= {f"auc_{label}": auc, f"user_auc_{label}": user_auc}
    (found,) = RunPosition(best_epoch=1).warn_of_opposite_metrics(log, "", "auc_like")
    assert found.startswith("warning: over epochs 1, 2, 3 validation AUC and AUC per user of like move in opposite")
    assert found.endswith("set training.monitor: user_auc_like")


def test_a_resumed_run_remembers_the_best_score_and_warns_of_all_epochs(tmp_path, monkeypatch, capsys):
    """The first of three epochs is the best; the run dies in the second."""
    score(monkeypatch, "auc", [0.9, 0.6, 0.5, 0.7])
    score(monkeypatch, "user_auc", [0.5, 0.6, 0.7, 0.7])
    killed_after(20, tiny(tmp_path / "run", patience=None), monkeypatch)
    log = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["auc"] for line in log if line["split"] == "validation"] == [0.9]
    result = resume(tmp_path / "run")
    assert (result.epochs, result.best_epoch) == (3, 1)
    assert "AUC 0.9000, 0.6000, 0.5000, AUC per user 0.5000, 0.6000, 0.7000; the run keeps" in capsys.readouterr().out


def test_a_line_of_the_log_is_the_mean_of_its_own_steps(tmp_path, monkeypatch):
    losses = {}
    for every in (1, 4):
        monkeypatch.setattr(TrainingConfig, "log_every", every)
        train(tiny(tmp_path / f"{every}", epochs=1, checkpoint_every=0))
        log = read_metrics(tmp_path / f"{every}" / "metrics.jsonl")
        losses[every] = [line["loss"] for line in log if line["split"] == "train"]
    assert len(losses[1]) >= 12
    for i in range(3):
        assert losses[4][i] == pytest.approx(sum(losses[1][4 * i : 4 * i + 4]) / 4, rel=1e-5)
