"""The columns of samples: the statistics of a run, and none changes with what is not older."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_tables import CLICKS, IMPLICIT, LABELED, first_rows, load, random_row

from jfi.baselines.features import Features
from jfi.baselines.samples import Samples
from jfi.utils.encoding import standardize

KINDS = {
    "labels": LABELED,
    "labels, clicks": LABELED | CLICKS,
    "implicit": IMPLICIT,
    "implicit, clicks": IMPLICIT | CLICKS,
    "labels, sessions": LABELED | {"session": "device"},
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
    before = load(folder, rows, kind | {"statistics": ["popularity"]})  # its schema has the half-lives
    known = features_until(before, cut)

    # The samples at the cut stay; what they were rated, and all that comes later, is another.
    changed = [row for row in rows if row[2] < cut]
    for user, item, time, rating, action, *rest in (row for row in rows if row[2] == cut):
        rating = rating and ("1" if rating == "5" else "5")
        changed.append((user, item, time, rating, "view" if action == "click" else "click", *rest))
    changed += [random_row(rng, rng.randrange(cut + 1, 20)) for _ in range(25)]
    after = features_until(load(folder, changed, kind | {"statistics": ["popularity"]}, before.schema), cut)
    assert known.keys() == after.keys()
    for name in known:
        np.testing.assert_allclose(known[name], after[name], rtol=1e-9, atol=1e-12, err_msg=name)


def features_until(dataset, cut):
    samples = Samples.of(dataset, seed=3)
    until = dataset.arrays().events.time[samples.events] <= cut
    features = Features.of(dataset, samples)
    return {name: values[until] for name, values in (features.numbers | features.categories).items()}


@kinds
def test_statistics_are_those_of_a_run(folder, kind):
    dataset = make(folder, kind | {"statistics": "auto"})
    samples = Samples.of(dataset)
    features = Features.of(dataset, samples)
    batch, part = dataset.batches("train", 10**6)[0], samples.splits["train"]
    run = dict(zip(dataset.schema.dense_names, batch.dense_features.numpy().T, strict=True))
    assert features.numbers.keys() > run.keys()
    assert len({len(one) for one in (features.numbers | features.categories).values()}) == 1
    for name, values in run.items():
        scale = dataset.schema.encodings.scale(name)
        own = features.numbers[name][part]
        if "_rate" in name and not name.endswith("_count"):
            own = 1 / (1 + np.exp(-own))
        expected = own if name == "price" else standardize(own, *scale)
        np.testing.assert_allclose(values, expected, atol=1e-4, err_msg=name)


def test_rates_and_ids_of_columns(folder):
    dataset = make(folder, LABELED | CLICKS)
    samples = Samples.of(dataset)
    features, events = Features.of(dataset, samples), dataset.arrays().events
    place = [spec.key for spec in dataset.features].index("device")
    device, labeled = dataset.arrays().columns[place].ids, ~np.isnan(events.label)
    np.testing.assert_array_equal(features.categories["device"], device[samples.events])
    for n, event in enumerate(samples.events):
        past = labeled & (events.time < events.time[event])
        overall = (events.label[past].sum() + 0.5) / (past.sum() + 1)
        own = events.label[past & (device == device[event])]
        rate = (own.sum() + 10 * overall) / (len(own) + 10)
        assert 1 / (1 + np.exp(-features.numbers["device_rate"][n])) == pytest.approx(rate, abs=1e-5)


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
