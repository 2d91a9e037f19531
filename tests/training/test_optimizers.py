"""Learning-rate schedules, clipping and precision of a run, against torch's own."""

import dataclasses
from pathlib import Path

import pytest
import torch
from test_distributed import environment, free_port
from test_run import assert_same_run, by_user, killed_after, tiny
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from jfi.data import load_dataset
from jfi.training import Config, ConfigError, EncoderConfig, OptimizerConfig, OptimizerGroup, TrainingConfig, train
from jfi.training import resume as resume_run
from jfi.training.distributed.processes import World, join_world
from jfi.training.loop.learning_rates import rate_factor
from jfi.training.loop.trainer import Trainer
from jfi.training.model.build_model import build_model, build_optimizer

LOG_EVERY = 4


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    for name in ("draw_curves", "draw_attention"):
        monkeypatch.setattr(f"jfi.training.run.plots.{name}", lambda *_: None)


def scheduled(run_dir: Path | None, warmup: int = 5, **training: object) -> Config:
    config = tiny(run_dir, epochs=2, patience=None, **training)
    groups = OptimizerGroup("adam", 0.01), OptimizerGroup("adagrad", 0.02)
    optimizer = OptimizerConfig(*groups, ema_decay=0.9, schedule="cosine", warmup_steps=warmup)
    return dataclasses.replace(config, optimizer=optimizer)


