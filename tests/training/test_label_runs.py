"""Weights in the loss, runs of a label of real numbers, and runs of several labels."""

import dataclasses
import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pyarrow.csv
import pytest
import torch
from data_configs import regression, replace_data
from own_table import config_of, ends_after_the_first_checkpoint, row, write_table
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from worker import without_pictures

import jfi
from jfi.baselines.run import run_baselines
from jfi.data import DataConfig, load_dataset
from jfi.data.config import LabelConfig
from jfi.data.schema.schema import LabelSpec
from jfi.models import Heads
from jfi.serving.dataset_schema import schema_of
from jfi.serving.model import ScoringModel
from jfi.serving.scorer import Scorer
from jfi.training import Config, ConfigError, resume, train
from jfi.training.config_parser import parse_config, save_config
from jfi.training.distributed.processes import World
from jfi.training.loop.objective import Objective
from jfi.training.loop.trainer import Trainer
from jfi.training.metrics.label_metrics import Predictions
from jfi.training.run.recorder import read_metrics

BINARY, NUMBER = LabelSpec("like"), LabelSpec("seconds", "regression", 20.0, 4.0)
LABELS = [
    LabelConfig("clicked", "clicked"),
    LabelConfig("long", "seconds >= 25"),
    LabelConfig("seconds", "seconds", "regression", 0.5),
]


def test_a_weight_counts_as_so_many_samples():
    """Of one label and of several; what is reported has the weights of the labels alone."""
    outputs, target = torch.randn(6), torch.tensor([0.0, 1, 1, 0, 1, 0])
    weights = torch.tensor([1.0, 2, 3, 1, 1, 4])
    total, plain = Objective([BINARY], [1.0])(outputs, target, weights)
    again = torch.arange(6).repeat_interleave(weights.long())
    expected = binary_cross_entropy_with_logits(outputs[again], target[again], reduction="sum")
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(plain, binary_cross_entropy_with_logits(outputs, target, reduction="sum"))

    outputs = torch.randn(6, 2, requires_grad=True)
    numbers = torch.tensor([10.0, math.nan, 30, 20, math.nan, 25])
    total, plain = Objective([BINARY, NUMBER], [1.0, 0.5])(outputs, torch.stack([target, numbers], 1), weights)
    errors = (outputs[:, 1] - numbers).square().nan_to_num() / 16
    own = binary_cross_entropy_with_logits(outputs[:, 0], target, reduction="none")
    torch.testing.assert_close(total, (weights * (own + 0.5 * errors)).sum())
    torch.testing.assert_close(plain, (own + 0.5 * errors).sum().detach())
    total.backward()
    assert outputs.grad.isfinite().all() and (outputs.grad[numbers.isnan(), 1] == 0).all()


def test_metrics_of_numbers_and_of_several_labels():
    outputs, target = torch.tensor([1.0, 3, 8, 4]), torch.tensor([2.0, 3, 6, 5])
    users = torch.zeros(4)
    found = Predictions([outputs], [target], [users]).metrics([NUMBER])
    assert found["rmse"] == pytest.approx(mse_loss(outputs, target).sqrt().item())
    assert found["mae"] == pytest.approx(1.0) and found["loss"] == pytest.approx(1.5 / 16)
    assert found["r2"] == pytest.approx(1 - 6 / 10)
    constant = Predictions([torch.full((4,), 4.0)], [target], [users]).metrics([NUMBER])
    assert constant["r2"] == pytest.approx(0.0)

    both = torch.tensor([[1.0, 2], [0, 3], [1, math.nan], [0, 5]])
    found = Predictions([torch.stack([target, outputs], 1)], [both], [users]).metrics([BINARY, NUMBER], [1.0, 0.5])
    assert found["auc"] == found["auc_like"] and found["r2"] == found["r2_seconds"]
    assert found["mae_seconds"] == pytest.approx((1 + 0 + 1) / 3)
    assert found["loss"] == pytest.approx(found["loss_like"] + 0.5 * found["loss_seconds"])


