"""All groups of statistics against loops over strictly older rows, of labeled rows, positives and sampled negatives.

None changes with rows at or after its moment, and a drawn item has what a row of it would have.
"""

import functools
import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from statistics_columns import with_statistics

from jfi.data import DataConfig, DataError, FeatureConfig, LabelConfig, load_dataset
from jfi.data.prepared.event_logs import read_log
from jfi.data.prepared.prepare import prepare_dataset
from jfi.data.prepared.scoring import ScoringRows, Sources
from jfi.data.prepared.stages.statistics import past_index
from jfi.data.schema.schema import DataSchema
from jfi.events import groups, past, point_in_time, statistics
from jfi.events.groups import GROUPS
from jfi.events.live_counters import LiveCounters
from jfi.events.live_index import LiveRows
from jfi.events.point_in_time import Queries
from jfi.events.statistics import Statistics
from jfi.serving.dataset_schema import statistics_settings
from jfi.utils.encoding import standardize

USERS, ITEMS = 5, 6
TABLE = pa.table(
    {
        "item_id": np.arange(ITEMS),
        "genres": [["war"], ["war", "drama"], [], ["drama"], ["comedy", "war", "drama"], ["comedy"]],
        "brand": ["a", "b", "a", None, "b", "c"],
    }
)
FEATURES = [FeatureConfig("genres", "item"), FeatureConfig("brand", "item")]
FEATURES += [FeatureConfig("rating", "event", "number"), FeatureConfig("kind", "event")]
CONFIG = DataConfig(
    items=TABLE,
    features=FEATURES,
    negatives=2,
    statistics=list(GROUPS),
    max_history=4,
    split="column",
    split_column="split",
)
KINDS = {
    "labels": {"label": "rating >= 3"},
    "labels of all rows": {"label": "visit >= 1"},
    "labels, views": {"label": "rating >= 3", "history": "kind == view"},
    "implicit": {},
    "implicit, views, sessions": {"history": "kind == view", "session": "visit"},
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))


def log(seed: int, count: int = 70) -> pa.Table:
    """Ties within and between users, pauses, several hours, and all items in training; no row is there twice."""
    rng = np.random.default_rng(seed)
    first = [(i % USERS, i, i % 2) for i in range(ITEMS)]
    rows = {*first, *zip(*(rng.integers(0, n, count).tolist() for n in (USERS, ITEMS, 60)), strict=True)}
    user, item, time = np.array(sorted(rows, key=lambda row: (row[0], row[2], row[1]))).T
    split = np.where(time < 40, "train", np.where(np.arange(len(user)) % 2, "validation", "test"))
    rating = [
        None if empty else int(x)
        for empty, x in zip(rng.random(len(user)) < 0.1, rng.integers(1, 6, len(user)), strict=True)
    ]
    columns = {"user_id": user, "item_id": item, "timestamp": time * 700, "split": split, "rating": rating}
    return pa.table(
        columns | {"kind": rng.choice(["view", "buy"], len(user), p=[0.8, 0.2]), "visit": rng.integers(0, 2, len(user))}
    )


