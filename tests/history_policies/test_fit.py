"""A policy's tables against loops over the events, planted truth, and what `fit` refuses."""

import warnings
from collections import Counter
from math import exp, log

import numpy as np
import pytest
from history_policies.logs import EVENTS, SURFACES, make_log, planted
from hypothesis import assume, given, settings

from jfi.history_policies import EventLog, Policy, fit
from jfi.history_policies.relevance import fit_logistic, information


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def clipped(dwell: float) -> float:
    return min(max(dwell, 0.0), 86400.0) if dwell == dwell else dwell


def loop_bin(dwell: float, edges: tuple) -> int:
    dwell = np.float32(dwell)
    return sum(dwell >= edge for edge in edges) if dwell == dwell else len(edges) + 1


def loop_information(pairs: list[tuple]) -> tuple[float, float]:
    """Of (bin, conversion): by the definition, and corrected."""
    n, joint = len(pairs), Counter(pairs)
    bins, ones = Counter(b for b, _ in pairs), Counter(c for _, c in pairs)
    found = sum(k / n * log(k * n / (bins[b] * ones[c])) for (b, c), k in joint.items())
    entropy = -sum(k / n * log(k / n) for k in ones.values())
    return found - (len(bins) - 1) * (len(ones) - 1) / (2 * n) if n else 0.0, entropy


def loop_edges(dwell: list[float], num_bins: int) -> list[float]:
    known = sorted(float(np.float32(d)) for d in dwell if d == d)
    wanted = [i / num_bins * (len(known) - 1) for i in range(1, num_bins)] if known else []
    edges = {known[int(np.ceil(place - 1e-9))] for place in wanted}
    return sorted(edge for edge in edges if edge > known[0])


@settings(max_examples=60)
@given(rows=EVENTS)
def test_counts_and_relevance_are_those_of_a_loop(rows):
    ones = sum(row[4] for row in rows)
    assume(0 < ones < len(rows) and any(row[2] >= 0 for row in rows))
    known = [row for row in rows if row[2] >= 0]
    assume(0 < sum(row[4] for row in known) < len(known))
    conversion = np.array([row[4] for row in rows])
    policy = fit(make_log(rows), conversion, num_segments=1, num_bins=4, remove=0.4, newest=1, boost=["all"])
    rate = sum(row[4] for row in known) / len(known)
    cells = []
    for g, report in enumerate(policy.surface_reports):
        assert (report.segment, report.surface) == ("all", SURFACES[g])
        own = [row for row in known if row[2] == g]
        edges = policy.edges[g]
        assert list(edges) == loop_edges([clipped(row[3]) for row in own], 4)
        bins = [loop_bin(clipped(row[3]), edges) for row in own]
        for b in range(len(edges) + 2):
            events = sum(one == b for one in bins)
            hits = sum(one == b and row[4] for one, row in zip(bins, own, strict=True))
            shrunk = (hits + 50 * rate) / (events + 50)
            odds = log(shrunk / (1 - shrunk)) - log(rate / (1 - rate))
            assert (report.events[b], report.conversions[b]) == (events, hits)
            assert report.log_odds[b] == pytest.approx(odds, abs=1e-9)
            assert report.weight[b] == pytest.approx(exp(odds), rel=1e-6)
            cells.append((report.log_odds[b], g, b, events, report.keep[b]))
        if own:
            pairs = [(b, row[4]) for b, row in zip(bins, own, strict=True)]
            assert (report.information, report.entropy) == pytest.approx(loop_information(pairs), abs=1e-9)
    # By rising relevance as long as the budget holds.
    budget, filled = 0.4 * len(known), [cell for cell in sorted(cells) if cell[3]]
    spent, open_ = 0, True
    for _, _, _, events, keep in filled:
        spent += events
        open_ = open_ and spent <= budget + 1e-9
        assert keep == (not open_)
    assert all(keep for _, _, _, events, keep in cells if not events)