def config(folder, name: str, data: dict, **training: object) -> Config:
    made = config_of(folder / "table.csv", folder / name)
    inputs = {"event_dense": [], "label": None, **data}
    options = dataclasses.replace(made.training, **training)
    return dataclasses.replace(made, data=replace_data(made.data, **inputs), training=options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("labels")
    write_table(path / "table.csv", [row(i) for i in range(300)])
    write_table(path / "weighted.csv", [[*row(i)[:5], 1 + i % 4, *row(i)[6:]] for i in range(300)])
    return path


@pytest.fixture(scope="module")
def several(folder):
    made = config(folder, "several", {"labels": LABELS}, monitor="auc_long")
    made = dataclasses.replace(made, model=dataclasses.replace(made.model, over_arch=[8, 4]))
    with without_pictures():
        return made, train(made)


def test_a_run_of_several_labels(folder, several):
    """Its metrics, predictions and best epoch; a resume ends in the same bits."""
    made, result = several
    names = {"loss", "auc", "r2", "auc_clicked", "auc_long", "ne_long", "rmse_seconds", "r2_seconds"}
    assert names <= result.test.keys() and "rmse" not in result.test
    log = [r for r in read_metrics(folder / "several" / "metrics.jsonl") if r["split"] == "validation"]
    assert result.best_epoch == max(log, key=lambda r: r["auc_long"])["epoch"]
    run = jfi.load_run(folder / "several")
    table = run.predict(str(folder / "table.csv"))
    columns = ["score_clicked", "probability_clicked", "score_long", "probability_long", "prediction_seconds"]
    assert table.column_names == ["user_id", "item_id", "timestamp", *columns]
    np.testing.assert_allclose(
        table["probability_long"].to_numpy(), 1 / (1 + np.exp(-table["score_long"].to_numpy())), rtol=1e-5
    )
    test = pyarrow.csv.read_csv(folder / "table.csv")
    metrics = run.evaluate(test.slice(270), history=test.slice(0, 270))
    for name, value in result.test.items():
        assert metrics["overall"][name] == pytest.approx(value, abs=1e-4, nan_ok=True), name
    assert set(metrics["deciles"]) == {"clicked", "long", "seconds"} and "mean_label_long" in metrics["overall"]
    without = test.drop_columns(["clicked"])
    assert run.predict(without)["score_long"].to_pylist() == table["score_long"].to_pylist()

    with without_pictures(), ends_after_the_first_checkpoint():
        train(made.with_training(run_dir=str(folder / "stopped")))
    with without_pictures():
        assert resume(folder / "stopped").test == pytest.approx(result.test, nan_ok=True, rel=0)


def test_a_served_model_names_its_labels(folder, several):
    """The dense part has an output for each label; a request's scores are by their names."""
    run = jfi.load_run(folder / "several")
    schema = schema_of(run.config.data, run.schema, True, True)
    assert schema.labels == ["clicked", "long", "seconds"]
    scoring = ScoringModel(run.model, [key for one in schema.user for key in one.keys])
    width = scoring.over_arch[0].bottom._mlp[0]._in_size
    outputs = scoring.over_arch(torch.randn(5, width))
    assert outputs.shape == (5, 3)
    requests = [SimpleNamespace(num_candidates=2), SimpleNamespace(num_candidates=3)]
    for labels, expected in ((schema.labels, outputs[2:].T.tolist()), ([], outputs[2:].tolist())):
        scorer = SimpleNamespace(
            package=lambda: outputs,
            info=SimpleNamespace(schema=dataclasses.replace(schema, labels=labels)),
            inputs=SimpleNamespace(history=[]),
            tables=None,
            device=torch.device("cpu"),
        )
        scorer._to_probability = None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("jfi.serving.scorer.batch_inputs", lambda *_: ())
            answers = Scorer._score(scorer, requests)
        assert answers[1] == (dict(zip(labels, expected, strict=True)) if labels else expected)


def test_a_run_of_real_numbers(folder):
    """Predictions are on the label's scale, the best epoch has the highest R², and the loss does not know the unit."""
    made = config(folder, "numbers", {"label": None, "labels": regression("seconds")})
    with without_pictures():
        result = train(made)
    assert made.monitor == "r2" and {"loss", "rmse", "mae", "r2"} == result.test.keys()
    run = jfi.load_run(folder / "numbers")
    table = pyarrow.csv.read_csv(folder / "table.csv")
    found = run.predict(table)["prediction"].to_numpy()
    target = table["seconds"].to_numpy()
    assert abs(found.mean() - target[:240].mean()) < 5 and 0.1 < found.std() < 30
    metrics = run.evaluate(table.slice(270), history=table.slice(0, 270))
    assert metrics["overall"]["rmse"] == pytest.approx(np.sqrt(np.square(found - target)[270:].mean()), rel=1e-4)
    assert metrics["overall"]["r2"] == pytest.approx(result.test["r2"], abs=1e-4)
    json.dumps(metrics, allow_nan=False)


def test_a_regression_finds_a_number_that_follows_from_the_item(tmp_path):
    rows = [row(i) for i in range(200)]
    write_table(tmp_path / "table.csv", [[*line[:7], 100 + 50 * (int(line[1][1:]) % 3)] for line in rows])
    made = config(
        tmp_path, "run", {"label": None, "labels": regression("seconds")}, epochs=8, patience=None, batch_size=16
    )
    made.optimizer.dense.learning_rate = 0.03
    with without_pictures():
        result = train(made)
    assert result.test["r2"] > 0.8, result.test


def test_weights_reach_the_step_and_no_metric(folder):
    """Weights give another model; labels and samples are counted as before."""
    states, outputs = [], []
    for data in ({}, {"weight": "price"}):
        data = {"label": "clicked", "item_dense": [], "interactions": str(folder / "weighted.csv"), **data}
        made = config(folder, "unused", data)
        dataset = load_dataset(made.data)
        trainer = Trainer(made, dataset, World(device=torch.device("cpu")))
        trainer.model.train()
        list(itertools.islice(trainer._outputs("train", 32, "train"), 3))
        states.append(trainer.model.over_arch.state_dict())
        outputs.append(trainer.window.tolist())
    first, other = ([*state.values()] for state in states)
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert outputs[0][1:] == outputs[1][1:]


def test_parts_of_a_batch_have_its_weights(folder):
    states = []
    for parts in (1, 3):
        made = config(
            folder, "unused", {"labels": LABELS, "weight": "price", "item_dense": []}, gradient_accumulation_steps=parts
        )
        made.data.interactions = str(folder / "weighted.csv")
        trainer = Trainer(made, load_dataset(made.data), World(device=torch.device("cpu")))
        trainer.model.train()
        list(itertools.islice(trainer._outputs("train", 32, "train"), 3))
        states.append(trainer.model.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-3, atol=1e-5, msg=name)


def test_heads():
    x = torch.randn(5, 6)
    for sizes in ([4, 3, 1], [4, 1]):
        shared = Heads(2).arch(6, sizes)
        assert shared(x).shape == (5, 2)
        torch.testing.assert_close(shared(x)[:, 1:], shared.towers[1](shared.bottom(x)))
    scaled = Heads(1, moments=[(100.0, 10.0)]).arch(6, [4, 1])
    torch.testing.assert_close(scaled(x), scaled[0](x) * 10 + 100)
    for arguments, expected in (
        ((0,), "count must be at least 1, got 0"),
        ((2, [(0.0, 1.0)]), "moments must have 2 entries, one for each output, got 1"),
    ):
        with pytest.raises(ValueError, match=expected):
            Heads(*arguments)


def test_settings_that_do_not_fit(folder):
    for training, expected in (
        ({"max_grad_norm": 0.0}, "training.max_grad_norm: got 0.0, must be a number above 0 and finite"),
        ({"monitor": "rmse"}, "training.monitor: got 'rmse', must be auc, ne or user_auc; hr@k"),
    ):
        with pytest.raises(ConfigError, match=expected.split(";")[0]):
            config(folder, "unused", {"label": "clicked"}, **training)
    known = "auc, ne, user_auc, r2, auc_clicked, ne_clicked, user_auc_clicked, auc_long, ne_long, user_auc_long, "
    known += "r2_seconds, rmse_seconds or mae_seconds"
    with pytest.raises(ConfigError, match=f"training.monitor: got 'rmse', must be {known}"):
        config(folder, "unused", {"labels": LABELS}, monitor="rmse")
    numbers = load_dataset(DataConfig(interactions=str(folder / "table.csv"), labels=regression("seconds")))
    with pytest.raises(ConfigError, match=r"baselines predict a binary label, got a regression; .*--models none mean"):
        run_baselines(numbers)


def test_a_config_with_labels_is_written_and_read(folder, tmp_path):
    made = config(folder, "unused", {"labels": LABELS})
    save_config(made, tmp_path / "config.yaml")
    assert parse_config(["--config", str(tmp_path / "config.yaml")])[0] == made
    text = '[{"name": "a", "label": "x > 1"}, {"name": "b", "label": "y", "task": "regression"}]'
    read, _ = parse_config(["--data.interactions", "r.csv", "--data.labels", text])
    assert read.data.labels == [LabelConfig("a", "x > 1"), LabelConfig("b", "y", "regression")]
    assert (read.data.task, read.monitor) == ("binary", "auc")
    with pytest.raises(ConfigError, match=r"unknown key data\.labels\[0\]\.nam"):
        (tmp_path / "wrong.yaml").write_text("data: {labels: [{nam: a, label: x}]}")
        parse_config(["--config", str(tmp_path / "wrong.yaml")])
