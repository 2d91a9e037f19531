import json
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from data_configs import line_of

from jfi.data import DataConfig, FeatureConfig, load_dataset
from jfi.data.io import json_lines
from jfi.data.io.blocks import read_table

# Made up: (user, item, rating, timestamp).
ROWS = [("7", "31", "4", "100"), ("9", "32", "2", "101"), ("7", "33", "5", "102")]
COLUMNS = ["user_id", "item_id", "rating", "timestamp"]


@pytest.mark.parametrize(
    ("name", "header", "delimiter"),
    [
        ("r.csv", "user_id,item_id,rating,timestamp", ","),
        ("r.csv", "\ufeffuser_id,item_id,rating,timestamp", ","),
        ("r.tsv", "user_id\titem_id\trating\ttimestamp", "\t"),
        ("r.inter", "user_id:token\titem_id:token\trating:float\ttimestamp:float", "\t"),
        ("ratings.dat", None, "::"),
        ("u.data", None, "\t"),
    ],
)
@pytest.mark.parametrize("newline", ["", "\r"])
def test_interactions(write, name, header, delimiter, newline):
    lines = [] if header is None else [header]
    lines += [delimiter.join(row) for row in ROWS]
    table = read_table(write(name, *(line + newline for line in lines)), COLUMNS)
    assert table.known == COLUMNS
    for i, column in enumerate(COLUMNS):
        assert table.strings(column).to_pylist() == [row[i] for row in ROWS]
    assert [line_of(table, row) for row in range(3)] == [len(lines) - 2 + row for row in range(3)]


def test_parquet_types(tmp_path):
    data = {
        "user_id": pa.array(["7", "9", "7"]).dictionary_encode(),
        "item_id": pa.array([31, 32, 33], pa.int32()),
        "rating": pa.array([4.0, 2.0, None], pa.float32()),
        "timestamp": pa.array([100_000, 101_000, 102_500], pa.timestamp("ms")),
        "tags": [["a", "b"], [], None],
    }
    pa.parquet.write_table(pa.table(data), tmp_path / "r.parquet")
    table = read_table(str(tmp_path / "r.parquet"), data)
    assert table.strings("user_id").to_pylist() == ["7", "9", "7"]
    assert table.strings("item_id").to_pylist() == ["31", "32", "33"]
    assert table.strings("rating").to_pylist() == ["4", "2", None]
    assert table.times("timestamp", "s").tolist() == [100.0, 101.0, 102.5]
    assert table.categories("tags", {}).to_pylist() == [["a", "b"], [], None]


def test_only_the_wanted_columns_are_read(write):
    table = read_table(write("r.csv", "a,b,c", "1,2,3"), ["b"])
    assert table.data.column_names == ["b"]
    assert table.known == ["a", "b", "c"]


def test_quotes_and_empty_fields(write):
    table = read_table(write("i.csv", "item_id,title", '1,"One, Two"', "2,"), ["item_id", "title"])
    assert table.strings("title").to_pylist() == ["One, Two", None]
    # RecBole's files know no quotes.
    table = read_table(write("r.item", "item_id:token\ttitle:token", '1\t"One" Two', "2\t"), ["title"])
    assert table.strings("title").to_pylist() == ['"One" Two', None]


@pytest.mark.parametrize("encoding", ["latin-1", "utf8"])
def test_movielens_1m(write, encoding):
    items = write("movies.dat", "1::Élan (1990)::Drama|War", "2::Two: 2::Comedy", encoding=encoding)
    table = read_table(items, ["item_id", "title", "genres"])
    assert table.strings("title").to_pylist() == ["Élan (1990)", "Two: 2"]
    assert table.categories("genres", {}).to_pylist() == [["Drama", "War"], ["Comedy"]]
    users = read_table(write("users.dat", "1::F::25::3::00501", encoding=encoding), ["gender", "zip_code"])
    assert users.strings("zip_code").to_pylist() == ["00501"]