class Loops:
    """The definition of each statistic, a query at a time.

    A row is (user, item, time, label, is event, visit, quantile of the rating, kind).
    """

    def __init__(self, dataset, kind: dict, table: pa.Table) -> None:
        events, self.implicit = dataset.arrays().events, "label" not in kind
        in_history = set(range(len(events)) if events.rows is None else events.rows.tolist())
        visit = table["visit"].to_pylist() if "session" in kind else [None] * len(events)
        label = [None if math.isnan(one) else float(one) for one in events.label]
        of = (events.user.tolist(), events.item.tolist(), events.time.tolist(), label)
        self.rows = [(*row, n in in_history, visit[n]) for n, row in enumerate(zip(*of, strict=True))]
        ids = {one.key: own.ids for one, own in zip(dataset.features, dataset.arrays().columns, strict=False)}
        of_events = [
            (int(one), int(other)) for one, other in zip(ids["history_rating"], ids["history_kind"], strict=True)
        ]
        self.rows = [(*row, *own) for row, own in zip(self.rows, of_events, strict=True)]
        self.half_lives = dataset.schema.encodings.half_lives
        self.known = 1 + ITEMS
        self.values = {}
        for name in ("genres", "brand"):
            slots = [
                ids.ids
                for spec, ids in zip(dataset.features, dataset.arrays().columns, strict=False)
                if spec.column == name and spec.role == "history"
            ]
            self.values[name] = [set(one.tolist()) - {0} for one in np.stack(slots, axis=1)]

    def labeled(self, time: float, chosen=lambda row: True) -> list[tuple]:
        return [row for row in self.rows if row[2] < time and row[3] is not None and chosen(row)]

    def history(self, user: int, time: float) -> list[tuple]:
        return [r for r in self.rows if r[0] == user and r[2] < time and r[4]]

    def item_rate(self, item: int, time: float) -> float:
        mean = rate(self.labeled(time), 0.5, 1.0)
        return rate(self.labeled(time, lambda row: row[1] == item), mean, 10.0)

    def surprise(self, row: tuple) -> float:
        if row[3] is None:
            return 0.0
        mean = rate(self.labeled(row[2]), 0.5, 1.0)
        of_user = self.labeled(row[2], lambda one: one[0] == row[0])
        expected = self.item_rate(row[1], row[2]) + rate(of_user, mean, 10.0) - mean
        return round((row[3] - min(max(expected, 0.0), 1.0)) * 1024) / 1024

    def session(self, user: int, time: float) -> list[tuple]:
        history = self.history(user, time)
        if not history or time - history[-1][2] > 1800:
            return []
        first = len(history) - 1
        while (
            first and history[first][2] - history[first - 1][2] <= 1800 and history[first][5] == history[first - 1][5]
        ):
            first -= 1
        return [row for row in history if row[2] >= history[first][2]]

    @functools.cached_property
    def pairs(self) -> list[tuple]:
        found = []
        for row in filter(lambda row: row[4], self.rows):
            for other in self.history(row[0], row[2])[-4:]:
                product = 0.0 if self.implicit else self.surprise(row) * self.surprise(other)
                found.append((frozenset((row[1], other[1])), row[2], product))
        return found

    def of(self, user: int, item: int, time: float) -> dict[str, float]:
        implicit = self.implicit
        rows, own = self.labeled(time), self.labeled(time, lambda row: row[1] == item)
        history, known = self.history(user, time), self.labeled(time, lambda row: row[0] == user)
        mean, item_rate = rate(rows, 0.5, 1.0), self.item_rate(item, time)
        user_rate, pair = rate(known, mean, 10.0), [row for row in known if row[1] == item]
        share = (len(own) + 10 / self.known) / (len(rows) + 10)
        found = {"past_item_count": math.log1p(len(own)), "past_user_count": math.log1p(len(known))}
        found["past_item_share" if implicit else "past_item_rate"] = math.log(share) if implicit else item_rate
        if not implicit:
            found["past_user_rate"] = user_rate
            for most in (3, 10, 30):
                above = sum(row[3] - self.item_rate(row[1], row[2]) for row in known[-most:])
                found[f"past_user_newest_{most}"] = above / (min(len(known), most) + 1)
        pair_rate = rate(pair, item_rate, 2.0)
        if implicit:
            of_item = sum(row[1] == item for row in history)
            found["past_user_item_share"] = (of_item + 2 * share) / (len(history) + 2)
            found["past_user_item_count"] = math.log1p(of_item)
        else:
            found |= {"past_user_item_rate": pair_rate, "past_user_item_count": math.log1p(len(pair))}
            found["past_user_item_newest_3"] = rate(pair[-3:], pair_rate, 1.0)
        found |= self.similar(item, time, history, user_rate)
        for number, half_life in enumerate(self.half_lives, 1):
            total, count, positives = (
                sum(weight(row) * 0.5 ** ((time - row[2]) / half_life) for row in of)
                for of, weight in ((rows, lambda row: 1.0), (own, lambda row: 1.0), (own, lambda row: row[3]))
            )
            found[f"past_popularity_{number}"] = math.log((count + 1 / self.known) / (total + 1))
            if not implicit:
                found[f"past_recent_rate_{number}"] = (positives + 10 * mean) / (count + 10)
        since = lambda of, which: math.log1p(time - of[which][2]) if of else math.nan  # noqa: E731
        found["past_item_age"] = since(sorted(own, key=lambda row: row[2]), 0)
        found["past_user_pause"] = since(history, -1)
        found["past_user_item_pause"] = since([row for row in history if row[1] == item], -1)
        return found | self.categories(user, item, time, history, known, user_rate)

    def similar(self, item: int, time: float, history: list[tuple], user_rate: float) -> dict[str, float]:
        similarity = labeled = liked = agreement = 0.0
        for row in history[-4:]:
            older = [product for both, moment, product in self.pairs if both == {item, row[1]} and moment < time]
            counts = [sum(one[4] and one[1] == i and one[2] < time for one in self.rows) for i in (item, row[1])]
            weight = len(older) / math.sqrt(max(counts[0] * counts[1], 1))
            similarity, labeled = similarity + weight, labeled + weight * (row[3] is not None)
            liked += weight * (row[3] or 0.0)
            agreement += 0.0 if self.implicit else sum(older) / (len(older) + 10) * self.surprise(row)
        found = {"past_similarity": math.log(similarity + 1e-3)}
        if self.implicit:
            return found
        return found | {"past_similar_rate": (liked + user_rate) / (labeled + 1), "past_agreement": agreement}

    def categories(self, user, item, time, history, known, user_rate) -> dict[str, float]:
        session = self.session(user, time)
        found = {"past_session_count": math.log1p(len(session))}
        everybody = [row for row in self.rows if row[2] < time and row[4]]

        def mean(of: list[tuple], expected: float, smoothing: float) -> float:
            known = [row[6] for row in of if row[6]]
            return (sum(known) + smoothing * expected) / (len(known) + smoothing)

        own, overall = [row for row in history if row[1] == item], mean(everybody, 1.0, 1.0)
        of_user = found["past_user_mean_rating"] = mean(history, overall, 10.0)
        found["past_item_mean_rating"] = mean([row for row in everybody if row[1] == item], overall, 10.0)
        found["past_session_mean_rating"] = mean(session, of_user, 2.0)
        for i in range(1, groups.NUM_VALUES + 1):
            found[f"past_session_kind_{i}"] = math.log1p(sum(row[7] == i for row in session))
            found[f"past_user_item_kind_{i}"] = math.log1p(sum(row[7] == i for row in own))
        for name, values in self.values.items():

            def shared(of: list[tuple], values=values) -> list[tuple]:
                return [row for row in of for _ in values[row[1]] & values[item]]

            each = max(len(values[item]), 1)
            found[f"past_user_{name}_mean_rating"] = mean(shared(history), of_user, 2.0)
            found[f"past_session_{name}_share"] = len(shared(session)) / each / max(len(session), 1)
            if self.implicit:
                expected, count = len(shared(everybody)) / each / max(len(everybody), 1), len(shared(history)) / each
                found[f"past_user_{name}_share"] = (count + 2 * expected) / (len(history) + 2)
                found[f"past_user_{name}_count"] = math.log1p(count)
            else:
                found[f"past_user_{name}_rate"] = rate(shared(known), user_rate, 2.0)
                found[f"past_user_{name}_count"] = math.log1p(len(shared(known)))
        return found


