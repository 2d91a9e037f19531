import re

import pyarrow as pa
import pyarrow.parquet
import pytest
from data_configs import data_config, replace_data

from jfi.data import DataConfig, DataError, load_dataset

HEADER = "user_id,item_id,rating,timestamp"
ROWS = ["1,1,5,10", "2,1,1,20", "1,2,4,30", "2,2,2,40", "1,3,5,50", "2,3,1,60"]
THIRDS = [0.34, 0.33, 0.33]


def message(config: DataConfig) -> str:
    with pytest.raises(DataError) as caught:
        load_dataset(config)
    text = str(caught.value)
    assert "\n" not in text
    return text


def fault(path: str, **settings) -> str:
    """The message without the folder, for a config that is right for HEADER and ROWS."""
    config = data_config(interactions=path, label="rating >= 4", event_categorical=["rating"], fractions=THIRDS)
    return re.sub(r"\S*/(?=\w)", "", message(replace_data(config, **settings)))


def test_the_table_of_these_tests_is_right(write):
    config = DataConfig(interactions=write("r.csv", HEADER, *ROWS), label="rating >= 4", fractions=THIRDS)
    assert load_dataset(config).num_samples("test") == 2


NO_DATE = (
    "neither a number nor a date; a date is of ISO 8601, such as 2020-01-31 23:59:00, and may end in an offset such as "
    "+01:00, Z or UTC"
)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([*ROWS, "3,1,good,70"], "r.csv:8: 'rating' is 'good', not a number"),
        (
            [*ROWS, "3,1,NULL,70"],
            "r.csv:8: 'rating' is 'NULL', not a number; data.missing_values lists texts that mean a missing value, "
            "such as [NULL]",
        ),
        (
            [*ROWS, '3,1,"1,060.45",70'],
            "r.csv:8: 'rating' is '1,060.45', not a number; a number has digits and one decimal point, without signs "
            "for thousands or a currency, such as 1060.45",
        ),
        (["", *ROWS[:2], "", "3,1,good,70", *ROWS], "r.csv:6: 'rating' is 'good', not a number"),
        ([*ROWS, "3,1,5,23.03.2026 21:33"], f"r.csv:8: 'timestamp' is '23.03.2026 21:33', {NO_DATE}"),
        (
            ["1,1,5,2020-01-01", "1,2,5,2020-01-02", "1,3,5,noon"],
            f"r.csv:4: 'timestamp' is 'noon', {NO_DATE}",
        ),
        (["1,1,5,2020-01-01", "1,2,5,77"], "r.csv:3: 'timestamp' is '77', a number; the first value is a date"),
        ([*ROWS, "3,1,5,"], "r.csv:8: empty 'timestamp'"),
        ([*ROWS[:3], ",1,5,70"], "r.csv:5: empty 'user_id'; data.null_ids: drop leaves such rows out"),
        ([*ROWS[:3], "1,,5,70"], "r.csv:5: empty 'item_id'; data.null_ids: drop leaves such rows out"),
        ([*ROWS, "3,1,5"], "r.csv:8: 3 fields, expected 4"),
        ([*ROWS[:1], "", "3,1,5,70,9", *ROWS[1:]], "r.csv:4: 5 fields, expected 4"),
        ([], "r.csv: no rows"),
        (["", ""], "r.csv: no rows"),
        (ROWS[:2], "the train split is empty: 2 labeled rows, split by data.fractions [0.1, 0.45, 0.45]"),
        (["1,1,,10", "1,1,,20"], "label 'rating >= 4' is empty in every row"),
        (["1,1,5,10", "1,2,5,20", "1,3,1,30"], "label 'rating >= 4': all 1 labels of the train split are 1"),
        (
            ["1,1,5,10", "1,2,5,20", "1,3,4,30"],
            "r.csv: label 'rating >= 4': every one of the 3 rows is positive; values of 'rating': 5 (2), 4 (1)",
        ),
    ],
)
def test_rows(write, rows, expected):
    fractions = [0.1, 0.45, 0.45] if "split is empty" in expected else THIRDS
    assert fault(write("r.csv", HEADER, *rows), fractions=fractions) == expected


def test_a_label_of_texts_needs_a_rule(write):
    path = write("r.csv", "user_id,item_id,rating,timestamp,action", "1,1,5,10,view", "1,2,5,20,buy")
    expected = "r.csv:2: 'action' is 'view', not a number; did you mean a rule such as 'action == VALUE'?"
    assert fault(path, label="action") == expected


