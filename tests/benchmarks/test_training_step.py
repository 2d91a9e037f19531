"""The suite of a training step on tiny tables: its models run and agree, and a model that differs gets no speed."""

import csv
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from stand_ins import ENVIRONMENT

from benchmarks import figures, measure, report, table, training_step
from benchmarks.layer import Projections
from benchmarks.training_step import (
    BY_ID,
    CAPTURED,
    JFI,
    PADDED,
    PADDED_CAPTURED,
    POOLINGS,
    WAYS,
    StepCase,
    StepShape,
    Training,
    build_model,
    make_batch,
)
from jfi.data import Batch

CPU = torch.device("cpu")
TINY = StepShape(
    16, 30, 8, H=2, mean=6, items=50, categories=7, users=9, dense_layers=(8,), over_layers=(8, 8), dtype="float32"
)


@pytest.fixture(autouse=True)
def _clocks(monkeypatch):
    """The clocks alone need a GPU."""
    monkeypatch.setattr(measure, "eager_us", lambda steps, _: [step() for step in steps] and 2000.0)
    monkeypatch.setattr(measure, "peak_mb", lambda step: [step()] and 3.0)
    monkeypatch.setattr(measure, "wall_us", lambda steps, _: [step() for step in steps] and 500.0)
    monkeypatch.setattr(measure, "first_peak_mb", lambda step, kept: [step()] and 3.0 + 0 * kept())


def test_batches_are_the_same_work():
    first, second = (make_batch(TINY, seed, CPU).sparse_features["history_item"] for seed in range(2))
    assert sorted(first.lengths().tolist()) == sorted(second.lengths().tolist())
    assert not torch.equal(first.lengths(), second.lengths())
    assert 0 in first.lengths() and first.lengths().max() <= TINY.N
    assert abs(first.values().numel() - TINY.B * TINY.mean) < TINY.B


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", POOLINGS)
def test_models_train(name, dtype):
    model, batch = build_model(name, TINY, CPU, CPU), make_batch(TINY, 0, CPU)
    for collection in (model.embedding_collection, model.embedding_bag_collection):
        collection.to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch.dense_features, batch.sparse_features).squeeze(-1)
    loss = F.binary_cross_entropy_with_logits(logits.float(), batch.labels)
    loss.backward()
    assert loss.isfinite()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in model.parameters())


def test_padded_and_jagged_models_agree():
    jagged, padded = (build_model(name, TINY, CPU, CPU) for name in (JFI, PADDED))
    own = "sequence_arch.pooling."
    state = {name: x for name, x in jagged.state_dict().items() if not name.startswith(own)}
    assert all(name.startswith(own) for name in padded.load_state_dict(state, strict=False).missing_keys)
    (layer,) = jagged.sequence_arch.pooling.attention.values()
    padded.sequence_arch.pooling.load(layer.state_dict())
    batch = make_batch(TINY, 0, CPU)
    inputs = batch.dense_features, batch.sparse_features
    torch.testing.assert_close(padded(*inputs), jagged(*inputs))


