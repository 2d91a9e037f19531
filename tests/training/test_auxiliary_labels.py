"""Auxiliary labels train the model and are nothing else: no output, no metric, no column that a request needs."""

import dataclasses

import pyarrow.csv
import pytest
import torch
from data_configs import data_config, replace_data
from own_table import config_of, ends_after_the_first_checkpoint, row, write_table
from torch.nn.functional import binary_cross_entropy_with_logits
from worker import without_pictures

import jfi
from jfi.data import DataError, load_dataset
from jfi.data.config import LabelConfig
from jfi.data.prepared.manifest import prepared_config
from jfi.data.prepared.prepare import prepare_dataset
from jfi.data.schema.schema import LabelSpec
from jfi.models import Heads
from jfi.serving.dataset_schema import schema_of
from jfi.training import Config, ConfigError, resume, train
from jfi.training.distributed.processes import World
from jfi.training.loop.objective import Objective
from jfi.training.loop.trainer import Trainer
from jfi.training.run.recorder import read_metrics

RULES = ["seconds >= 15", "seconds >= 35"]


def labels(rules: list[str] = RULES, label: str = "seconds >= 25") -> list[LabelConfig]:
    others = [LabelConfig(f"other_{number}", rule, "auxiliary", 0.5) for number, rule in enumerate(rules)]
    return [LabelConfig("label", label), *others]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("auxiliary")
    write_table(path / "table.csv", [row(i) for i in range(300)])
    return path


def config(folder, name: str, rules: list[str] = RULES, *, data: dict | None = None, **labeled: str) -> Config:
    made = config_of(folder / "table.csv", folder / name)
    inputs = {"event_dense": [], "label": None, "labels": labels(rules, **labeled), **(data or {})}
    return dataclasses.replace(made, data=replace_data(made.data, **inputs))


@pytest.fixture(scope="module")
def run(folder):
    made = config(folder, "run")
    with without_pictures():
        return made, train(made)


@pytest.mark.parametrize("batching", ["sample", "user"])
@pytest.mark.parametrize("source", ["csv", "prepared"])
def test_a_batch_has_them_behind_the_label(folder, tmp_path, batching, source):
    data = dataclasses.replace(config(folder, "none").data, batching=batching)
    if source == "prepared":
        prepare_dataset(data, tmp_path / "prepared", show=False)
        data = dataclasses.replace(prepared_config(tmp_path / "prepared"), batching=batching)
        assert [one.label for one in data.auxiliary_labels()] == RULES
    dataset = load_dataset(data)
    assert dataset.schema.num_auxiliary == 2 and len(dataset.schema.labels) == 1
    seconds = pyarrow.csv.read_csv(folder / "table.csv")["seconds"].to_numpy()
    times = pyarrow.csv.read_csv(folder / "table.csv")["timestamp"].to_numpy()
    by_time = dict(zip(times.tolist(), seconds.tolist(), strict=True))
    events, rows = dataset.arrays().events, dataset.arrays().samples["train"]
    for batch in dataset.batches("train", 17):
        own = torch.tensor([by_time[events.time[rows[sample]]] for sample in batch.samples])
        torch.testing.assert_close(batch.labels, torch.stack([(own >= least).float() for least in (25, 15, 35)], 1))


def test_the_loss_has_them_and_the_model_predicts_one_label(folder, run):
    """The loss of a step is that of three logits, with the weight; in evaluation mode the first one alone is left."""
    made, result = run
    dataset = load_dataset(made.data)
    trainer = Trainer(made, dataset, World())
    batch = dataset.batches("train", 32)[0]
    trainer.model.train()
    torch.manual_seed(0)
    loss, _ = trainer._forward(batch)
    torch.manual_seed(0)
    logits = trainer.model(batch.dense_features, batch.sparse_features, batch.timelines)
    assert logits.shape == (32, 3)
    each = binary_cross_entropy_with_logits(logits, batch.labels, reduction="none").mean(0)
    torch.testing.assert_close(loss, each[0] + 0.5 * (each[1] + each[2]))
    trainer.model.eval()
    trainer.evaluated.eval()
    assert trainer._forward(batch)[1][0].shape == trainer._forward(batch)[1][1].shape == (32,)

    assert {"auc", "ne", "user_auc"} <= result.test.keys() and not any("auxiliary" in name for name in result.test)
    lines = [line for line in read_metrics(folder / "run" / "metrics.jsonl") if line["split"] == "train"]
    assert lines and all(0.5 < line["loss"] < 0.8 and line["ne"] > 0.8 for line in lines)


def test_the_run_predicts_without_their_columns(folder, run):
    table = pyarrow.csv.read_csv(folder / "table.csv")
    loaded = jfi.load_run(folder / "run")
    scores = loaded.predict(str(folder / "table.csv"))
    assert scores.column_names == ["user_id", "item_id", "timestamp", "score", "probability"]
    without = loaded.predict(table.drop_columns(["seconds"]))
    assert without["score"].to_pylist() == scores["score"].to_pylist()
    found = loaded.evaluate(table.slice(270), history=table.slice(0, 270))["overall"]
    assert found["auc"] == pytest.approx(run[1].test["auc"], abs=1e-4)
    assert schema_of(loaded.config.data, loaded.schema, True, True).labels == []


