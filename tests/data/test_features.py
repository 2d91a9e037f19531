"""Columns -> keys: vocabularies, several values, quantiles, dense columns, titles."""

import numpy as np
import pyarrow as pa
import torch
from data_configs import data_config

from jfi.data import DataConfig, load_dataset
from jfi.data.schema import columns
from jfi.data.schema.columns import CodedColumn, cut, encode, learn_edges, learn_vocabulary, moments, sort_values
from jfi.utils.encoding import standardize

# Six rows train, two validate, two test.
FRACTIONS = [0.6, 0.2, 0.2]


def test_ids_sort_by_number_if_all_are_numbers():
    assert sort_values(pa.array(["10", "9", "100"])).tolist() == [1, 0, 2]
    assert sort_values(pa.array(["10", "9", "x"])).tolist() == [0, 1, 2]
    assert sort_values(pa.array(["7", "10", "07"])).tolist() == [2, 0, 1]


def test_values_outside_training_are_zero():
    column = CodedColumn.of(pa.array(["b", None, "a", "c", "b"]))
    vocabulary = learn_vocabulary(column, np.array([True, True, True, False, False]))
    assert (encode(column, vocabulary).ids.tolist(), vocabulary.num_ids) == ([2, 0, 1, 0, 2], 3)


def test_lists():
    lists = CodedColumn.of(pa.array([["b", "a"], [], None, ["c", "", "a"], ["b", None]]))
    train = np.array([True, True, True, False, True])
    column = encode(lists, learn_vocabulary(lists, train))
    assert column.ids.tolist() == [2, 1, 0, 1, 2]
    assert column.offsets.tolist() == [0, 2, 2, 2, 4, 5]
    assert column.counts(np.array([3, 1, 0])).tolist() == [2, 0, 2]
    out = np.empty(4, np.int64)
    column.fill(np.array([3, 1, 0]), out)
    assert out.tolist() == [0, 1, 2, 1]
    assert [column.slot(number).ids.tolist() for number in (0, 1)] == [[2, 0, 0, 0, 2], [1, 0, 0, 1, 0]]


def test_the_number_of_slots_comes_from_training():
    lists = CodedColumn.of(pa.array([["b", "a"], None, ["c", "", "a", "d"]]))
    assert lists.longest(np.array([True, True, False])) == 2
    assert lists.longest(np.array([False, True, True])) == 3  # an empty value takes none
    assert lists.longest(np.array([False, True, False])) == 1


def test_quantiles_come_from_training():
    # All outsiders lie above: quantiles of all rows would be 1.25, 2.5 and 55.
    values = np.array([0.0, 1.0, 2.0, 3.0, np.nan, 90.0, 99.0])
    edges = learn_edges(values, np.array([True] * 5 + [False] * 2), 4)
    assert edges.tolist() == [0.75, 1.5, 2.25]
    assert cut(values, edges).ids.tolist() == [1, 2, 3, 4, 0, 4, 4]


def test_quantiles_of_a_long_column_are_those_of_rows_spread_evenly(monkeypatch):
    monkeypatch.setattr(columns, "_QUANTILE_ROWS", 10)
    values, train = np.arange(40.0), np.arange(40) < 36
    assert learn_edges(values, train, 3).tolist() == np.quantile(np.arange(0.0, 36.0, 4), [1 / 3, 2 / 3]).tolist()


def test_standardize_by_the_moments_of_training_rows():
    values = np.array([1.0, 3.0, np.nan, 100.0])
    mean, deviation = moments(values, np.array([2, 2, 1, 0]))
    assert (mean, deviation) == (2.0, 1.0)
    out = standardize(values, mean, deviation)
    assert out.dtype == np.float32
    assert out.tolist() == [-1.0, 1.0, 0.0, 98.0]
    assert moments(np.array([5.0, 5.0]), np.array([1, 3])) == (5.0, 1.0)
    assert moments(np.array([np.nan, 2.0]), np.array([1, 0])) == (0.0, 1.0)


