"""Which epoch is the best, also after a resume, and what a line of the log averages."""

import pytest
from test_run import killed_after, tiny

from jfi.training import resume, train
from jfi.training.run.recorder import read_metrics
from jfi.training.run.run_position import Progress


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    for name in ("draw_curves", "draw_attention"):
        monkeypatch.setattr(f"jfi.training.run.plots.{name}", lambda *_: None)


def score(monkeypatch: pytest.MonkeyPatch, metric: str, values: list[float]) -> None:
    """Replaces a metric of the evaluations to come: validation after each epoch, and the test."""
    given = iter(values)
    function = {"auc": "auc", "ne": "normalized_entropy"}[metric]
    monkeypatch.setattr(f"jfi.training.metrics.label_metrics.{function}", lambda *_: next(given))


@pytest.mark.parametrize("metric", ["auc", "ne"])
def test_of_epochs_that_tie_the_earlier_is_best(tmp_path, monkeypatch, metric):
    score(monkeypatch, metric, [0.6, 0.6, 0.6])
    result = train(tiny(tmp_path / "run", monitor=metric, epochs=2, patience=None, checkpoint_every=0))
    assert result.best_epoch == 1


@pytest.mark.parametrize(("metric", "values", "best"), [("auc", [0.6, 0.7, 0.5], 2), ("ne", [0.6, 0.7, 0.5], 1)])
def test_auc_is_best_at_its_highest_and_ne_at_its_lowest(tmp_path, monkeypatch, metric, values, best):
    score(monkeypatch, metric, values)
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
    assert bool(Progress(epoch=1, best_epoch=1).warn_of_best_epoch({"ne": 1.2, name: 1.2}, "auc")) == warns


def test_a_resumed_run_remembers_the_best_score(tmp_path, monkeypatch):
    """The first of three epochs is the best; the run dies in the second."""
    score(monkeypatch, "auc", [0.9, 0.6, 0.5, 0.7])
    killed_after(20, tiny(tmp_path / "run", patience=None), monkeypatch)
    log = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["auc"] for line in log if line["split"] == "validation"] == [0.9]
    result = resume(tmp_path / "run")
    assert (result.epochs, result.best_epoch) == (3, 1)


def test_a_line_of_the_log_is_the_mean_of_its_own_steps(tmp_path):
    losses = {}
    for every in (1, 4):
        train(tiny(tmp_path / f"{every}", epochs=1, log_every=every, checkpoint_every=0))
        log = read_metrics(tmp_path / f"{every}" / "metrics.jsonl")
        losses[every] = [line["loss"] for line in log if line["split"] == "train"]
    assert len(losses[1]) >= 12
    for i in range(3):
        assert losses[4][i] == pytest.approx(sum(losses[1][4 * i : 4 * i + 4]) / 4, rel=1e-5)
