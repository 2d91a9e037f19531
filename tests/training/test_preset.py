"""What `training.preset: auto` decides by pilots, and by what: gains, pilots, statistics without test rows."""

import dataclasses
import signal

import numpy as np
import pytest
import torch
from data_configs import replace_data
from own_table import config_of, row, write_table
from test_run import tiny
from test_semantic_id_runs import config as with_ids
from test_semantic_id_runs import items, make_ids
from worker import without_pictures

from jfi.data import DataConfig, load_dataset
from jfi.data.prepared.prepare import prepare_dataset
from jfi.training import preset, resume, train
from jfi.training.distributed import World
from jfi.training.evidence import Gain, auc_gain, gain_of_columns
from jfi.training.interrupt import Interrupted
from jfi.training.loop import Trainer
from jfi.training.metrics import Predictions
from jfi.training.pilot import pilot_scores, statistics_of, validation_rows
from jfi.training.recorder import read_metrics
from jfi.training.run_folder import RunFolder


@pytest.fixture(autouse=True)
def _no_pictures():
    with without_pictures():
        yield


@pytest.mark.parametrize("seed", range(3))
def test_the_error_is_that_of_all_pairs(seed):
    """DeLong's formula, from the table of all pairs of a positive and a negative, with ties."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, 40)
    scores = [rng.integers(0, 9, 40).astype(float) for _ in range(2)]
    in_order = [np.sign(np.subtract.outer(one[labels == 1], one[labels == 0])) / 2 + 0.5 for one in scores]
    gain, moved = auc_gain(*scores, labels), in_order[1] - in_order[0]
    variance = sum(moved.mean(axis).var() / moved.shape[1 - axis] for axis in (0, 1))
    assert (gain.before, gain.after) == pytest.approx([one.mean() for one in in_order])
    assert gain.error == pytest.approx(variance**0.5)
    assert auc_gain(scores[0], scores[0], labels).counts is False  # a difference of 0 with an error of 0


def test_columns_gain_where_they_tell_something_new():
    rng = np.random.default_rng(0)
    known, new, noise = rng.normal(size=(3, 1200))
    labels = (known + new + rng.normal(size=1200) > 0).astype(np.float32)
    users = rng.integers(0, 50, 1200)
    assert gain_of_columns(known, new[:, None], labels, users).counts
    assert not gain_of_columns(known, np.column_stack([noise, known]), labels, users).counts
    assert gain_of_columns(known[:500], new[:500, None], labels[:500], users[:500]) is None


def test_a_pilot_has_the_scores_of_the_best_epoch_of_a_run(tmp_path):
    config = tiny(tmp_path / "run", epochs=2, monitor="ne")
    dataset = load_dataset(config.data)
    scores = pilot_scores(config, dataset, World())
    result = train(config, dataset)
    assert scores.metrics() == result.validation
    rows = validation_rows(dataset, config.training.eval_batch_size)
    assert torch.equal(scores.labels[0], torch.from_numpy(dataset.arrays().events.label[rows]))


def test_statistics_for_pilots_are_those_without_test_rows():
    """By user, test rows are often older than validation rows: their labels and they themselves are not read."""
    config = dataclasses.replace(tiny(None).data, split="user", batching="user")
    dataset = load_dataset(config)
    events, rows = dataset.arrays().events, validation_rows(dataset, 64)
    names = ["item", "user", "user_item", "similar"]
    found = statistics_of(dataset, names, rows)
    test = events.split == 2
    assert (events.time[test].min() < events.time[rows]).any()
    changed = dataclasses.replace(events, label=np.where(test, 1 - events.label, events.label))
    changed = dataclasses.replace(changed, item=np.where(test, 0, events.item))
    dataset._arrays = dataclasses.replace(dataset.arrays(), events=changed)
    for name, values in statistics_of(dataset, names, rows).items():
        np.testing.assert_array_equal(values, found[name])
    changed = dataclasses.replace(events, label=np.where(test, events.label, 1 - events.label))
    dataset._arrays = dataclasses.replace(dataset.arrays(), events=changed)
    assert not np.array_equal(statistics_of(dataset, names, rows)["past_item_rate"], found["past_item_rate"])


def test_it_chooses_statistics_that_count_and_the_better_heads(tmp_path, capsys, monkeypatch):
    """The choice is written, the data is read again with it, and a warm start takes it over."""
    monkeypatch.setattr(
        preset, "gain_of_columns", lambda _, columns, *__: Gain(0.7, 0.8 + columns.shape[1] / 100, 0.01)
    )
    config = tiny(tmp_path / "run", epochs=1, preset="auto")
    config.model = dataclasses.replace(config.model, bias=None)
    heads = []

    def pilot(config, dataset, world):
        heads.append(config.model.bias)
        rows = validation_rows(dataset, config.training.eval_batch_size)
        labels = torch.from_numpy(dataset.arrays().events.label[rows])
        scores = labels if "recency" in config.model.bias else torch.rand(len(labels))
        return Predictions([scores], [labels], [torch.from_numpy(rows)])

    monkeypatch.setattr(preset, "pilot_scores", pilot)
    train(config)
    assert sorted(heads) == [["history_age", "position"], ["history_age", "recency"]]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("training.preset")]
    assert lines[0] == "training.preset: data.auxiliary_labels: none: the synthetic table has one label"
    assert lines[1].startswith("training.preset: model.bias: ['history_age', 'recency']: heads by recency")
    assert lines[2].endswith("on top of the model's scores: validation AUC 0.7000 to 0.9000, 20.0 standard errors")
    saved = RunFolder.open(tmp_path / "run")[1]
    assert saved.data.statistics == ["item", "user", "similar"] and saved.model.bias == ["history_age", "recency"]
    resume(tmp_path / "run")
    warm = tiny(tmp_path / "warm", epochs=1, preset="auto", warm_start=str(tmp_path / "run"))
    warm.model = dataclasses.replace(warm.model, bias=None)
    train(warm)
    assert len(heads) == 2
    assert RunFolder.open(tmp_path / "warm")[1].data.statistics == saved.data.statistics


def test_it_says_what_it_cannot_try(tmp_path, monkeypatch):
    config = tiny(None, preset="auto", epochs=1)  # with a bias of its own
    write_table(tmp_path / "table.csv", [row(i) for i in range(100)])
    own = config_of(tmp_path / "table.csv", tmp_path / "run").data
    prepare_dataset(config.data, tmp_path / "prepared", show=False)
    monkeypatch.setattr(preset, "pilot_scores", None)  # no pilot is needed
    for data, labels, statistics in (
        (
            DataConfig(prepared=str(tmp_path / "prepared")),
            "a prepared dataset has its own",
            "a prepared dataset makes none",
        ),
        (replace_data(own, label=None, event_dense=[]), "they are beside data.label", "they need data.label"),
    ):
        settled, lines = preset.apply_preset(dataclasses.replace(config, data=data), load_dataset(data))
        said = [f"data.auxiliary_labels: none: {labels}", f"data.statistics: none: {statistics}"]
        assert lines[:2] == [f"training.preset: {one}" for one in said] and settled.data == data
    given = replace_data(config.data, context_dense=["past_item_rate"])
    lines = preset.apply_preset(dataclasses.replace(config, data=given), load_dataset(config.data))[1]
    assert lines[1] == "training.preset: data.statistics: none: the table has such columns"
    real = dataclasses.replace(config, data=dataclasses.replace(config.data, label="rating", task="regression"))
    lines = preset._by_pilots(real, real, load_dataset(config.data), None)[1]
    assert lines[0] == "training.preset tried no parts: they are compared by the AUC of a single label"
    monkeypatch.setattr(preset, "_LARGE", 100)
    lines = preset.apply_preset(config, load_dataset(config.data))[1]
    assert lines[0] == "training.preset tried no parts: 1,114 training samples, 100 or more"


def test_a_signal_ends_a_pilot_with_nothing_written(tmp_path, monkeypatch):
    predict = Trainer._predict

    def interrupted(self, *arguments):
        signal.raise_signal(signal.SIGTERM)
        return predict(self, *arguments)

    monkeypatch.setattr(Trainer, "_predict", interrupted)
    with pytest.raises(Interrupted, match="stopped by SIGTERM; the run has not begun"):
        train(tiny(tmp_path / "run", epochs=1, preset="auto"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("better", [False, True])
def test_the_id_stays_beside_content_only_if_it_pays(tmp_path, monkeypatch, better):
    write_table(tmp_path / "table.csv", [row(i) for i in range(300)])
    items(tmp_path, 10)
    make_ids(tmp_path)
    config = with_ids(tmp_path, "run", preset="auto")
    dataset = load_dataset(config.data)

    def pilot(config, dataset, world):
        labels = torch.tensor([0.0, 1.0] * 50)
        scores = labels if better and config.model.item_id else torch.rand(100, generator=torch.manual_seed(0))
        return Predictions([scores], [labels], [torch.arange(100)])

    monkeypatch.setattr(preset, "pilot_scores", pilot)
    monkeypatch.setattr(preset._Parts, "statistics", lambda self: ({}, None))
    settled, lines = preset.apply_preset(config, dataset)
    assert settled.model.item_id is better
    assert lines[0].startswith(f"training.preset: model.item_id: {'true stays' if better else 'false'}: ")
    given = dataclasses.replace(config, model=dataclasses.replace(config.model, item_id=False))
    assert not any("item_id" in line for line in preset.apply_preset(given, dataset)[1])


def test_a_pilot_leaves_the_run_as_it_is(tmp_path):
    """A run with a preset has the bits of a run with the settings that it chose."""
    config = tiny(tmp_path / "run", epochs=1, preset="auto")
    train(config)
    chosen = RunFolder.open(tmp_path / "run")[1]
    train(chosen.with_training(run_dir=str(tmp_path / "again")))
    a, b = (read_metrics(tmp_path / name / "metrics.jsonl")[-1] for name in ("run", "again"))
    assert a["loss"] == b["loss"]
