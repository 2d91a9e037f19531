"""Policies are those of jfi 0.1.0, whose own k-means and logistic regression scikit-learn has replaced."""

import numpy as np
import pytest
from history_policies.logs import planted, segments_of

from jfi.history_policies import fit, segments

#: Seconds; events removed in all; events that stay, the sum of their rows and of their weights, of all histories.
EDGES = [4.6887, 7.6236, 11.0629, 15.2711, 20.5875, 28.1557, 39.6957, 57.3154, 92.7027]
WHOLE = 0.3669047619047619, 3755, 15793474, 4541.31213670969
BY_SEGMENT = [0.5, 0.16766666666666666], 6229, 26142624, 6970.271934837103


@pytest.mark.parametrize(
    ("options", "removed", "kept"),
    [
        ({"num_segments": 1, "remove": 0.4, "boost": ["all"], "caps": 20}, [WHOLE[0]], WHOLE[1:]),
        (
            {"remove": {"passive": 0.5, "active": 0.2}, "boost": ["active"], "caps": {"passive": 6}},
            BY_SEGMENT[0],
            BY_SEGMENT[1:],
        ),
    ],
    ids=["one segment", "two segments"],
)
def test_the_same_events_stay(options, removed, kept):
    log, conversion, _ = planted()
    policy = fit(log, conversion, newest=3, **options)
    assert [one.removed for one in policy.segment_reports] == pytest.approx(removed, rel=1e-12)
    assert policy.edges[0] == pytest.approx(EDGES, abs=1e-4)
    ordered = log.ordered
    cells = policy.cells(log.surface[ordered.order], log.dwell[ordered.order])
    stay = policy.select(cells, segments_of(policy, log)[1], np.diff(ordered.first))
    assert (len(stay.rows), stay.rows.sum()) == kept[:2]
    assert stay.weights.sum(dtype=float) == pytest.approx(kept[2], rel=1e-9)


def test_relevance_and_models_are_the_same():
    log, conversion, _ = planted()
    report = fit(log, conversion, num_segments=1).surface_reports[0]
    assert (report.information, report.entropy) == pytest.approx((0.0341827, 0.4584967), abs=1e-7)
    # That of 0.1.0 was fitted to counts of 2,048 cells of log dwell.
    assert (report.intercept, report.slope) == pytest.approx((-3.79706, 0.66009), abs=3e-4)


def test_segments_differ_by_the_floor_of_a_week_alone(monkeypatch):
    log, conversion, _ = planted()
    monkeypatch.setattr(segments, "_MIN_DAYS", 1.0)
    policy = fit(log, conversion, num_segments=None)
    assert np.bincount(policy.segments_before(log)).tolist() == [3087, 5313]