def test_every_kind_of_column(write, monkeypatch):
    monkeypatch.setattr("jfi.data.prepared.stages.encode_columns.NUM_QUANTILES", 2)
    rows = [f"u{i % 3},{i % 5},{i},{i % 2},{i / 10},{'x;y' if i % 2 else ''}" for i in range(10)]
    users = ["u0,a b,20,F", "u1,b,40,M"]
    items = [f"{i},{'g|h' if i % 2 else 'g'},{i},Title {i}" for i in range(4)]
    config = data_config(
        interactions=write("r.csv", "user_id,item_id,timestamp,clicked,seconds,tags", *rows),
        users=write("users.csv", "user_id,hobbies,years,gender", *users),
        items=write("items.csv", "item_id,genres,price,title", *items),
        label="clicked",
        user_categorical=["user_id", "hobbies", "gender"],
        user_dense=["years"],
        item_categorical=["genres"],
        item_dense=["price"],
        event_categorical=["clicked", "tags"],
        event_dense=["seconds"],
        separators={"hobbies": " ", "genres": "|", "tags": ";"},
        title="title",
        fractions=FRACTIONS,
    )
    dataset = load_dataset(config)
    assert [spec.key for spec in dataset.features] == [
        *("user_id", "hobbies", "gender", "item_id", "genres"),
        *("history_item_id", "history_genres_0", "history_genres_1", "history_clicked"),
        *("history_tags_0", "history_tags_1", "history_seconds", "history_age"),
    ]
    assert {spec.key for spec in dataset.features if spec.multi_valued} == {"hobbies", "genres"}
    assert {spec.key for spec in dataset.features if spec.table == "genres"} == {
        *("genres", "history_genres_0", "history_genres_1")
    }
    assert dataset.schema.dense_names == ["years", "price"]
    assert dataset.schema.item_key == "item_id"
    assert dataset.schema.titles == ["unseen", "Title 0", "Title 1", "Title 2", "Title 3", "untitled"]

    batch = dataset.batches("train", 6)[0]
    sparse = batch.sparse_features
    assert sparse["user_id"].values().tolist() == [1, 2, 3, 1, 2, 3]
    assert [ids.tolist() for ids in sparse["hobbies"].to_dense()] == [[1, 2], [2], [], [1, 2], [2], []]
    assert sparse["gender"].values().tolist() == [1, 2, 0, 1, 2, 0]
    # u0 did rows 0, 3, 6, 9; u1 rows 1, 4, 7; u2 rows 2, 5, 8.
    assert [ids.tolist() for ids in sparse["history_clicked"].to_dense()] == [[], [], [], [1], [2], [1]]
    assert [ids.tolist() for ids in sparse["history_tags_1"].to_dense()] == [[], [], [], [0], [2], [0]]
    assert [ids.tolist() for ids in sparse["history_seconds"].to_dense()] == [[], [], [], [1], [1], [1]]
    years, price = batch.dense_features.T
    # 20 and 40 are of mean 30 and deviation 10; u2 is in no table.
    assert torch.allclose(years, torch.tensor([-1.0, 1.0, 0.0, -1.0, 1.0, 0.0]))
    # Item 4 is in no table; the others' prices in training are 0, 1, 2, 3, 0.
    expected = (torch.tensor([0.0, 1.0, 2.0, 3.0, 1.2, 0.0]) - 1.2) / 1.36**0.5
    assert torch.allclose(price, expected)
    assert batch.labels.tolist() == [0, 1, 0, 1, 0, 1]


def test_columns_without_their_tables_are_those_of_the_first_event(write):
    rows = [f"{i // 2 % 2},{i % 3},{i},{i % 2},c{min(i, 3)}" for i in range(10)]
    path = write("r.csv", "user_id,item_id,timestamp,clicked,color", *reversed(rows))
    config = data_config(interactions=path, label="clicked", item_categorical=["color"], fractions=FRACTIONS)
    batch = load_dataset(config).batches("train", 6)[0]
    assert batch.sparse_features["color"].values().tolist() == [1, 2, 3, 1, 2, 3]


def test_the_layouts_of_movielens_1m_and_100k_load_alike(write):
    rows = [(1 + i % 3, 1 + i % 3, 2 + 2 * (i % 2), 1000 + i) for i in range(20)]
    flags = [["0"] * 19 for _ in range(3)]
    for item, genres in enumerate([(5,), (5, 8), (1, 8, 14)]):
        for genre in genres:
            flags[item][genre] = "1"
    million = data_config(
        interactions=write("ratings.dat", *("::".join(map(str, row)) for row in rows)),
        users=write("users.dat", "1::F::25::3::00501", "2::M::35::4::00502", "3::F::35::4::00503"),
        items=write("movies.dat", "1::É (1990)::Comedy", "2::B::Comedy|Drama", "3::C::Action|Drama|Romance"),
        label="rating >= 4",
        user_categorical=["gender"],
        item_categorical=["genres"],
        event_categorical=["rating"],
        title="title",
    )
    titles = ["É (1990)", "B", "C"]
    items = [f"{i}|{titles[i - 1]}|||url|{'|'.join(flags[i - 1])}" for i in (1, 2, 3)]
    hundred = data_config(
        interactions=write("u.data", *("\t".join(map(str, row)) for row in rows)),
        users=write("u.user", "1|25|F|3|00501", "2|35|M|4|00502", "3|35|F|4|00503"),
        items=write("u.item", *items, encoding="latin-1"),
        label="rating >= 4",
        user_categorical=["gender"],
        item_categorical=["genres"],
        event_categorical=["rating"],
        title="title",
    )
    left, right = load_dataset(million), load_dataset(hundred)
    assert left.features == right.features
    assert left.schema.titles == right.schema.titles == ["unseen", "É (1990)", "B", "C"]
    for a, b in zip(left.batches("train", 16), right.batches("train", 16), strict=True):
        assert torch.equal(a.sparse_features.values(), b.sparse_features.values())
        assert torch.equal(a.labels, b.labels)


def test_label_rules(write):
    rows = [f"1,{i % 2},{i},{'buy' if i % 2 else 'view'}" for i in range(10)]
    path = write("r.csv", "user_id,item_id,timestamp,action", *rows)
    for label, expected in {"action == buy": [0, 1] * 3, "action!=buy": [1, 0] * 3, "item_id < 1": [1, 0] * 3}.items():
        config = DataConfig(interactions=path, label=label, fractions=FRACTIONS)
        assert load_dataset(config).batches("train", 6)[0].labels.tolist() == expected