def test_lines_are_counted_through_quoted_newlines(write):
    header = "user_id,item_id,rating,timestamp,note"
    rows = ['1,1,5,10,"two', "", 'lines"', "", '1,2,5,20,a 5" disc', "2,1,1,30,b"]
    assert fault(write("a.csv", header, *rows, "3,1,bad,40,c")) == "a.csv:8: 'rating' is 'bad', not a number"
    assert fault(write("b.csv", header, *rows, "3,1")) == "b.csv:8: 2 fields, expected 5"
    # More than a block of Arrow's reader.
    rows = [f'{i},1,5,{i},"{"x" * 40}\n{"y" * 40}"' for i in range(30_000)]
    assert fault(write("c.csv", header, *rows, "3,1,bad,40,c")) == "c.csv:60002: 'rating' is 'bad', not a number"


def test_faults_deep_in_a_large_file_are_placed(write):
    rows = [f"{i},1,5,{i}" for i in range(200_000)]
    assert fault(write("a.csv", HEADER, *rows, "1,1,bad,2")) == "a.csv:200002: 'rating' is 'bad', not a number"
    assert fault(write("b.csv", HEADER, *rows, "1,1")) == "b.csv:200002: 2 fields, expected 4"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"event_categorical": ["raitng"]}, "r.csv: no column 'raitng'; did you mean 'rating'?"),
        ({"user": "User_ID"}, "r.csv: no column 'User_ID' (data.user); did you mean 'user_id'?"),
        ({"item": "x"}, "r.csv: no column 'x' (data.item); known: user_id, item_id, rating, timestamp"),
        ({"label": "stars >= 4"}, "r.csv: no column 'stars'; known: user_id, item_id, rating, timestamp"),
        ({"item_dense": ["price"]}, "r.csv: no column 'price' (data.items is not set); known: user_id, item_id, "),
        ({"label": "ratings"}, "r.csv: no column 'ratings'; did you mean 'rating'?"),
        ({"label": "rating"}, "r.csv:2: label 'rating' is 5, not 0 or 1; did you mean a rule such as 'rating >= 5'?"),
        (
            {"label": "rating >= good"},
            "rule 'rating >= good': 'good' is neither a number nor a date; compare it with ==, != or in; the operators",
        ),
        (
            {"label": "rating >= 9"},
            "r.csv: label 'rating >= 9': none of the 6 rows is positive; values of 'rating': 5 (2), 1 (2), 4 (1), ",
        ),
        (
            {"history": "rating in [6, 7]"},
            "r.csv: history 'rating in [6, 7]': none of the 6 rows is an event; values of 'rating': 5 (2), 1 (2), 4 ",
        ),
        ({"label": "rating = 5"}, "rule 'rating = 5': expected an operator after 'rating'; the operators are ==, !=, "),
        ({"interactions": "gone.csv"}, "gone.csv: no such file or directory"),
        ({"interactions": "ratings.xls"}, "ratings.xls: unknown file type; known names and suffixes: u.data, u.user, "),
        ({"interactions": None}, "data.interactions is not set; it must name the file of interactions"),
        ({"label": None, "negatives": 0}, "data.negatives is 0; without a label it must be at least 1"),
        (
            {"separators": {"rating": ""}},
            "data.features 'rating': separator is ''; it must be the separator",
        ),
        ({"fractions": [0.9, 0.2, 0.1]}, "data.fractions is [0.9, 0.2, 0.1]; it must hold three positive numbers"),
        (
            {"item_categorical": ["rating"]},
            "data.features lists the column 'rating' twice; it may do so",
        ),
        (
            {"item_categorical": ["age"]},
            "data.features 'age' needs the key 'history_age', which is the age of the events; rename the column",
        ),
        ({"user": "item_id"}, "data.user and data.item are both 'item_id'; they must be different columns"),
        ({"user": "timestamp"}, "data.user and data.timestamp are both 'timestamp'; they must be different columns"),
        ({"item": "timestamp"}, "data.item and data.timestamp are both 'timestamp'; they must be different columns"),
        ({"label": "'user_id'"}, "data.user and data.label are both 'user_id'; they must be different columns"),
        (
            {"split": "column", "split_column": "item_id"},
            "data.item and data.split_column are both 'item_id'; they must be different columns",
        ),
        (
            {"item_categorical": ["user_id"]},
            "data.features lists 'user_id' of item, which is data.user; an ",
        ),
        ({"user_dense": ["age"], "separators": {"age": "|"}}, "data.features 'age': separator is of features of type"),
        ({"user_categorical": [""]}, "data.features[0].name is ''; it must name a column"),
        ({"separators": {"item_id": "|"}}, "data.features 'item_id' is the item's id; it must be a category without a"),
    ],
)
def test_settings(write, settings, expected):
    assert fault(write("r.csv", HEADER, *ROWS), **settings).startswith(expected)


