"""Scripts of single measurements, at a size that shows no more than that they run."""

import json
import sys

import pytest

from benchmarks import policy_step, sid_serving


@pytest.mark.slow
def test_steps_with_a_policy_beside_one_without(tmp_path, monkeypatch):
    sizes = [
        "--users",
        "60",
        "--batch",
        "64",
        "--history",
        "40",
        "--width",
        "8",
        "--rounds",
        "2",
        "--held",
        "2",
        "--arms",
        "full",
        "policy-50",
    ]
    monkeypatch.setattr(sys, "argv", ["policy_step", *sizes, "--out", str(tmp_path / "out.json")])
    policy_step.main()
    full, chosen = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert full["gain"] == 0 and full["events_removed"] == 0 and 0.2 < chosen["events_removed"] < 0.7
    assert chosen["samples_per_second"] > 0


@pytest.mark.slow
def test_requests_of_semantic_ids_beside_those_by_id(tmp_path, monkeypatch):
    sizes = [
        "--history",
        "50",
        "--candidates",
        "5",
        "--items",
        "200",
        "--seconds",
        "0.2",
        "--device",
        "cpu",
        "--clients",
        "2",
    ]
    monkeypatch.setattr(sys, "argv", ["sid_serving", *sizes, "--out", str(tmp_path / "out.json")])
    sid_serving.main()
    rows = json.loads((tmp_path / "out.json").read_text())
    assert {row["way"] for row in rows} == {"id", "sid"} and all(row["request_kb"] > 1 for row in rows)
