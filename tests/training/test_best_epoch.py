"""Which epoch is the best, also after a resume, and what a line of the log averages."""

import pytest
from test_run import killed_after, tiny

from jfi.training import resume, train
from jfi.training.recorder import read_metrics


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    for name in ("draw_curves", "draw_attention"):
        monkeypatch.setattr(f"jfi.training.plots.{name}", lambda *_: None)


def score(monkeypatch: pytest.MonkeyPatch, metric: str, values: list[float]) -> None:
    """Replaces a metric of the evaluations to come: validation after each epoch, and the test."""
    given = iter(values)
    function = {"auc": "auc", "ne": "normalized_entropy"}[metric]
    monkeypatch.setattr(f"jfi.training.metrics.{function}", lambda *_: next(given))


@pytest.mark.parametrize("metric", ["auc", "ne"])
def test_of_epochs_that_tie_the_earlier_is_best(tmp_path, monkeypatch, metric):
    score(monkeypatch, metric, [0.6, 0.6, 0.6])
    result = train(tiny(tmp_path / "run", monitor=metric, epochs=2, patience=None, checkpoint_every=0))
    assert result.best_epoch == 1


@pytest.mark.parametrize(("metric", "values", "best"), [("auc", [0.6, 0.7, 0.5], 2), ("ne", [0.6, 0.7, 0.5], 1)])
def test_auc_is_best_at_its_highest_and_ne_at_its_lowest(tmp_path, monkeypatch, metric, values, best):
    score(monkeypatch, metric, values)
    assert train(tiny(tmp_path / "run", monitor=metric, epochs=2, checkpoint_every=0)).best_epoch == best


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
