"""The benchmark on tiny inputs: what it writes, what it refuses to time, and that its pictures get drawn."""

import csv
import json
import re
import sys
from dataclasses import replace

import pytest
import torch
from stand_ins import ENVIRONMENT, looped_varlen

from benchmarks import __main__ as main
from benchmarks import (
    cpu,
    figures,
    jagged_peers,
    measure,
    report,
    run,
    self_lengths,
    table,
    table1,
    timeline,
)
from benchmarks.jagged_peers import JaggedShape, jagged_problem
from benchmarks.peers import FBGEMM, OURS, PADDED, SEGMENTS, SLL_UNFUSED, attention_problem
from benchmarks.problem import Shape, draw_lengths
from benchmarks.run import Case, Implementation, Missing, Rates

CPU = torch.device("cpu")
TINY = Shape(6, 9, 4, T=2, H=2, dtype="float32")


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(before[0])
    torch.set_float32_matmul_precision(before[1])


def rows_of(*implementations, shape=TINY, build=attention_problem):
    return list(run.run(Case("tiny", shape, build, implementations), CPU, Rates(), 0.0))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (2, 2)])
def test_peers_compute_the_same(shared, heads):
    shape = replace(TINY, shared=shared, H=heads[0], G=heads[1])
    for row in rows_of(OURS, PADDED, SEGMENTS, FBGEMM, SLL_UNFUSED, shape=shape):
        if row["status"] != "missing":
            assert row["status"] == "ok", row
            assert row["forward_us"] > 0 and row["forward_backward_us"] > 0


@pytest.mark.parametrize(
    "shape",
    [
        JaggedShape(12, 9, 4, H=2, G=2, dtype="float32"),
        JaggedShape(12, 9, 4, dtype="float32"),
        JaggedShape(12, 9, 4, T=5, H=2, G=2, dtype="float32"),
        JaggedShape(12, 9, 4, H=2, G=2, dtype="float32", causal=True),
    ],
    ids=lambda shape: shape.name,
)
def test_peers_of_jagged_attention_compute_the_same(shape, monkeypatch):
    monkeypatch.setattr(jagged_peers, "varlen_attn", lambda shape: looped_varlen)
    assert 0 in draw_lengths(shape, 0)
    peers = [x for x in vars(jagged_peers).values() if isinstance(x, Implementation) and x is not jagged_peers.FLEX]
    status = {row["implementation"]: row["status"] for row in rows_of(*peers, shape=shape, build=jagged_problem)}
    served = {"jfi", "torch varlen_attn"}
    if not shape.causal:
        served |= {"padded SDPA", "padded SDPA, no mask", "dense"}
    if not shape.T:
        served.add("padding + SDPA")
    if not shape.causal and not shape.T and shape.H == 1:
        served.add("jagged, unfused")
    assert status == {peer.name: "ok" if peer.name in served else "missing" for peer in peers}


