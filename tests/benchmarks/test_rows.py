"""The suite of rows by id on tiny tables: its ways agree, and one that differs gets no speed."""

import argparse
import csv
from dataclasses import replace

import pytest
import torch
from stand_ins import ENVIRONMENT

from benchmarks import __main__ as main
from benchmarks import figures, measure, readme, report, rows, table
from benchmarks.rows import BFLOAT16, FLOAT32, JFI, ById, RowsCase, RowsShape, draw_ids, make_inputs
from benchmarks.run import Rates

CPU = torch.device("cpu")
RATES = Rates(4e12, 7e14)
TINY = RowsShape(6, 40, 8, mean=9, rows=50, dtype="float32")
SHAPES = [
    TINY,
    replace(TINY, ids="zipf", T=2, H=2, dtype="bfloat16"),
    replace(TINY, table="float16"),
]


@pytest.fixture(autouse=True)
def _clocks(monkeypatch):
    """The clocks alone need a GPU."""
    monkeypatch.setattr(measure, "kernel_us", lambda build: [call() for call in build()] and 100.0)
    monkeypatch.setattr(measure, "peak_mb", lambda call: [call()] and 3.0)


def measured(shape: RowsShape) -> list[dict]:
    return [{"suite": "rows"} | row for row in rows.run(RowsCase(shape), CPU, 0.0, RATES)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_all_ways_make_the_same_step(shape, tmp_path):
    found = measured(shape)
    assert [row["implementation"] for row in found] == [JFI, FLOAT32, BFLOAT16]
    for row in found:
        assert row["status"] == "ok" and row["forward_backward_speed_over_fbgemm"] == row["memory_over_fbgemm"] == 1
        floor = row["floor_forward_us"] + row["floor_backward_us"]
        assert row["efficiency_forward_backward"] == pytest.approx(floor / 100)
    assert found[1]["error"] == 0 < found[2]["error"]
    assert found[0]["error"] < (1e-5 if shape.dtype == "float32" else 2e-2)
    report.write(tmp_path, "rows", ENVIRONMENT, found)
    with (tmp_path / "rows.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 3
    assert "against fbgemm 1.00x" in report.line(found[0]) and "floors" in report.heading(found[0])
    printed = table.markdown({"environment": ENVIRONMENT, "rows": found})
    assert f"| {shape.name} | {JFI} | " in printed and "| 100 \\| 100 |" in printed
    (path,) = figures.rows({"environment": ENVIRONMENT, "rows": found}, tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_suite_is_run_with_the_rates_of_the_machine(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(rows, "cases", lambda quick: [RowsCase(TINY)])
    main.run_suite("rows", CPU, RATES, ENVIRONMENT, argparse.Namespace(out=tmp_path, quick=True, movielens=None))
    (jfi, *_) = report.read(tmp_path / "rows.json")["rows"]
    inputs = make_inputs(TINY, 0, CPU)
    assert jfi["suite"] == "rows" and jfi["floor_forward_us"] == rows.floor_bytes(TINY, inputs)[0] / 4e6
    assert "rows.png" in capsys.readouterr().out and (tmp_path / "rows.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3), ids=["output", "gradient of the queries", "table"])
def test_a_way_that_differs_gets_no_speed(monkeypatch, part):
    own = rows.result

    def wrong(way, table, inputs):
        found = own(way, table, inputs)
        scale = [1.05 if i == part and isinstance(way, ById) else 1 for i in range(3)]
        return tuple(x * factor for x, factor in zip(found, scale, strict=True))

    monkeypatch.setattr(rows, "result", wrong)
    jfi, fbgemm, _ = measured(TINY)
    assert jfi["status"] == "wrong" and "kernel_forward_us" not in jfi and "differs from" in report.line(jfi)
    assert fbgemm["status"] == "ok" and "kernel_forward_us" in fbgemm
    printed = table.markdown({"environment": ENVIRONMENT, "rows": [jfi, fbgemm]})
    assert f"| {JFI} | " in printed and "| wrong | - |" in printed


def test_nothing_is_compared_with_a_way_that_failed(monkeypatch):
    def failing(shape, table):
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setitem(rows.WAYS, FLOAT32, failing)
    assert [row["status"] for row in measured(TINY)] == ["missing", "failed", "missing"]


def test_the_least_bytes_are_those_of_the_first_row_of_the_issue():
    """4,096 histories of 200 events, D = 64, 1 million float32 rows, uniform ids: 218 us at 4.25 TB/s."""
    shape = rows.HEADLINES[0]
    inputs = make_inputs(shape, 0, CPU)
    assert len(inputs.ids) == pytest.approx(819_200, rel=1e-3)
    forward, backward = rows.floor_bytes(shape, inputs)
    assert forward == len(inputs.ids) * (8 + 256) + 2 * 4096 * 64 * 2
    assert (forward + backward) / 4.25e6 == pytest.approx(218, rel=0.015)


@pytest.mark.parametrize("law", ["uniform", "zipf"])
def test_ids_follow_their_law(law):
    ids = draw_ids(law, 200_000, 5000, torch.Generator().manual_seed(0))
    assert ids.min() >= 0 and ids.max() < 5000
    shares = ids.bincount(minlength=5000).sort(descending=True).values / 200_000
    harmonic = (1 / torch.arange(1, 5001, dtype=torch.float64)).sum().item()
    assert shares[0].item() == pytest.approx(1 / harmonic, rel=0.03) if law == "zipf" else shares[0] < 0.001
    others = draw_ids(law, 200_000, 5000, torch.Generator().manual_seed(1))
    assert (ids.bincount().argmax() == others.bincount().argmax()) == (law == "zipf")


def test_sets_are_the_same_work():
    first, second = (make_inputs(TINY, seed, CPU) for seed in range(2))
    lengths = [inputs.offsets.diff() for inputs in (first, second)]
    assert sorted(lengths[0].tolist()) == sorted(lengths[1].tolist()) and not torch.equal(*lengths)
    assert not torch.equal(first.ids, second.ids)


@pytest.mark.slow
def test_a_page_says_where_results_are_missing(monkeypatch, tmp_path):
    page = "<!-- table: rows -->\nold\n<!-- end -->"
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    assert readme.with_tables(page) == "<!-- table: rows -->\nNot measured yet.\n<!-- end -->"
    report.write(tmp_path / "h200", "rows", ENVIRONMENT, measured(TINY))
    assert f"| {TINY.name} | {JFI} | " in readme.with_tables(page)


def test_the_cases_are_those_of_the_issue_and_more():
    names = [case.name for case in rows.cases(quick=False)]
    assert len(set(names)) == len(names) == len(rows.HEADLINES) + len(rows.OTHERS)
    assert "B=1024 mean=1,500 D=128, 4,000,000 float16 rows, zipf ids" in names
    assert len(rows.cases(quick=True)) < 4
