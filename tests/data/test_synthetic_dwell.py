"""The synthetic log with dwell times has the truth that its docstring says."""

import numpy as np
import pytest
from synthetic_data import synthetic_data

from examples import synthetic_tables
from jfi.data import load_dataset
from jfi.data.prepared.event_logs import training_log
from jfi.history_policies import fit

SYNTHETIC = {"num_users": 400, "num_items": 60, "num_categories": 6, "mean_length": 80, "labeled": 20}


@pytest.fixture(scope="module")
def log() -> dict[str, np.ndarray]:
    """The columns, and the category of each event."""
    interactions, items = synthetic_tables.dwell(**SYNTHETIC)
    columns = {name: interactions[name].to_numpy(zero_copy_only=False) for name in interactions.column_names}
    return columns | {"category": items["category"].to_numpy()[columns["item"]]}


def counted(log: dict[str, np.ndarray], horizon: int) -> np.ndarray:
    """`[E]`, the long events of the same category among the user's `horizon` events before each."""
    matters = (log["active"] == 1) & (log["surface"] != "autoplay") & (log["dwell"] > synthetic_tables.LONG)
    found = np.zeros(len(matters), int)
    for row in range(len(matters)):
        low = max(np.searchsorted(log["user"], log["user"][row]), row - horizon)
        found[row] = (matters[low:row] & (log["category"][low:row] == log["category"][row])).sum()
    return np.where((log["active"] == 1) & (log["surface"] != "autoplay"), found, 0)


def test_an_event_is_long_from_halfway_between_both_medians_in_log_dwell():
    assert pytest.approx(np.sqrt(4 * 40), abs=0.1) == synthetic_tables.LONG


def test_a_dwell_time_has_at_most_two_decimals(log):
    hundredths = log["dwell"] * 100
    np.testing.assert_allclose(hundredths, np.rint(hundredths), rtol=0, atol=1e-6)
    assert len(np.unique(np.rint(hundredths) % 10)) == 10


def test_the_long_events_of_active_users_are_counted(log):
    assert np.array_equal(counted(log, 10_000), log["counted"])
    assert log["counted"].max() > 5


def test_an_event_counts_no_more_after_the_horizon():
    interactions, items = synthetic_tables.dwell(
        num_users=60, num_items=20, num_categories=3, mean_length=60, horizon=7
    )
    columns = {name: interactions[name].to_numpy(zero_copy_only=False) for name in interactions.column_names}
    columns["category"] = items["category"].to_numpy()[columns["item"]]
    assert np.array_equal(counted(columns, 7), columns["counted"])
    assert not np.array_equal(counted(columns, 8), columns["counted"])


def test_conversions_follow_the_count_for_the_active_alone(log):
    n, active, autoplay = log["counted"], log["active"] == 1, log["surface"] == "autoplay"
    rate = [log["converted"][active & ~autoplay & (n == k)].mean() for k in (0, 1, 3)]
    assert rate[0] < 0.1 < 0.2 < rate[1] < 0.45 < rate[2]
    same = [log["converted"][~active & ~autoplay & side].mean() for side in (log["dwell"] > 2, log["dwell"] <= 2)]
    assert abs(same[0] - same[1]) < 0.03
    assert 0.01 < log["converted"][autoplay].mean() < 0.06
    # The log-odds of a conversion are linear in log dwell.
    reads = active & ~autoplay
    means = [np.log(log["dwell"][reads & (log["converted"] == k)]).mean() for k in (0, 1)]
    np.testing.assert_allclose(means, np.log([4, 40]), atol=0.05)


def test_labels_are_the_newest_conversions_but_for_autoplay(log):
    last = np.append(log["user"][1:] != log["user"][:-1], True)
    ends = np.flatnonzero(last)[log["user"]]
    newest = ends - np.arange(len(ends)) < SYNTHETIC["labeled"]
    labeled = ~np.isnan(log["label"].astype(float))
    assert np.array_equal(labeled, newest & (log["surface"] != "autoplay"))
    assert np.array_equal(log["label"][labeled], log["converted"][labeled])


def test_times_and_sessions_go_on(log):
    same = log["user"][1:] == log["user"][:-1]
    pause = np.diff(log["timestamp"]) - log["dwell"][:-1]
    goes_on = same & (log["session"][1:] == log["session"][:-1])
    assert (pause[goes_on] > 0.9).all()
    assert (np.diff(log["timestamp"])[same & ~goes_on] >= 3599).all()


def test_a_policy_finds_the_events_that_say_nothing():
    config = synthetic_data("dwell", **SYNTHETIC)
    policy = fit(*training_log(config, "converted"), remove=0.5)
    keep = {(one.segment, one.surface): one.keep for one in policy.surface_reports}
    short, long = slice(0, 5), slice(-3, -1)
    for surface in ("feed", "search"):
        assert not any(keep["active", surface][short])
        assert all(keep["active", surface][long])


def test_it_depends_on_its_seed_alone():
    first, again, other = (synthetic_tables.dwell(num_users=20, seed=seed)[0] for seed in (1, 1, 2))
    assert first.equals(again)
    assert not first.equals(other)


def test_the_truth_is_no_input():
    dataset = load_dataset(synthetic_data("dwell", **SYNTHETIC))
    assert {spec.column for spec in dataset.features} == {"item", "category", "surface", "dwell", "timestamp"}
    assert dataset.schema.dense_names == []
