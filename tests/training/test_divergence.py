"""A step that diverged is not saved: the last finite checkpoint stays, and the run can be continued from it."""

import math

import pytest
import torch
from test_run import assert_same_run, saved_tensors, tiny, tiny_data

from jfi.training import resume, train
from jfi.training.checkpoints.checkpoint import latest_checkpoint
from jfi.training.loop.trainer import Trainer
from jfi.utils.exit_codes import run_command

LOG_EVERY = 1000


def small(run, **training):
    config = tiny(run, epochs=1, checkpoint_every=1, **training)
    config.data = tiny_data(num_users=30)
    return config


@pytest.fixture(autouse=True, scope="module")
def _no_pictures():
    with pytest.MonkeyPatch.context() as patched:
        for name in ("draw_curves", "draw_attention"):
            patched.setattr(f"jfi.training.run.plots.{name}", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def whole(_no_pictures, tmp_path_factory):
    """A run that never diverged."""
    path = tmp_path_factory.mktemp("whole") / "run"
    train(small(path))
    return path


def files(run) -> dict:
    return {path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()}


def test_a_learning_rate_that_is_far_too_high(tmp_path, capfd):
    run = tmp_path / "run"
    config = small(run)
    config.optimizer.dense.learning_rate = 1e30
    assert run_command(lambda: train(config) and None) == 1
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "learning_rate" in line and "step 2" in line
    assert all(tensor.isfinite().all() for tensor in saved_tensors(run).values())
    kept = files(run)
    assert kept
    assert run_command(lambda: resume(run) and None) == 1
    assert files(run) == kept


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_run_continues_from_the_last_finite_step_to_the_bits_of_a_run_that_never_diverged(
    whole, tmp_path, monkeypatch, capfd, where
):
    """A NaN in step 6 alone; that of a gradient is in no loss until step 7."""
    run, config = tmp_path / "run", small(tmp_path / "run")
    forward = Trainer._forward

    def failing_forward(trainer, batch):
        loss, output = forward(trainer, batch)
        if trainer.model.training and trainer.progress.step == 5:
            if where == "loss":
                trainer.window[0] = math.nan
            else:
                loss = loss * torch.tensor(math.nan)
        return loss, output

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_forward", failing_forward)
        assert run_command(lambda: train(config) and None) == 1
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert ("the loss is nan" if where == "loss" else "is not finite") in line and "at step 6; lower" in line, line
    assert latest_checkpoint(run / "checkpoints").name.endswith("batch-0000005")
    resume(run)
    assert_same_run(whole, run)


def test_a_run_that_ran_out_of_memory_continues_to_the_same_bits(whole, tmp_path, monkeypatch, capfd):
    run, config = tmp_path / "run", small(tmp_path / "run")
    forward = Trainer._forward

    def greedy_forward(trainer, batch):
        if trainer.progress.step == 7:
            torch.empty(2**62, dtype=torch.uint8)
        return forward(trainer, batch)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_forward", greedy_forward)
        assert run_command(lambda: train(config) and None) == 4
    assert "error: out of memory" in capfd.readouterr().err
    resume(run)
    assert_same_run(whole, run)