@pytest.mark.parametrize(("begin", "end", "expected"), [(1, 1600, ["train"]), (1600, 2000, [])])
def test_a_nearly_constant_one_is_warned_of_in_training_alone(tmp_path, begin, end, expected):
    rows = [[*row(i)[:-1], 40 if begin <= i < end else 10 * (i % 5)] for i in range(2000)]
    write_table(tmp_path / "table.csv", rows)
    lines = load_dataset(config(tmp_path, "none", ["seconds >= 30"], label="clicked").data).summary.warnings
    assert [line.split()[-3] for line in lines if "seconds >= 30" in line] == expected


def test_a_warm_start_needs_the_same_labels_and_auxiliary_labels(folder, run):
    """Towers have no names: of others, an output would begin as that of another label."""
    two = [LabelConfig("label", "seconds >= 25"), LabelConfig("clicked", "clicked")]
    warm = {"run_dir": str(folder / "warm"), "warm_start": str(folder / "run"), "rows_after": None, "epochs": 1}
    for name, rules, data, more, message in (
        ("fewer", RULES[:1], {}, {}, r"auxiliary ones .* are \['seconds >= 15'\], in .* \['seconds >= 15', "),
        ("swapped", RULES[::-1], {}, {}, "use the same, in the same order"),
        ("none", [], {}, {}, r"auxiliary ones of data.labels are \[\], in"),
        (
            "promoted",
            RULES[:1],
            {"labels": two},
            {},
            r"predicts label \(binary\), clicked \(binary\), .* label \(binary\);",
        ),
    ):
        made = config(folder, name, rules, data=data).with_training(**warm, **more)
        with pytest.raises(ConfigError, match=f"^training.warm_start: .*{message}"):
            train(made)
        assert not (folder / "warm").exists()
    with without_pictures():
        train(run[0].with_training(**warm))


def test_a_warm_start_with_another_rule_of_the_label_says_so(folder, run, capsys):
    made = config(folder, "other", label="seconds > 24").with_training(
        warm_start=str(folder / "run"), rows_after=None, epochs=1
    )
    with without_pictures():
        train(made)
    line = f"training.warm_start: label is 'seconds > 24', in {folder / 'run'} it is 'seconds >= 25'"
    assert line in capsys.readouterr().out.splitlines()


def test_their_losses_are_not_reported():
    labels = [LabelSpec("label"), LabelSpec("auxiliary")]
    outputs, target = torch.randn(4, 2), torch.ones(4, 2)
    weighted, plain = Objective(labels, [1.0, 0.5], num_auxiliary=1)(outputs, target, None)
    each = binary_cross_entropy_with_logits(outputs, target, reduction="none").sum(0)
    torch.testing.assert_close(weighted, each[0] + 0.5 * each[1])
    torch.testing.assert_close(plain, each[0])


def test_a_resumed_run_ends_in_the_same_bits(folder, run):
    with without_pictures(), ends_after_the_first_checkpoint():
        train(run[0].with_training(run_dir=str(folder / "stopped")))
    with without_pictures():
        assert resume(folder / "stopped").test == pytest.approx(run[1].test, nan_ok=True, rel=0)


def test_outputs_in_training_alone():
    heads = Heads(2, moments=[(0.0, 1.0), (20.0, 4.0)], auxiliary=1)
    arch = heads.arch(8, [6, 4, 1])
    inputs = torch.randn(5, 8)
    whole = arch.train()(inputs)
    assert whole.shape == (5, 3)
    assert torch.equal(arch.eval()(inputs), whole[:, :2])
    torch.testing.assert_close(whole[:, 1], arch[0].train()(inputs)[:, 1] * 4 + 20)
    torch.testing.assert_close(whole[:, 2], arch[0].train()(inputs)[:, 2])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"labels": labels()[1:]}, "data.labels has auxiliary ones alone"),
        ({"label": "clicked", "labels": labels()}, "data.label and data.labels are both set"),
        ({"labels": labels(["seconds >= 25"])}, r"data.labels\[0\] and data.labels\[1\] are both 'seconds >= 25'"),
        ({"labels": labels(["'seconds'  >=  25"])}, r"data.labels\[0\] and data.labels\[1\] are both"),
        ({"labels": labels(["a > 1", "a > 1"])}, r"data.labels\[1\] and data.labels\[2\] are both 'a > 1'"),
        ({"labels": labels(["seconds >="])}, "rule 'seconds >='"),
        ({"labels": labels(["user_id"])}, r"data.user and data.labels\[1\] are both 'user_id'"),
        ({"labels": labels(["absent >= 3"])}, "absent"),
        ({"labels": labels(["seconds >= 1000"])}, "'seconds >= 1000'.*none of the 300 rows is positive"),
    ],
)
def test_wrong_settings_are_refused(folder, settings, message):
    with pytest.raises(DataError, match=message):
        load_dataset(data_config(interactions=str(folder / "table.csv"), **settings))
