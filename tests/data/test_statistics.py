"""Statistics of the past: by hand on small tables, never from the future, and as dense features of a run."""

import functools
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from data_configs import data_config, regression
from hypothesis import given, settings
from hypothesis import strategies as st
from statistics_columns import with_statistics

from jfi.data import DataConfig, DataError, DataSchema, FeatureConfig, load_dataset
from jfi.data.config import LabelConfig
from jfi.data.prepared.manifest import DatasetManifest, resolve
from jfi.data.prepared.prepare import prepare_dataset
from jfi.data.prepared.scoring import ScoringRows, Sources
from jfi.events.groups import GROUPS
from jfi.training.config_parser import parse_config
from jfi.utils.encoding import standardize

ROOT = Path(__file__).parents[2]
BY_HAND, ALL = ["item", "user", "user_item"], list(GROUPS)
CONFIG = DataConfig(label="rating >= 3", history="kind == view", statistics=ALL)


def random_table(seed: int, count: int = 120) -> pa.Table:
    """Few users and items, ties within and between users, rows without a label, rows that are no events."""
    rng = np.random.default_rng(seed)
    rating = [
        None if empty else int(x) for empty, x in zip(rng.random(count) < 0.15, rng.integers(1, 6, count), strict=True)
    ]
    return pa.table(
        {
            "user_id": rng.integers(0, 5, count),
            "item_id": rng.integers(0, 4, count),
            "timestamp": rng.integers(0, count // 2, count),
            "rating": pa.array(rating, pa.int64()),
            "kind": rng.choice(["view", "buy"], count, p=[0.8, 0.2]),
        }
    )


def by_hand(table: pa.Table) -> list[dict[str, float]]:
    """The definition, a row at a time."""
    rows = table.to_pylist()
    for row in rows:
        row["label"] = None if row["rating"] is None else float(row["rating"] >= 3)

    def rate(older: list[dict], expected: float, smoothing: float) -> float:
        return (sum(one["label"] for one in older) + smoothing * expected) / (len(older) + smoothing)

    def in_order(older: list[dict]) -> list[dict]:
        return sorted(older, key=lambda one: (one["timestamp"], one["item_id"]))

    def item_rate(row: dict) -> float:
        older = [one for one in rows if one["timestamp"] < row["timestamp"] and one["label"] is not None]
        own = [one for one in older if one["item_id"] == row["item_id"]]
        return rate(own, rate(older, 0.5, 1.0), 10.0)

    found = []
    for row in rows:
        older = [one for one in rows if one["timestamp"] < row["timestamp"] and one["label"] is not None]
        overall, item = rate(older, 0.5, 1.0), item_rate(row)
        of_user = in_order([one for one in older if one["user_id"] == row["user_id"]])
        pair = [one for one in of_user if one["item_id"] == row["item_id"]]
        values = {"past_item_rate": item}
        values["past_item_count"] = np.log1p(sum(one["item_id"] == row["item_id"] for one in older))
        values |= {"past_user_rate": rate(of_user, overall, 10.0), "past_user_count": np.log1p(len(of_user))}
        for most in (3, 10, 30):
            newest = of_user[-most:]
            surprise = sum(one["label"] - item_rate(one) for one in newest)
            values[f"past_user_newest_{most}"] = surprise / (len(newest) + 1)
        pair_rate = rate(pair, item, 2.0)
        values |= {"past_user_item_rate": pair_rate, "past_user_item_count": np.log1p(len(pair))}
        values["past_user_item_newest_3"] = rate(pair[-3:], pair_rate, 1.0)
        found.append(values)
    return found


def test_means_of_numbers_are_of_their_quantiles(monkeypatch):
    config = replace(CONFIG, features=[FeatureConfig("rating", "event", "number")], statistics=["event_values"])
    for count, most in ((2, 2), (16, 5)):
        monkeypatch.setattr("jfi.data.prepared.stages.encode_columns.NUM_QUANTILES", count)
        made = with_statistics(random_table(0), config)
        assert most - 1 < np.max(made["past_session_mean_rating"].to_numpy()) <= most


def columns_of(table: pa.Table) -> np.ndarray:
    return np.array([table[name].to_numpy() for name in CONFIG.statistics_columns()])


@pytest.mark.parametrize("ties", [True, False])
def test_they_are_those_of_the_definition(ties):
    table = random_table(int(ties))
    if not ties:  # the order of a user's newest events is then given
        times = np.random.default_rng(1).permutation(len(table))
        table = table.set_column(2, "timestamp", pa.array(times))
    made, wanted = with_statistics(table, CONFIG), by_hand(table)
    for name in replace(CONFIG, statistics=BY_HAND).statistics_columns():
        expected = [one[name] for one in wanted]
        # Rows of one user and time are in the order of the items, and equal ones are alike to a sample but for labels.
        newest = ties and "newest" in name
        close = np.isclose(made[name].to_numpy(), expected, rtol=0, atol=1e-12)
        assert close.mean() > (0.9 if newest else 0.999), name
        assert np.std(expected) > 0.01
    assert made.column_names == [*table.column_names, *CONFIG.statistics_columns()]


@functools.cache
def learnt_schema():
    return load_dataset(replace(CONFIG, interactions=random_table(0))).schema


@settings(max_examples=8)
@given(st.integers(0, 10_000), st.data())
def test_nothing_comes_from_the_row_itself_its_moment_or_the_future(seed, data):
    table = random_table(seed, count=60)
    now = data.draw(st.integers(0, 30))
    time = table["timestamp"].to_numpy()
    rng = np.random.default_rng(seed + 1)
    later = time >= now
    rating = [
        int(rng.integers(1, 6)) if new else old for new, old in zip(later, table["rating"].to_pylist(), strict=True)
    ]
    kind = [
        str(rng.choice(["view", "buy"])) if new else old
        for new, old in zip(later, table["kind"].to_pylist(), strict=True)
    ]
    changed = table.set_column(3, "rating", pa.array(rating, pa.int64())).set_column(4, "kind", pa.array(kind))
    dropped = changed.filter(pa.array(~later | (rng.random(len(time)) < 0.5)))
    # The half-lives of popularity are learnt from training, as means are.
    schema = learnt_schema()
    before = columns_of(with_statistics(table, CONFIG, schema))[:, time <= now]
    after = columns_of(with_statistics(changed, CONFIG, schema))[:, time <= now]
    np.testing.assert_allclose(before, after, rtol=0, atol=1e-9)
    if (~later).sum() > 1:
        kept = columns_of(with_statistics(dropped, CONFIG, schema))[:, dropped["timestamp"].to_numpy() < now]
        np.testing.assert_allclose(before[:, time[time <= now] < now], kept, rtol=0, atol=1e-9)


def test_they_are_dense_features_of_a_run(tmp_path):
    table = random_table(0).drop_columns("kind")
    path = tmp_path / "rows.parquet"
    pa.parquet.write_table(table, path)
    config = DataConfig(interactions=str(path), label="rating >= 3", statistics=["user", "item"])
    dataset = load_dataset(config)
    names = config.statistics_columns()
    assert names[:2] == GROUPS["item"][0] and dataset.schema.dense_names == names
    (batch,) = dataset.batches("test", 1000)
    # The same columns in the table itself give the same features.
    given_path = tmp_path / "given.parquet"
    pa.parquet.write_table(with_statistics(table, config), given_path)
    other = load_dataset(data_config(interactions=str(given_path), label="rating >= 3", context_dense=names))
    (expected,) = other.batches("test", 1000)
    encodings = dataset.schema.encodings
    bounds = [standardize(np.array(encodings.bounds[name]), *encodings.moments[name]) for name in names]
    clipped = expected.dense_features.numpy().clip(*np.array(bounds).T)
    np.testing.assert_array_equal(batch.dense_features.numpy(), clipped)
    train = other.arrays().samples["train"]
    assert all(abs(float(column[train].mean())) < 1e-5 for column in other.arrays().dense[2])
    with pytest.raises(DataError, match=r"has a column 'past_item_rate', which data.statistics makes; rename it"):
        load_dataset(DataConfig(interactions=str(given_path), label="rating >= 3", statistics=["item"]))


def test_shares_outside_count_the_samples_of_validation_alone():
    """Without a label rows of items that training lacks are no samples, and negatives are."""
    rng, count = np.random.default_rng(0), np.arange(3000)
    is_new = (count >= 2400) & (rng.random(3000) < 0.85)
    item = np.where(is_new, 100 + rng.integers(0, 400, 3000), rng.integers(0, 30, 3000))
    table = pa.table({"user_id": rng.integers(0, 50, 3000), "item_id": item, "timestamp": 60 * count})
    config = DataConfig(interactions=table, features=[], statistics=["popularity"], split="time")
    assert not [one for one in load_dataset(config).summary.warnings if "left out" in one]


@pytest.mark.parametrize("label", ["rating >= 3", None])
def test_those_outside_of_trainings_range_are_clipped_or_left_out(label, tmp_path):
    # The rows of training are hours long; those of validation are a year later, those of test two years later.
    table, count, year = random_table(0, 1200).drop_columns("kind"), np.arange(1200), 365 * 86_400
    time = 60 * count + np.searchsorted([960, 1080], count, side="right") * year
    table = table.set_column(2, "timestamp", pa.array(time))
    config = DataConfig(interactions=table, label=label, features=[], statistics=["item", "age"], split="time")
    config = replace(config, fractions=[0.8, 0.1, 0.1])
    dataset = load_dataset(config)
    (line,) = [one for one in dataset.summary.warnings if "statistics" in one]
    assert line.startswith("statistics outside of training's range in validation: left out past_item_")
    assert "past_item_age 100.0%" in line
    dataset.schema.save(tmp_path / "schema")
    again = load_dataset(config, DataSchema.load(tmp_path / "schema"))
    assert not [one for one in again.summary.warnings if "statistics" in one]
    ends = np.array([standardize(np.array(b), *m) for b, m in _scales(dataset.schema)])
    assert (np.ptp(ends, axis=1) == 0).any() and (np.ptp(ends, axis=1) > 1).any()
    for split in ("train", "validation", "test"):  # with the drawn negatives of implicit feedback
        (batch,), (same,) = (one.batches(split, 10_000) for one in (dataset, again))
        dense = batch.dense_features.numpy()
        np.testing.assert_array_equal(dense, same.dense_features.numpy())
        assert ((dense >= np.minimum(ends[:, 0], 0)) & (dense <= np.maximum(ends[:, 1], 0))).all()


def _scales(schema: DataSchema) -> list[tuple]:
    return [(schema.encodings.bounds[name], schema.encodings.moments[name]) for name in schema.dense_names]


def test_a_table_to_score_has_those_of_its_history(tmp_path):
    table = random_table(0).drop_columns("kind")
    pa.parquet.write_table(table, tmp_path / "rows.parquet")
    config = DataConfig(interactions=str(tmp_path / "rows.parquet"), label="rating >= 3", statistics=["user"])
    schema = load_dataset(config).schema

    def parts(interactions: pa.Table, history: pa.Table | None) -> ScoringRows:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        return ScoringRows(Sources(interactions, history=history), folder, schema, config.resolved())

    # Its own interactions are the history while they are there; the rows to score are in it too, and count once.
    own, given = parts(table, None), parts(table, table)
    for one, other in zip(own.dataset.batches("rows", 50), given.dataset.batches("rows", 50), strict=True):
        np.testing.assert_array_equal(one.dense_features.numpy(), other.dense_features.numpy())
    (tmp_path / "rows.parquet").unlink()
    advice = (
        r"no history is given for data.statistics, and the run's own interactions are not there; give a table with the "
        r"past of all users as the history \(`history`, --history\), or train the run with data.statistics: \["
    )
    with pytest.raises(DataError, match=advice):
        parts(table, None)
    with pytest.raises(DataError, match=r"has a column 'past_user_rate', which data.statistics makes; rename it"):
        parts(with_statistics(table, config), table)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"statistics": ["users"]}, "data.statistics: got \\['users'\\], must be a list of"),
        (
            {"statistics": ["user_item", "user_category"], "item_categorical": ["item"]},
            "data.statistics makes 'past_user_item_rate' twice, by a category of the item; rename the column",
        ),
        (
            {"statistics": ["item"], "item_dense": ["past_item_rate"]},
            "data.statistics makes 'past_item_rate', which is a column of this config; rename the column",
        ),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    settings = {"interactions": "rows.csv", "label": "rating >= 3"} | changes
    with pytest.raises(DataError, match=message):
        load_dataset(data_config(**settings))


