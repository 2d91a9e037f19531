"""The suite of training by user on tiny tables, and attention by time: what they count, refuse and print."""

import argparse
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from stand_ins import ENVIRONMENT, looped_varlen

from benchmarks import __main__ as main
from benchmarks import figures, jagged_peers, measure, report, run, self_attention, table, timeline, timeline_attention
from benchmarks.jagged_peers import jagged_problem
from benchmarks.problem import draw_lengths
from benchmarks.run import Case, Implementation, Rates
from benchmarks.timeline import WARM_UP, Run, StepTrainer, TrainingCase, Way, batch_bytes
from benchmarks.timeline_attention import KINDS, OURS, TimedShape, timed_problem
from benchmarks.timeline_tables import SyntheticTable, movielens_config, write_table
from jfi.data import load_dataset
from jfi.training import Config, ModelConfig
from jfi.training.distributed.processes import World

CPU = torch.device("cpu")
TABLE = SyntheticTable(users=12, items=9, mean_length=40, labelled=10)
SAMPLE, USER = Way("sample", 16, 2), Way("user", 32, 2)
TIMED = [
    TimedShape(5, 40, 8, T=6, H=2, dtype="float32", lengths="full", shared=True),
    TimedShape(6, 300, 16, T=9, H=4, G=2, dtype="float32", lengths="nearly full"),
]


def config(folder: Path) -> Config:
    model = ModelConfig(
        embedding_dim=8, num_heads=2, bias="history_age", dense_arch=[8], over_arch=[8], cross_layers=0, dropout=0.0
    )
    return Config(data=write_table(TABLE, folder), model=model)


CASE = TrainingCase("tiny", config, 20, (SAMPLE, USER), repeats=2)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    made = timeline.config_of(CASE, tmp_path_factory.mktemp("table"))
    return StepTrainer(made, load_dataset(made.data), World())


def rows_of(case=CASE):
    return [{"suite": "timeline"} | row for row in timeline.run(case, CPU, 0.0)]


def test_labels_are_spread_over_the_timelines():
    rows = TABLE.interactions()
    user, time = rows["user_id"].to_numpy(), rows["timestamp"].to_numpy()
    assert np.bincount(user).tolist() == [40] * 12
    assert ((np.diff(time) > 0) | (np.diff(user) > 0)).all()
    labelled = rows["rating"].is_valid().to_numpy().reshape(12, 40)
    assert all(one.nonzero()[0].tolist() == list(range(0, 40, 4)) for one in labelled)
    uneven = SyntheticTable(500, 9, 40, sigma=0.9).interactions()
    lengths = np.bincount(uneven["user_id"].to_numpy())
    assert uneven["rating"].null_count == 0
    assert abs(lengths.mean() - 40) < 1 and lengths.max() > 3 * np.median(lengths)


def test_every_way_is_a_row_with_what_a_sample_costs():
    by_sample, by_user = rows_of()
    assert [by_sample["status"], by_user["status"]] == ["ok", "ok"], (by_sample, by_user)
    for row in (by_sample, by_user):
        assert row["samples_per_second_least"] <= row["samples_per_second"] <= row["samples_per_second_most"]
        assert 0 < row["loading_share"] < 1 and row["peak_mb"] is None and 0 <= row["error"] < 1e-4
        assert row["ids_per_sample"] == pytest.approx(row["events_per_sample"] + 1)  # and the target
    assert by_sample["speed_over_sample"] == 1
    ratio = by_user["samples_per_second"] / by_sample["samples_per_second"]
    assert by_user["speed_over_sample"] == pytest.approx(ratio)
    assert by_user["events_per_sample"] < by_sample["events_per_sample"] <= 20
    assert by_user["copied_bytes_per_sample"] < by_sample["copied_bytes_per_sample"]


@pytest.mark.parametrize("way", [SAMPLE, USER], ids=lambda way: way.batching)
def test_counts_are_those_of_the_batches(trainer, way):
    one = Run(way, trainer, gpu=False)
    one.repeat()
    epochs = (
        trainer.dataset.batches("train", way.batch_size, shuffle=True, epoch=epoch, batching=way.batching)
        for epoch in itertools.count()
    )
    batches = itertools.chain.from_iterable(epochs)
    expected = list(itertools.islice(batches, WARM_UP, WARM_UP + way.steps))
    samples = sum(len(batch.labels) for batch in expected)
    events = sum(batch.sparse_features["history_item_id"].values().numel() for batch in expected)
    targets = sum(batch.sparse_features["item_id"].values().numel() for batch in expected)
    (counts,) = one.counts
    assert (counts.samples, counts.events, counts.ids) == (samples, events, events + targets)
    assert counts.copied_bytes == sum(map(batch_bytes, expected))


@pytest.mark.parametrize("batching", ["sample", "user"])
def test_all_tensors_of_a_batch_are_copied(trainer, batching):
    batch = trainer.dataset.batches("train", 16, batching=batching)[0]
    moved = []
    batch._map(lambda one: moved.append(one) or one)
    keyed = batch.sparse_features
    tensors = [keyed.values(), keyed.lengths(), *(one for one in moved if one is not keyed)]
    assert batch_bytes(batch) == sum(x.nbytes for x in tensors)