def rate(rows: list[tuple], expected: float, smoothing: float) -> float:
    return (sum(row[3] for row in rows) + smoothing * expected) / (len(rows) + smoothing)


def questions(dataset, split: str, seed: int = 0):
    """The batch of all samples of a split, and the user, target and time of each."""
    count = dataset.num_samples(split)
    events, item, _ = dataset.draw(split, np.arange(count), seed)
    table = dataset.arrays().events
    (batch,) = dataset.batches(split, count, seed=seed, batching="sample")
    return batch.dense_features.numpy(), list(zip(table.user[events], item, table.time[events], strict=True))


@kinds
def test_they_are_those_of_loops(kind):
    table = log(1)
    dataset = load_dataset(replace(CONFIG, interactions=table, **kind))
    loops, names = Loops(dataset, kind, table), dataset.schema.dense_names
    checked = 0
    for split in ("train", "validation", "test"):
        dense, queries = questions(dataset, split)
        wanted = [loops.of(int(user), int(item), float(time)) for user, item, time in queries]
        assert wanted[0].keys() == set(names)
        for place, name in enumerate(names):
            numbers = np.array([one[name] for one in wanted])
            expected = standardize(numbers, *dataset.schema.encodings.scale(name))
            np.testing.assert_allclose(dense[:, place], expected, atol=1e-5, err_msg=name)
            checked += np.ptp(numbers[~np.isnan(numbers)]) > 0.01
    assert checked > 2 * len(names)


