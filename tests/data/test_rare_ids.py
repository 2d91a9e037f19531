"""Rare values, hashed values, and crosses of an event's columns."""

import dataclasses
import json
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from data_configs import data_config, replace_data

from jfi.data import DataConfig, DataError, DataSchema, FeatureConfig, load_dataset
from jfi.data.config import HISTORY
from jfi.data.prepared.prepare import prepare_dataset
from jfi.serving.dataset_schema import schema_of
from jfi.serving.requests import RequestReader
from jfi.serving.schema import Limits

ROWS = [
    {"user": i % 3, "item": f"i{i * i % 7}", "right": i % 2, "tags": "a|b" if i % 5 else "b|c", "made": f"m{i % 11}"}
    for i in range(60)
]
TRAIN = ROWS[:48]


def config_of(write, **settings: object) -> DataConfig:
    lines = [f"{r['user']},{r['item']},{t},{r['right']},{r['tags']},{r['made']}" for t, r in enumerate(ROWS)]
    base = {
        "interactions": write("r.csv", "user_id,item_id,timestamp,right,tags,made", *lines),
        "label": "right",
        "event_categorical": ["right", "tags", "made"],
        "separators": {"tags": "|"},
    }
    return data_config(**base | settings)


def histories(dataset, split: str, key: str) -> list[list[int]]:
    (batch,) = dataset.batches(split, 1000)
    return [ids.tolist() for ids in batch.sparse_features[key].to_dense()]


def test_values_with_too_few_training_rows_are_unseen(write):
    dataset = load_dataset(config_of(write, min_count={"item_id": 8, "tags": 10, "made": 5}))
    known = dataset.schema.encodings.vocabularies
    items, made = Counter(r["item"] for r in TRAIN), Counter(r["made"] for r in TRAIN)
    assert list(known["item_id"].values) == sorted(v for v, n in items.items() if n >= 8) and len(items) == 4
    assert list(known["made"].values) == sorted(v for v, n in made.items() if n >= 5) and len(made) == 11
    # "c" has ten rows in training, "a" 38.
    assert list(known["tags"].values) == ["a", "b", "c"]
    assert list(
        load_dataset(config_of(write, min_count={"tags": 11})).schema.encodings.vocabularies["tags"].values
    ) == [
        "a",
        "b",
    ]
    rare = min(items, key=items.__getitem__)
    (batch,) = dataset.batches("train", 1000)
    assert [i for i, r in enumerate(TRAIN) if r["item"] == rare] == [
        i for i, number in enumerate(batch.sparse_features["item_id"].values().tolist()) if number == 0
    ]


@pytest.mark.parametrize(
    ("most", "kept"), [(1, ["b"]), (2, ["a", "b"]), (3, ["a", "b", "c"]), (9, ["a", "b", "c", "d"])]
)
def test_the_most_frequent_values_of_training_have_ids(write, most, kept):
    """Three rows of b, two of a and c each, one of d; the held-out rows, all of d, do not count."""
    lines = [f"u{t % 2},i,{t},{t % 2},{value}" for t, value in enumerate("dcbabcab" + "dddd")]
    path = write("r.csv", "user_id,item_id,timestamp,right,kind", *lines)
    feature = FeatureConfig("kind", "context", max_values=most)
    config = DataConfig(interactions=path, label="right", features=[feature], fractions=[2 / 3, 1 / 6, 1 / 6])
    assert list(load_dataset(config).schema.encodings.vocabularies["kind"].values) == list(kept)


def test_hashed_values_share_a_fixed_table(write, tmp_path):
    config = config_of(write, hash_buckets={"item_id": 5, "tags": 1000})
    dataset = load_dataset(config)
    sizes = {spec.key: spec.num_embeddings for spec in dataset.features}
    assert (sizes["item_id"], sizes["history_item_id"], sizes["history_tags_0"]) == (6, 6, 1001)
    (batch,) = dataset.batches("test", 1000)
    # Documented: 1 + CRC-32 of the UTF-8 bytes modulo the number of buckets.
    assert batch.sparse_features["item_id"].values().tolist() == [
        1 + zlib.crc32(r["item"].encode()) % 5 for r in ROWS[54:]
    ]
    dataset.schema.save(tmp_path / "schema")
    again = load_dataset(config, DataSchema.load(tmp_path / "schema"))
    assert torch.equal(again.batches("test", 1000)[0].sparse_features.values(), batch.sparse_features.values())
    with pytest.raises(
        DataError,
        match=r"data\.features with hash_buckets: got {'item_id': 6}, but the run was started",
    ):
        load_dataset(replace_data(config, hash_buckets={"item_id": 6}), dataset.schema)


