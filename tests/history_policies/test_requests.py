"""One history at a time, as a request has it, against the policy on a log: the segment, what stays, and the weights."""

from functools import cache

import numpy as np
from history_policies.logs import EVENTS, make_log, planted, segments_of
from hypothesis import given, settings
from hypothesis import strategies as st

from jfi.history_policies import EventLog, Policy, fit
from jfi.history_policies.segments import statistics_of
from jfi.serving.history_policy import RequestPolicy
from jfi.serving.schema import PolicyFields

FIELDS = PolicyFields("dwell", "surface", "session", 1.0)


@cache
def fitted(segments: int, boosted: bool, newest: int) -> Policy:
    events, conversion, _ = planted()
    names = ["active"] if segments == 2 else []
    caps = {"passive": 4, "active": 9} if segments == 2 else None
    boost = names if boosted else []
    return fit(events, conversion, num_segments=segments, remove=0.5, boost=boost, caps=caps, newest=newest)


def by_log(policy: Policy, log: EventLog) -> tuple[int, list[int], list[float] | None]:
    (segment,) = segments_of(policy, log)[1]
    found = policy.select(policy.cells(log.surface, log.dwell), np.array([segment]), np.array([len(log)]))
    return segment, found.rows.tolist(), None if found.weights is None else found.weights.tolist()


def names(log: EventLog) -> list[str]:
    """The surfaces of events as a request has them; one that the policy does not know has another name."""
    return [log.surfaces[number] if number >= 0 else "?" for number in log.surface]


@settings(max_examples=150)
@given(
    rows=EVENTS,
    is_sorted=st.booleans(),
    session=st.none() | st.lists(st.integers(0, 3), min_size=40, max_size=40),
    policy=st.builds(fitted, st.sampled_from([1, 2, 4]), st.booleans(), st.sampled_from([1, 3])),
)
def test_a_single_history_keeps_what_the_log_of_it_keeps(rows, is_sorted, session, policy):
    rows = [(0, *row[1:]) for row in rows]
    rows = sorted(rows, key=lambda row: row[1]) if is_sorted else rows
    log = make_log(rows, session and session[: len(rows)])
    found, weights = RequestPolicy(policy, FIELDS)(50 * 600.0 - log.time, log.dwell, names(log), log.session)
    _, expected, expected_weights = by_log(policy, log)
    assert found.tolist() == expected
    assert (None if weights is None else weights.tolist()) == expected_weights


def test_every_user_of_a_log_is_in_the_same_segment_and_keeps_the_same():
    log, _, _ = planted()
    for policy in (fitted(2, True, 3), fitted(4, False, 1)):
        choose, segments, ordered = RequestPolicy(policy, FIELDS), set(), log.ordered
        for first, end in zip(ordered.first[:-1], ordered.first[1:], strict=True):
            rows = ordered.order[first:end]
            user = np.zeros(len(rows), np.int64)
            segment, *expected = by_log(policy, EventLog(user, *(of[rows] for of in parts(log)), log.surfaces))
            stay, weights = choose(1e6 - log.time[rows], log.dwell[rows], [names(log)[row] for row in rows], None)
            assert [stay.tolist(), None if weights is None else weights.tolist()] == expected
            segments.add(int(segment))
        assert segments == {*range(len(policy.segments.names))}


@given(rows=EVENTS, data=st.data())
def test_the_statistics_of_one_range_have_the_bits_of_those_of_many(rows, data):
    log = make_log([(0, *row[1:]) for row in rows]).ordered
    index = st.integers(0, len(rows))
    drawn = data.draw(st.lists(st.tuples(index, index).map(sorted), min_size=2, max_size=6))
    first, end = np.array(sorted(drawn)).T
    end = np.maximum.accumulate(end)
    found = statistics_of(log, 3, first, end)
    alone = [statistics_of(log, 3, first[i : i + 1], end[i : i + 1]) for i in range(len(first))]
    assert found.tobytes() == np.concatenate(alone, axis=1).tobytes()


def parts(log: EventLog) -> tuple[np.ndarray, ...]:
    return log.time, log.surface, log.dwell
