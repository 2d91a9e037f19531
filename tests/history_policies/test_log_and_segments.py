"""Sessions, statistics of users and segments against loops; nothing of a sample's segment comes from its future."""

from itertools import pairwise
from math import log, nan

import numpy as np
import pytest
from history_policies.logs import EVENTS, SURFACES, make_log, planted, segments_of
from hypothesis import given, settings
from hypothesis import strategies as st

from jfi.history_policies import EventLog, Policy, fit
from jfi.history_policies.segments import STATISTICS, Segments, learn_segments, statistics_of


def loop_sessions(rows: list[tuple], session: list[int] | None) -> list:
    """A key of each event's session."""
    keys = []
    for i, row in enumerate(rows):
        if session is not None:
            keys.append((row[0], session[i]))
            continue
        # Back from the event, as long as no gap is longer than 30 minutes.
        times = sorted({other[1] for other in rows if other[0] == row[0] and other[1] <= row[1]}, reverse=True)
        begin = times[0]
        for one in times[1:]:
            if (begin - one) * 600 > 1800:
                break
            begin = one
        keys.append((row[0], begin))
    return keys


def loop_statistics(rows: list[tuple], keys: list) -> list[float]:
    """The six statistics of the events of one user in the order of time; quantiles exactly."""
    days = max(7.0, (max(r[1] for r in rows) - min(r[1] for r in rows)) * 600 / 86400)
    dwell = sorted(min(max(r[3], 0.0), 86400.0) for r in rows if r[3] == r[3])
    surfaces = [r[2] for r in rows if r[2] >= 0]
    shares = [surfaces.count(s) / len(surfaces) for s in {*surfaces}]
    quantiles = [nan, nan]
    if dwell:
        quantiles = [dwell[max(0, int(np.ceil(share * len(dwell))) - 1)] for share in (0.5, 0.9)]
    return [
        log(1 + len(rows) / days),
        log(1 + len(rows) / (1 + sum(a != b for a, b in pairwise(keys)))),
        *quantiles,
        sum(d < 3 for d in dwell) / len(dwell) if dwell else nan,
        -sum(s * log(s) for s in shares),
    ]


def check_statistics(found: np.ndarray, expected: list[float]) -> None:
    np.testing.assert_allclose(found[[0, 1, 4, 5]], np.array(expected)[[0, 1, 4, 5]], rtol=1e-5, atol=1e-6)
    for place in (2, 3):  # counted between edges a factor of 1.34 apart, from 0.5 to 7,200 seconds
        exact = expected[place]
        if np.isnan(exact):
            assert np.isnan(found[place])
        else:
            assert abs(found[place] - log(min(max(exact, 0.5), 7200))) < 0.3


@settings(max_examples=60)
@given(rows=EVENTS, session=st.none() | st.lists(st.integers(0, 3), min_size=40, max_size=40))
def test_sessions_and_statistics_are_those_of_a_loop(rows, session):
    session = session and session[: len(rows)]
    ordered = make_log(rows, session).ordered
    keys = loop_sessions(rows, session)
    of = {}
    for place, row in enumerate(ordered.order):
        assert of.setdefault(ordered.session[place], keys[row]) == keys[row]
    assert len(of) == len({*keys}) == len({*ordered.session})

    found = statistics_of(ordered, 3, ordered.first[:-1], ordered.first[1:])
    assert found.shape == (len(STATISTICS), len({row[0] for row in rows}))
    for number, user in enumerate(sorted({row[0] for row in rows})):
        own = [i for i in ordered.order if rows[i][0] == user]
        check_statistics(found[:, number], loop_statistics([rows[i] for i in own], [keys[i] for i in own]))


@settings(max_examples=60)
@given(rows=EVENTS, data=st.data())
def test_a_range_may_begin_within_a_session(rows, data):
    rows = [(0, *row[1:]) for row in rows]
    session = data.draw(st.none() | st.lists(st.integers(0, 3), min_size=40, max_size=40))
    session = session and session[: len(rows)]
    ordered, keys = make_log(rows, session).ordered, loop_sessions(rows, session)
    first, end = sorted(data.draw(st.tuples(st.integers(0, len(rows)), st.integers(0, len(rows)))))
    found = statistics_of(ordered, 3, np.array([first]), np.array([end]))[:, 0]
    if first == end:
        assert np.isnan(found).all()
    else:
        own = ordered.order[first:end]
        check_statistics(found, loop_statistics([rows[i] for i in own], [keys[i] for i in own]))


