"""The suite of a training step on tiny tables: its models run and agree, and a model that differs gets no speed."""

import csv

import pytest
import torch
import torch.nn.functional as F
from stand_ins import ENVIRONMENT

from benchmarks import measure, report, table, training_step
from benchmarks.layer import Projections
from benchmarks.training_step import JFI, MEAN, MODELS, PADDED, StepCase, StepShape, build_model, make_batch

CPU = torch.device("cpu")
TINY = StepShape(
    16, 30, 8, H=2, mean=6, items=50, categories=7, users=9, dense_layers=(8,), over_layers=(8, 8), dtype="float32"
)


@pytest.fixture(autouse=True)
def _clocks(monkeypatch):
    """The clocks alone need a GPU."""
    monkeypatch.setattr(measure, "eager_us", lambda steps, _: [step() for step in steps] and 2000.0)
    monkeypatch.setattr(measure, "peak_mb", lambda step: [step()] and 3.0)


def test_batches_are_the_same_work():
    first, second = (make_batch(TINY, seed, CPU).sparse_features["history_item"] for seed in range(2))
    assert sorted(first.lengths().tolist()) == sorted(second.lengths().tolist())
    assert not torch.equal(first.lengths(), second.lengths())
    assert 0 in first.lengths() and first.lengths().max() <= TINY.N
    assert abs(first.values().numel() - TINY.B * TINY.mean) < TINY.B


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_models_train(name, dtype):
    model, batch = build_model(name, TINY, CPU, CPU), make_batch(TINY, 0, CPU)
    for collection in (model.embedding_collection, model.embedding_bag_collection):
        collection.to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch)
    loss = F.binary_cross_entropy_with_logits(logits.float(), batch.labels)
    loss.backward()
    assert loss.isfinite()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in model.parameters())


def test_padded_and_jagged_models_agree():
    jagged, padded = (build_model(name, TINY, CPU, CPU) for name in (JFI, PADDED))
    own = "sequence_arch.pooling."
    state = {name: x for name, x in jagged.state_dict().items() if not name.startswith(own)}
    assert all(name.startswith(own) for name in padded.load_state_dict(state, strict=False).missing_keys)
    layer = jagged.sequence_arch.pooling.named_parameters()
    padded.sequence_arch.pooling.load({name.removeprefix("attention.0."): x for name, x in layer}, 0)
    batch = make_batch(TINY, 0, CPU)
    torch.testing.assert_close(padded(batch), jagged(batch))


def test_steps_are_measured_written_and_printed(tmp_path):
    rows = [{"suite": "step"} | row for row in training_step.run(StepCase(TINY), CPU, 0.0)]
    assert [(row["implementation"], row["status"]) for row in rows] == [(name, "ok") for name in MODELS], rows
    for row in rows:
        assert row["step_us"] == 2000.0 and row["queries_per_second"] == 8000.0 and row["peak_mb"] == 3.0
        assert row["speed_over_padded"] == row["memory_over_mean"] == 1.0
    kernels = rows[0]["kernels"]
    assert len(kernels) == training_step.HEAVIEST and "kernels" not in rows[1]
    assert [kernel["us"] for kernel in kernels] == sorted((kernel["us"] for kernel in kernels), reverse=True)
    assert kernels[0]["name"] in report.line(rows[0]) and "2.00 ms" in report.line(rows[0])
    assert report.heading(rows[0]) == f"step: {TINY.name}"
    report.write(tmp_path, "step", ENVIRONMENT, rows)
    assert report.read(tmp_path / "step.json")["rows"][0]["kernels"] == kernels
    with (tmp_path / "step.csv").open() as file:
        assert "kernels" not in next(csv.DictReader(file))
    printed = table.markdown({"environment": ENVIRONMENT, "rows": rows}, brief=True)
    assert f"| {TINY.name} | {MEAN} | 2.00 | 8,000 | 3 | 1.00x, 1.00x | 1.00x, 1.00x |" in printed


def test_a_pooling_that_differs_gets_no_speed(monkeypatch):
    monkeypatch.setattr(Projections, "load", lambda *_: None)
    rows = list(training_step.run(StepCase(TINY), CPU, 0.0))
    assert [row["status"] for row in rows] == ["wrong", "wrong", "ok"]
    assert "step_us" not in rows[0] and "speed_over_padded" not in rows[2]
    printed = table.markdown({"environment": ENVIRONMENT, "rows": [{"suite": "step"} | row for row in rows]})
    assert f"| {JFI} | wrong | - |" in printed and "differ by" in report.line(rows[0])


def test_a_loss_that_is_not_finite_gets_no_speed(monkeypatch):
    monkeypatch.setattr(training_step, "train_step", lambda *_: torch.tensor(torch.nan))
    assert {row["status"] for row in training_step.run(StepCase(TINY), CPU, 0.0)} == {"wrong"}