def test_a_cross_has_an_id_for_each_pair_of_training(write):
    dataset = load_dataset(config_of(write, event_crosses=[["item_id", "right"], ["made", "right", "item_id"]]))
    pairs = sorted({f"{r['item']}\x1f{r['right']}" for r in TRAIN})
    assert list(dataset.schema.encodings.vocabularies["item_id_x_right"].values) == pairs
    number = {pair: i for i, pair in enumerate(pairs, 1)}
    expected = []
    for now in range(54, 60):
        past = [r for r in ROWS[:now] if r["user"] == ROWS[now]["user"]]
        expected.append([number[f"{r['item']}\x1f{r['right']}"] for r in past])
    assert histories(dataset, "test", f"{HISTORY}_item_id_x_right") == expected
    assert f"{HISTORY}_made_x_right_x_item_id" in {spec.key for spec in dataset.features}


@pytest.mark.parametrize("hashed", [{}, {"item_id_x_right": 50, "made": 20}])
def test_requests_get_the_ids_of_training(write, hashed):
    """Crosses and buckets: a request that repeats a sample's history reads the batch's ids."""
    config = config_of(write, event_crosses=[["item_id", "right"]], hash_buckets=hashed)
    dataset = load_dataset(config)
    read = RequestReader(schema_of(config, dataset.schema, True, True), Limits(10, 200))
    assert "item_id_x_right" not in read.fields["history"]
    now = 57
    past = [(t, r) for t, r in enumerate(ROWS[:now]) if r["user"] == ROWS[now]["user"]]
    events = [
        {"item_id": r["item"], "right": r["right"], "tags": r["tags"].split("|"), "made": r["made"], "age": now - t}
        for t, r in past
    ]
    request = read({"user": {}, "history": events, "candidates": [{"item_id": ROWS[now]["item"]}]})
    (batch,) = dataset.batches("test", 1000)
    for key in ("history_item_id_x_right", "history_made", "history_tags_1"):
        assert request.ids[key].tolist() == batch.sparse_features[key].to_dense()[now - 54].tolist(), key
    missing = read({"user": {}, "history": [events[0] | {"right": None}], "candidates": [{"item_id": "i0"}]})
    assert missing.ids["history_item_id_x_right"].tolist() == [0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_count": {"made": 0}}, "data.features 'made': min_count: got 0, must be an integer in"),
        (
            {"min_count": {"made": 2}, "hash_buckets": {"made": 9}},
            "'made' has both min_count and hash_buckets",
        ),
        (
            {"features": [FeatureConfig("one", "event", cross=["made"])]},
            "cross is \\['made'\\]; it must have at least",
        ),
        (
            {"event_crosses": [["made", "user_id"]]},
            "'made_x_user_id': cross has 'user_id', which is no such",
        ),
        ({"event_crosses": [["made", "tags"]]}, "data.features: a cross has 'tags', whose rows are lists"),
        (
            {"event_crosses": [["made", "item_id"]], "context_categorical": ["made_x_item_id"]},
            "data.features 'made_x_item_id' is a cross, but a column has that name",
        ),
    ],
)
def test_wrong_settings_of_ids_are_refused(write, settings, message):
    with pytest.raises(DataError, match=message):
        load_dataset(config_of(write, **settings))


DEFAULTS = [
    FeatureConfig("city", "user", default="Oslo"),
    FeatureConfig("price", "item", "number", default=7),
    FeatureConfig("kind", "event", default=3),
    FeatureConfig("kind", "context", default=3),
    FeatureConfig("place", "context", hash_buckets=50, default="top"),
    FeatureConfig("seconds", "event", "number", default=5.0),
    FeatureConfig("hour", "context", "number", default=0),
]