@pytest.fixture(scope="module")
def policy() -> Policy:
    events, conversion, _ = planted()
    return fit(events, conversion, remove=0.3, boost=["active"], caps=20, newest=3)


@settings(max_examples=60)
@given(rows=EVENTS, data=st.data())
def test_a_row_has_the_segment_of_its_past(policy, rows, data):
    """By all events of a log that ends before the row, and whatever happens then or later."""
    before = policy.segments_before(make_log(rows))
    for i, row in enumerate(rows):
        past = [one for one in rows if one[0] == row[0] and one[1] < row[1]]
        expected = segments_of(policy, make_log(past))[1][0] if past else 0
        assert before[i] == expected
    now = data.draw(st.integers(0, 40))
    changed = [row for row in rows if row[1] < now]
    changed += [(r[0], r[1], -1 if r[2] == 2 else r[2] + 1, r[3] * 2 + 1, not r[4]) for r in rows if r[1] >= now]
    changed += data.draw(EVENTS.map(lambda new: [(r[0], r[1] + now, *r[2:]) for r in new]))
    kept = [i for i, row in enumerate(rows) if row[1] < now]
    later = [i for i, row in enumerate(rows) if row[1] == now]
    after = policy.segments_before(make_log(changed)) if changed else np.empty(0)
    assert after[: len(kept)].tolist() == before[kept].tolist()
    of_now = {row[0]: after[len(kept) + i] for i, row in enumerate(changed[len(kept) :]) if row[1] == now}
    assert all(of_now[rows[i][0]] == before[i] for i in later)


def test_who_has_no_event_is_in_the_first_segment():
    six = (0.0,) * 6
    segments = Segments(("passive", "active"), six, (1.0,) * 6, ((5.0,) * 6, six))
    missing = np.full((6, 2), np.nan, np.float32)
    missing[0, 1] = 0.1  # one event, of unknown dwell: what is missing counts as the mean
    assert segments.assign(missing).tolist() == [0, 1]


def test_segments_are_the_planted_ones(policy):
    events, _, active = planted()
    users, of = segments_of(policy, events)
    assert users.tolist() == list(range(300))
    assert policy.segments.names == ("passive", "active")
    assert (of == active).mean() > 0.99


def test_the_silhouette_finds_the_number_of_segments():
    rng = np.random.default_rng(0)
    centers = np.eye(6)[:4] * 10
    points = (centers[np.arange(400) % 4] + rng.normal(0, 0.3, (400, 6))).T.astype(np.float32)
    segments = learn_segments(points, None, seed=0)
    assert len(segments.names) == 4 and segments.names[0] == "activity 1 of 4"
    activity = [center[0] for center in segments.centers]
    assert activity == sorted(activity)
    assert (np.bincount(segments.assign(points)) == 100).all()


def test_who_came_once_is_passive():
    """20 visitors of one hour with 20 events each, and 20 users with 3 events a day for a month."""
    user = np.repeat(np.arange(40), [20] * 20 + [90] * 20)
    time = np.concatenate([np.tile(np.arange(20) * 180.0, 20), np.tile(np.arange(90) * 28800.0, 20)])
    dwell = np.random.default_rng(0).lognormal(3, 1, len(user))
    policy = fit(EventLog(user, time, np.zeros(len(user), int), dwell, ["feed"]), dwell > 30)
    assert segments_of(policy, EventLog(user, time, np.zeros(len(user), int), dwell, ["feed"]))[1].tolist() == (
        [0] * 20 + [1] * 20
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"surfaces": []}, "surfaces must be 1 to 256 names"),
        ({"surfaces": ["a", "a", "b"]}, "surfaces must not repeat a name, got 'a' twice"),
        ({"surfaces": "abc"}, "surfaces must be names"),
        ({"surface": np.array([0, 3])}, "surface must be from -1 to 2, got 3"),
        ({"surface": np.array([0.0, 1.0])}, "surface must be an array .* of integers, got float64"),
        ({"dwell": np.array([1.0])}, "dwell must have 2 events like user, got 1"),
        ({"time": np.array([1.0, nan])}, "time must be finite, got nan"),
        ({"dwell": [1.0, 2.0]}, "dwell must be an array"),
    ],
)
def test_a_wrong_log_is_refused_by_name(change, message):
    two = np.arange(2)
    with pytest.raises((ValueError, TypeError), match=message):
        EventLog(**{"user": two, "time": two, "surface": two, "dwell": two, "surfaces": SURFACES, **change})