def test_a_prepared_dataset_has_them(tmp_path):
    pa.parquet.write_table(random_table(0).drop_columns("kind"), tmp_path / "rows.parquet")
    path, features = str(tmp_path / "rows.parquet"), [FeatureConfig("rating", "event")]
    config = DataConfig(interactions=path, label="rating >= 3", features=features, statistics=["item", "user"])
    prepare_dataset(config, tmp_path / "out", show=False)
    here, there = load_dataset(config), load_dataset(replace(config, prepared=str(tmp_path / "out")))
    assert here.schema.dense_names == there.schema.dense_names == config.statistics_columns()
    for one, other in zip(here.batches("train", 16), there.batches("train", 16), strict=True):
        assert one.dense_features.tolist() == other.dense_features.tolist()


IMPLICIT = ["item", "user", "popularity", "age", "user_category", "session"]
TWO = [LabelConfig("like", "rating >= 3"), LabelConfig("stars", "rating", "regression")]
GENRE = FeatureConfig("genre", "item")


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        ({"label": "rating >= 3"}, ALL),
        ({"label": "rating >= 3", "features": [GENRE], "split": "leave_one_out", "batching": "user"}, ALL),
        ({"labels": TWO}, ALL),
        ({}, IMPLICIT),
        ({"features": [GENRE], "negatives": 1}, IMPLICIT),
        ({"label": None, "labels": regression("rating")}, []),
        ({"labels": TWO[::-1]}, []),
        ({"label": "rating >= 3", "statistics": ["similar"]}, ["similar"]),
        # The table has a column of that name, so that a list would be refused.
        ({"label": "rating >= 3", "features": [FeatureConfig("past_item_rate", "context", "number")]}, []),
        ({"label": "past_item_rate >= 3"}, []),
        ({"label": "rating >= 3", "title": "past_user_rate"}, []),
        ({"features": [FeatureConfig("pause", "event", cross=["item_id", "past_user_count"])]}, IMPLICIT),
        ({"features": [FeatureConfig("past_user_count", "event", cross=["item_id", "genre"]), GENRE]}, []),
        ({"label": "rating >= 3", "features": [FeatureConfig("item", "item")]}, []),  # past_user_item_rate twice
    ],
)
def test_the_groups_of_auto(settings, groups):
    config = DataConfig(interactions="rows.csv", **settings)
    assert config.statistics_groups() == config.resolved().statistics == groups
    made = config.statistics_columns()
    assert bool(made) == bool(groups) and len(set(made)) == len(made)
    assert made == config.resolved().statistics_columns() == config.resolved().resolved().statistics_columns()
    known = config.resolved().names("context", "number")
    assert [name for name in known if name not in made] == config.names("context", "number")


