"""Columns with a capacity: values become raw ids, which no vocabulary bounds."""

import dataclasses
import hashlib

import numpy as np
import pytest
import torch
from data_configs import data_config, replace_data

from jfi.data import DataConfig, DataError, DataSchema, FeatureConfig, load_dataset
from jfi.data.config import HISTORY
from jfi.data.prepared.prepare import prepare_dataset
from jfi.utils.encoding import LARGEST_ID, UNKNOWN, HashedIds, hash_words, mix

ROWS = [
    {"user": i % 3, "item": f"i{i * i % 7}", "right": i % 2, "tags": "a|b" if i % 5 else "b|c", "made": f"m{i % 11}"}
    for i in range(60)
]


def config_of(write, **settings: object) -> DataConfig:
    lines = [f"{r['user']},{r['item']},{t},{r['right']},{r['tags']},{r['made']}" for t, r in enumerate(ROWS)]
    base = {
        "interactions": write("r.csv", "user_id,item_id,timestamp,right,tags,made", *lines),
        "label": "right",
        "event_categorical": ["right", "tags", "made"],
        "separators": {"tags": "|"},
    }
    return data_config(**base | settings)


def hash_of(text: str) -> int:
    """The documented hash: the words of 8 bytes, folded into that of the length by SplitMix64."""
    data = text.encode()
    words = max(1, -(-len(data) // 8))
    state = mix(np.array([len(data)], np.uint64))
    for word in np.frombuffer(data.ljust(8 * words, b"\0"), "<u8"):
        state = mix(state ^ word)
    return int(state[0])


def test_the_hash_is_that_of_each_value_alone():
    texts = ["", "a", "用户7", "12345678", "123456789", "x" * 1000, "nul\0", "nul", "\0", *map(str, range(500))]
    found = hash_words(texts).tolist()
    assert found == [hash_of(text) for text in texts] and len(set(found)) == len(texts)
    many = hash_words([hashlib.sha256(bytes([i % 256, i // 256])).hexdigest() for i in range(20_000)])
    assert len(np.unique(many)) == len(many)
    bits = (many[:, None] >> np.arange(64, dtype=np.uint64) & np.uint64(1)).mean(axis=0)
    assert np.abs(bits - 0.5).max() < 0.02


def test_ids_are_positive_int64_but_for_the_two_largest(monkeypatch):
    assert HashedIds(5).ids([None, "a"]).tolist() == [UNKNOWN, hash_of("a") >> 1]
    every = np.array([0, 1, 2**64 - 1, 2**64 - 2, 2**64 - 5], np.uint64)
    monkeypatch.setattr("jfi.utils.encoding.hash_words", lambda values: every)
    assert HashedIds(5).ids(list("abcde")).tolist() == [1, 1, LARGEST_ID, LARGEST_ID, 2**63 - 3]


def test_batches_have_raw_ids_in_every_role(write, tmp_path):
    capacity = {"item_id": 5, "tags": 1000, "made": 3, "user_id": 7}
    config = config_of(write, capacity=capacity, user_categorical=["user_id"], context_categorical=["made"])
    dataset = load_dataset(config)
    specs = {spec.key: spec for spec in dataset.features}
    for key in ("item_id", "history_item_id", "history_tags_0", "made", "history_made", "user_id"):
        assert specs[key].raw and specs[key].num_embeddings == capacity[specs[key].column]
    assert not specs["history_right"].raw and not dataset.schema.encodings.vocabularies.keys() & capacity.keys()
    (batch,) = dataset.batches("test", 1000)
    known = HashedIds(1)
    assert batch.sparse_features["item_id"].values().tolist() == known.ids([r["item"] for r in ROWS[54:]]).tolist()
    for now, (made, tags) in enumerate(
        zip(*(batch.sparse_features[f"{HISTORY}_{name}"].to_dense() for name in ("made", "tags_1")), strict=True), 54
    ):
        past = [r for r in ROWS[:now] if r["user"] == ROWS[now]["user"]]
        assert made.tolist() == known.ids([r["made"] for r in past]).tolist()
        assert tags.tolist() == known.ids([r["tags"][-1] for r in past]).tolist()
    dataset.schema.save(tmp_path / "schema")
    again = DataSchema.load(tmp_path / "schema")
    assert again.features == dataset.features and again.encodings.capacities == dataset.schema.encodings.capacities
    assert torch.equal(
        load_dataset(config, again).batches("test", 1000)[0].sparse_features.values(), batch_values(batch)
    )
    prepare_dataset(config, tmp_path / "prepared")
    prepared = load_dataset(DataConfig(prepared=str(tmp_path / "prepared")))
    assert torch.equal(prepared.batches("test", 1000)[0].sparse_features.values(), batch_values(batch))
    assert prepared.summary.vocabulary_sizes["item_id"] == 5
    for change in ({"capacity": capacity | {"item_id": 6}}, {"min_count": {"item_id": 2}}):
        with pytest.raises(DataError, match=r"data\.features with capacity: got {.*}, but the run was started with"):
            load_dataset(replace_data(config, **change), dataset.schema)


def batch_values(batch) -> torch.Tensor:
    return batch.sparse_features.values()


def test_negatives_are_items_of_training(write):
    dataset = load_dataset(config_of(write, capacity={"item_id": 5}, label=None, negatives=2, event_categorical=[]))
    known = set(HashedIds(1).ids([r["item"] for r in ROWS]).tolist())
    for batch in dataset.batches("train", 16):
        assert set(batch.sparse_features["item_id"].values().tolist()) <= known


def test_statistics_of_items_are_those_of_a_vocabulary(write):
    """Those by categories leave columns with a capacity out, or refuse them."""
    config = dataclasses.replace(
        config_of(write, item_categorical=["made"], event_categorical=["right"], separators={}), statistics="auto"
    )
    plain, growing = (load_dataset(one) for one in (config, replace_data(config, capacity={"item_id": 5})))
    assert "past_user_made_rate" in plain.schema.dense_names
    assert plain.schema.dense_names == growing.schema.dense_names
    columns = [k for k, name in enumerate(plain.schema.dense_names) if "similar" not in name and "popular" not in name]
    (first,), (second,) = (one.batches("test", 1000) for one in (plain, growing))
    assert len(columns) > 10
    torch.testing.assert_close(first.dense_features[:, columns], second.dense_features[:, columns])
    without = load_dataset(replace_data(config, capacity={"made": 5}))
    left_out = set(plain.schema.dense_names) - set(without.schema.dense_names)
    of_groups = {name for name in left_out if "right" not in name}  # the others are those of `event_values`
    assert of_groups == {"past_user_made_rate", "past_user_made_count", "past_session_count", "past_session_made_share"}
    assert {f"past_{of}_right_{i}" for of in ("session", "user_item") for i in range(1, 5)} == left_out - of_groups
    wrong = replace_data(config, capacity={"made": 5}, statistics=["item", "session"])
    message = r"data\.statistics has 'session', which counts by 'made', which has a capacity"
    with pytest.raises(DataError, match=message):
        load_dataset(wrong)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"capacity": {"made": 1}}, "data.features 'made': capacity: got 1, must be an integer in .2, 2147483648"),
        ({"capacity": {"made": 9}, "max_values": {"made": 2}}, "'made' has both max_values and capacity"),
        ({"capacity": {"made": 9}, "hash_buckets": {"made": 2}}, "'made' has both hash_buckets and capacity"),
        (
            {"features": [FeatureConfig("price", "item", "number", capacity=9)]},
            "'price': capacity is of features of type category; this one is of type number",
        ),
        (
            {"features": [FeatureConfig("made", "context", capacity=9)]},
            "'made': capacity must be equal in its entry of event and that of context",
        ),
    ],
)
def test_wrong_capacities_are_refused(write, settings, message):
    with pytest.raises(DataError, match=message):
        load_dataset(config_of(write, **settings))