def test_a_stream_goes_on_with_the_next_epoch(trainer):
    one, counts = Run(USER, trainer, gpu=False), timeline.Counts()
    steps = 3 * len(trainer.dataset.batches("train", USER.batch_size, batching="user"))
    with one.batches() as batches:
        samples = torch.cat([batch.samples for batch in one.counted(batches, steps, counts)])
    assert samples.bincount().tolist() == [3] * trainer.dataset.num_samples("train")


def test_steps_are_those_of_training(trainer):
    before = [p.detach().clone() for p in trainer.model.parameters()]
    Run(USER, trainer, gpu=False).warm_up()
    assert trainer.model.training
    assert any(not torch.equal(x, y) for x, y in zip(before, trainer.model.parameters(), strict=True))


def test_predictions_that_differ_get_no_speed(monkeypatch):
    own = StepTrainer.predictions

    def wrong(self, batching, batch_size):
        return own(self, batching, batch_size) * (1.01 if batching == "user" else 1)

    monkeypatch.setattr(StepTrainer, "predictions", wrong)
    rows = rows_of()
    assert [row["status"] for row in rows] == ["wrong", "wrong"]
    assert all("samples_per_second" not in row and "differ by" in report.line(row) for row in rows)
    monkeypatch.setattr(StepTrainer, "predictions", lambda *_: torch.full((3,), torch.nan))
    assert {row["status"] for row in rows_of()} == {"wrong"}


def test_a_way_that_fails_leaves_the_others(monkeypatch):
    own = Run.repeat

    def repeat(self):
        if self.way.batching == "sample":
            raise torch.OutOfMemoryError("too large")
        own(self)

    monkeypatch.setattr(Run, "repeat", repeat)
    by_sample, by_user = rows_of()
    assert by_sample["status"] == "failed" and "too large" in report.line(by_sample)
    assert by_user["status"] == "ok" and "speed_over_sample" not in by_user and "samples/s" in report.line(by_user)


def test_what_a_gpu_is_asked_to_measure(trainer, monkeypatch):
    """The GPU's path with clock and allocator taken out, since they alone need one."""
    peaks = iter([5e6, 9e6, 7e6])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2e6)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(peaks))
    monkeypatch.setattr(measure, "eager_us", lambda calls, _: [call() for call in calls] and 4000.0)
    one, row = Run(USER, trainer, gpu=True), {}
    timeline._measure({USER: one}, {USER: row}, 3, 0.0)
    assert row["status"] == "ok" and row["peak_mb"] == 7.0 and row["step_us"] == 4000.0, row
    assert "7 MB, 4.00 ms a step" in report.line(row | {"implementation": USER.name})


def test_results_are_written_printed_and_drawn(tmp_path):
    rows = rows_of()
    report.write(tmp_path, "timeline", ENVIRONMENT, rows)
    results = report.read(tmp_path / "timeline.json")
    printed = table.markdown(results)
    assert f"| {CASE.name} | {SAMPLE.name} | {rows[0]['samples_per_second']:,.0f} | 1.00x |" in printed
    failed = {**rows[0], "case": "other", "status": "failed", "note": "no memory"}
    assert "| other | by sample, 16 | failed | - |" in table.markdown({**results, "rows": [*rows, failed]})
    (path,) = figures.timeline(results, tmp_path)
    assert path.name == "timeline.png" and path.stat().st_size > 10_000
    assert figures.timeline({"environment": ENVIRONMENT, "rows": [{"case": "attention alone"}]}, tmp_path) == []


def test_the_config_of_movielens_reads_a_synthetic_table(tmp_path):
    made = movielens_config(tmp_path, None, SyntheticTable(30, 20, 12, sigma=0.5))
    dataset = load_dataset(made.data)
    keys = [spec.key for spec in dataset.features]
    assert {"item_id", "class", "history_class_2", "history_rating", "history_age"} <= set(keys)
    assert made.model.bias == "history_age" and dataset.num_samples("train") > 200


