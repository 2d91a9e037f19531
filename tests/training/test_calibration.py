"""Platt scaling: of a fit, of a run, and of what it serves."""

import contextlib
import dataclasses
import io
import math
import re
import types

import numpy as np
import pytest
import torch
from data_configs import replace_data
from own_table import config_of, row, write_table
from worker import without_pictures

import jfi
from jfi.data.schema.schema import LabelSpec
from jfi.training import ConfigError, train
from jfi.training.metrics.calibration import calibrate, describe, fit_calibration, fit_platt
from jfi.training.metrics.label_metrics import Predictions
from jfi.training.run.run_folder import RunFolder
from jfi.training.run.run_position import last_progress


def drawn(count: int, a: float, b: float) -> tuple[torch.Tensor, torch.Tensor]:
    logits = 2 * torch.randn(count, dtype=torch.float64)
    return logits, torch.bernoulli((a * logits + b).sigmoid())


def test_the_fit_has_the_maximum_likelihood():
    logits, labels = drawn(20_000, 0.5, -1.5)
    a, b = fit_platt(logits, labels)
    assert a == pytest.approx(0.5, abs=0.03) and b == pytest.approx(-1.5, abs=0.06)
    residual = (a * logits + b).sigmoid() - labels  # the gradient is 0 there
    assert abs(residual.mean()) < 1e-8 and abs((residual * logits).mean()) < 1e-8
    shifted = fit_platt(100 * logits + 1e5, labels)  # badly scaled logits
    assert shifted == pytest.approx((a / 100, b - 1e3 * a), rel=1e-5)


@pytest.mark.parametrize(
    ("logits", "labels", "why"),
    [
        (torch.randn(99), torch.arange(99) % 2, "99 samples, fewer than 100"),
        (torch.randn(200), torch.ones(200), "all labels are equal"),
        (torch.ones(200), torch.arange(200) % 2, "all logits are equal"),
        (torch.arange(200.0), torch.arange(200) > 90, "the logits separate the labels"),
        (-torch.arange(200.0), (torch.arange(200) > 90) ^ (torch.arange(200) % 5 == 0), "a higher logit does not"),
    ],
)
def test_what_cannot_be_fitted_keeps_its_logits(logits, labels, why):
    seen = Predictions([logits], [labels.float()], [torch.zeros(len(logits))])
    found = fit_calibration(seen, [LabelSpec()])["label"]
    assert (found["a"], found["b"]) == (1.0, 0.0) and found["identity"].startswith(why)
    assert f"calibration: none, {why}" in describe(seen, [LabelSpec()], {"label": found})[0]


def test_labels_have_calibrations_of_their_own():
    logits, labels = drawn(2000, 0.7, 0.4)
    labels[:500] = math.nan
    specs = [LabelSpec("seconds", "regression", 1.0, 1.0), LabelSpec("like")]
    both = Predictions([torch.stack([logits, logits], 1)], [torch.stack([labels, labels], 1)], [torch.zeros(2000)])
    found = fit_calibration(both, specs)
    own = found["like"]
    assert list(found) == ["like"] and (own["a"], own["b"]) == fit_platt(logits[500:], labels[500:])
    scaled = calibrate(both.logits[0], specs, found)
    assert torch.equal(scaled[:, 0], logits) and torch.equal(scaled[:, 1], own["a"] * logits + own["b"])


@pytest.fixture(scope="module")
def weighted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibration")
    rows = [row(i) for i in range(1500)]
    write_table(folder / "table.csv", rows)
    header, *lines = (folder / "table.csv").read_text().splitlines()
    weights = ["importance", *(5 if one[3] else 1 for one in rows)]
    table = [f"{line},{weight}" for line, weight in zip([header, *lines], weights, strict=True)]
    (folder / "table.csv").write_text("\n".join(table) + "\n")
    made = config_of(folder / "table.csv", folder / "run")
    data = replace_data(made.data, event_dense=[], label="clicked", weight="importance")
    made.optimizer.embeddings.weight_decay = 0.0  # 1,200 samples would leave almost nothing of the tables
    made = dataclasses.replace(made, data=data).with_training(epochs=3, patience=None)
    said = io.StringIO()
    with without_pictures(), contextlib.redirect_stdout(said):
        train(made)
    return folder, said.getvalue()


def test_weights_of_positives_are_corrected(weighted):
    folder, said = weighted
    assert re.search(
        r"^calibration: a \S+, b -\S+; test ne \S+ -> \S+, mean prediction / mean label \S+ -> \S+$", said, re.M
    )
    run = jfi.load_run(folder / "run")
    progress = last_progress(RunFolder(folder / "run"))[1]
    assert run.calibration == progress.calibration and run.calibration["label"]["identity"] == ""
    raw, calibrated = (
        run.evaluate(str(folder / "table.csv"), output=output)["overall"] for output in ("probabilities", "calibrated")
    )
    assert raw["mean_prediction"] - raw["mean_label"] > 0.1
    assert abs(calibrated["mean_prediction"] - calibrated["mean_label"]) < 0.02
    assert calibrated["auc"] == pytest.approx(raw["auc"], abs=1e-6) and calibrated["ne"] < raw["ne"]
    table = run.predict(str(folder / "table.csv"), output="calibrated")
    own, score = run.calibration["label"], table["score"].to_numpy().astype(np.float64)
    wanted = 1 / (1 + np.exp(-(own["a"] * score + own["b"])))
    np.testing.assert_allclose(table["probability"].to_numpy(), wanted, rtol=1e-6)
    plain = dataclasses.replace(run, calibration={})
    assert plain.predict(str(folder / "table.csv"))["score"].equals(table["score"])
    with pytest.raises(ConfigError, match=r"output is calibrated, but run .* has no calibration"):
        plain.predict(str(folder / "table.csv"), output="calibrated")
    with pytest.raises(ValueError, match="output is 'odds', must be one of probabilities, calibrated"):
        run.predict(str(folder / "table.csv"), output="odds")
    number = types.SimpleNamespace(labels=[LabelSpec("seconds", "regression", 1.0, 1.0)])
    with pytest.raises(ConfigError, match="predicts numbers, which have no probabilities"):
        dataclasses.replace(run, schema=number).check_output("calibrated")
