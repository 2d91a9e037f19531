"""Splits that are given, by user, of whole groups; and which rows enter histories."""

import numpy as np
import pytest
from data_configs import data_config

from jfi.data import DataError, load_dataset
from jfi.data.prepared.stages.splits import split_by_time, split_users, time_cuts

HEADER = "user_id,item_id,timestamp,clicked,part,request,action"


def rows(count: int = 40, **columns) -> list[str]:
    """Row i: user i % 4, item i % 5, time i, label i // 2 % 2; a column given as a function of i replaces its own."""
    default = {"user": lambda i: i % 4, "item": lambda i: i % 5, "clicked": lambda i: i // 2 % 2}
    default |= {"part": lambda i: "train", "request": lambda i: "", "action": lambda i: "view"}
    made = default | columns
    names = ("user", "item", "time", "clicked", "part", "request", "action")
    return [",".join(str(made.get(name, lambda i: i)(i)) for name in names) for i in range(count)]


def load(write, lines: list[str], **settings: object):
    return load_dataset(data_config(interactions=write("r.csv", HEADER, *lines), label="clicked", **settings))


def times(dataset, split: str) -> list[int]:
    """The times of a split's samples."""
    return dataset.arrays().events.time[dataset.arrays().samples[split]].astype(int).tolist()


def test_a_column_gives_the_split(write):
    names = {0: "TRAIN", 1: "training", 2: "valid", 3: "test", 4: "val", 5: "dev", 6: "validation"}
    dataset = load(
        write, rows(70, part=lambda i: names[i % 7]), split="column", split_column="part", event_categorical=["part"]
    )
    for split, parts in {"train": (0, 1), "validation": (2, 4, 5, 6), "test": (3,)}.items():
        assert times(dataset, split) == [i for i in range(70) if i % 7 in parts]
    assert list(dataset.schema.encodings.vocabularies["part"].values) == ["TRAIN", "training"]


@pytest.mark.parametrize(("value", "message"), [("rest", "'part' is 'rest', must be train"), ("", "empty 'part'")])
def test_an_unknown_name_of_a_split_is_refused_with_its_line(write, value, message):
    lines = rows(part=lambda i: value if i == 7 else ["train", "val", "test"][i % 3])
    with pytest.raises(DataError, match=rf"r\.csv:9: {message}"):
        load(write, lines, split="column", split_column="part")


def test_files_give_the_split(write):
    lines = rows()
    files = {"validation": write("v.csv", HEADER, *lines[20:30]), "test": write("t.csv", HEADER, *lines[30:])}
    dataset = load(write, lines[:20], split="files", **files)
    assert times(dataset, "train") == list(range(20))
    assert times(dataset, "validation") == list(range(20, 30)) and times(dataset, "test") == list(range(30, 40))
    # Rows of the test file have the training file's in their histories.
    last = dataset.batches("test", 10)[0].sparse_features["history_item_id"].lengths().tolist()
    assert last == [i // 4 for i in range(30, 40)]


def test_a_fault_in_a_splits_file_names_that_file(write):
    lines = rows()
    broken = [*lines[20:25], "1,1,soon,1,,,view"]
    files = {"validation": write("v.csv", HEADER, *broken), "test": write("t.csv", HEADER, *lines[30:])}
    with pytest.raises(DataError, match=r"v\.csv:7: 'timestamp' is 'soon'"):
        load(write, lines[:20], split="files", **files)
    files = {"validation": write("v.csv", HEADER, *lines[20:25])}
    files["test"] = write("t.csv", "user_id,item_id,timestamp", "1,1,1")
    with pytest.raises(DataError, match=r"t\.csv: no column 'clicked', which .*r\.csv has"):
        load(write, lines[:20], split="files", **files)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "column"}, "data.split_column is not set; data.split: column needs it"),
        ({"split": "files", "test": "t.csv"}, "data.validation is not set; data.split: files needs it"),
        ({"test": "t.csv"}, "data.test is set, but data.split is time; set data.split: files to use it"),
        ({"history": "clicked"}, "clicked"),
    ],
)
def test_a_split_that_is_not_whole_is_refused(write, settings, message):
    with pytest.raises(DataError, match=message):
        load(write, rows(), **settings)


