"""Steps whose gradients are computed in parts are the steps of whole batches."""

import dataclasses
import re

import pytest
import torch
from synthetic_data import synthetic_data

from jfi.data import load_dataset
from jfi.training import (
    Config,
    ConfigError,
    ModelConfig,
    OptimizerConfig,
    OptimizerGroup,
    TrainingConfig,
    resume,
    train,
)
from jfi.training.distributed.processes import World
from jfi.training.loop.captured_steps import capture
from jfi.training.loop.trainer import Trainer
from jfi.training.run.recorder import read_metrics

LOG_EVERY = 1

_WORLD = World(device=torch.device("cpu"))


def config(accumulate: int, *, embeddings: str = "adagrad", data: dict | None = None, **training: object) -> Config:
    return Config(
        data=synthetic_data(num_users=40, num_items=30, mean_length=12.0, **(data or {})),
        model=ModelConfig(
            embedding_dim=8, num_heads=2, bias="history_age", dense_arch=[8], over_arch=[8], cross_layers=0, dropout=0.0
        ),
        optimizer=OptimizerConfig(
            dense=OptimizerGroup(learning_rate=3e-3),
            embeddings=OptimizerGroup(name=embeddings, learning_rate=0.02),
            ema_decay=0.9,
            schedule="cosine",
            warmup_steps=2,
        ),
        training=TrainingConfig(
            **{
                "gradient_accumulation_steps": accumulate,
                "epochs": 2,
                "batch_size": 64,
                "device": "cpu",
                **training,
            }
        ),
    )


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    for name in ("draw_curves", "draw_attention"):
        monkeypatch.setattr(f"jfi.training.run.plots.{name}", lambda *_: None)


@pytest.mark.parametrize(
    ("embeddings", "data", "training"),
    [
        ("adagrad", {}, {"max_grad_norm": 0.05}),
        ("adam", {"batching": "user"}, {}),
        ("rowwise_adagrad", {}, {"precision": "bfloat16"}),
    ],
    ids=["clipped", "by user", "bfloat16"],
)
def test_parts_make_the_steps_of_the_whole_batch(tmp_path, embeddings, data, training):
    """With clipping, a schedule, averages, unknown ids, a last batch that has fewer samples, and in bfloat16."""
    logs = []
    for parts in (1, 3):
        made = config(parts, embeddings=embeddings, data=data, run_dir=str(tmp_path / f"{parts}"), **training)
        train(made)
        logs.append(read_metrics(tmp_path / f"{parts}" / "metrics.jsonl"))
    whole, parted = logs
    assert [(r["split"], r["step"]) for r in whole] == [(r["split"], r["step"]) for r in parted]
    tolerance = 2e-2 if training.get("precision") else 2e-5
    for one, other in zip(whole, parted, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=tolerance)
    assert len(whole) > 10 and whole[0]["loss"] != pytest.approx(whole[-2]["loss"], rel=1e-3)


def test_one_step_of_many_parts_is_the_step_of_the_batch():
    """Every parameter, also with more parts than some batches have samples."""
    models = []
    for parts in (1, 64):
        made = config(parts, embeddings="adam")
        trainer = Trainer(made, load_dataset(made.data), _WORLD)
        trainer.model.train()
        for _ in trainer._outputs("train", 64, "train"):
            trainer.progress.step += 1
        models.append(trainer.model.state_dict())
    for name, tensor in models[0].items():
        torch.testing.assert_close(models[1][name], tensor, rtol=1e-3, atol=2e-5, msg=name)


def test_a_resumed_run_of_parts_ends_in_the_same_bits(tmp_path, monkeypatch):
    """A checkpoint lies between two steps, never within one."""
    whole = train(config(2, run_dir=str(tmp_path / "whole"), checkpoint_every=3))
    saved = Trainer.save

    def save_and_stop(self, run, recorder, stops):
        saved(self, run, recorder, stops)
        if self.progress.step == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "save", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        train(config(2, run_dir=str(tmp_path / "stopped"), checkpoint_every=3))
    monkeypatch.setattr(Trainer, "save", saved)
    assert resume(tmp_path / "stopped").test == whole.test


def test_where_a_step_must_be_one_backward_pass_parts_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"training\.gradient_accumulation_steps: got 0, must be an integer"):
        config(0)
    with pytest.raises(
        ConfigError, match=re.escape("training.gradient_accumulation_steps: got 65, must be at most training.batch")
    ):
        config(65)
    made = dataclasses.replace(config(2), optimizer=OptimizerConfig(ema_decay=None))
    dataset = load_dataset(made.data)
    trainer = Trainer(made, dataset, _WORLD)
    always = made.with_training(cuda_graph="always")
    with pytest.raises(
        ConfigError, match=r"since training\.gradient_accumulation_steps is 2, so that a step has several"
    ):
        capture(trainer._step, trainer.model, trainer.optimizer, always, dataset, _WORLD)
