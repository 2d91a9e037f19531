"""Every feature against loops over the rows that are strictly older, and none changes with what is not older."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import CLICKS, GENRES, IMPLICIT, LABELED, first_rows, load, random_row

from jfi.baselines.features import Features, Smoothing
from jfi.baselines.samples import Samples
from jfi.data.features.past_index import past_index
from jfi.events.co_occurrence import co_occurrence
from jfi.events.point_in_time import Tallies

SMOOTHING = Smoothing(item=3.0, user=2.0, half_life=4.0)
KINDS = {
    "labels": LABELED,
    "labels, clicks": LABELED | CLICKS,
    "implicit": IMPLICIT,
    "implicit, clicks": IMPLICIT | CLICKS,
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tables")


def make(folder, kind, seed=0, count=60):
    rng = random.Random(seed)
    return load(folder, first_rows() + [random_row(rng, rng.randrange(1, 14)) for _ in range(count)], kind)


@kinds
@settings(max_examples=12)
@given(seed=st.integers(0, 10**6), cut=st.integers(1, 13))
def test_features_do_not_depend_on_what_is_not_older(folder, kind, seed, cut):
    rng = random.Random(seed)
    rows = first_rows() + [random_row(rng, rng.randrange(1, 14)) for _ in range(40)]
    before = load(folder, rows, kind)
    known = features_until(before, cut)

    # The samples at the cut stay; what they were rated, and all that comes later, is another.
    changed = [row for row in rows if row[2] < cut]
    for user, item, time, rating, action, *rest in (row for row in rows if row[2] == cut):
        rating = rating and ("1" if rating == "5" else "5")
        changed.append((user, item, time, rating, "view" if action == "click" else "click", *rest))
    changed += [random_row(rng, rng.randrange(cut + 1, 20)) for _ in range(25)]
    after = features_until(load(folder, changed, kind, before.schema), cut)
    assert known.keys() == after.keys()
    for name in known:
        assert known[name].tobytes() == after[name].tobytes(), name


def features_until(dataset, cut):
    samples = Samples.of(dataset, seed=3)
    until = dataset.arrays().events.time[samples.events] <= cut
    columns = Features(dataset, samples).all(SMOOTHING)
    return {name: values[until] for name, values in (columns | {"item": samples.item}).items()}


def tallies_of(dataset, samples):
    arrays = dataset.arrays()
    index = past_index(arrays.events, dataset.schema, arrays.columns, dataset.is_implicit, contexts=True)
    return Tallies(index, index.questions(samples.events, samples.item))


class Loops:
    """The tallies of a dataset in Python's loops; a row is (user, item, time, label or None, is event)."""

    def __init__(self, dataset):
        arrays = dataset.arrays()
        events, negatives = arrays.events, arrays.negatives
        in_history = set(range(len(events)) if events.rows is None else events.rows.tolist())
        self.rows = [
            (int(u), int(i), float(t), None if math.isnan(label) else float(label), number in in_history)
            for number, (u, i, t, label) in enumerate(
                zip(events.user, events.item, events.time, events.label, strict=True)
            )
        ]
        self.per_positive = None if negatives is None else negatives.per_positive / len(negatives.candidates)
        self.candidates = set() if negatives is None else set(negatives.candidates.tolist())

    def labels(self, time, chosen=lambda row: True):
        return [row[3] for row in self.rows if row[2] < time and row[3] is not None and chosen(row)]

    def history(self, user, time):
        return [row for row in self.rows if row[0] == user and row[2] < time and row[4]]

    def with_negatives(self, labels, time, items=1):
        """The positives and the number of labels, with the negatives that are expected."""
        drawn = 0 if self.per_positive is None else len(self.labels(time)) * self.per_positive * items
        return sum(labels), len(labels) + drawn

    def similar(self, window):
        """By pair of items the moments at which a user had both, and what c and a are made of."""
        pairs = []
        for row in self.rows:
            if row[4]:
                for other in self.history(row[0], row[2])[-window:]:
                    pairs.append((frozenset((row[1], other[1])), row[2], self.surprise(row) * self.surprise(other)))
        return pairs

    def surprise(self, row):
        if row[3] is None:
            return 0.0
        mean = rate(self.labels(row[2]), 0.5, 1.0)
        item = rate(self.labels(row[2], lambda one: one[1] == row[1]), mean, 10.0)
        user = rate([one[3] for one in self.history(row[0], row[2]) if one[3] is not None], mean, 10.0)
        return round((row[3] - min(max(item + user - mean, 0.0), 1.0)) * 1024) / 1024