def test_users_are_in_one_split_that_their_id_decides():
    ids = [f"user {i}" for i in range(20_000)]
    split = split_users(ids, [0.7, 0.2, 0.1])
    assert np.bincount(split) / len(ids) == pytest.approx([0.7, 0.2, 0.1], abs=0.01)
    assert split_users(ids[5:50], [0.7, 0.2, 0.1]).tolist() == split[5:50].tolist()


def test_no_user_is_in_two_splits(write):
    dataset = load(write, rows(600, user=lambda i: i % 60), split="user")
    users = {
        split: set(dataset.arrays().events.user[dataset.arrays().samples[split]])
        for split in ("train", "validation", "test")
    }
    assert sum(map(len, users.values())) == 60 == len(set.union(*users.values()))


def test_fractions_count_labeled_rows():
    labeled, cuts = np.arange(20) >= 10, time_cuts(10, [0.6, 0.2, 0.2])
    split = np.concatenate([split_by_time(labeled[:7], 0, cuts), split_by_time(labeled[7:], 0, cuts)])
    # The ten rows without a label go with the labeled ones after them.
    assert split.tolist() == [0] * 16 + [1] * 2 + [2] * 2


def test_a_split_by_time_never_cuts_a_group_which_goes_where_it_begins(write):
    # Of 40 rows in groups of three, 32 and 36 are cuts: rows 30 to 32 begin before the first, 36 to 38 at the second.
    dataset = load(write, rows(user=lambda i: 0, request=lambda i: f"r{i // 3}"), request_id="request")
    assert times(dataset, "train") == list(range(33))
    assert times(dataset, "validation") == [33, 34, 35]
    assert times(dataset, "test") == [36, 37, 38, 39]


def test_leave_one_out_leaves_the_last_groups_out(write):
    # Row 39 has no request: it is alone, and the last of its user. Row 38 is without a label.
    lines = rows(
        user=lambda i: 0, request=lambda i: "" if i == 39 else i // 4, clicked=lambda i: "" if i == 38 else i // 2 % 2
    )
    other = rows(user=lambda i: 1, request=lambda i: i // 4, clicked=lambda i: i % 2)
    dataset = load(write, lines + other, split="leave_one_out", request_id="request")
    by_user = {split: [[], []] for split in ("train", "validation", "test")}
    for split, found in by_user.items():
        for row in dataset.arrays().samples[split]:
            found[dataset.arrays().events.user[row]].append(int(dataset.arrays().events.time[row]))
    assert by_user["test"] == [[39], [36, 37, 38, 39]]
    assert by_user["validation"] == [[36, 37], [32, 33, 34, 35]]
    assert by_user["train"] == [list(range(36)), list(range(32))]


def test_a_given_split_that_cuts_a_group_is_refused(write):
    lines = rows(part=lambda i: ["train", "val", "test"][i // 4 % 3], request=lambda i: i // 8)
    with pytest.raises(DataError, match=r"r\.csv:6: the rows of 'request' 0 are in more than one split"):
        load(write, lines, split="column", split_column="part", request_id="request")


def test_only_rows_of_the_rule_enter_histories(write):
    """Against a loop: impressions are samples, and clicks alone are events."""
    lines = rows(60, action=lambda i: "click" if i % 3 == 0 else "", item=lambda i: i % 7, user=lambda i: i // 2 % 3)
    dataset = load(write, lines, history="action == click", max_history=4)
    for split in ("train", "validation", "test"):
        (batch,) = dataset.batches(split, 100)
        histories = [ids.tolist() for ids in batch.sparse_features["history_item_id"].to_dense()]
        expected = []
        for now in times(dataset, split):
            past = [i for i in range(now) if i // 2 % 3 == now // 2 % 3 and i % 3 == 0]
            expected.append([i % 7 + 1 for i in past[-4:]])
        assert histories == expected
    assert len(times(dataset, "train")) == 48  # the rows that are no events too
    assert dataset.summary.history_lengths["max"] == 4