def test_the_logistic_fit_is_the_maximum_of_the_likelihood():
    rng = np.random.default_rng(0)
    dwell, group = rng.lognormal(3, 1.5, 4000), rng.integers(0, 2, 4000)
    truth = np.array([[-3.0, 0.6], [1.0, -0.4]])
    x = np.log1p(dwell)
    conversion = rng.random(4000) < 1 / (1 + np.exp(-(truth[group, 0] + truth[group, 1] * x)))
    dwell[::50] = np.nan  # left out
    for g in range(2):
        intercept, slope = fit_logistic(dwell[group == g], conversion[group == g])
        rows = (group == g) & ~np.isnan(dwell)
        p = 1 / (1 + np.exp(-(intercept + slope * x[rows])))
        # The gradient of the penalized likelihood, beside its scale.
        size = np.sqrt(rows.sum())
        assert abs((conversion[rows] - p).sum()) < 1e-3 * size
        assert abs(((conversion[rows] - p) * x[rows]).sum() - slope) < 1e-3 * size
        np.testing.assert_allclose([intercept, slope], truth[g], atol=0.35)
    assert fit_logistic(np.array([1.0, np.nan]), np.array([True, False])) == (None, None)


def test_separable_groups_have_finite_slopes():
    dwell = np.array([1.0, 2.0, 50.0, 60.0] * 5)
    intercept, slope = fit_logistic(dwell, dwell > 30)
    assert 1 < slope < 10 and np.isfinite(intercept)


def test_information_is_unbiased_where_bins_say_nothing():
    rng = np.random.default_rng(0)
    found = []
    for _ in range(400):
        bins, conversion = rng.integers(0, 10, 500), rng.random(500) < 0.2
        found.append(information(np.bincount(bins, minlength=10), np.bincount(bins[conversion], minlength=10))[0])
    uncorrected = 9 / (2 * 500)
    assert abs(np.mean(found)) < uncorrected / 10


@pytest.fixture(scope="module")
def truth() -> Policy:
    events, conversion, _ = planted(600)
    return fit(events, conversion, remove={"active": 0.2}, boost=["active"])


def test_the_planted_relevance_is_found(truth):
    reports = {(one.segment, one.surface): one for one in truth.surface_reports}
    feed = reports["active", "feed"]
    assert feed.slope == pytest.approx(0.8, abs=0.15) and feed.intercept == pytest.approx(-4, abs=0.5)
    assert feed.log_odds[-2] - feed.log_odds[0] > 1
    others = [one for key, one in reports.items() if key != ("active", "feed")]
    assert feed.information > 5 * max(abs(one.information) for one in others)
    # Only the feed's short events go, and only of the active.
    assert not any(feed.keep[:2])
    assert all(feed.keep[5:]) and all(all(reports["passive", surface].keep) for surface in SURFACES)
    assert all(one.weight == (1.0,) * len(one.weight) for one in others if one.segment == "passive")
    assert feed.weight[-2] > 1 > feed.weight[0] > 0
    removed = {one.name: one.removed for one in truth.segment_reports}
    assert removed["passive"] == 0 and 0.1 < removed["active"] <= 0.2


def test_a_threshold_takes_the_place_of_a_budget():
    events, conversion, _ = planted()
    policy = fit(events, conversion, threshold=0.05)
    for one in policy.surface_reports:
        expected = [odds >= 0.05 or not events for odds, events in zip(one.log_odds, one.events, strict=True)]
        assert list(one.keep) == expected
    assert not all(all(one.keep) for one in policy.surface_reports)


def test_weights_are_clipped():
    events, conversion, _ = planted()
    free, clipped_ = (fit(events, conversion, boost=["active"], max_weight=most) for most in (1e6, 1.5))
    for one, other in zip(free.surface_reports, clipped_.surface_reports, strict=True):
        assert other.weight == pytest.approx(np.clip(one.weight, 1 / 1.5, 1.5), rel=1e-6)
    weights = [weight for one in free.surface_reports for weight in one.weight]
    assert min(weights) < 1 / 1.5 and max(weights) > 1.5


def test_a_segment_without_conversions_has_the_relevance_of_all():
    events, conversion, active = planted()
    policy = fit(events, conversion & active[events.user], remove=0.3)
    passive, lively = policy.segment_reports
    assert passive.is_global and not lively.is_global
    assert any("'passive' has the relevance of all users: no event of it has a conversion" in n for n in policy.notes)
    alone = fit(events, conversion & active[events.user], remove=0.3, num_segments=1)
    for own, of_all in zip(policy.surface_reports[:3], alone.surface_reports, strict=True):
        assert own.conversions == (0,) * len(own.conversions)
        assert own.log_odds == of_all.log_odds
        assert (own.information, own.slope) == (of_all.information, of_all.slope)