def test_a_folder_without_movielens_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "ml-100k.inter").touch()
    with pytest.raises(argparse.ArgumentTypeError, match=r"has no file ml-100k\.item"):
        main.movielens(str(tmp_path))
    (tmp_path / "ml-100k.item").touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ["benchmarks", "--only", "timeline", "--list", "--movielens", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert main.main() == 0
    assert "timeline: MovieLens-100K, max_history 1,000" in capsys.readouterr().out


def timed_rows(shape, implementation=OURS):
    return list(run.run(Case(shape.name, shape, timed_problem, (implementation,), True), CPU, Rates(), 0.0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", TIMED, ids=["one read", "distinct"])
def test_attention_by_time_is_the_formula(shape, kind):
    (row,) = timed_rows(replace(shape, kind=kind))
    assert row["status"] == "ok" and row["kind"] == kind, row


@pytest.mark.parametrize(("kind", "leaf"), [("older", 0), ("older, bias by age", 1), ("older, bias by distance", 2)])
def test_a_wrong_gradient_of_attention_by_time_is_seen(kind, leaf):
    def wrong(problem):
        scale = [1.01 if i == leaf else 1 for i in range(len(problem.inputs))]
        return replace(
            OURS.prepare(problem), gradients=lambda grads: [x * s for x, s in zip(grads, scale, strict=True)]
        )

    (row,) = timed_rows(replace(TIMED[0], kind=kind), Implementation("wrong", wrong))
    assert row["status"] == "wrong gradient"


def test_attention_that_ignores_times_is_wrong():
    def blind(problem):
        return OURS.prepare(replace(problem, shape=replace(problem.shape, kind="no times")))

    (row,) = timed_rows(replace(TIMED[1], kind="older"), Implementation("blind", blind))
    assert row["status"] == "wrong"


def test_operations_of_attention_by_time_are_those_of_seen_pairs():
    whole, older = (timed_problem(replace(TIMED[1], kind=kind), 0, CPU) for kind in ("no times", "older"))
    all_pairs = seen = 0
    for user in range(TIMED[1].B):
        query_time, key_time = older.take(older.query_time, "queries", user), older.take(older.key_time, "rows", user)
        all_pairs += len(query_time) * len(key_time)
        seen += int((key_time < query_time[:, None]).sum())
        assert (key_time.diff() > 0).all() and (query_time.diff() >= 0).all() and query_time[0] > key_time[0]
    assert whole.flops == (4.0 * 16 * 4 * all_pairs, 10.0 * 16 * 4 * all_pairs)
    assert older.flops == (4.0 * 16 * 4 * seen, 10.0 * 16 * 4 * seen)


def test_the_table_compares_biases_with_the_same_shape_without(monkeypatch):
    monkeypatch.setattr(measure, "eager_times", lambda *_: [1.0])
    for name in ("host_us", "peak_mb"):
        monkeypatch.setattr(measure, name, lambda *_: 1.0)
    rows = []
    for kind, time in (("older", 10.0), ("older, bias by age", 15.0)):
        monkeypatch.setattr(measure, "kernel_us", lambda build, time=time: [call() for call in build()] and time)
        problem = timed_problem(replace(TIMED[0], kind=kind), 0, CPU)
        row = {"suite": "timeline", "case": problem.shape.name, "implementation": "jfi", "ours": True}
        row |= {"headline": True, **problem.columns(), "floor_forward_us": 2.0, "floor_backward_us": 3.0}
        run._run_gpu(OURS, [problem], row, 0.0)
        assert row["status"] == "ok" and row["kernel_backward_tflops"] == problem.flops[1] / time / 1e6, row
        rows.append(row)
    printed = table.markdown({"environment": ENVIRONMENT, "rows": rows})
    assert f"| {rows[0]['case']} | 10.0 \\| 20.0 | 0 \\| 0 | 1.00 \\| 1.00 |" in printed
    assert f"| {rows[1]['case']} | 15.0 \\| 30.0 | 0 \\| 0 | 1.50 \\| 1.50 |" in printed


def test_lengths_that_are_nearly_full_or_full():
    shape = self_attention.CROSS[0]
    lengths = draw_lengths(shape, 0)
    assert lengths.min() >= 3686 and lengths.max() <= 4096 and lengths.unique().numel() > 100
    assert (draw_lengths(TIMED[0], 0) == 40).all()
    assert (jagged_peers.draw_candidates(TIMED[0], 0) == 6).all()


def test_cross_attention_has_two_query_heads_on_one_key_head(monkeypatch):
    shape = replace(self_attention.CROSS[0], B=4, N=30, D=8, T=5, dtype="float32")
    problem = jagged_problem(shape, 0, CPU)
    assert problem.inputs["query"].shape[1:] == (2, 8) and problem.inputs["value"].shape[1:] == (1, 8)
    pairs = int((problem.query_lengths * problem.lengths).sum())
    assert problem.flops == (4.0 * 8 * 2 * pairs, 10.0 * 8 * 2 * pairs)
    case = Case("cross", shape, jagged_problem, (jagged_peers.OURS, jagged_peers.VARLEN))
    monkeypatch.setattr(jagged_peers, "varlen_attn", lambda shape: looped_varlen)
    assert [row["status"] for row in run.run(case, CPU, Rates(), 0.0)] == ["ok", "ok"]
    monkeypatch.setattr(jagged_peers, "varlen_attn", lambda shape: lambda query, key, value: query)
    assert [row["status"] for row in run.run(case, CPU, Rates(), 0.0)] == ["ok", "missing"]


def test_measured_attention_by_time_can_be_read():
    results = report.read(Path(table.__file__).parent / "results/h200/timelines.json")
    printed = table.markdown(results)
    names = [shape.name for shape in timeline_attention.SHAPES]
    assert all(f"| {name.removesuffix('no times')}older, bias by age | " in printed for name in names)
