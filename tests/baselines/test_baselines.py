"""The baselines of small tables: chosen on validation, evaluated as a run is, and the command."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import commands
import numpy as np
import pytest
import torch
from random_tables import IMPLICIT, first_rows, load, random_row
from synthetic_data import options, synthetic_data

from jfi.baselines import run_baselines
from jfi.baselines.features import Features
from jfi.baselines.models import BaselineResult, best, gradient_boosting, logistic_regression
from jfi.baselines.samples import Samples
from jfi.data import DataConfig, load_dataset
from jfi.data.prepared.prepare import prepare_dataset
from jfi.training import ConfigError
from jfi.training.metrics.label_metrics import auc, user_auc
from jfi.utils.exit_codes import SUCCESS, WRONG_INPUT

ROOT = Path(__file__).parents[2]
NAMES = ["item mean", "item + user mean", "popularity by time", "co-occurrence", "logistic regression"]
NAMES += ["gradient boosting"]
SYNTHETIC = synthetic_data(num_users=150, num_items=60)


@pytest.fixture(scope="module")
def synthetic():
    return load_dataset(SYNTHETIC)


@pytest.fixture(scope="module")
def results(synthetic):
    return run_baselines(synthetic, seeds=[0, 1])


def test_results_of_the_synthetic_table(results):
    assert list(results) == NAMES
    test = {name: runs[0].test["auc"] for name, runs in results.items()}
    # A user's taste for a category is all that there is to know beside the item's quality.
    assert test["gradient boosting"] > 0.8 and test["logistic regression"] > 0.8
    assert test["item mean"] < test["item + user mean"] < test["logistic regression"]
    assert all(len(runs) == 2 and runs[0] == runs[1] for runs in results.values())  # the labels depend on no seed
    assert 0 < results["gradient boosting"][0].test["ne"] < results["item mean"][0].test["ne"] < 1.05


def test_the_half_life_is_the_best_of_validation(synthetic, results):
    samples = Samples.of(synthetic)
    features = Features.of(synthetic, samples)
    fits = {}
    for number, half_life in enumerate(features.half_lives, 1):
        name = f"past_recent_rate_{number}"
        fits[half_life] = logistic_regression({name: features.numbers[name]}, samples).validation["auc"]
    chosen = results["popularity by time"][0]
    assert chosen.settings["half_life"] == max(fits, key=fits.get)
    assert chosen.validation["auc"] == max(fits.values())


def test_the_best_fit_has_the_highest_auc_or_the_lowest_ne():
    fits = [
        BaselineResult({"number": i}, {"auc": a, "ne": n}, {})
        for i, (a, n) in enumerate([(0.6, 0.9), (0.7, 1.1), (0.7, 1.0)])
    ]
    assert best(fits, "auc").settings == best(fits, "ndcg@10").settings == {"number": 1}
    assert best(fits, "ne").settings == {"number": 0}


def made_up_samples(rng, label):
    count = len(label)
    splits = {"train": slice(0, 600), "validation": slice(600, 800), "test": slice(800, count)}
    return Samples(np.arange(count), np.arange(count), label, rng.integers(0, 20, count), splits)


def test_models_fit_training_alone_and_are_evaluated_on_the_held_out_rows():
    rng = np.random.default_rng(0)
    signal = rng.normal(size=1000)
    label = (signal + rng.logistic(size=1000) / 2 > 0).astype(np.float32)
    samples = made_up_samples(rng, label)
    columns = {"signal": np.where(rng.random(1000) < 0.1, np.nan, signal), "noise": rng.normal(size=1000)}
    columns |= {"constant": np.ones(1000), "missing": np.full(1000, np.nan)}
    categories = {"kind": rng.integers(0, 5, 1000).astype(float), "none": np.full(1000, np.nan)}
    others = label.copy()
    others[800:] = 1 - others[800:]
    models = (
        lambda one: logistic_regression(columns, one, 1.0),
        lambda one: gradient_boosting(columns, one, 7, 20, categories),
    )
    for model in models:
        fit, again = model(samples), model(replace(samples, label=others))
        assert 0.75 < fit.test["auc"] < 1 and fit.test["ne"] < 0.8
        assert (again.settings, again.validation) == (fit.settings, fit.validation) != (fit.settings, fit.test)
        assert again.test["auc"] == pytest.approx(1 - fit.test["auc"])


def test_logits_are_evaluated_with_the_metrics_of_a_run():
    rng = np.random.default_rng(1)
    label = rng.integers(0, 2, 1000).astype(np.float32)
    samples, values = made_up_samples(rng, label), rng.normal(size=1000) + label
    fit = logistic_regression({"one": values}, samples)
    part = samples.splits["test"]
    of = [torch.from_numpy(one[part]) for one in (values, label, samples.user)]
    assert fit.test["auc"] == auc(*of[:2])  # a single column keeps its order
    assert fit.test["user_auc"] == pytest.approx(user_auc(*of), abs=1e-12)


def test_implicit_feedback_has_no_rate_of_the_user_and_negatives_by_seed(tmp_path):
    rng = random.Random(0)
    rows = first_rows() + [random_row(rng, rng.randrange(1, 14)) for _ in range(300)]
    results = run_baselines(load(tmp_path, rows, IMPLICIT), seeds=[0, 1])
    assert list(results) == [name for name in NAMES if name != "item + user mean"]
    first, second = results["logistic regression"]
    assert first.test["auc"] != second.test["auc"]


def test_a_prepared_dataset_has_the_same_results(tmp_path, synthetic, results):
    prepare_dataset(SYNTHETIC, tmp_path / "prepared", show=False)
    found = run_baselines(load_dataset(DataConfig(prepared=str(tmp_path / "prepared"))))
    assert {name: runs[0].test for name, runs in found.items()} == {
        name: runs[0].test for name, runs in results.items()
    }


def test_a_missing_package_is_named(synthetic, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(ConfigError, match="need scikit-learn"):
        run_baselines(synthetic)


def test_a_constant_of_training_says_nothing():
    rng = np.random.default_rng(0)
    label = rng.integers(0, 2, 1000).astype(np.float32)
    samples, values = made_up_samples(rng, label), rng.normal(size=1000) + label
    constant = np.full(1000, 0.1)
    constant[700:] = rng.normal(size=300)  # held-out rows have other values
    with_it = logistic_regression({"one": values, "constant": constant}, samples)
    assert with_it.test["loss"] == pytest.approx(logistic_regression({"one": values}, samples).test["loss"])


def test_the_command_writes_its_table(tmp_path, monkeypatch, capsys, results):
    monkeypatch.chdir(tmp_path)
    overrides = options(num_users=150, num_items=60)
    arguments = ["--config", str(ROOT / "configs/quickstart.yaml"), *overrides, "--training.run_dir", "out"]
    command = ["compare", *arguments, "--seeds", "0", "1", "--models", "baselines"]
    assert commands.call(*command) == SUCCESS
    record = json.loads((tmp_path / "out/comparison.json").read_text())
    assert record["seeds"] == [0, 1] and list(record["summary"]) == NAMES
    assert record["data"]["interactions"] == SYNTHETIC.interactions
    boosting = record["baselines"]["gradient boosting"]
    assert [run["test"] for run in boosting] == [results["gradient boosting"][0].test] * 2
    lines = capsys.readouterr().out.splitlines()
    (head,) = (i for i, line in enumerate(lines) if line.startswith("test split"))
    assert [line[: len(name)] for line, name in zip(lines[head + 1 :], NAMES, strict=False)] == NAMES
    assert f"{boosting[0]['test']['auc']:.4f} ± 0.0000" in lines[head + 6]
    assert commands.call(*command) == WRONG_INPUT
    assert "training.run_dir: out is not empty" in capsys.readouterr().err