@pytest.mark.slow
def test_steps_are_measured_written_and_printed(tmp_path):
    rows = [{"suite": "step"} | row for row in training_step.run(StepCase(TINY), CPU, 0.0)]
    assert [(row["implementation"], row["status"]) for row in rows] == [(way.name, "ok") for way in WAYS], rows
    captured = {way.name for way in WAYS if way.captured}
    for row in rows:
        is_captured = row["implementation"] in captured
        assert row["step_us"] == (500.0 if is_captured else 2000.0) and row["peak_mb"] == 3.0
        assert row["queries_per_second"] == TINY.B / row["step_us"] * 1e6
        assert row["speed_over_padded"] == row["speed_over_jfi"] == (4.0 if is_captured else 1.0)
        assert row["speed_over_padded_captured"] == (1.0 if is_captured else 0.25) and row["memory_over_mean"] == 1.0
        assert row["kernel_count"] > 100 and row["step_over_kernels"] == row["step_us"] / row["kernels_us"]
        assert ("summary" in row) == is_captured and ("kernels" in row) == row["ours"]
    kernels = rows[0]["kernels"]
    assert len(kernels) == training_step.HEAVIEST
    assert [kernel["us"] for kernel in kernels] == sorted((kernel["us"] for kernel in kernels), reverse=True)
    assert kernels[0]["name"] in report.line(rows[0]) and "2.00 ms" in report.line(rows[0])
    assert "without a GPU" in report.line(rows[-1])
    assert report.heading(rows[0]) == f"step: {TINY.name}"
    report.write(tmp_path, "step", ENVIRONMENT, rows)
    assert report.read(tmp_path / "step.json")["rows"][0]["kernels"] == kernels
    with (tmp_path / "step.csv").open() as file:
        assert "kernels" not in next(csv.DictReader(file))
    results = {"environment": ENVIRONMENT, "rows": rows}
    printed = table.markdown(results, brief=True)
    assert f"| {TINY.name} | {CAPTURED.name} | 0.50 | 32,000 | 3 | " in printed
    assert "| 4.00x, 1.00x | 4.00x, 1.00x | 4.00x, 1.00x | 1.00x, 1.00x |" in printed
    (path,) = figures.step(results, tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_results_without_captured_steps_are_printed():
    columns = {"speed_over_padded": 1.0, "memory_over_padded": 1.0}
    row = {"suite": "step", "case": "old", "implementation": JFI, "ours": True, "headline": True, "status": "ok"}
    row |= {"step_us": 2000.0, "queries_per_second": 8000.0, "peak_mb": 3.0, **columns}
    printed = table.markdown({"environment": ENVIRONMENT, "rows": [row]})
    assert "| old | jfi | 2.00 | 8,000 | 3 | 1.00x, 1.00x |" in printed and "kernels" not in printed


@pytest.mark.slow
def test_a_pooling_that_differs_gets_no_speed(monkeypatch):
    monkeypatch.setattr(Projections, "load", lambda *_: None)
    rows = list(training_step.run(StepCase(TINY), CPU, 0.0))
    assert [row["status"] for row in rows] == ["wrong", "wrong", "ok", "ok", "ok", "ok"]
    assert "step_us" not in rows[0] and "speed_over_padded" not in rows[2]
    printed = table.markdown({"environment": ENVIRONMENT, "rows": [{"suite": "step"} | row for row in rows]})
    assert f"| {JFI} | wrong | - |" in printed and "differ by" in report.line(rows[0])


@pytest.mark.parametrize("way", [BY_ID, CAPTURED, PADDED_CAPTURED], ids=lambda way: way.name)
def test_tables_by_id_train_as_those_of_torchrec(way):
    batches = [make_batch(TINY, seed, CPU) for seed in range(2)]
    with training_step.one_process(CPU):
        assert training_step.training_error(way, replace(TINY, dtype="bfloat16"), batches, CPU) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [pytest.param({"lr": 0.011, "eps": 1e-8}, marks=pytest.mark.slow), {"lr": 0.01, "eps": 1e-5}],
    ids=["rate", "eps"],
)
def test_tables_that_are_stepped_otherwise_get_no_speed(monkeypatch, options):
    own = training_step.FusedEmbeddingBagCollection
    monkeypatch.setattr(
        training_step, "FusedEmbeddingBagCollection", lambda tables, kind, _, **rest: own(tables, kind, options, **rest)
    )
    rows = list(training_step.run(StepCase(TINY), CPU, 0.0))
    assert [row["status"] for row in rows] == ["ok", "ok", "ok", "wrong", "wrong", "wrong"]
    assert "TorchRec's tables" in report.line(rows[3])


def test_steps_that_were_not_captured_get_no_speed(monkeypatch):
    """The GPU's path: here nothing is captured, so that it has no graph to measure."""
    monkeypatch.setattr(training_step, "training_error", lambda *_: 0.0)
    monkeypatch.setattr(Batch, "pin_memory", lambda batch: batch)
    gpu = SimpleNamespace(type="cuda")
    monkeypatch.setattr(training_step, "Training", lambda way, shape, _, *rest: Training(way, shape, CPU, *rest))
    row = {"implementation": CAPTURED.name, "ours": True}
    with pytest.raises(RuntimeError, match="nothing was captured: 0 of 8 steps ran captured"):
        training_step.measure_model(row, CAPTURED, TINY, [make_batch(TINY, seed, CPU) for seed in range(4)], gpu, 0.0)
    assert "step_us" not in row


@pytest.mark.slow
def test_a_loss_that_is_not_finite_gets_no_speed(monkeypatch):
    monkeypatch.setattr(training_step, "train_step", lambda *_: torch.tensor(torch.nan))
    assert {row["status"] for row in training_step.run(StepCase(TINY), CPU, 0.0)} == {"wrong"}