def test_missing_negative_and_absurd_dwell():
    events, conversion, _ = planted()
    dwell = events.dwell.copy()
    dwell[:500], dwell[500:510], dwell[510:513] = np.nan, -5, 1e12
    policy = fit(EventLog(events.user, events.time, events.surface, dwell, SURFACES), conversion, num_segments=1)
    count = len(events)
    assert policy.notes == (
        f"10 of {count:,} events have a dwell below 0, which counts as 0",
        f"3 of {count:,} events have a dwell of more than a day, which counts as a day",
        f"500 of {count:,} events have no dwell; they have a bin of their own",
    )
    assert sum(one.events[-1] for one in policy.surface_reports) == 500
    same = np.where(dwell < 0, 0, np.where(dwell > 86400, 86400, dwell))
    log_of = EventLog(events.user, events.time, events.surface, same, SURFACES)
    assert fit(log_of, conversion, num_segments=1).surface_reports == policy.surface_reports


def test_one_surface_and_no_dwell_at_all():
    events, conversion, _ = planted()
    one = np.zeros(len(events), np.int64)
    policy = fit(EventLog(events.user, events.time, one, events.dwell, ["feed"]), conversion, remove=0.3)
    assert len(policy.surface_reports) == 2 and 0 < policy.segment_reports[0].removed <= 0.3
    nothing = np.full(len(events), np.nan)
    policy = fit(EventLog(events.user, events.time, one, nothing, ["feed"]), conversion, remove=0.3)
    assert policy.edges == ((),) and policy.keeps_all  # one cell would be more than the budget
    assert policy.surface_reports[0].slope is None


def test_the_order_of_the_log_does_not_matter():
    events, conversion, _ = planted()
    order = np.random.default_rng(1).permutation(len(events))
    parts = (events.user, events.time, events.surface, events.dwell)
    other = EventLog(*(part[order] for part in parts), SURFACES)
    assert fit(other, conversion[order], remove=0.3) == fit(events, conversion, remove=0.3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"remove": 1.0}, r"remove must be in \[0, 1\), got 1.0 for segment 'passive'"),
        ({"remove": -0.1}, r"remove must be in \[0, 1\), got -0.1"),
        ({"remove": float("nan")}, r"remove must be in \[0, 1\), got nan"),
        ({"remove": {"activ": 0.3}}, "remove names segment 'activ'; did you mean 'active'"),
        ({"remove": 0.3, "threshold": 0.0}, "threshold and remove both say"),
        ({"threshold": float("inf")}, "threshold must be finite"),
        ({"boost": ["lively"]}, "boost names segment 'lively'"),
        ({"boost": "active"}, "boost must be a list"),
        ({"caps": 5}, "caps must be whole numbers of at least newest = 10, got 5"),
        ({"caps": {"active": 10.5}}, "caps must be whole numbers"),
        ({"newest": -1}, "newest must be at least 0"),
        ({"num_bins": 0}, "num_bins must be 1 to 64"),
        ({"num_segments": 9}, "num_segments must be 1 to 8"),
        ({"max_weight": 0.5}, "max_weight must be at least 1"),
        ({"pseudo_count": 0}, "pseudo_count must be above 0"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options, message):
    events, conversion, _ = planted(30)
    with pytest.raises((ValueError, TypeError), match=message):
        fit(events, conversion, **options)


@pytest.mark.parametrize(
    ("conversion", "message"),
    [
        (np.zeros(3), r"conversion must be an array \[840\]"),
        (np.zeros(840), "all 840 events with a surface have no conversion"),
        (np.ones(840), "all 840 events with a surface have a conversion"),
        (np.full(840, 0.5), "conversion must be 0 or 1, got 0.5"),
    ],
)
def test_wrong_conversions_are_refused(conversion, message):
    events = planted(30)[0]
    with pytest.raises(ValueError, match=message):
        fit(events, conversion)


def test_users_who_are_all_alike_have_no_segments():
    rows = [(user, t, 0, 5.0, t == 0) for user in range(4) for t in range(3)]
    conversion = np.array([row[4] for row in rows])
    with pytest.raises(ValueError, match="num_segments is 2, but there are only 1 users with different habits"):
        fit(make_log(rows), conversion)
    assert fit(make_log(rows), conversion, num_segments=None).segments.names == ("all",)