def test_operations_of_jagged_attention_are_those_of_real_pairs():
    shape = JaggedShape(12, 9, 4, H=2, G=2, dtype="float32")
    lengths = draw_lengths(shape, 0).tolist()
    full, causal = (jagged_problem(replace(shape, causal=causal), 0, CPU).flops for causal in (False, True))
    pairs, seen = sum(n * n for n in lengths), sum(n * (n + 1) // 2 for n in lengths)
    assert full == (4 * 4 * 2 * pairs, 10 * 4 * 2 * pairs) and causal == (4 * 4 * 2 * seen, 10 * 4 * 2 * seen)


@pytest.mark.parametrize("name", table1.OPERATORS)
def test_the_six_operators_agree_with_their_peers(name):
    operator = table1.OPERATORS[name]
    rows = rows_of(*operator.implementations(), shape=replace(TINY, H=1), build=operator.build)
    assert [row["status"] for row in rows[:2]] == ["ok", "ok"], rows
    assert all(row["status"] in ("ok", "missing") for row in rows), rows


def test_a_wrong_result_gets_no_speed():
    def wrong(problem):
        prepared = OURS.prepare(problem)
        return replace(prepared, call=lambda *leaves: OURS.prepare(problem).call(*leaves) * 1.01)

    def wrong_gradient(problem):
        prepared = OURS.prepare(problem)
        return replace(prepared, gradients=lambda grads: [grads[0] * 1.01, *grads[1:]])

    def broken(problem):
        raise RuntimeError("no such\nkernel")

    def absent(problem):
        raise Missing("not installed")

    named = {"wrong": wrong, "gradient": wrong_gradient, "broken": broken, "absent": absent}
    rows = rows_of(*(Implementation(name, prepare) for name, prepare in named.items()))
    assert [row["status"] for row in rows] == ["wrong", "wrong gradient", "failed", "missing"]
    assert [name for name in rows[0] if name in ("forward_us", "forward_backward_us")] == []
    assert "forward_us" in rows[1] and "forward_backward_us" not in rows[1]
    printed = [report.line(row) for row in rows]
    assert "wrong: relative error" in printed[0] and " | " not in printed[0]
    assert "RuntimeError: no such kernel" in printed[2] and "not installed" in printed[3]


def test_a_nan_is_wrong():
    def prepare(problem):
        return replace(OURS.prepare(problem), gradients=lambda grads: [x * torch.nan for x in grads])

    assert rows_of(Implementation("nan", prepare))[0]["status"] == "wrong gradient"


def test_log_normal_lengths_have_the_sum_of_uniform_ones():
    shape = Shape(512, 4096, 8)
    uniform, uneven = (draw_lengths(replace(shape, lengths=kind), 0) for kind in ("uniform", "log-normal"))
    assert abs(int(uniform.sum()) - int(uneven.sum())) < 512 and uneven.max() <= 4096
    assert uneven.float().std() > uniform.float().std()


def test_the_cpu_is_measured_where_there_is_no_gpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(main, "QUICK_CPU_SECONDS", 0.0)
    monkeypatch.setattr(cpu, "TARGET_SHAPES", [replace(TINY, B=64)])
    monkeypatch.setattr(cpu, "TABLE_1_SHAPE", Shape(64, 9, 4, T=2, dtype="float32"))
    monkeypatch.setattr(cpu, "SELF_SHAPES", [JaggedShape(96, 9, 4, H=2, G=2, dtype="float32", causal=True)])
    monkeypatch.setattr(timeline, "cases", lambda *_, **__: [])
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--quick", "--out", str(tmp_path), "--commit", "abc"])
    assert main.main() == 0
    printed = capsys.readouterr().out
    assert "No GPU here" in printed and "timeline: " in printed
    results = json.loads((tmp_path / "cpu.json").read_text())
    assert {"device", "driver", "versions", "commit", "date", "threads"} <= results["environment"].keys()
    assert results["environment"]["commit"] == "abc"
    assert {row["status"] for row in results["rows"]} <= {"ok", "missing"}
    assert all(row["memory_training_mb"] > 0 for row in results["rows"] if row["status"] == "ok")
    assert any(row["case"].startswith("self-attention") for row in results["rows"] if row["ours"])
    row = results["rows"][0]
    assert row["suite"] == "cpu" and row["implementation"] == "jfi" and row["status"] == "ok"
    assert {"B", "N", "D", "T", "S", "dtype", "error_forward", "forward_us", "forward_least_us"} <= row.keys()
    with (tmp_path / "cpu.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(results["rows"])
    printed = table.markdown(results)
    assert printed.startswith("| case | jfi | padding, torch | fbgemm | padded SDPA |") and "commit abc" in printed


def test_gpu_suites_are_refused_without_one(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--only", "target,layer,step,self"])
    assert main.main() == 2
    assert "no GPU here, for target, layer, step, self" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--only", "targets"])
    with pytest.raises(SystemExit, match="2"):
        main.main()


def test_a_suite_whose_packages_are_missing_is_a_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "benchmarks.layer", None)
    assert main.importable(["layer", "target"]) == ["target"]
    assert "layer: not measured: " in capsys.readouterr().out


def test_what_a_gpu_is_asked_to_measure(monkeypatch):
    """The GPU's path with the clocks taken out, since they alone need one."""
    monkeypatch.setattr(measure, "eager_times", lambda *_: [1.0, 0.5, 3.0])
    for name in ("kernel_us", "host_us", "peak_mb"):
        monkeypatch.setattr(measure, name, lambda *_: 1.0)
    problem = attention_problem(TINY, 0, CPU)
    row = {"floor_forward_us": 2.0, "floor_backward_us": 3.0}
    run._run_gpu(OURS, [problem], row, 0.0)
    assert row["status"] == "ok" and row["efficiency_forward"] == 2.0 and row["efficiency_backward"] == 3.0
    assert row["forward_us"] == 1.0 and row["forward_backward_least_us"] == 0.5
    assert row["memory_training_mb"] == 1.0 and row["floor_memory_forward_mb"] == problem.grad.nbytes / 1e6
    assert row["forward_tflops"] == problem.flops[0] / 1e6
    assert row["forward_backward_tflops"] == sum(problem.flops) / 1e6
    assert "host 1" in report.line(row | {"implementation": "jfi"})


@pytest.mark.parametrize("quick", [True, False])
def test_cases_have_names_of_their_own(quick, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for suite in main.SUITES:
        names = [case.name for case in main.load(suite).cases(quick)]
        assert names and len(set(names)) == len(names)


def made_up(implementation: str, speed: float, **columns) -> dict:
    row = {"implementation": implementation, "ours": implementation == "jfi", "status": "ok", "headline": True}
    row |= {"B": 1, "D": 2, "T": 3, "dtype": "float32", "shared": False, "case": "a case"}
    row |= {"forward_us": speed, "forward_backward_us": 3 * speed, "memory_forward_mb": speed}
    return row | {"memory_training_mb": 2 * speed} | columns


def test_figures_are_drawn(tmp_path):
    rows = [made_up("jfi", n / 100, N=n, shared=shared) for n in (128, 512, 2048) for shared in (True, False)]
    rows += [made_up("padded, math", n / 20, N=n) for n in (128, 512)]
    rows += [{**made_up("padded, math", 0, N=2048), "forward_backward_us": None}]
    paths = figures.lengths({"environment": ENVIRONMENT, "rows": rows}, tmp_path)
    rows = [
        made_up(line.name, n / 100 * (i + 1), N=n, H=1, ours=line.ours)
        for n in (128, 512)
        for i, line in enumerate(self_lengths.LINES)
    ]
    paths += figures.self_lengths({"environment": ENVIRONMENT, "rows": rows}, tmp_path)
    names = {"jfi": 20.0, "padded torch": 100.0, "fbgemm CUDA": 50.0, "sll Triton": 70.0}
    rows = [
        made_up(name, speed * (i + 1), case=case, N=1, paper_speedup=1.5, floor_forward_us=15.0, floor_backward_us=30.0)
        for i, case in enumerate(table1.OPERATORS)
        for name, speed in names.items()
    ]
    rows[-2] |= {"forward_us": None, "forward_backward_us": None}
    paths += figures.table1({"environment": ENVIRONMENT, "rows": rows}, tmp_path)
    drawn = ["latency.png", "memory.png", "figure2_self_latency.png", "figure2_self_memory.png", "table1.png"]
    assert [path.name for path in paths] == drawn
    assert all(path.stat().st_size > 10_000 for path in paths)


def test_the_table_names_the_best_peer():
    rows = [made_up("jfi", 10.0, efficiency_forward=0.9, efficiency_backward=0.8)]
    rows += [made_up("slow", 40.0), {**made_up("half", 20.0), "status": "forward only", "forward_backward_us": None}]
    printed = table.markdown({"environment": ENVIRONMENT, "rows": rows})
    assert "| 10.0 \\| 30.0 | 40.0 \\| 120 | 20.0 \\| fails | 2.0x \\| 4.0x | 0.90 \\| 0.80 |" in printed
    assert "calling thread" not in printed
    rows[0]["one_thread_us"], rows[1]["one_thread_us"] = 20.0, 100.0
    printed = table.markdown({"environment": ENVIRONMENT, "rows": rows})
    assert "| 2.0x \\| 4.0x | 5.0x |" in printed and "calling thread" in printed


@pytest.mark.parametrize(
    ("text", "fault"), [(None, "No such file"), ("{", "Expecting"), ('{"rows": [{}]}', "is no results file")]
)
def test_the_table_names_a_file_it_cannot_read(text, fault, tmp_path, monkeypatch, capsys):
    path = tmp_path / "results.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["table", str(path)])
    with pytest.raises(SystemExit, match="2"):
        table.main()
    assert re.search(f"{path}.*{fault}", capsys.readouterr().err)


def test_quick_results_do_not_replace_whole_ones(monkeypatch):
    folders = []
    monkeypatch.setattr(main, "run_suite", lambda *arguments: folders.append(arguments[-1].out.name))
    for options in ([], ["--quick"]):
        monkeypatch.setattr(sys, "argv", ["benchmarks", "--only", "cpu", *options])
        assert main.main() == 0
    assert folders == ["cpu", "cpu-quick"]


def test_the_table_of_self_attention_names_its_peers():
    mine = {"suite": "self", "floor_memory_forward_mb": 8.0, "forward_tflops": 512.3, "forward_backward_tflops": 401.7}
    rows = [made_up("jfi", 10.0, **mine), made_up("torch varlen_attn", 15.0)]
    rows += [made_up("padded SDPA", 40.0), made_up("padded SDPA, no mask", 20.0), made_up("dense", 100.0)]
    rows.append(made_up("FlashAttention 4", 11.0))
    printed = table.markdown({"environment": ENVIRONMENT, "rows": rows}, brief=True)
    peers = " | ".join(f"against {peer}" for peer in ("varlen_attn", "FlashAttention 4", "padded SDPA", "dense"))
    assert f"| {peers} | useful TFLOP/s | MB, forward |" in printed
    assert "| 1.5x \\| 1.5x | 1.1x \\| 1.1x | 2.0x \\| 2.0x | 10.0x \\| 10.0x | 512 \\| 402 | 10 (1.25) |" in printed
