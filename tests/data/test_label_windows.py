"""Samples of a raw log: `data.samples`, and labels of what comes later."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statistics_columns import with_statistics

from jfi.data import DataConfig, DataError, FeatureConfig, load_dataset
from jfi.data.config import LabelConfig
from jfi.data.labels import LabelWindow
from jfi.data.prepared.scoring import ScoringRows, Sources
from jfi.events.groups import GROUPS
from jfi.training.config_parser import load_config, parse_config, save_config

SECONDS = 8
BUY = LabelWindow("event == buy", f"{SECONDS} s")
CONFIG = DataConfig(samples="event == view", label=BUY, statistics=[])
WITH_STATISTICS = replace(CONFIG, statistics=list(GROUPS), features=[FeatureConfig("event", "event")])


def raw_log(seed: int, count: int = 300) -> pa.Table:
    """Few users and items, and ties."""
    rng = np.random.default_rng(seed)
    return pa.table(
        {
            "user_id": rng.integers(0, 4, count),
            "item_id": rng.integers(0, 3, count),
            "timestamp": np.sort(rng.integers(0, count // 2, count)),
            "event": rng.choice(["view", "cart", "buy"], count, p=[0.6, 0.2, 0.2]),
            "shop": pa.array([None if one == 3 else f"s{one}" for one in rng.integers(0, 4, count)]),
            "visit": rng.integers(0, 3, count),
            "price": pa.array([None if one == 5 else float(one) for one in rng.integers(1, 6, count)]),
        }
    )


def by_hand(table: pa.Table, window: LabelWindow, session: str | None = None) -> list[float]:
    """The labels of rows by the definition, NaN for none."""
    rows, found = table.to_pylist(), []
    newest = max(row["timestamp"] for row in rows)
    if window.of == "session" and session is None:  # no pause is long enough to end one
        window = replace(window, of="user")
    common = {"item": "item_id", "user": "user_id", "session": session}.get(window.of, window.of)
    for i, row in enumerate(rows):
        until, total = row["timestamp"] + window.seconds, 0.0
        for j, other in enumerate(rows):
            is_own = other["user_id"] == row["user_id"] and other[common] == row[common] and j != i
            if is_own and row["timestamp"] <= other["timestamp"] <= until and other["event"] == "buy":
                total += {None: 1.0, "count": 1.0}.get(window.value, other["price"] or 0.0)
        is_sample = row["event"] == "view" and until <= newest and row[common] is not None
        found.append((float(total > 0) if window.value is None else total) if is_sample else np.nan)
    return found


def labels_of(table: pa.Table, config: DataConfig) -> np.ndarray:
    """The labels `[N]` of a table's rows, in the table's order."""
    events = load_dataset(replace(config, interactions=table)).arrays().events
    order = np.lexsort([table[name].to_numpy() for name in ("item_id", "timestamp", "user_id")])
    found = np.empty(len(table), np.float32)
    found[order] = events.label
    return found


@pytest.mark.parametrize("value", [None, "count", "price"])
@pytest.mark.parametrize("of", ["item", "user", "session", "shop", "visit"])
def test_labels_are_those_of_the_definition(of, value):
    table, window = raw_log(1, 400), replace(BUY, of=of, value=value)
    config = replace(CONFIG, label=window)
    np.testing.assert_array_equal(labels_of(table, config), np.array(by_hand(table, window), np.float32))
    if of == "session":
        of_visits = labels_of(table, replace(config, session="visit"))
        np.testing.assert_array_equal(of_visits, np.array(by_hand(table, window, "visit"), np.float32))


def test_a_column_of_the_table_of_items_is_looked_up_there():
    items = pa.table({"item_id": [2, 0, 1], "kind": ["b", "a", "b"]})
    table, features = raw_log(2), [FeatureConfig("kind", "item")]
    config = replace(CONFIG, items=items, features=features, label=replace(BUY, of="kind"))
    with_kind = table.append_column("kind", pa.array(["abb"[one] for one in table["item_id"].to_pylist()]))
    expected = by_hand(with_kind, replace(BUY, of="kind"))
    np.testing.assert_array_equal(labels_of(table, config), np.array(expected, np.float32))
    lists = items.set_column(1, "kind", pa.array([["b"], ["a"], ["b", "c"]]))
    with pytest.raises(DataError, match=r"data.label.of is 'kind', whose rows are lists; it must have one"):
        labels_of(table, replace(config, items=lists))


def test_every_row_is_an_event_and_only_samples_have_a_label():
    dataset = load_dataset(replace(CONFIG, interactions=raw_log(3)))
    events, samples = dataset.arrays().events, dataset.arrays().samples
    assert events.rows is None and len(events) == 300
    assert 0 < sum(map(len, samples.values())) < np.count_nonzero(raw_log(3)["event"].to_numpy() == "view")
    assert not np.isnan(events.label[samples["test"]]).any()
    plain = replace(CONFIG, label="price >= 3", samples="event == view and shop != s1")
    kept = [one["event"] == "view" and one["shop"] not in (None, "s1") for one in raw_log(3).to_pylist()]
    labels = labels_of(raw_log(3), plain)
    assert not np.isnan(labels[kept]).all() and np.isnan(labels[np.invert(kept)]).all()


def test_what_is_left_out_is_counted():
    table = raw_log(4)
    dataset = load_dataset(replace(CONFIG, interactions=table))
    events, samples = dataset.arrays().events, dataset.arrays().samples
    views, time = table["event"].to_numpy() == "view", table["timestamp"].to_numpy()
    begin = events.time[samples["validation"]].min()
    trained, cut = events.split == 0, np.count_nonzero(views & (time + SECONDS > time.max()))
    purged = np.count_nonzero(trained & ~np.isnan(events.label) & (events.time + SECONDS >= begin))
    assert cut and purged and events.time[samples["train"]].max() + SECONDS < begin
    assert dataset.summary.warnings[:2] == [
        f"{cut} of {views.sum()} rows have no label '{BUY}': the table ends within their window",
        f"{purged} of {purged + len(samples['train'])} samples of training are left out: their label's window reaches "
        "into the time of validation",
    ]


def test_several_labels_have_windows_of_their_own():
    spent = LabelConfig("spent", replace(BUY, value="price", of="user"), "regression")
    config = replace(CONFIG, label=None, labels=[LabelConfig("bought", BUY), spent])
    table = raw_log(5)
    found = load_dataset(replace(config, interactions=table)).arrays().events
    order = np.lexsort([table[name].to_numpy() for name in ("item_id", "timestamp", "user_id")])
    for column, one in zip(config.labels_of(found.label, found.targets), config.labels, strict=True):
        is_sample = ~np.isnan(found.label)
        np.testing.assert_allclose(column[is_sample], np.array(by_hand(table, one.label), np.float32)[order][is_sample])


@settings(max_examples=12)
@given(st.integers(0, 10_000), st.integers(0, 59))
def test_what_happens_from_a_row_on_changes_nothing_of_it_but_its_label(seed, row):
    table, rng = raw_log(seed, 60), np.random.default_rng(seed + 1)
    now = table["timestamp"][row].as_py()
    later = (table["timestamp"].to_numpy() >= now) & (np.arange(60) != row)
    event = np.where(later, rng.choice(["view", "cart", "buy"], 60), table["event"].to_numpy())
    changed = table.set_column(3, "event", pa.array(event))
    kept = changed.filter(pa.array(~later | (rng.random(60) < 0.5)))
    schema = load_dataset(replace(WITH_STATISTICS, interactions=raw_log(0))).schema
    names = WITH_STATISTICS.statistics_columns()
    first, *others = (with_statistics(one, WITH_STATISTICS, schema) for one in (table, changed, kept))
    for other in others:
        at = int(np.count_nonzero(other["timestamp"].to_numpy()[: row + 1] <= now)) - 1
        at = next(
            i
            for i in range(at, -1, -1)
            if all(other[k][i] == table[k][row] for k in ("user_id", "item_id", "timestamp"))
        )
        for name in names:
            np.testing.assert_allclose(
                other[name][at].as_py(), first[name][row].as_py(), rtol=0, atol=1e-9, err_msg=name
            )


def test_rates_count_labels_whose_windows_are_over():
    table = raw_log(6)
    made, labels, rows = with_statistics(table, WITH_STATISTICS), by_hand(table, BUY), table.to_pylist()
    for i, row in enumerate(rows):
        known = [
            (other, label)
            for other, label in zip(rows, labels, strict=True)
            if not np.isnan(label) and other["timestamp"] + SECONDS < row["timestamp"]
        ]
        own = [label for other, label in known if other["item_id"] == row["item_id"]]
        overall = (sum(label for _, label in known) + 0.5) / (len(known) + 1)
        assert made["past_item_rate"][i].as_py() == pytest.approx((sum(own) + 10 * overall) / (len(own) + 10))
        assert made["past_item_count"][i].as_py() == pytest.approx(np.log1p(len(own)))


def test_a_table_to_score_has_the_labels_and_statistics_of_the_whole_log(tmp_path):
    table = raw_log(7)
    dataset = load_dataset(replace(WITH_STATISTICS, interactions=table))
    whole = with_statistics(table, WITH_STATISTICS, dataset.schema)
    for value in (None, "price"):
        config = replace(WITH_STATISTICS, label=replace(BUY, value=value), statistics=[] if value else list(GROUPS))
        schema = load_dataset(replace(config, interactions=table)).schema
        newest = table.slice(200)
        for name, history in (("repeated", table), ("apart", table.slice(0, 200))):
            (folder := tmp_path / f"{name} {value}").mkdir()
            rows = ScoringRows(Sources(newest, history=history), folder, schema, config.resolved(), are_events=True)
            np.testing.assert_array_equal(rows.labels, np.array(by_hand(table, config.label), np.float32)[200:])
            if value is None:
                made = rows.dataset.arrays().statistics.statistics.of(rows.dataset.arrays().samples["rows"])
                found = made["past_user_item_rate"][np.argsort(rows.rows)]
                np.testing.assert_allclose(found, whole["past_user_item_rate"].to_numpy()[200:])


def test_settings_are_written_and_read(tmp_path):
    label = "{event: event == buy, within: 1 h, of: session, value: price}"
    config, _ = parse_config(["--data.samples", "event == view", "--data.label", label])
    assert config.data.label == LabelWindow("event == buy", "1 h", "session", "price")
    assert config.data.task == "regression"
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml").data == config.data
    (tmp_path / "own.yaml").write_text("data:\n  label:\n    event: event == buy\n    within: 3600\n")
    with pytest.raises(Exception, match=r"own.yaml:4: data.label.within: got '3600', must be a time such as 30"):
        parse_config(["--config", str(tmp_path / "own.yaml")])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"samples": "event == viwe"},
            "samples 'event == viwe': none of the 300 rows is a sample; values of 'event'",
        ),
        ({"label": replace(BUY, event="event == by")}, "label.event 'event == by': none of the 300 rows is an event"),
        ({"label": replace(BUY, event="event ==")}, "rule 'event ==': expected a value"),
        ({"label": replace(BUY, of="shopp")}, "no column 'shopp'; did you mean 'shop'"),
        (
            {"label": replace(BUY, of="user_id")},
            "data.label.of is 'user_id'; it must be item, session, user or",
        ),
        ({"label": replace(BUY, value="shop")}, "'shop' is 's2', not a number"),
        ({"label": replace(BUY, within="1000 s")}, "is empty in every row"),
        ({"label": replace(BUY, within="100 s")}, "the train split is empty"),
        ({"label": None}, "data.samples is set, but no label"),
        (
            {"label": None, "labels": [LabelConfig("a", BUY, "regression")]},
            "a label with a value is of task regr",
        ),
    ],
)
def test_wrong_settings_are_named(changes, message):
    with pytest.raises(DataError, match=message):
        load_dataset(replace(CONFIG, interactions=raw_log(8), **changes))
