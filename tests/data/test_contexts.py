"""Columns that are known when an item is shown: inputs of the sample itself, from its own row."""

import numpy as np
import pytest
import torch
from data_configs import data_config, replace_data

from jfi.data import Batch, DataConfig, DataError, InteractionDataset, load_dataset
from jfi.data.prepared.store import DATA, TIMELINES, TRAIN, fingerprint_of
from jfi.data.schema.columns import moments
from jfi.utils.encoding import standardize

HEADER = "user_id,item_id,timestamp,liked,device,place,tags,price,city"


def row(i: int) -> dict[str, object]:
    """Row i: user i % 3. The device, the place, the tags and the price change from row to row."""
    return {
        "user_id": f"u{i % 3}",
        "item_id": f"i{i * 5 % 7}",
        "timestamp": 100 * i,
        "liked": (i * i // 3) % 2,
        "device": ["tv", "web", "app", ""][i * 3 % 7 % 4],
        "place": f"p{i * i % 5}",
        "tags": ["a", "b|c", "", "c|a|b"][i * i % 11 % 4],
        "price": ["", i * 1.5][i % 4 > 0],
        "city": "Rome",
    }


ROWS = [row(i) for i in range(40)]


def config_of(write, rows: list[dict] = ROWS, **settings: object) -> DataConfig:
    base = {
        "label": "liked",
        "user_categorical": ["city"],
        "event_categorical": ["device", "tags"],
        "context_categorical": ["place", "tags", "device"],
        "context_dense": ["price"],
        "separators": {"tags": "|"},
        "fractions": [0.5, 0.25, 0.25],
        "max_slots": 2,
    }
    lines = [",".join(map(str, one.values())) for one in rows]
    return data_config(interactions=write("rows.csv", HEADER, *lines), **base | settings)


def only_batch(dataset: InteractionDataset, split: str = "train") -> Batch:
    (batch,) = dataset.batches(split, 10_000)
    return batch


def values_of(dataset: InteractionDataset, batch: Batch, key: str) -> list[list[str | None]]:
    """By sample the values under a key, None for an unknown one."""
    column = next(spec.column for spec in dataset.features if spec.key == key)
    known = [None, *dataset.schema.encodings.vocabularies[column].values]
    return [[known[int(i)] for i in ids] for ids in batch.sparse_features[key].to_dense()]


def test_a_sample_has_the_values_of_its_own_row_and_its_history_those_of_earlier_rows(write):
    dataset = load_dataset(config_of(write))
    keys = [spec.key for spec in dataset.features]
    assert keys == [
        *("city", "item_id", "place", "tags", "device"),
        *("history_item_id", "history_device", "history_tags_0", "history_tags_1", "history_age"),
    ]
    roles = {spec.key: (spec.role, spec.of, spec.table) for spec in dataset.features}
    assert roles["device"] == ("context", "event", "device") and roles["history_device"][2] == "device"
    batch = only_batch(dataset)
    assert len(batch.labels) == 20
    found = {key: values_of(dataset, batch, key) for key in keys[:-1]}
    for i, one in enumerate(ROWS[:20]):
        assert found["device"][i] == [one["device"] or None]
        assert found["place"][i] == [one["place"]]
        assert found["tags"][i] == [tag for tag in one["tags"].split("|") if tag]  # all, and not the first two
        before = [other for other in ROWS[:i] if other["user_id"] == one["user_id"]]
        assert found["history_device"][i] == [other["device"] or None for other in before]
        assert found["history_tags_0"][i] == [other["tags"].split("|")[0] or None for other in before]
    prices = np.array([one["price"] or np.nan for one in ROWS], np.float64)
    expected = standardize(prices[:20], np.nanmean(prices[:20]), np.nanstd(prices[:20]))
    np.testing.assert_allclose(batch.dense_features[:, 0], expected, rtol=1e-6)
    assert dataset.schema.dense_names == ["price"]


def test_dense_features_of_users_items_and_contexts_stand_side_by_side(write):
    rows = [one | {"city": int(one["user_id"][1:]), "place": int(one["item_id"][1:])} for one in ROWS]
    settings = {"user_categorical": [], "user_dense": ["city"], "item_dense": ["place"]}
    dataset = load_dataset(config_of(write, rows, context_categorical=["device"], **settings))
    assert dataset.schema.dense_names == ["city", "place", "price"]
    known = dataset.schema.encodings.moments
    dense = only_batch(dataset, "test").dense_features
    for column, name in enumerate(dataset.schema.dense_names):
        numbers = np.array([one[name] if one[name] != "" else np.nan for one in rows[30:]], np.float64)
        np.testing.assert_allclose(dense[:, column], standardize(numbers, *known[name]), rtol=1e-6)


def test_negatives_and_candidates_share_the_context_of_their_positive(write):
    config = config_of(write, label=None, negatives=3)
    dataset = load_dataset(config)
    batch = only_batch(dataset)
    groups = [slice(i, i + 4) for i in range(0, len(batch.labels), 4)]
    assert batch.labels.tolist() == [1.0, 0.0, 0.0, 0.0] * len(groups)
    for key in ("device", "place", "tags"):
        found = values_of(dataset, batch, key)
        assert all(found[group] == [found[group.start]] * 4 for group in groups)
        assert len({str(one) for one in found}) > 2
    assert all((batch.dense_features[group] == batch.dense_features[group.start]).all() for group in groups)
    assert any(len(set(batch.sparse_features["item_id"].values()[group].tolist())) > 1 for group in groups)
    candidates = dataset.candidates("test", "sampled", None, 4)
    positive, item, _ = candidates.pairs(np.arange(len(candidates)))
    ranked = dataset.batch_of(candidates.rows[positive], item)
    own = dataset.batch_of(candidates.rows, candidates.items)
    assert values_of(dataset, ranked, "place") == [values_of(dataset, own, "place")[i] for i in positive]
    assert torch.equal(ranked.dense_features, own.dense_features[torch.from_numpy(positive)])


def test_values_and_moments_are_learnt_from_the_labelled_rows_of_training(write):
    """A row of history alone counts for the values of events, and those that contexts share with them."""
    rows = [one | {} for one in ROWS]
    rows[4] |= {"liked": "", "device": "radio", "place": "p radio", "price": 1e6}
    rows[35] |= {"device": "late", "place": "p late", "price": 1e9}
    dataset = load_dataset(config_of(write, rows))
    known = dataset.schema.encodings.vocabularies
    assert "radio" in known["device"].values and "late" not in known["device"].values
    assert set(known["place"].values) == {one["place"] for one in ROWS[:20]}
    assert dataset.schema.encodings.moments["price"][0] < 100
    alone = load_dataset(config_of(write, rows, event_categorical=[])).schema.encodings.vocabularies
    assert "radio" not in alone["device"].values
    late = values_of(dataset, only_batch(dataset, "test"), "place")
    assert [None] in late


def test_rare_and_hashed_values(write):
    counts = {name: sum(one["place"] == name for one in ROWS[:20]) for name in ("p0", "p1", "p4")}
    least = max(counts.values())
    rare = load_dataset(config_of(write, min_count={"place": least}))
    assert list(rare.schema.encodings.vocabularies["place"].values) == [p for p, n in counts.items() if n == least]
    hashed = load_dataset(config_of(write, hash_buckets={"device": 9, "tags": 5}))
    sizes = {spec.key: spec.num_embeddings for spec in hashed.features}
    assert sizes["device"] == sizes["history_device"] == 10 and sizes["tags"] == sizes["history_tags_1"] == 6
    with pytest.raises(DataError, match=r"data.features 'price': min_count is of features of type category"):
        load_dataset(config_of(write, min_count={"price": 3}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"context_categorical": ["liked"]},
            "column 'liked' defines the label, so data.features must not list it of context; `of: event` shows it",
        ),
        (
            {"label": "price > 3 and place == p1"},
            "column 'price' defines the label, so data.features must not list it",
        ),
        (
            {"label": "price > 3", "items": "items.csv", "users": "users.csv"},
            "column 'price' defines the label, so data.features must not list it of context",
        ),
        ({"context_dense": ["timestamp"]}, "data.features lists 'timestamp' of context, which is data.timestamp;"),
        ({"context_categorical": ["user_id"]}, "data.features lists 'user_id' of context, which is data.user; "),
        ({"context_categorical": ["item_id"]}, "data.features lists 'item_id' of context, which is data.item; "),
        (
            {"context_dense": ["city"], "split": "column", "split_column": "city", "user_categorical": []},
            "data.features lists 'city' of context, which is data.split_column; list other columns",
        ),
        ({"context_categorical": ["city"]}, "data.features lists the column 'city' twice"),
        ({"context_categorical": ["place", "place"]}, "data.features lists the column 'place' twice"),
        ({"context_categorical": ["device", "device"]}, "data.features lists the column 'device' twice"),
        ({"event_dense": ["price"]}, "data.features lists the column 'price' twice"),
        ({"context_dense": ["device"]}, "data.features lists the column 'device' twice"),
        ({"context_categorical": ["plce"]}, "rows.csv: no column 'plce'; did you mean 'place'?"),
        ({"context_dense": ["place"], "context_categorical": []}, "'place' is 'p0', not a number"),
    ],
)
def test_columns_that_cannot_describe_a_context_are_refused(write, settings, message):
    with pytest.raises(DataError) as refused:
        load_dataset(config_of(write, **settings))
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_schema_without_the_column_does_not_fit(write):
    schema = load_dataset(config_of(write)).schema
    with pytest.raises(DataError, match=r"data\.features of context: got \['tags'\], but the run was started with"):
        load_dataset(config_of(write, context_categorical=["tags"]), schema)
    with pytest.raises(DataError, match=r"data.features of type number: got \[\], but"):
        load_dataset(config_of(write, context_dense=[]), schema)
    new = load_dataset(config_of(write, [row(i + 1) for i in range(40)]), schema)
    assert new.schema is schema
    found = values_of(new, only_batch(new, "test"), "device")
    assert found == [[row(i + 1)["device"] or None] for i in range(30, 40)]