def rate(labels, expected, smoothing):
    return (sum(labels) + smoothing * expected) / (len(labels) + smoothing)


@kinds
def test_tallies_are_those_of_loops(folder, kind):
    dataset = make(folder, kind)
    samples = Samples.of(dataset)
    tallies, loops, columns = tallies_of(dataset, samples), Loops(dataset), Features(dataset, samples).all(SMOOTHING)
    similar = co_occurrence(tallies, 5)
    recent, user_newest = tallies.decayed(("item",), 4.0), tallies.tally("history", ("user",), 10)
    of_genres, of_device = tallies.tally("labeled", ("column genres",)), tallies.tally("labeled", ("context device",))

    def is_rate(name, n, positives, count):
        mean = rate(loops.labels(loops.rows[samples.events[n]][2]), 0.5, 1.0) if kind["label"] else 1 / 3
        assert 1 / (1 + math.exp(-columns[name][n])) == pytest.approx((positives + 3 * mean) / (count + 3), abs=1e-5)

    pairs = loops.similar(5)
    genres = [set(filter(None, one.split("|"))) for one in GENRES]
    device = dataset.arrays().columns[[spec.key for spec in dataset.features].index("device")].ids
    checked = 0
    for n, (event, user, item) in enumerate(zip(samples.events, samples.user, samples.item, strict=True)):
        time = loops.rows[event][2]
        history = loops.history(user, time)
        labels = [row[3] for row in history if row[3] is not None]
        of_item = loops.labels(time, lambda row, item=item: row[1] == item)
        if kind["label"]:
            assert tallies.overall[n] == rate(loops.labels(time), 0.5, 1.0)
        positives, count = loops.with_negatives(of_item, time)
        assert (tallies.item.positives[n], tallies.item.count[n]) == (positives, len(of_item))
        assert math.expm1(columns["item count"][n]) == pytest.approx(count)
        is_rate("item rate", n, positives, count)
        assert (np.expm1(columns["user count"][n]), tallies.user.count[n]) == (pytest.approx(len(history)), len(labels))
        assert tallies.user.positives[n] == sum(labels)
        newest = [row[3] for row in history[-10:] if row[3] is not None]
        assert (user_newest.positives[n], user_newest.count[n]) == (sum(newest), len(newest))
        age = time - history[-1][2] if history else math.nan
        assert tallies.age("history", ("user",))[n] == pytest.approx(age, nan_ok=True)

        decayed = [
            (row[3], 0.5 ** ((time - row[2]) / 4.0)) for row in loops.rows if row[2] < time and row[3] is not None
        ]
        own = [
            (row[3], 0.5 ** ((time - row[2]) / 4.0))
            for row in loops.rows
            if row[2] < time and row[3] is not None and row[1] == item
        ]
        drawn = 0 if loops.per_positive is None else loops.per_positive * sum(weight for _, weight in decayed)
        count = sum(weight for _, weight in own)
        assert recent.positives[n] == pytest.approx(sum(label * weight for label, weight in own))
        assert recent.count[n] == pytest.approx(count)
        assert math.expm1(columns["recent item count"][n]) == pytest.approx(count + drawn)
        is_rate("recent item rate", n, recent.positives[n], count + drawn)

        # Labels of rows that share a genre, once for each that is shared.
        shared = [
            row[3] for row in loops.rows if row[2] < time and row[3] is not None for _ in genres[row[1]] & genres[item]
        ]
        among = sum(len(genres[one] & genres[item]) for one in loops.candidates)
        positives, count = loops.with_negatives(shared, time, among)
        assert (of_genres.positives[n], of_genres.count[n]) == (positives, len(shared))
        is_rate("genres: rate", n, positives, count)
        if kind["label"]:
            alike = [
                row[3]
                for row, one in zip(loops.rows, device, strict=True)
                if row[2] < time and row[3] is not None and one == device[event]
            ]
            assert (of_device.positives[n], of_device.count[n]) == (sum(alike), len(alike))
        for part, of in (("column genres", genres), ("item", [{one} for one in range(len(genres))])):
            shared = [row[3] for row in history for _ in of[row[1]] & of[item]]
            if kind["label"]:
                shared = [label for label in shared if label is not None]
                tally = tallies.tally("history", ("user", part))
                assert (tally.positives[n], tally.count[n]) == (sum(shared), len(shared))
                continue
            tally, share = tallies.user_share(part)
            values = max(len(of[item]), 1)
            events = [row for row in loops.rows if row[4] and row[2] < time]
            everybody = sum(len(of[row[1]] & of[item]) for row in events)
            assert (tally.positives[n], tally.count[n]) == (pytest.approx(len(shared) / values), len(history))
            assert share[n] == pytest.approx(everybody / values / max(len(events), 1))

        sums = np.zeros(4)
        for row in history[-5:]:
            older = [product for both, moment, product in pairs if both == {item, row[1]} and moment < time]
            counts = [sum(one[4] and one[1] == i and one[2] < time for one in loops.rows) for i in (item, row[1])]
            weight = len(older) / math.sqrt(max(counts[0] * counts[1], 1))
            label = row[3] or 0.0
            sums += (
                weight,
                weight * (row[3] is not None),
                weight * label,
                sum(older) / (len(older) + 10) * loops.surprise(row),
            )
            checked += len(older)
        if kind["label"] is None:
            sums[3] = 0.0
        found = [similar.similarity[n], similar.labeled[n], similar.liked[n], similar.agreement[n]]
        np.testing.assert_allclose(found, sums, atol=1e-12)
    assert checked > 100


