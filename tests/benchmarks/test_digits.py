"""The suite of packed digits on tiny batches: both ways agree, and one that differs gets no speed."""

from dataclasses import replace

import pytest
import torch
from stand_ins import ENVIRONMENT

from benchmarks import digits, measure, report
from benchmarks.digits import DIGITS, ROWS, DigitCase, DigitShape
from benchmarks.run import Rates

CPU = torch.device("cpu")
TINY = DigitShape(6, 40, 25, H=2, dtype="float32")


@pytest.fixture(autouse=True)
def _clocks(monkeypatch):
    """The clocks alone need a GPU."""
    monkeypatch.setattr(measure, "kernel_us", lambda build: [call() for call in build()] and 100.0)
    monkeypatch.setattr(measure, "peak_mb", lambda call: [call()] and 3.0)
    monkeypatch.setattr(measure, "SETS", 2)


def measured(shape: DigitShape) -> list[dict]:
    return [{"suite": "digits"} | row for row in digits.run(DigitCase(shape), CPU, 0.0, Rates(4e12, 7e14))]


@pytest.mark.parametrize("shape", [TINY, replace(TINY, T=2), replace(TINY, buckets=3)], ids=lambda x: x.name)
def test_both_ways_agree(shape, tmp_path):
    found = measured(shape)
    assert [row["implementation"] for row in found] == [DIGITS, ROWS]
    for row in found:
        assert row["status"] == "ok" and row["error"] < 1e-5
        assert row["efficiency_backward"] == pytest.approx(row["floor_backward_us"] / 100)
    assert found[0]["floor_forward_us"] < found[1]["floor_forward_us"]
    report.write(tmp_path, "digits", ENVIRONMENT, found)
    assert "kernels 100" in report.line(found[0]) and "floors" in report.heading(found[0])


def test_a_wrong_result_gets_no_speed(monkeypatch):
    attend = digits.digit_attention
    monkeypatch.setattr(digits, "digit_attention", lambda *inputs, **given: 1.1 * attend(*inputs, **given))
    found = measured(TINY)
    assert [row["status"] for row in found] == ["wrong", "ok"] and "kernel_forward_us" not in found[0]
