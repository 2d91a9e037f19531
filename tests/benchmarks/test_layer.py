"""The suite of the whole layer on tiny inputs: its formula, what its check sees, and what is written."""

from dataclasses import replace

import pytest
import torch
from stand_ins import ENVIRONMENT, looped_varlen

from benchmarks import layer, measure, report, run, table
from benchmarks.layer import OURS, PROJECTED, LayerShape, layer_problem
from benchmarks.report import microseconds
from benchmarks.run import Implementation, Rates

CPU = torch.device("cpu")
ONE = LayerShape(12, 9, 8, H=2, T=2, dtype="float32")
SEVERAL = LayerShape(5, 9, 8, H=2, F=3, dtype="float32")


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch):
    monkeypatch.setattr(layer, "CHECKED_ELEMENTS", 4 * 9 * 8)


@pytest.fixture
def varlen(monkeypatch):
    monkeypatch.setattr(layer, "varlen_attn", lambda shape: looped_varlen)


def rows_of(shape, *implementations):
    return list(run.run(layer.case(shape, *implementations), CPU, Rates(), 0.0))


@pytest.mark.parametrize("shape", [ONE, SEVERAL], ids=lambda shape: shape.name)
def test_both_compute_the_formula(shape, varlen):
    assert 0 in layer_problem(shape, 0, CPU).lengths
    for row in rows_of(shape, OURS, PROJECTED):
        assert row["status"] == "ok", row
        assert row["forward_us"] > 0 and row["forward_backward_us"] > 0


def test_the_formula_is_multihead_attention():
    problem = layer_problem(replace(ONE, T=1), 0, CPU)
    sample = int(problem.lengths.argmax())
    history = problem.take(problem.inputs["history"], "rows", sample)
    target = problem.inputs["target"][sample : sample + 1]
    parameters = {name: x[0] for name, x in problem.parameters.items()}
    attention = torch.nn.MultiheadAttention(8, 2)
    weights = [parameters[f"{name}_weight"] for name in ("query", "key", "value")]
    state = {"in_proj_weight": torch.cat(weights), "out_proj.weight": parameters["output_weight"]}
    state |= {"in_proj_bias": torch.cat([parameters["query_bias"], torch.zeros(16)])}
    attention.load_state_dict(state | {"out_proj.bias": parameters["output_bias"]})
    got = layer.attend(history, target, problem.lengths[sample : sample + 1], 2, **parameters)
    torch.testing.assert_close(got, attention(target, history, history)[0])


@pytest.mark.parametrize("at", range(8), ids=list(layer_problem(ONE, 0, CPU).inputs))
def test_a_wrong_gradient_of_any_input_is_seen(at):
    def wrong(problem):
        prepared = OURS.prepare(problem)
        return replace(
            prepared,
            gradients=lambda grads: [g * (1 + (i == at)) for i, g in enumerate(prepared.gradients(grads))],
        )

    (row,) = rows_of(SEVERAL, Implementation("wrong", wrong))
    assert row["status"] == "wrong gradient" and "forward_backward_us" not in row


def test_a_wrong_output_is_seen():
    def wrong(problem):
        prepared = OURS.prepare(problem)
        return replace(prepared, call=lambda *inputs: OURS.prepare(problem).call(*prepared.arguments) * 1.01)

    (row,) = rows_of(SEVERAL, Implementation("wrong", wrong))
    assert row["status"] == "wrong" and "forward_us" not in row


def test_the_baseline_is_missing_in_float32():
    status = {row["implementation"]: row["status"] for row in rows_of(ONE, OURS, PROJECTED)}
    assert status == {"jfi": "ok", PROJECTED.name: "missing"}


def test_what_a_gpu_is_asked_to_measure(varlen, monkeypatch):
    """The GPU's path with the clocks taken out, since they alone need one."""
    for name, value in {"eager_times": [6.0], "host_us": 5.0, "peak_mb": 70.0}.items():
        monkeypatch.setattr(measure, name, lambda *_, value=value: value)
    monkeypatch.setattr(measure, "kernel_us", lambda build: float(sum(len(call()) for call in build())))
    problems, rows = [layer_problem(SEVERAL, seed, CPU) for seed in range(2)], []
    for implementation in (OURS, PROJECTED):
        row = {"implementation": implementation.name, "ours": implementation.ours, "headline": True, "suite": "layer"}
        row |= {"case": "a case", **problems[0].columns(), "floor_forward_us": 2.0, "floor_backward_us": 3.0}
        run._run_gpu(implementation, problems, row, 0.0)
        assert row["status"] == "ok" and "note" not in row, row
        assert f"| {microseconds(row['kernel_forward_backward_us'])} (" in report.line(row)
        rows.append(row)
    for row in rows:
        # The output, the gradients of history and targets, and one of every parameter, of both sets.
        assert row["kernel_forward_backward_us"] == 2 * (3 + 6 * SEVERAL.F)
        assert row["efficiency_forward_backward"] == 5.0 / row["kernel_forward_backward_us"]
    printed = table.markdown({"environment": ENVIRONMENT, "rows": rows}, brief=True)
    memory = f"70 ({70 / rows[0]['history_mb']:.2f})"
    assert f"| a case | 6.0 \\| 6.0 | 6.0 \\| 6.0 | 1.0x | 1.0x | 1.0x | {memory} | {memory} |" in printed


def test_the_table_does_without_a_baseline():
    row = {"suite": "layer", "case": "alone", "implementation": "jfi", "ours": True, "headline": True, "status": "ok"}
    row |= {"forward_us": 10.0, "forward_backward_us": 30.0, "memory_training_mb": 12.0, "history_mb": 10.0}
    printed = table.markdown({"environment": ENVIRONMENT, "rows": [row]}, brief=True)
    assert "| alone | 10.0 \\| 30.0 |  | - | - | - | 12 (1.20) | - |" in printed
