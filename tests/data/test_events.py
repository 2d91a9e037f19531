import numpy as np
import pytest

from jfi.data.batches.negatives import NegativeSampler
from jfi.data.batches.order import Shuffled
from jfi.events.events import SortedEvents, order_by_item, user_blocks


def random_events(rng: np.random.Generator, count: int = 400, users: int = 12, items: int = 15) -> SortedEvents:
    user = np.sort(np.append(np.arange(users), rng.integers(0, users, count - users)))
    item, time = rng.integers(0, items, count), rng.integers(0, 30, count).astype(np.float64)
    order = np.lexsort((item, time, user))
    label, split = np.ones(count, np.float32), np.zeros(count, np.int8)
    return SortedEvents(user[order].astype(np.int32), item[order].astype(np.int32), time[order], label, split)


@pytest.mark.parametrize("max_history", [1, 4, 1000])
def test_a_history_is_what_the_user_did_strictly_before(max_history):
    events = random_events(np.random.default_rng(0))
    rows = np.random.default_rng(1).permutation(len(events))
    starts, lengths = events.histories(rows, max_history)
    assert lengths.max() > 1 or max_history == 1
    for row, start, length in zip(rows, starts, lengths, strict=True):
        before = np.flatnonzero((events.user == events.user[row]) & (events.time < events.time[row]))
        assert list(range(start, start + length)) == before[-max_history:].tolist()


@pytest.mark.parametrize("rows_at_once", [1, 50, 10_000])
def test_rows_by_item_are_sorted_within_each_user(rows_at_once):
    events = random_events(np.random.default_rng(2))
    expected = np.lexsort((events.time, events.item, events.user))
    assert order_by_item(events, rows_at_once=rows_at_once).tolist() == expected.tolist()
    blocks = user_blocks(events.first, rows_at_once)
    assert [start for start, _ in blocks[1:]] == [end for _, end in blocks[:-1]]
    assert (blocks[0][0], blocks[-1][1]) == (0, len(events))


def test_a_negative_is_refused_from_the_moment_of_its_first_event_on():
    events = random_events(np.random.default_rng(3))
    sampler = NegativeSampler(events, order_by_item(events), np.arange(15), 1)
    user, item, time = (a.ravel() for a in np.meshgrid(np.arange(12), np.arange(16), np.arange(-1.0, 31.0)))
    expected = [
        bool(np.any((events.user == u) & (events.item == i) & (events.time <= t)))
        for u, i, t in zip(user, item, time, strict=True)
    ]
    assert sampler.knows(user, item, time).tolist() == expected
    assert 0.1 < np.mean(expected) < 0.9


@pytest.mark.parametrize("count", [1, 2, 3, 17, 1000, 4097])
def test_an_order_computed_in_slices_is_a_permutation(count):
    def whole(epoch: int, size: int) -> list[int]:
        order = Shuffled(count, seed=3, epoch=epoch, large=0)
        return [value for start in range(0, count, size) for value in order[start : start + size].tolist()]

    assert sorted(whole(0, 7)) == list(range(count))
    assert whole(0, 7) == whole(0, 100_000)
    if count > 3:
        assert whole(0, 7) != whole(1, 7)
        assert whole(0, 7) != list(range(count))


def test_an_order_computed_in_slices_mixes_all_distances():
    order = Shuffled(100_000, seed=0, epoch=0, large=0)[0:100_000]
    # Of a random permutation the correlation with the place, and of neighbours, has a deviation of 1 / sqrt(100,000).
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 5 / 100_000**0.5
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 5 / 100_000**0.5
    # Each tenth of the places gets each tenth of the samples equally often, up to five deviations of a count.
    counts = np.histogram2d(order, np.arange(100_000), bins=10)[0]
    assert np.abs(counts - 1000).max() < 5 * 1000**0.5


def test_no_events_have_no_users():
    ids = np.zeros(0, np.int32)
    events = SortedEvents(ids, ids, np.zeros(0), np.zeros(0, np.float32), np.zeros(0, np.int8))
    assert events.first.tolist() == [0]
