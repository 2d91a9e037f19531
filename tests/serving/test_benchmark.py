"""benchmarks/serving.py and serving_stages.py at small size."""

import json
import random

import pytest

pytest.importorskip("aiohttp")

from benchmarks import serving, serving_stages
from jfi.serving.export import inputs_of
from jfi.serving.model import ScoringModel
from jfi.serving.requests import RequestReader


@pytest.mark.slow
def test_it_measures_an_artifact(exported, tmp_path, monkeypatch):
    sizes = ["--large", 20, 10, "--small", 4, 3, "--clients", 3, "--seconds", 0.1]
    options = ["--artifact", exported.path, "--out", tmp_path, *sizes]
    monkeypatch.setattr("sys.argv", ["serving", *map(str, options)])
    assert serving.main() == 0
    results = json.loads((tmp_path / "serving.json").read_text())
    assert {"device", "versions", "commit", "table_sizes"} <= set(results["environment"])
    rows = results["rows"]
    assert len(rows) == 16 and all(0 < row["p50_us"] <= row["p99_us"] for row in rows)
    assert {row["clients"] for row in rows if "clients" in row} == {1, 3}
    assert all(row["requests_per_second"] > 0 for row in rows if "clients" in row)


def test_the_synthetic_model_takes_the_requests(monkeypatch, tmp_path):
    """All but the compiling, which the test above has in its artifact."""
    exported = {}

    class Export:
        def __init__(self, model, schema, limits, **options):
            exported.update(reader=RequestReader(schema, limits), inputs=inputs_of(ScoringModel(model, [])))

        def write(self, path):
            pass

    monkeypatch.setattr(serving, "Export", Export)
    shape = serving.Shape(7, 5)
    serving.synthetic(tmp_path, 1000, "cpu", "float32", shape)
    scorer = type("Scorer", (), {"reader": exported["reader"]})
    request = exported["reader"](json.loads(serving.make_body(scorer, shape, random.Random(0))))
    assert (request.num_events, request.num_candidates) == (7, 5)
    assert set(request.ids) == set(exported["inputs"].keys) and all((ids > 0).all() for ids in request.ids.values())


@pytest.mark.slow
def test_the_stages_of_a_request_are_measured(exported, tmp_path, monkeypatch):
    options = ["--artifact", exported.path, "--out", tmp_path, "--size", 20, 10, "--requests", 20]
    monkeypatch.setattr("sys.argv", ["serving_stages", *map(str, options)])
    assert serving_stages.main() == 0
    results = json.loads((tmp_path / "serving_stages.json").read_text())
    rows = {row["stage"]: row for row in results["rows"]}
    assert set(serving_stages.STAGES.values()) <= rows.keys()
    assert all(row["calls"] == 20 and 0 < row["p5_us"] <= row["p50_us"] <= row["p99_us"] for row in rows.values())
    assert rows["model"]["cpu_p50_us"] > 0 and "cpu_p50_us" not in rows["hand-over back"]


def test_a_stage_is_the_time_between_two_stamps():
    request = [
        ("headers", 5_000, 100, 1),
        ("body", 9_000, 1_100, 1),
        ("model", 12_000, 50, 2),
        ("answer", 20_000, 2_100, 1),
    ]
    rows = {row["stage"]: row for row in serving_stages.stages([(1_000, 22_000)] * 3, [request] * 3)}
    names = serving_stages.STAGES
    times = {name: rows[names[name]]["p50_us"] for name in ("headers", "body", "model", "answer", "received")}
    assert times == {"headers": 4, "body": 4, "model": 3, "answer": 8, "received": 2}
    assert rows[names["body"]]["cpu_p50_us"] == 1 and "cpu_p50_us" not in rows[names["answer"]]
    assert rows["all"]["p50_us"] == 21 and rows["all but look-up and model"]["p50_us"] == 18
    with pytest.raises(RuntimeError, match="not all have the stages body, model, answer"):
        serving_stages.stages([(1_000, 22_000)] * 2, [request, request[:1]])