def torch_rates(base: float, warmup: int, steps: int) -> list[float]:
    """The rates of torch's schedulers."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base)
    rise = LinearLR(optimizer, 1 / warmup, total_iters=warmup - 1)
    schedule = SequentialLR(optimizer, [rise, CosineAnnealingLR(optimizer, steps - warmup)], [warmup])
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def noted_rates(monkeypatch) -> list[list[float]]:
    """By step of the runs to come the rates of the groups."""
    rates = []

    def noting(*arguments):
        optimizer = build_optimizer(*arguments)
        step = optimizer.step

        def noting_step(*a, **k):
            rates.append([float(group["lr"]) for group in optimizer.param_groups])
            step(*a, **k)

        optimizer.step = noting_step
        return optimizer

    monkeypatch.setattr("jfi.training.run.state.build_optimizer", noting)
    return rates


@pytest.mark.parametrize("batching", ["sample", "user"])
def test_rates_are_those_of_torchs_schedulers(tmp_path, monkeypatch, batching):
    rates = noted_rates(monkeypatch)
    config = scheduled(tmp_path / "run")
    train(by_user(config) if batching == "user" else config)
    assert len(rates) > 20
    for group, base in enumerate((0.02, 0.01)):  # tables first
        want = torch_rates(base, 5, len(rates))
        # By user an epoch may have one batch more than another, and the end is then known in the last one.
        tolerance = {"rel": 1e-9} if batching == "sample" else {"abs": base * 0.02}
        assert [step[group] for step in rates] == pytest.approx(want, **tolerance)
    assert 0 < rates[-1][0] < 0.02 * 0.02


def test_without_a_schedule_the_rates_are_the_configs(tmp_path, monkeypatch):
    rates = noted_rates(monkeypatch)
    config = tiny(tmp_path / "run", epochs=1)
    config.optimizer.warmup_steps = 3
    train(config)
    factors = [1 / 3, 2 / 3] + [1.0] * (len(rates) - 2)
    assert [step[1] for step in rates] == pytest.approx([3e-3 * factor for factor in factors])


@pytest.mark.parametrize("step", [4, pytest.param(9, marks=pytest.mark.slow)])
def test_a_run_resumes_within_its_schedule_to_the_same_bits(tmp_path, monkeypatch, step):
    """Behind three of five steps of warm-up, and of the steps by cosine."""
    options = {"checkpoint_every": 3, "max_grad_norm": 0.05, "precision": "bfloat16"}
    train(scheduled(tmp_path / "whole", **options))
    killed_after(step, scheduled(tmp_path / "run", **options), monkeypatch)
    resume_run(tmp_path / "run")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_the_cosine_ends_at_zero_however_late():
    config = OptimizerConfig(schedule="cosine", warmup_steps=2)
    assert rate_factor(config, 10, 10) == rate_factor(config, 25, 10) == 0.0


def test_a_warm_up_that_no_run_ends_is_refused():
    config = scheduled(None, warmup=10_000)
    with pytest.raises(ConfigError, match=r"optimizer\.warmup_steps: got 10000, must be below the run's \d+ steps"):
        Trainer(config, load_dataset(config.data), World())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: OptimizerConfig(warmup_steps=-1),
            r"optimizer\.warmup_steps: got -1, must be an integer of",
        ),
        (lambda: TrainingConfig(max_grad_norm=0.0), r"training\.max_grad_norm: got 0\.0, must be a number above 0"),
        (lambda: TrainingConfig(max_grad_norm=float("nan")), r"training\.max_grad_norm: got nan"),
    ],
)
def test_wrong_values_are_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("limit", [None, 0.1, 1e6])
def test_gradients_outside_of_the_tables_are_clipped_by_their_norm(limit):
    config = tiny(None)
    schema = load_dataset(config.data).schema
    model = build_model(config.model, EncoderConfig(), schema, optimizer=config.optimizer)
    optimizer = build_optimizer(config.optimizer, model, limit)
    *_, dense = (list(one.params.values()) for _, one in optimizer.optimizers)
    tables = {name: table.clone() for name, table in model.state_dict().items() if "embedding" in name}
    for parameter in dense:
        parameter.grad = torch.randn_like(parameter)
    given = {parameter: parameter.grad.clone() for parameter in dense}
    norm = torch.cat([grad.flatten() for grad in given.values()]).norm()
    optimizer.step()
    scale = 1.0 if limit is None else min(1.0, limit / float(norm))
    for parameter in dense:  # Adam's first moment is a tenth of the first gradient
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], 0.1 * scale * given[parameter])
    assert tables and all(torch.equal(model.state_dict()[name], table) for name, table in tables.items())


def test_the_trainer_clips_at_every_step(tmp_path, monkeypatch):
    norms, clip = [], torch.nn.utils.clip_grad_norm_

    def noting(parameters, max_norm):
        before = clip(parameters, max_norm)
        norms.append((float(before), float(torch.cat([p.grad.flatten() for p in parameters]).norm())))

    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", noting)
    train(tiny(tmp_path / "run", epochs=1, max_grad_norm=1e-3))
    assert len(norms) > 10 and all(before > 2e-3 for before, _ in norms)
    assert [after for _, after in norms] == pytest.approx([1e-3] * len(norms), rel=1e-2)


def widths(trainer: Trainer) -> set[torch.dtype]:
    """Dtypes of the products of DLRM's dense arch from now on."""
    seen: set[torch.dtype] = set()
    for module in trainer.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    return seen


@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize(("precision", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_products_have_the_precision_in_training_and_evaluation(monkeypatch, launched, precision, dtype):
    config = tiny(None, precision=precision)
    config.optimizer.ema_decay = None
    if launched:
        for name, value in environment(0, 1).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with join_world("cpu") as world:
        trainer = Trainer(config, load_dataset(config.data), world)
        seen = widths(trainer)
        for training in (True, False):
            trainer.model.train(training)
            logits, *_ = next(trainer._outputs("train" if training else "test", 64, "a step"))
            assert seen == {dtype} and logits.dtype == torch.float32
            seen.clear()
        assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
        states = [value for state in trainer.optimizer.state.values() for value in state.values()]
        floating = {x.dtype for x in states if isinstance(x, torch.Tensor) and x.is_floating_point()}
        assert floating == {torch.float32}


def test_half_precision_trains_as_well(tmp_path):
    results = [train(tiny(tmp_path / name, precision=name, seed=3)) for name in ("float32", "bfloat16")]
    assert results[1].test["ne"] == pytest.approx(results[0].test["ne"], abs=0.02)
    assert results[1].test["ne"] != results[0].test["ne"]
