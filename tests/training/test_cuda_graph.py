"""Training steps as CUDA graphs: when they are chosen, and on a GPU the same runs as eager ones."""

import dataclasses
from pathlib import Path

import pytest
import torch
from test_run import assert_same_run, by_user, read_results, saved_tensors, tiny

from jfi.cuda_graphs.captured_step import CapturedStep
from jfi.data import load_dataset
from jfi.training import Config, EncoderConfig, OptimizerConfig, OptimizerGroup, TrainingConfig, resume, train
from jfi.training.distributed.processes import World
from jfi.training.loop.captured_steps import capture
from jfi.training.loop.trainer import Trainer

LOG_EVERY = 1

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    for name in ("draw_curves", "draw_attention"):
        monkeypatch.setattr(f"jfi.training.run.plots.{name}", lambda *_: None)


def graphed(run_dir: Path | None, cuda_graph: str = "auto", model: dict | None = None, **training: object) -> Config:
    """Some 35 steps of batches of 64 samples, the last of an epoch smaller."""
    options = {"epochs": 2, "device": "auto", "checkpoint_every": 5, "patience": None, **training}
    config = tiny(run_dir, cuda_graph=cuda_graph, **options)
    groups = OptimizerGroup("adam", 3e-3), OptimizerGroup("adam", 3e-3)
    optimizer = OptimizerConfig(*groups, ema_decay=0.9, schedule="cosine", warmup_steps=5)
    model = dataclasses.replace(config.model, **{"dropout": 0.0, **(model or {})})
    return dataclasses.replace(config, optimizer=optimizer, model=model)


def decided(config: Config, world: World | None = None, capturable: bool = True) -> CapturedStep | str:
    """What `capture` decides; on a CPU as if its optimizers could be captured."""
    trainer = Trainer(config, load_dataset(config.data), World())
    for group in trainer.optimizer.param_groups:
        if "capturable" in group:  # not of tables, which step in the backward pass
            group["capturable"] = capturable
    return capture(trainer._step, trainer.model, trainer.optimizer, config, trainer.dataset, world or World())


@pytest.mark.parametrize(
    "model",
    [{}, {"bias": ["history_age", "position"], "cross_layers": 1}],
    ids=["plain", "deep"],
)
def test_what_is_captured(model):
    found = decided(graphed(None, model=model))
    assert isinstance(found, CapturedStep)


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        (lambda c: c, {"world": World(launched=True)}, "the run is under torchrun"),
        (by_user, {}, "data.batching is user"),
        (lambda c: c, {"capturable": False}, "optimizer.dense.name is adam"),
        (
            lambda c: dataclasses.replace(c, encoder=EncoderConfig(num_layers=1)),
            {},
            "a JaggedEncoder has linear layers",
        ),
    ],
)
def test_what_is_not_captured_has_a_reason(change, options, reason):
    assert reason in decided(change(graphed(None)), **options)


def test_a_cpu_runs_eagerly_and_says_nothing(tmp_path, capsys, monkeypatch):
    if torch.cuda.is_available():
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    train(graphed(tmp_path / "run", epochs=1, device="cpu"))
    said = capsys.readouterr()
    assert "captured" not in said.out + said.err and "CUDA" not in said.out + said.err


class StandInGraphs:
    """Runs the step on the buffers, at a replay as before it."""

    def reset(self): ...

    def load(self, bucket, batch):
        bucket.buffers.fill(bucket.block, batch)

    def run(self, step):
        return step()

    def capture(self, step):
        return step, None


def test_the_loop_is_the_same_with_steps_from_buffers(tmp_path, monkeypatch, capsys):
    """Without histories a CPU's layers take buffers with room, and every number is the same."""
    options = {"device": "cpu", "model": {"pooling": "none", "dropout": 0.1}, "max_grad_norm": 0.1}
    train(graphed(tmp_path / "plain", **options))
    fit = Trainer.fit

    def buffered(trainer, *arguments):
        trainer._captured = CapturedStep(trainer._step, trainer.model)
        trainer._captured._graphs = StandInGraphs()
        return fit(trainer, *arguments)

    monkeypatch.setattr(Trainer, "fit", buffered)
    train(graphed(tmp_path / "buffers", **options))
    assert_same_run(tmp_path / "plain", tmp_path / "buffers")
    lines = [line for line in capsys.readouterr().out.splitlines() if "steps ran captured" in line]
    assert len(lines) == 2 and "of 36 steps ran captured" in lines[1]
    assert "as warm-up, 2 another number of samples, or another structure" in lines[1]