def test_auto_is_the_default_and_no_other_text_is_known():
    assert DataConfig().statistics == "auto"
    assert parse_config(["--data.statistics", "auto"])[0].data.statistics == "auto"
    assert parse_config(["--data.statistics", "[]"])[0].data.statistics == []
    with pytest.raises(DataError, match=r"data.statistics: got 'item', must be a list of .* or auto"):
        load_dataset(DataConfig(interactions="rows.csv", statistics="item"))


def test_a_prepared_dataset_decides_what_auto_stands_for(tmp_path):
    pa.parquet.write_table(random_table(0).drop_columns("kind"), tmp_path / "rows.parquet")
    config = DataConfig(interactions=str(tmp_path / "rows.parquet"), label="rating >= 3")
    for name, statistics, groups in (("a", "auto", ALL), ("b", [], []), ("c", ["user"], ["user"])):
        prepare_dataset(replace(config, statistics=statistics), tmp_path / name, show=False)
        prepared = str(tmp_path / name)
        assert DatasetManifest.load(prepared).data.statistics == groups
        assert resolve(DataConfig(prepared=prepared)).statistics_groups() == groups
        assert resolve(DataConfig(prepared=prepared, statistics=groups)).statistics_groups() == groups
        made = replace(config, statistics=groups).statistics_columns()
        assert load_dataset(DataConfig(prepared=prepared)).schema.dense_names == made
    with pytest.raises(DataError, match=r"data.statistics is \['item'\], but .*/c was prepared with \['user'\]"):
        resolve(DataConfig(prepared=prepared, statistics=["item"]))


def test_a_log_without_a_header_can_be_a_history(tmp_path):
    """It has the names that `data.header` gives the interactions."""
    table = random_table(0).drop_columns("kind")
    for name in ("log", "few"):
        rows = table if name == "log" else table.slice(100)
        pa.csv.write_csv(rows, tmp_path / f"{name}.csv", pa.csv.WriteOptions(include_header=False))
    header = {"interactions": table.column_names}
    config = DataConfig(interactions=str(tmp_path / "log.csv"), label="rating >= 3", header=header)
    schema = load_dataset(config).schema
    for number, history in enumerate((None, config.interactions)):
        (folder := tmp_path / f"rows {number}").mkdir()
        sources = Sources(str(tmp_path / "few.csv"), history=history)
        rows = ScoringRows(sources, folder, schema, config.resolved())
        assert rows.num_rows == 20 and len(rows.dataset.arrays().events) == 140