def test_rates_columns_and_missing_values(folder):
    dataset = make(folder, LABELED)
    samples = Samples.of(dataset)
    features, tallies = Features(dataset, samples), tallies_of(dataset, samples)
    columns = features.all(SMOOTHING)
    item = (tallies.item.positives + 3.0 * tallies.overall) / (tallies.item.count + 3.0)
    np.testing.assert_allclose(1 / (1 + np.exp(-columns["item rate"])), item, atol=1e-5)
    user = (tallies.user.positives + 2.0 * tallies.overall) / (tallies.user.count + 2.0)
    np.testing.assert_allclose(1 / (1 + np.exp(-columns["user rate"])), user, atol=1e-5)
    shared = tallies.tally("history", ("user", "column genres"))
    expected = (shared.positives + 2.0 * user) / (shared.count + 2.0)
    np.testing.assert_allclose(1 / (1 + np.exp(-columns["genres: rate in the history"])), expected, atol=1e-5)
    assert (np.isnan(columns["age of the newest event"]) == (tallies.num_rows("history", ("user",)) == 0)).all()
    batch = dataset.batches("train", 10**6)[0]
    np.testing.assert_array_equal(columns["price"][samples.splits["train"]], batch.dense_features[:, 0].numpy())
    assert len({len(one) for one in columns.values()}) == 1


@pytest.mark.parametrize("batching", ["sample", "user"])
@kinds
def test_samples_are_those_that_a_run_evaluates(folder, kind, batching):
    dataset = make(folder, kind)
    samples = Samples.of(dataset, seed=5)
    for split, part in samples.splits.items():
        seed = 5 if split == "train" else 0
        batches = dataset.batches(split, 7, seed=seed, batching=batching)
        seen = [
            (number, user, label, item)
            for batch in batches
            for number, user, label, item in zip(
                batch.samples.tolist(),
                batch.users.tolist(),
                batch.labels.tolist(),
                batch.sparse_features["item_id"].values().tolist(),
                strict=False,
            )
        ]
        ids = dataset.arrays().columns[[spec.key for spec in dataset.features].index("item_id")].ids
        own = zip(
            samples.user[part].tolist(), samples.label[part].tolist(), ids[samples.item[part]].tolist(), strict=True
        )
        assert sorted(seen) == [(number, *one) for number, one in enumerate(own)]
