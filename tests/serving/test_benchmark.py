"""benchmarks/serving.py at small size."""

import json
import random

import pytest

pytest.importorskip("aiohttp")

from benchmarks import serving
from jfi.serving.export import inputs_of
from jfi.serving.model import ScoringModel
from jfi.serving.requests import RequestReader, parse


@pytest.mark.slow
def test_it_measures_an_artifact(exported, tmp_path, monkeypatch):
    sizes = ["--large", 20, 10, "--small", 4, 3, "--clients", 3, "--seconds", 0.1]
    options = ["--artifact", exported.path, "--out", tmp_path, *sizes]
    monkeypatch.setattr("sys.argv", ["serving", *map(str, options)])
    assert serving.main() == 0
    results = json.loads((tmp_path / "serving.json").read_text())
    assert {"device", "versions", "commit", "table_sizes"} <= set(results["environment"])
    rows = results["rows"]
    assert len(rows) == 12 and all(0 < row["p50_us"] <= row["p99_us"] for row in rows)
    assert {row["clients"] for row in rows if "clients" in row} == {1, 3}
    assert all(row["requests_per_second"] > 0 for row in rows if "clients" in row)


def test_the_synthetic_model_takes_the_requests(monkeypatch, tmp_path):
    """All but the compiling, which the test above has in its artifact."""
    exported = {}

    def export(path, model, schema, limits, **options):
        scoring = ScoringModel(model, [])
        exported.update(reader=RequestReader(schema, limits), inputs=inputs_of(scoring))

    monkeypatch.setattr(serving, "export", export)
    shape = serving.Shape(7, 5)
    serving.synthetic(tmp_path, 1000, "cpu", "float32", shape)
    scorer = type("Scorer", (), {"reader": exported["reader"]})
    request = exported["reader"](parse(serving.make_body(scorer, shape, random.Random(0))))
    assert (request.num_events, request.num_candidates) == (7, 5)
    assert set(request.ids) == set(exported["inputs"].keys) and all((ids > 0).all() for ids in request.ids.values())