def filled(write, name: str, empty: bool) -> str:
    """A table with missing values, or with the defaults in their place."""
    header, lines = "user_id,item_id,timestamp,right,city,price,kind,place,seconds,hour", []
    for t in range(60):
        given = [f"c{t % 3}", t % 11 / 2, t % 4, f"p{t % 5}", t % 17, t % 24]
        for i, default in enumerate(("Oslo", 7, 3, "top", 5, 0)):
            if (t + i) % 4 == 0:
                given[i] = "" if empty else default
        # One row a user and an item, so that the value of each is that of its row.
        lines.append(",".join(map(str, [f"u{t}", f"i{t}", t, t % 2, *given])))
        lines.append(",".join(map(str, [f"u{t}", f"i{t}", t + 0.5, (t // 2) % 2, *given])))
    return write(name, header, *lines)


def test_a_default_stands_for_a_missing_value(write, tmp_path):
    """The ids of a table with missing values are those of the table with the defaults in their place."""
    tables = [filled(write, name, empty) for name, empty in (("empty.csv", True), ("full.csv", False))]
    configs = [DataConfig(interactions=path, label="right", features=DEFAULTS, split="time") for path in tables]
    full = load_dataset(configs[1])
    # Means and quantiles are of the values that are there, so both are encoded with one schema.
    empty, whole = (load_dataset(one, full.schema) for one in configs)
    prepare_dataset(configs[0], tmp_path / "prepared", schema=full.schema)
    prepared = load_dataset(DataConfig(prepared=str(tmp_path / "prepared")), full.schema)
    for found in (empty, prepared):
        for ours, theirs in zip(found.batches("train", 16), whole.batches("train", 16), strict=True):
            assert torch.equal(ours.dense_features, theirs.dense_features)
            assert torch.equal(ours.sparse_features.values(), theirs.sparse_features.values())
    plain = load_dataset(dataclasses.replace(configs[0], features=[FeatureConfig(f.name, f.of) for f in DEFAULTS[:1]]))
    assert (only_ids(plain, "city") == 0).any() and not (only_ids(empty, "city") == 0).any()
    # A value that only the default has, with an id of its own in any case.
    rare = FeatureConfig("city", "user", default="nowhere", max_values=1)
    known = load_dataset(dataclasses.replace(configs[0], features=[rare])).schema.encodings.vocabularies["city"]
    assert len(known.values) == 2 and "nowhere" in list(known.values)
    assert DataSchema.load(saved(full.schema, tmp_path)).encodings.defaults == full.schema.encodings.defaults


@pytest.mark.parametrize("as_bytes", [False, True])
def test_a_default_stands_for_null_in_a_request(write, as_bytes):
    path = filled(write, "full.csv", False)
    config = DataConfig(interactions=path, label="right", features=DEFAULTS, statistics=[])
    schema = schema_of(config, load_dataset(config).schema, True, True)
    read, found = RequestReader(schema, Limits(10, 200)), []
    for null in (True, False):
        city, price, kind, place, seconds, hour = [None] * 6 if null else ("Oslo", 7, 3, "top", 5, 0)
        event = {"item_id": "i1", "price": price, "kind": kind, "seconds": seconds, "age": 5}
        candidate = {"item_id": "i2", "price": price, "kind": kind, "place": place, "hour": hour}
        events = [{name: event[name] for name in read.fields["history"]}]
        request = {"user": {"city": city}, "history": events, "candidates": [candidate]}
        found.append(read.read(json.dumps(request).encode()) if as_bytes else read(request))
    for key in found[1].ids:
        assert found[0].ids[key].tolist() == found[1].ids[key].tolist() and (found[1].ids[key] != 0).all(), key
    np.testing.assert_array_equal(found[0].dense, found[1].dense)


def only_ids(dataset, key: str):
    return torch.cat([batch.sparse_features[key].values() for batch in dataset.batches("train", 16)])


def saved(schema: DataSchema, folder: Path) -> Path:
    schema.save(folder / "schema")
    return folder / "schema"


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        (FeatureConfig("made", "user", separator="|", default="a"), "'made' has a default; it must be a column with"),
        (FeatureConfig("made", "event", "number", default="a"), "'made': default is 'a'; it must be a finite number"),
        (FeatureConfig("made", "event", "number", default=1e39), "default is 1e.39; it must be a finite number"),
        (FeatureConfig("made", "event", default=""), "'made': default is ''; it must not be|which counts as missing"),
        (FeatureConfig("item_id", "item", default="a"), "'item_id' is the item's id; it must be a category without"),
    ],
)
def test_a_default_that_no_column_can_have_is_refused(write, feature, message):
    with pytest.raises(DataError, match=message):
        load_dataset(dataclasses.replace(config_of(write), features=[feature]))