# --- On a GPU ---------------------------------------------------------------------------------------------------------
def assert_alike(run: Path, other: Path, losses: float, metrics: float) -> None:
    log, other_log = read_results(run / "metrics.jsonl"), read_results(other / "metrics.jsonl")
    assert [(one["split"], one["step"]) for one in log] == [(one["split"], one["step"]) for one in other_log]
    assert sum(one["split"] == "train" for one in log) >= 30
    for one, two in zip(log, other_log, strict=True):
        bound = losses if one["split"] == "train" else metrics
        for name in ("loss", "ne") if one["split"] == "train" else ("auc", "ne"):
            assert one[name] == pytest.approx(two[name], abs=bound), (name, one)


@on_gpu
@pytest.mark.parametrize(
    ("model", "training", "losses"),
    [
        ({}, {}, 5e-4),
        ({"bias": "position"}, {"max_grad_norm": 0.05}, 5e-4),
        ({"pooling": "mean"}, {}, 5e-4),
        ({"pooling": "none"}, {}, 5e-4),
        ({"bias": ["history_age", "position"], "cross_layers": 1}, {}, 5e-4),
        ({}, {"precision": "bfloat16"}, 5e-3),
    ],
    ids=["attention", "clipped", "mean", "none", "deep", "bfloat16"],
)
def test_losses_equal_those_of_eager_steps(tmp_path, capsys, model, training, losses):
    train(graphed(tmp_path / "eager", "never", model, **training))
    assert "CUDA" not in capsys.readouterr().out
    train(graphed(tmp_path / "graphs", "auto", model, **training))
    said = capsys.readouterr().out
    assert "steps ran captured, in " in said and "another number of samples" in said, said
    assert_alike(tmp_path / "eager", tmp_path / "graphs", losses, 0.02)
    a, b = saved_tensors(tmp_path / "eager"), saved_tensors(tmp_path / "graphs")
    assert a.keys() == b.keys()
    steps = [name for name in a if name.endswith(".step")]
    assert steps and all(torch.equal(a[name], b[name]) for name in steps)


@on_gpu
def test_dropout_draws_what_eager_steps_draw(tmp_path):
    for name, mode in (("eager", "never"), ("graphs", "auto")):
        train(graphed(tmp_path / name, mode, {"dropout": 0.2}))
    assert_alike(tmp_path / "eager", tmp_path / "graphs", 5e-4, 0.02)


@on_gpu
@pytest.mark.parametrize("calls", [3, 13, 24])
def test_a_captured_run_resumes_to_the_same_bits(tmp_path, monkeypatch, calls):
    """Killed in the warm-up, while replaying, and in the second epoch."""
    train(graphed(tmp_path / "whole", model={"dropout": 0.2}))
    call, done = CapturedStep.__call__, []

    def dying(step, batch):
        done.append(None)
        if len(done) > calls:
            raise RuntimeError("killed")
        return call(step, batch)

    with monkeypatch.context() as patched:
        patched.setattr(CapturedStep, "__call__", dying)
        with pytest.raises(RuntimeError, match="killed"):
            train(graphed(tmp_path / "run", model={"dropout": 0.2}))
    resume(tmp_path / "run")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@on_gpu
def test_divergence_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingConfig, "log_every", 10)
    config = graphed(tmp_path / "run", checkpoint_every=0)
    for group in (config.optimizer.dense, config.optimizer.embeddings):
        group.learning_rate = 1e30
    with pytest.raises(FloatingPointError, match="lower the learning rates"):
        train(config)


@on_gpu
@pytest.mark.parametrize("name", ["embeddings", "dense"])
def test_an_optimizer_that_cannot_be_captured_is_named(tmp_path, capsys, name):
    config = graphed(tmp_path / "run", epochs=1)
    getattr(config.optimizer, name).name = "adagrad"
    train(config)
    said = capsys.readouterr()
    captured = "steps ran captured" in said.out
    # Tables whose optimizer steps in the backward pass can be captured with any.
    assert captured or f"optimizer.{name}.name is adagrad" in said.out
    assert captured <= (name == "embeddings")
