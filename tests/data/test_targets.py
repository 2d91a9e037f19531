"""Weights, several labels and labels of real numbers, from every reader and through a prepared dataset."""

import dataclasses

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from data_configs import data_config, regression

from jfi.data import DataConfig, DataError, load_dataset
from jfi.data.config import LabelConfig
from jfi.data.config_checks import check_data_config
from jfi.data.prepared.manifest import prepared_config
from jfi.data.prepared.prepare import prepare_dataset
from jfi.data.prepared.store import DATA, TRAIN, fingerprint_of

HEADER = "user_id,item_id,timestamp,rating,seen,seconds,importance"
LABELS = [
    LabelConfig("like", "rating >= 4"),
    LabelConfig("seen", "seen"),
    LabelConfig("seconds", "seconds", "regression", 0.5),
]


def row(i: int) -> str:
    seen = "" if i % 5 == 2 else i * 7 % 2
    return f"u{i % 6},i{i * 7 % 11},{60 * i},{1 + i * 3 % 5},{seen},{i % 13 * 2.5},{1 + i % 4}"


@pytest.fixture
def table(write) -> str:
    return write("table.csv", HEADER, *map(row, range(120)))


def several(table: str, **settings: object) -> DataConfig:
    return data_config(**{"interactions": table, "labels": LABELS, "weight": "importance", **settings})


def read(config: DataConfig) -> dict[tuple[int, float], tuple]:
    """By sample of training its labels and its weight."""
    dataset, found = load_dataset(config), {}
    events = dataset.arrays().events
    rows = dataset.arrays().samples["train"]
    for batch in dataset.batches("train", 17, shuffle=True, seed=3):
        assert batch.labels.shape == (len(batch.users), 3)
        assert batch.labels.dtype == batch.weights.dtype == torch.float32
        for sample, labels, weight in zip(batch.samples, batch.labels.tolist(), batch.weights.tolist(), strict=True):
            found[float(events.time[rows[sample]])] = (*labels, weight)
    return found


def wanted(i: int) -> tuple:
    seen = np.nan if i % 5 == 2 else float(i * 7 % 2)
    return float(1 + i * 3 % 5 >= 4), seen, i % 13 * 2.5, float(1 + i % 4)


@pytest.mark.parametrize("batching", ["sample", "user"])
@pytest.mark.parametrize("source", ["csv", "parquet", "prepared"])
def test_labels_and_weights_are_those_of_the_row(table, tmp_path, batching, source):
    config = several(table)
    if source == "parquet":
        pyarrow.parquet.write_table(pyarrow.csv.read_csv(table), tmp_path / "table.parquet")
        config = several(str(tmp_path / "table.parquet"))
    if source == "prepared":
        prepare_dataset(config, tmp_path / "prepared", show=False)
        config = prepared_config(tmp_path / "prepared")
        assert config.targets() == LABELS
    found = read(dataclasses.replace(config, batching=batching))
    assert len(found) == 96
    for time, values in found.items():
        np.testing.assert_equal(values, wanted(round(time / 60)))


def test_a_row_without_the_first_label_is_no_sample_and_needs_no_weight(write):
    rows = [f"u{i % 3},{i},{i},{'' if i == 4 else i % 5 + 1},1,1,{'' if i == 4 else 2}" for i in range(60)]
    dataset = load_dataset(
        DataConfig(interactions=write("r.csv", HEADER, *rows), label="rating >= 4", weight="importance")
    )
    assert sum(dataset.num_samples(split) for split in ("train", "validation", "test")) == 59


@pytest.mark.parametrize("value", ["0", "-1", "inf", "nan", "", "1e-60"])
def test_a_wrong_weight_is_refused_by_file_and_line(write, value):
    rows = list(map(row, range(60)))
    rows[6] = ",".join([*rows[6].split(",")[:-1], value])
    shown = "empty" if value in ("", "nan") else value
    with pytest.raises(DataError, match=rf"r\.csv:8: weight 'importance' is {shown}, must be positive and finite"):
        load_dataset(DataConfig(interactions=write("r.csv", HEADER, *rows), label="rating >= 4", weight="importance"))