@pytest.mark.parametrize(("column", "changed"), [("place", "p1"), ("price", 7.25), ("tags", "b")])
def test_a_changed_value_changes_the_fingerprint(write, column, changed):
    config = config_of(write)
    dataset = load_dataset(config)
    rows = [one | {column: changed} if i == 38 else one for i, one in enumerate(ROWS)]
    config = config_of(write, rows)
    before, after = fingerprint_of(dataset), fingerprint_of(load_dataset(config, dataset.schema))
    assert [name for name in (DATA, TRAIN, TIMELINES) if before[name] != after[name]] == [DATA]


def test_the_summary_counts_missing_and_unseen_values(write):
    rows = [one | {"place": "new" if i == 39 else one["place"]} for i, one in enumerate(ROWS)]
    summary = load_dataset(config_of(write, rows)).summary
    assert summary.missing["price"] == sum(one["price"] == "" for one in ROWS) / 40
    assert summary.missing["device"] == sum(one["device"] == "" for one in ROWS) / 40
    assert summary.unseen["test"]["place"] == 0.1
    assert {"place", "device", "tags"} <= summary.vocabulary_sizes.keys()


def test_a_column_that_changes_is_told_where_it_belongs(write):
    config = replace_data(config_of(write), user_categorical=["place"], context_categorical=[])
    (warning,) = [text for text in load_dataset(config).summary.warnings if "'place' changes" in text]
    assert warning.endswith("known when the item is shown, as `of: context`")


def test_moments_of_many_rows_are_summed_in_blocks():
    rng = np.random.default_rng(0)
    values, weights = rng.normal(5, 3, 1000), rng.random(1000) < 0.7
    values[::50], values[7] = np.nan, np.inf
    kept = values[weights & np.isfinite(values)]
    for size in (1, 7, 999, 1000, 10_000):
        assert moments(values, weights, size) == pytest.approx((kept.mean(), kept.std()), rel=1e-12)
    assert moments(values, np.zeros(1000, bool), 7) == (0.0, 1.0)
