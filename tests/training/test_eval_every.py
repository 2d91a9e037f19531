"""Evaluations within an epoch: when they are, which is the best, early stopping, and resumes to the same bits."""

import os
import signal

import pytest
import torch
from test_best_epoch import score
from test_run import assert_same_run, killed_after, tiny

import jfi
from jfi.training import ConfigError, TrainingConfig, resume, train
from jfi.training.distributed.processes import Interrupted
from jfi.training.loop.trainer import Trainer
from jfi.training.run.recorder import read_metrics

LOG_EVERY = 4


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    for name in ("draw_curves", "draw_attention"):
        monkeypatch.setattr(f"jfi.training.run.plots.{name}", lambda *_: None)


def config(path, **training):
    return tiny(path, **{"epochs": 2, "eval_every": 5, "checkpoint_every": 0, "patience": None, **training})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("draw_curves", "draw_attention"):
            patch.setattr(f"jfi.training.run.plots.{name}", lambda *_: None)
        train(config(path))
    return path


def evaluations(path) -> list[dict]:
    return [line for line in read_metrics(path / "metrics.jsonl") if line["split"] == "validation"]


def test_evaluations_are_every_n_steps_and_at_the_end_of_each_epoch(whole):
    found = evaluations(whole)
    steps = found[-1]["step"] // 2
    wanted = sorted({*range(5, 2 * steps, 5), steps, 2 * steps})
    assert steps >= 12 and steps % 5 and [line["step"] for line in found] == wanted
    assert [line["epoch"] for line in found] == pytest.approx([step / steps for step in wanted], abs=1e-6)
    assert [line["epoch"] for line in found if line["step"] % steps == 0] == [1, 2]


def test_evaluations_do_not_change_the_training(tmp_path, whole):
    """But for the rounding of the average's rows, which an evaluation brings to the present."""
    train(config(tmp_path / "run", eval_every=0))
    by_step = {line["step"]: line for line in evaluations(whole)}
    for line in evaluations(tmp_path / "run"):
        assert line["auc"] == pytest.approx(by_step[line["step"]]["auc"], abs=1e-6)


@pytest.mark.slow  # test_disturbed_runs.py kills a run with evaluations within an epoch among all the rest
@pytest.mark.parametrize("step", [3, 5, 6, 12, 16, 21])
def test_a_killed_run_resumes_to_the_same_bits(tmp_path, monkeypatch, whole, step):
    killed_after(step, config(tmp_path / "run", checkpoint_every=3), monkeypatch)
    resume(tmp_path / "run")
    assert_same_run(whole, tmp_path / "run")


@pytest.mark.parametrize("at", [pytest.param("training", marks=pytest.mark.slow), "evaluation"])
def test_a_signal_before_or_in_an_evaluation_resumes_to_the_same_bits(tmp_path, monkeypatch, whole, at):
    forward = Trainer._forward

    def signalling(trainer, batch):
        step, training = trainer.progress.step, trainer.model.training
        if (step, training) == ((9, True) if at == "training" else (10, False)):
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(trainer, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_forward", signalling)
        with pytest.raises(Interrupted):
            train(config(tmp_path / "run"))
    assert evaluations(tmp_path / "run")[-1]["step"] == 5
    resume(tmp_path / "run")
    assert_same_run(whole, tmp_path / "run")


def test_the_best_parameters_may_lie_within_an_epoch(tmp_path, monkeypatch):
    kept, save = {}, Trainer.save

    def keep(trainer, *arguments):
        kept[trainer.progress.step] = {k: v.clone() for k, v in trainer.evaluated.state_dict().items()}
        save(trainer, *arguments)

    monkeypatch.setattr(Trainer, "save", keep)
    score(monkeypatch, "auc", [0.6, 0.9, 0.7, 0.8, 0.8, 0.8, 0.8, 0.8, 0.5])
    result = train(config(tmp_path / "run", patience=3))
    steps = [line["step"] for line in evaluations(tmp_path / "run")]
    per_epoch = next(line["step"] for line in evaluations(tmp_path / "run") if line["epoch"] == 1)
    assert len(steps) == 5 and steps[1] == 10  # 3 evaluations after the best one
    assert result.best_epoch == pytest.approx(10 / per_epoch, abs=1e-6)
    assert result.epochs == pytest.approx(steps[-1] / per_epoch, abs=1e-6)
    assert result.validation["auc"] == 0.9
    model = jfi.load_run(tmp_path / "run").model.state_dict()
    assert all(torch.equal(value, kept[10][name]) for name, value in model.items())
    assert "training.patience has ended the run" in (  # nothing is left
        _printed(lambda: (score(monkeypatch, "auc", [0.5]), resume(tmp_path / "run")))
    )


def _printed(call) -> str:
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out:
        call()
    return out.getvalue()


def test_a_negative_number_of_steps_is_refused():
    with pytest.raises(ConfigError, match=r"training\.eval_every: got -1, must be an integer of at least 0"):
        TrainingConfig(eval_every=-1)