@kinds
@settings(max_examples=8)
@given(seed=st.integers(0, 10**6), cut=st.integers(0, 59))
def test_nothing_comes_from_rows_at_the_moment_or_after(kind, seed, cut):
    """Rows later than the samples change, and what the samples' own rows tell; drawn items stay, by the same schema."""
    config, table = replace(CONFIG, **kind), log(seed)
    before = made(replace(config, interactions=table), learnt(tuple(kind.items())))
    rng, time = np.random.default_rng(seed), table["timestamp"].to_numpy()
    later, at = time > cut * 700, time == cut * 700
    rating = [6 - one if new and one else one for one, new in zip(table["rating"].to_pylist(), later | at, strict=True)]
    item = np.where(later, rng.integers(0, ITEMS, len(time)), table["item_id"].to_numpy())
    moved = time + np.where(later, rng.integers(0, 20_000, len(time)), 0)
    changed = pa.table(table.to_pydict() | {"rating": rating, "item_id": item, "timestamp": moved})
    after = made(replace(config, interactions=changed), before.schema)

    def known(dataset):
        """The statistics by user, item and time of all users' questions about all items until the cut."""
        events = dataset.arrays().events
        rows = np.flatnonzero(events.time <= cut * 700)
        if dataset.is_implicit:
            queries, items = rows.repeat(ITEMS), np.tile(np.arange(ITEMS), len(rows))
            dense = dataset.batch_of(queries, items).dense_features.numpy()
        else:
            queries, items = rows, events.item[rows]
            dense = np.stack([one[rows] for one in dataset.arrays().dense[2]], 1)
        keys = np.stack([events.user[queries], items, events.time[queries]], axis=1)
        return keys[np.lexsort(keys.T)], dense[np.lexsort(keys.T)]

    (keys, dense), (same, again) = known(before), known(after)
    np.testing.assert_array_equal(keys, same)
    np.testing.assert_allclose(dense, again, rtol=0, atol=1e-6)


@pytest.mark.parametrize("are_large", [False, True], ids=["small keys", "large keys"])
@kinds
def test_small_blocks_make_the_same_arrays_bit_by_bit(monkeypatch, kind, are_large):
    dataset = load_dataset(replace(CONFIG, interactions=log(5, 300), **kind))
    events, columns = dataset.arrays().events, dataset.arrays().columns
    session = np.random.default_rng(0).integers(0, 3, len(events)) if "session" in kind else None
    if are_large:
        monkeypatch.setattr(past, "_LARGEST", 1 << 11)

    def make() -> dict[str, np.ndarray]:
        index = past_index(events, dataset.schema, columns, dataset.is_implicit, session)
        maker = Statistics(index, list(GROUPS), ["genres", "brand"], 4, dataset.schema.encodings.half_lives)
        columns_of_rows = maker.of_rows(None, lambda name, kind, count: np.empty(count, kind))
        rows = np.arange(len(events))
        drawn = maker.of(rows, np.roll(events.item, 1).astype(np.int64))
        return index.arrays | columns_of_rows | {f"drawn: {name}": values for name, values in drawn.items()}

    one = make()
    for module, name, size in (
        *((module, "_AT_ONCE", 16) for module in (past, point_in_time, statistics)),
        (statistics, "_PAIRS_AT_ONCE", 16),
        *((past, "_IN_CACHE", 5), (past, "_BEFORE", 4), (past, "_MANY_KEYS", 20)),
    ):
        monkeypatch.setattr(module, name, size)
    other = make()
    assert one.keys() == other.keys() and any(name.startswith("pairs of 4") for name in one)
    assert any(len(values) for name, values in one.items() if name.endswith(": keys")) == are_large
    for name, values in one.items():
        if name.startswith("pairs") and name.endswith(": products"):  # equal pairs of a moment may have another order
            continue
        np.testing.assert_array_equal(values, other[name], err_msg=name, strict=True)