def test_a_sampled_negative_has_the_weight_of_its_positive(table):
    dataset = load_dataset(DataConfig(interactions=table, weight="importance", negatives=2))
    events, rows = dataset.arrays().events, dataset.arrays().samples["train"]
    for batch in dataset.batches("train", 32, shuffle=True):
        times = events.time[rows[batch.samples.numpy() // 3]]
        assert batch.weights.tolist() == [1 + round(time / 60) % 4 for time in times]


def test_moments_of_a_number_are_those_of_training(table):
    dataset = load_dataset(DataConfig(interactions=table, labels=regression("seconds")))
    (label,) = dataset.schema.labels
    values = np.array([i % 13 * 2.5 for i in range(96)])
    assert (label.mean, label.deviation) == pytest.approx((values.mean(), values.std()))
    assert dataset.summary.label_shares == {} and "positive" not in str(dataset.summary)


def test_a_number_that_is_not_finite_is_refused_by_file_and_line(write):
    rows = list(map(row, range(60)))
    rows[3] = rows[3].replace(",7.5,", ",inf,")
    with pytest.raises(DataError, match=r"r\.csv:5: label 'seconds' is inf, not a finite number of float32"):
        load_dataset(DataConfig(interactions=write("r.csv", HEADER, *rows), labels=regression("seconds")))


def test_the_fingerprint_knows_all_labels_and_the_weight(table, write):
    config = several(table)
    before = fingerprint_of(load_dataset(config))
    for place, name in ((4, "seen"), (6, "importance"), (5, "seconds")):
        rows = [row(i).split(",") for i in range(120)]
        rows[10][place] = "1" if name == "seen" else "9"
        changed = several(write("changed.csv", HEADER, *map(",".join, rows)))
        now = fingerprint_of(load_dataset(changed))
        assert before[DATA] != now[DATA] and before[TRAIN] == now[TRAIN], name  # the samples have the first label alone


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"labels": [LABELS[0], LABELS[0]]}, "data.labels has the name 'like' twice"),
        ({"labels": [LabelConfig("a b", "x"), LABELS[0]]}, "data.labels[0].name is 'a b'; it must be of letters"),
        ({"labels": [LABELS[0], LabelConfig("b", "x > 1", "regression")]}, "label 'x > 1' is a rule; with task"),
        ({"labels": LABELS, "label": "seen"}, "data.label and data.labels are both set"),
        ({"labels": regression("x"), "statistics": ["item"]}, "data.statistics counts positives, and the label is"),
        ({"weight": "user_id"}, "data.user and data.weight are both 'user_id'"),
        ({"weight": "w", "context_dense": ["w"]}, "data.features lists 'w' of context, which is data.weight"),
        (
            {"labels": LABELS, "item_dense": ["seconds"]},
            "column 'seconds' defines the label, so data.features",
        ),
    ],
)
def test_settings_that_no_table_fits(settings, expected):
    with pytest.raises(DataError) as fault:
        check_data_config(data_config(**{"interactions": "r.csv", **settings}))
    assert str(fault.value).startswith(expected)
    with pytest.raises(DataError, match=r"^data\.labels 'b': weight: got 0\.0, must be a number above 0 and finite$"):
        LabelConfig("b", "x", weight=0.0)


def test_a_label_that_is_constant_or_empty_in_a_split_is_refused(write):
    rows = [f"u{i % 3},{i},{i},{i % 5 + 1},{'' if i > 50 else i % 2},1,1" for i in range(60)]
    labels = [LABELS[0], LABELS[1]]
    with pytest.raises(DataError, match="label 'seen': all 6 labels of the test split are empty"):
        load_dataset(DataConfig(interactions=write("r.csv", HEADER, *rows), labels=labels))
