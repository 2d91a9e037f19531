"""The data in numbers, and warnings of what is probably not meant so."""

import json

import numpy as np
import pytest
from data_configs import data_config, regression

from jfi.data import DataConfig, load_dataset
from jfi.data.prepared.prepare import prepare_dataset

DAY = 86_400


def rows(count: int = 40) -> list[list[str]]:
    """Users 0 to 3 in turn, items 0 to 4 in turn, one row a day from 2001-09-09 on, every fourth row without a tag."""
    return [
        [f"{i % 4}", f"{i % 5}", f"{10**9 + i * DAY}", f"{i % 2}", "" if i % 4 == 3 else f"t{i % 3}", "a"]
        for i in range(count)
    ]


def load(write, table: list[list[str]], **settings: object):
    lines = [",".join(row) for row in table]
    path = write("r.csv", "user_id,item_id,timestamp,liked,tag,city", *lines)
    return load_dataset(data_config(interactions=path, label="liked", **settings)).summary


def test_counts_shares_and_lengths(write):
    table = rows()
    table[38][0] = "new"  # a user and an item that only the test split has
    table[39][1] = "new"
    table[37][4] = "rare"
    table[36][3] = ""  # a row of the test split that is only part of histories
    summary = load(write, table, event_categorical=["tag"])
    assert (summary.rows, summary.users, summary.items) == (40, 5, 6)
    assert summary.first_time == "2001-09-09T01:46:40+00:00" and summary.last_time[:10] == "2001-10-18"
    assert summary.samples == {"train": 31, "validation": 4, "test": 4}
    assert summary.label_shares == {"train": pytest.approx(15 / 31), "validation": 0.5, "test": 0.75}
    # User 3's rows are 3, 7, ... 39; the new user has one row, and user 2 nine.
    lengths = np.array([i // 4 for i in range(40) if i not in (36, 38)] + [0])
    assert summary.history_lengths["mean"] == pytest.approx(lengths.mean())
    assert summary.history_lengths["p50"] == np.quantile(lengths, 0.5)
    assert summary.history_lengths["max"] == 9 and summary.history_lengths["empty"] == pytest.approx(5 / 39)
    assert summary.missing == {"tag": 0.25}
    assert summary.unseen.keys() == {"validation", "test"}
    assert summary.unseen["validation"] == {"user": 0.0, "item": 0.0}
    assert summary.unseen["test"] == {
        "user": 0.25,
        "item": 0.25,
        "tag": 0.25,
    }
    assert summary.vocabulary_sizes == {"item_id": 5, "tag": 3}
    assert summary.warnings == []


def test_it_is_text_for_a_screen_and_json(write, tmp_path):
    summary = load(write, rows(), event_categorical=["tag"], timestamp_unit="ms")
    lines = str(summary).splitlines()
    assert lines[0] == "data: 40 rows, 4 users, 5 items, 1970-01-12 to 1970-01-12"
    assert lines[1].startswith("samples: train 32 (50.0% positive), validation 4")
    assert "missing: tag 25.0%" in lines
    assert lines[-1].startswith("warning: 'timestamp' lies around the year 1970; with data.timestamp_unit: s it would")
    summary.save(tmp_path / "summary.json")
    tree = json.loads((tmp_path / "summary.json").read_text())
    assert tree["rows"] == 40 and tree["warnings"] == summary.warnings


@pytest.mark.parametrize(("factor", "unit"), [(1, "s"), (10**3, "ms"), (10**6, "us")])
def test_times_of_another_unit_are_warned_of(write, factor, unit):
    table = rows()
    for row in table:
        row[2] = str(int(row[2]) * factor)
    (warning,) = load(write, table, timestamp_unit="ns").warnings
    assert warning == f"'timestamp' lies around the year 1970; with data.timestamp_unit: {unit} it would be 2002"
    assert load(write, table, timestamp_unit=unit).warnings == []
    if factor > 1:
        (warning,) = load(write, table).warnings
        assert f"with data.timestamp_unit: {unit} it would be 2002" in warning


def test_columns_that_change_from_row_to_row_are_warned_of(write):
    table = rows()
    table[20][5] = "b"
    (warning,) = load(write, table, user_categorical=["city"]).warnings
    assert warning.startswith("'city' changes for 1 of 4 users from row to row; every sample has the value of the user")
    (warning,) = load(write, table, item_categorical=["tag"], separators={"tag": "t"}).warnings
    assert warning.startswith("'tag' changes for 5 of 5 items from row to row")
    table[0][5], table[4][5], table[20][5] = "", "b", "a"  # the first row of user 0 has no city, the others have two
    (warning,) = load(write, table, user_categorical=["city"]).warnings
    assert warning.startswith("'city' changes for 1 of 4 users")
    # With a table of users there is one value.
    users = write("u.csv", "user_id,city", *(f"{i},a" for i in range(4)))
    assert load(write, table, user_categorical=["city", "user_id"], users=users).warnings == []


@pytest.mark.parametrize("prepared", [False, True])
def test_a_missing_value_is_no_change(write, tmp_path, prepared):
    table = [[*row, "x|y", str(i % 4)] for i, row in enumerate(rows())]
    names = ["city", "tags", "price"]
    for i, column in ((0, 5), (5, 5), (1, 6), (6, 6), (2, 7), (7, 7)):  # first rows of users, and later ones
        table[i][column] = ""
    path = tmp_path / "r.csv"

    def warnings() -> list[str]:
        columns = "user_id,item_id,timestamp,liked,tag,city,tags,price"
        path.write_text("\n".join([columns, *(",".join(row) for row in table)]) + "\n")
        fields = {"user_categorical": names[:2], "user_dense": names[2:], "separators": {"tags": "|"}}
        config = data_config(interactions=str(path), label="liked", **fields)
        if prepared:
            folder = tmp_path / f"prepared{len(list(tmp_path.iterdir()))}"
            prepare_dataset(config, folder)
            config = DataConfig(prepared=str(folder))
        return [one.split(" from")[0] for one in load_dataset(config).summary.warnings]

    assert warnings() == []
    table[8][5], table[9][6], table[10][7] = "b", "x", "7"
    assert warnings() == [f"'{name}' changes for 1 of 4 users" for name in names]


def test_labels_that_are_nearly_constant_are_warned_of(write):
    table = rows(4000)
    for i, row in enumerate(table):
        row[3] = str(int(i in (0, 1, 2, 3300, 3301, 3700, 3701)))
    (warning,) = load(write, table).warnings
    assert warning == "label 'liked' is nearly constant: 0.09% of the 3,200 labels of train are 1"


@pytest.mark.parametrize(
    ("views", "gap", "labels", "settings", "warns"),
    [
        (1, 60, "01", {}, True),
        (1, 600, "01", {}, True),
        (2, 60, "01", {}, True),
        (4, 60, "01", {}, True),
        (5, 60, "01", {}, False),  # four of five views follow another one
        (1, 601, "01", {}, False),
        (1, 60, "10", {}, False),
        (1, 60, "01", {"history": "tag == buy"}, False),  # no view is an event of histories,
        (1, 60, "01", {"history": "tag == buy", "statistics": ["user", "item"]}, False),
        (1, 60, "01", {"history": "tag == buy", "statistics": ["user_item"]}, True),  # they read its label
        (1, 60, "01", {"history": "tag == view"}, True),
        (1, 60, "01", {"label": None, "labels": regression("liked")}, False),
        (1, 60, "01", {"label": None}, False),
    ],
)
def test_positives_that_are_rows_just_after_another_one_are_warned_of(write, views, gap, labels, settings, warns):
    """A view of each item, or several, and of every other one a purchase `gap` seconds later."""
    table = []
    for i in range(60):
        kinds = ["view"] * views + ["buy"] * (i % 2)
        times = [10**9 + i * DAY + gap * n for n in range(len(kinds))]
        rows = zip(kinds, times, strict=True)
        table += [[f"{i % 4}", f"{i % 5}", f"{t}", labels[kind == "buy"], kind, "a"] for kind, t in rows]
    lines = [",".join(row) for row in table]
    path = write("r.csv", "user_id,item_id,timestamp,liked,tag,city", *lines)
    config = data_config(**{"interactions": path, "label": "liked", **settings}, event_categorical=["tag"])
    found = [one for one in load_dataset(config).summary.warnings if "within 10 minutes" in one]
    shares = f"100.0% of the positives of training, but {(views - 1) / views:.1%} of the negatives, come within"
    assert [one.startswith(shares) for one in found] == [True] * warns


def test_values_of_rules_that_no_row_has_are_warned_of(write):
    table = rows()
    known = "; values of 'tag': t0 (10), t1 (10), t2 (10)"
    rules = {"label": "tag in [t0, T1] or tag == t1 and liked >= 9", "history": "tag != t3 and liked in [0, 1, 2]"}
    path = write("h.csv", "user_id,item_id,timestamp,liked,tag,city", *(",".join(row) for row in table))
    summary = load_dataset(data_config(interactions=path, **rules)).summary
    assert summary.warnings == [
        f"label '{rules['label']}': no row has the value 'T1'{known}",
        f"history '{rules['history']}': no row has the value 't3'{known}",
        f"history '{rules['history']}': no row has the value '2'; values of 'liked': 0 (20), 1 (20)",
    ]
    assert load(write, table, history="tag == t1").warnings == []


def test_rows_that_repeat_another_one_are_counted(write):
    """Also where a row with another label, or none, lies between them; one with another feature is no repetition."""
    table = rows()
    table[7][3] = ""  # part of histories alone
    copies = [table[i] for i in (7, 7, 20)] + [[*table[5][:3], "0", *table[5][4:]], table[5]]
    same = "4 of 45 rows repeat another one, with the same user, item, time, label and features of the event; "
    (warning,) = load(write, table + copies).warnings
    assert warning.startswith(same)
    copies[2] = [*table[20][:4], "other", "a"]
    (warning,) = load(write, table + copies, event_categorical=["tag"]).warnings
    assert warning.startswith(same.replace("4", "3", 1))


@pytest.mark.parametrize("of", ["user", "item", "event"])
def test_unseen_values_of_multi_valued_columns_are_counted(write, of):
    """In the test split two samples have unseen values alone, and one of four has an unseen one beside a seen one."""
    tags = {36: "new", 37: "a;new", 38: "new;newer", 39: ""}
    table = [[*row[:4], tags.get(i, "a;b"), "a"] for i, row in enumerate(rows())]
    for i in tags:
        table[i][0] = table[i][1] = f"u{i}"  # their users and items have no other row
    summary = load(write, table, separators={"tag": ";"}, **{f"{of}_categorical": ["tag"]})
    seen = {name: share for name, share in summary.unseen["test"].items() if name not in ("user", "item")}
    assert seen == {"tag": 0.5, "tag (in part)": 0.25}
    assert summary.unseen["validation"].keys() == {"user", "item"}
    assert "tag 50.0%, tag (in part) 25.0%" in str(summary)