def test_the_log_of_a_run_with_several_labels_counts_the_first():
    several = [LabelConfig("good", "rating >= 3"), LabelConfig("visited", "visit")]
    found, none = [], np.arange(3)
    for labels in ({"label": "rating >= 3"}, {"labels": several}):
        config = DataConfig(interactions=log(1), statistics=["item", "user"], **labels)
        with read_log(config, load_dataset(config).schema) as (made, _):
            found.append(made.compute(Queries(none, np.full(3, 1e12), none)))
    for name, values in found[0].items():
        np.testing.assert_array_equal(values, found[1][name], err_msg=name, strict=True)


def test_similar_compares_as_many_events_as_in_training(monkeypatch, tmp_path):
    table = log(2)
    monkeypatch.setattr(groups, "_MAX_PAIRS", 3 * len(table))
    config = replace(CONFIG, interactions=table)
    schema = load_dataset(config).schema
    schema.save(tmp_path / "schema")
    schema = DataSchema.load(tmp_path / "schema")
    assert schema.encodings.window == 3
    monkeypatch.undo()
    small = table.slice(0, 30)
    assert load_dataset(replace(config, interactions=small)).schema.encodings.window == 4
    made, settings = with_statistics(small, config.resolved(), schema), config.resolved()
    wanted = with_statistics(small, replace(settings, max_history=3), None)
    other = with_statistics(small, settings, None)
    assert made["past_similarity"].equals(wanted["past_similarity"])
    assert not made["past_similarity"].equals(other["past_similarity"])


def made(config, schema):
    try:
        return load_dataset(config, schema)
    except DataError:  # all labels of a split are equal
        assume(False)


@functools.cache
def learnt(kind):
    return load_dataset(replace(CONFIG, interactions=log(3, 120), **dict(kind))).schema


@pytest.mark.parametrize("max_history", [4, 2])
def test_a_drawn_item_has_what_a_row_of_it_has_bit_by_bit(tmp_path, max_history):
    config = replace(CONFIG, interactions=log(2))
    prepare_dataset(config, tmp_path / "out", show=False)
    dataset = load_dataset(DataConfig(prepared=str(tmp_path / "out"), negatives=3, max_history=max_history))
    arrays = dataset.arrays()
    events, rows = arrays.events, np.arange(len(arrays.events))
    made = np.full((len(rows), len(dataset.schema.dense_names)), np.nan, np.float32)
    arrays.statistics.fill(made, rows, rows, events.item.astype(np.int64))
    np.testing.assert_array_equal(made, np.stack(arrays.dense[2], axis=1))
    one, other = (
        load_dataset(config if end is None else end)
        for end in (None, DataConfig(prepared=str(tmp_path / "out"), negatives=2, max_history=4))
    )
    for batch, again in zip(one.batches("train", 16, epoch=2), other.batches("train", 16, epoch=2), strict=True):
        assert batch.dense_features.tolist() == again.dense_features.tolist()
    by_user = other.batches("train", 10**6, batching="user")[0]
    by_sample = other.batches("train", 10**6, batching="sample")[0]
    order = np.argsort(by_user.samples), np.argsort(by_sample.samples)
    np.testing.assert_array_equal(by_user.dense_features[order[0]], by_sample.dense_features[order[1]])