def test_movielens_100k(write):
    flags = ["0"] * 19
    flags[1] = flags[8] = "1"
    items = write(
        "u.item",
        "1|Élan (1990)|01-Jan-1990||http://example.org|" + "|".join(flags),
        "2|Plain (1991)|01-Jan-1991||http://example.org|" + "|".join(["0"] * 19),
        encoding="latin-1",
    )
    table = read_table(items, ["item_id", "title", "genres"])
    assert table.known == ["item_id", "title", "release_date", "video_release_date", "imdb_url", "genres"]
    assert table.strings("title").to_pylist() == ["Élan (1990)", "Plain (1991)"]
    assert table.categories("genres", {}).to_pylist() == [["Action", "Drama"], []]
    users = read_table(write("u.user", "1|33|F|artist|00501"), ["age", "zip_code"])
    assert users.strings("age").to_pylist() == ["33"]
    assert users.strings("zip_code").to_pylist() == ["00501"]


def test_recbole_sequences_are_multi_valued(write):
    path = write("r.item", "item_id:token\tclass:token_seq", "1\tAction Drama", "2\t")
    assert read_table(path, ["class"]).categories("class", {}).to_pylist() == [["Action", "Drama"], None]


def test_times(write):
    path = write("r.csv", "a,b", "1.5,2020-01-01 00:00:01", "2,2020-01-02")
    table = read_table(path, ["a", "b"])
    assert table.times("a", "ms").tolist() == [0.0015, 0.002]
    assert table.times("b", "s").tolist() == [1577836801.0, 1577923200.0]


@pytest.mark.parametrize("offsets", [("Z", "Z"), ("+00:00", "+01:00")])
def test_times_with_an_offset(write, offsets):
    hours = 2 if offsets[1] == "+01:00" else 1
    path = write("r.csv", "a", f"2020-01-01T00:00:00{offsets[0]}", f"2020-01-01 0{hours}:00:00{offsets[1]}")
    assert read_table(path, ["a"]).times("a", "s").tolist() == [1577836800.0, 1577840400.0]


def test_integers_beyond_the_exact_float64(tmp_path):
    nanoseconds = 1_577_836_800_123_456_789
    data = pa.table({"t": pa.array([nanoseconds, None], pa.int64())})
    pa.parquet.write_table(data, tmp_path / "r.parquet")
    table = read_table(str(tmp_path / "r.parquet"), ["t"])
    assert table.numbers("t")[0] == float(nanoseconds)
    pa.parquet.write_table(data[:1], tmp_path / "r.parquet")
    times = read_table(str(tmp_path / "r.parquet"), ["t"]).times("t", "ns")
    assert times.tolist() == pytest.approx([nanoseconds * 1e-9], abs=1e-6, rel=0)


def test_a_column_of_the_table_of_users_is_not_looked_for_in_the_interactions(tmp_path):
    """Files of interactions may differ in it, and JSON Lines are read once."""
    for name, more in (("a", {"age": 7}), ("b", {})):
        rows = ({"user_id": i % 5, "item_id": i % 7, "timestamp": i, "clicked": i % 2, **more} for i in range(60))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "users.csv").write_text("user_id,age\n" + "".join(f"{i},{20 + i}\n" for i in range(5)))
    config = DataConfig(
        interactions=[str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")],
        users=str(tmp_path / "users.csv"),
        label="clicked",
        features=[FeatureConfig("age", "user", "number")],
        statistics=[],
    )
    with mock.patch("jfi.data.io.json_lines.stream_utf8", wraps=json_lines.stream_utf8) as reading:
        dataset = load_dataset(config)
    assert reading.call_count == 2
    assert (np.diff(dataset.arrays().dense[0][:, 0]) > 0.5).all()  # the ages of users.csv, standardized


def test_a_title_that_is_a_sequence_of_words_is_one_text(write):
    """As in RecBole's own file of MovieLens-100K."""
    write("r.item", "item_id:token\tmovie_title:token_seq", "1\tToy Story", "2\tHeat", "3\t")
    rows = "\n".join(f"{i % 5}\t{i % 3 + 1}\t{i % 2}\t{i}" for i in range(60))
    path = write("r.inter", "user_id:token\titem_id:token\tclicked:float\ttimestamp:float", *rows.split("\n"))
    items = path.replace("r.inter", "r.item")
    dataset = load_dataset(DataConfig(interactions=path, items=items, label="clicked", title="movie_title"))
    assert list(dataset.schema.titles) == ["unseen", "Toy Story", "Heat", "untitled"]