def test_a_message_of_any_length_keeps_its_start_and_its_end():
    text = str(DataError(f"start{'-' * 9000}end"))
    assert text == f"start{'-' * 995} ... {'-' * 997}end"
    assert str(DataError("x" * 2000)) == "x" * 2000


def test_a_label_is_not_a_fraction(write):
    rows = ["1,1,,10", "1,1,0,20", "1,1,1.0,30", "1,1,0.9,40"]
    expected = "r.csv:5: label 'rating' is 0.9, not 0 or 1; did you mean a rule such as 'rating >= 0.9'?"
    expected += " a label with task: regression predicts numbers"
    assert fault(write("r.csv", HEADER, *rows), label="rating") == expected


@pytest.mark.parametrize(
    ("settings", "key", "columns"),
    [
        ({"event_categorical": ["g", "g_0"], "separators": {"g": "|"}}, "history_g_0", ("g", "g_0")),
        ({"user_categorical": ["history_item_id"]}, "history_item_id", ("history_item_id", "item_id")),
    ],
)
def test_a_key_has_one_column(write, settings, key, columns):
    rows = [f"{row},a|b,1,1" for row in ROWS]
    expected = f"the columns '{columns[0]}' and '{columns[1]}' both need the key '{key}'; rename one of them"
    path = write("r.csv", HEADER + ",g,g_0,history_item_id", *rows)
    assert fault(path, **{"event_categorical": []} | settings) == expected


def test_split_too_small_to_leave_one_out(write):
    expected = "the validation split is empty: 6 labeled rows, split by users with 3 labeled rows or more"
    rows = [f"{user},1,{user},{time}" for user in (1, 5, 3) for time in (1, 2)]
    assert fault(write("r.csv", HEADER, *rows), split="leave_one_out") == expected


def test_tables_of_users_and_items(write):
    path = write("r.csv", HEADER, *ROWS)
    users = write("users.csv", "user_id,gender", "1,F", "2,M", "1,M")
    assert fault(path, users=users) == "users.csv:4: 'user_id' 1 is already in users.csv:2"
    users = write("users.csv", "id,gender", "1,F")
    assert fault(path, users=users) == "users.csv: no column 'user_id'; known: id, gender"
    users = write("users.csv", "user_id,gender", "u1,F", "u2,M")
    assert fault(path, users=users) == "users.csv: column 'user_id' has none of the ids of r.csv"
    items = write("items.csv", "item_id,genre,price", "1,a,3", "2,b,cheap")
    assert fault(path, items=items, item_dense=["price"]) == "items.csv:3: 'price' is 'cheap', not a number"
    wanted = {"items": items, "item_categorical": ["genres"]}
    assert fault(path, **wanted) == "items.csv: no column 'genres'; did you mean 'genre'?"


LEAK = (
    "column 'rating' defines the label, so data.features must not list it of {} (unless data.{}s is a table that has "
    "it); `of: event` shows it in the history only"
)


@pytest.mark.parametrize("entity", ["user", "item"])
@pytest.mark.parametrize("kind", ["categorical", "dense"])
def test_the_column_of_the_label_is_no_feature_of_its_sample(write, entity, kind):
    path = write("r.csv", HEADER, *ROWS)
    settings = {f"{entity}_{kind}": ["rating"], "event_categorical": []}
    assert fault(path, **settings) == LEAK.format(entity, entity)
    # The rating that a table of its own gives is another one.
    table = write("t.csv", f"{entity}_id,rating", "1,7", "2,8", "3,9")
    load_dataset(
        data_config(interactions=path, label="rating >= 4", fractions=THIRDS, **settings, **{f"{entity}s": table})
    )


def test_headers(write):
    repeated = write("r.csv", "user_id,item_id,rating,rating", *ROWS)
    assert fault(repeated) == "r.csv:1: column 'rating' appears twice"
    untyped = write("r.inter", "user_id:token\titem_id", "1\t2")
    assert fault(untyped).startswith("r.inter:1: header 'item_id' must be name:type")
    assert fault(write("e.csv")).startswith("e.csv:1: the file is empty, expected the names of the columns")
    assert fault(write("l.csv", "", *ROWS)).startswith("l.csv:1: empty line, expected the names of the columns")
    assert fault(write("u.data")) == "u.data: no rows"


def test_parquet(write, tmp_path):
    assert fault(write("r.parquet", "no parquet")).startswith(
        "r.parquet: a damaged Parquet file, or one that Arrow cannot"
    )
    table = {"user_id": [1, 2], "item_id": [1, 2], "rating": [["4"], ["5"]], "timestamp": [1, 2]}
    pa.parquet.write_table(pa.table(table), tmp_path / "t.parquet")
    assert fault(str(tmp_path / "t.parquet")) == "t.parquet:1: 'rating' is '['4']', not a number"