@kinds
def test_tables_to_score_have_those_of_training(tmp_path, kind):
    """From a history that has the rows before, or these as well."""
    table, config = log(4), replace(CONFIG, **kind)
    dataset = load_dataset(replace(config, interactions=table))
    schema, settings = dataset.schema, replace(config, interactions=table).resolved()
    test = pa.array(np.array(table["split"].to_pylist()) == "test")
    late = pa.compute.greater_equal(table["timestamp"], 40 * 700)
    before = table.filter(pa.compute.invert(late))
    names = ["user_id", "item_id", "timestamp"]
    numbers, stored = dataset.arrays().samples["test"], np.stack(dataset.arrays().dense[2], axis=1)
    events = dataset.arrays().events
    wanted = {(events.user[n], events.item[n], events.time[n]): stored[n] for n in numbers}
    cases = {
        "past": (table.filter(late), before),
        "all": (table.filter(test), table),
    }
    for case, (rows, history) in cases.items():
        (tmp_path / case).mkdir()
        sources = Sources(rows, history=history, items=TABLE)
        scored = ScoringRows(sources, tmp_path / case, schema, settings)
        (batch,) = scored.dataset.batches("rows", 10**6)
        found = 0
        keys = zip(*(pa.compute.take(rows[name], pa.array(scored.rows)).to_pylist() for name in names), strict=True)
        users = {user: n for n, user in enumerate(sorted(set(table["user_id"].to_pylist())))}
        for n, (user, item, time) in enumerate(keys):
            if (row := wanted.get((users[user], item, float(time)))) is not None:
                np.testing.assert_allclose(batch.dense_features[n], row, atol=1e-5, err_msg=case)
                found += 1
        assert found == len(numbers)


@pytest.mark.slow
def test_boosting_cannot_tell_negatives_of_a_random_log():
    """`user_item` and `similar` can where users meet items again, since these are no negatives; the others must not."""
    ensemble, metrics = pytest.importorskip("sklearn.ensemble"), pytest.importorskip("sklearn.metrics")
    rng, count = np.random.default_rng(0), 20_000
    user, item = rng.integers(0, 400, count), rng.integers(0, 2000, count)
    table = pa.table({"user_id": user, "item_id": item, "timestamp": np.sort(rng.integers(0, 10**7, count))})
    items = pa.table({"item_id": np.arange(2000), "brand": [str(i % 20) for i in range(2000)]})
    groups = [name for name in GROUPS if name not in ("user_item", "similar")]
    config = DataConfig(items=items, features=[FeatureConfig("brand", "item")], statistics=groups)
    dataset = load_dataset(replace(config, interactions=table))
    train, test = (dataset.batches(split, 10**6)[0] for split in ("train", "test"))
    model = ensemble.HistGradientBoostingClassifier(random_state=0).fit(train.dense_features, train.labels)
    auc = metrics.roc_auc_score(test.labels, model.predict_proba(test.dense_features)[:, 1])
    assert abs(auc - 0.5) < 0.02


@kinds
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(0, 300))
def test_records_of_a_log_answer_as_its_index_does_after_it(tmp_path_factory, kind, seed, count):
    """But for the rounding of sums, which begin with each key there; of most keys a few rows are left."""
    folder = tmp_path_factory.mktemp("log")
    pq.write_table(log(seed, count), folder / "log.parquet")
    config = replace(CONFIG, interactions=str(folder / "log.parquet"), max_history=40, **kind)
    schema = load_dataset(replace(config, interactions=log(0, 200))).schema
    with read_log(config, schema) as (made, columns):
        index, rng = made.index, np.random.default_rng(seed)
        users, items = (
            columns.categories(key, of).values for key, of in ((config.user, "user"), (config.item, "item"))
        )
        user, item = (rng.integers(-1, len(of), 50) for of in (users, items))
        later = rng.choice([1e-3, 100.0, 1800.0, 50000.0], 50)
        queries = Queries(user, index.times[-1] + later, np.maximum(item, 0))
        ids = {part: column.ids[queries.item] for part, column in index.item_columns.items()}
        expected = made.compute(queries)
        sizes = {"user": len(users), "item": len(items)}
        sizes |= {part: column.size for part, column in index.item_columns.items()}
        digests = {part: 1 + np.arange(size, dtype=np.uint64) for part, size in sizes.items()}
        live = LiveCounters(statistics_settings(config, schema))
        records = dict(live.records_of(index, digests, np.arange(len(items), dtype=np.uint64)))
        unknown, values = np.uint64(1 << 40), {}
        for part, own in ids.items():
            values[part.removeprefix("column ")] = np.where(own > 0, digests[part][own], np.uint64(0))
        rows = LiveRows(
            *(np.where(one < 0, unknown, 1 + one.astype(np.uint64)) for one in (user, queries.item)),
            queries.seconds,
            values,
        )
        found = live.compute(lambda keys: [records.get(key) for key in keys], rows)
    assert list(found) == list(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-13, atol=1e-14, err_msg=name)
