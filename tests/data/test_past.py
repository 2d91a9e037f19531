"""Sums over the past against loops."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jfi.events.past import Past

ROWS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(-3, 3)), max_size=30)
ASKED = st.lists(st.tuples(st.integers(-1, 6), st.integers(0, 9)), min_size=1, max_size=10)


@pytest.mark.parametrize("by_time", [False, True])
@pytest.mark.parametrize("scale", [1, 10**9, 2**59], ids=["small keys", "large keys", "keys too large to be packed"])
@settings(max_examples=60)
@given(rows=ROWS, asked=ASKED)
def test_sums_are_those_of_strictly_older_rows_of_the_key(scale, by_time, rows, asked):
    table, asked = np.array(rows, np.int64).reshape(-1, 3), np.array(asked, np.int64)
    table[:, 0], asked[:, 0] = table[:, 0] * scale, asked[:, 0] * scale
    if by_time:
        table, asked = (one[np.argsort(one[:, 1], kind="stable")] for one in (table, asked))
    key, moment, value = table.T
    past = Past.sort([(key, moment, np.arange(len(key)))], len(key), 7)
    older = past.older(*asked.T)
    chosen = [[i for i in range(len(key)) if key[i] == k and moment[i] < m] for k, m in asked]
    assert older.count.tolist() == [len(one) for one in chosen]
    assert older.sum(past.prefix(value.take)).tolist() == [value[one].sum() for one in chosen]
    before = [(key == k) & (moment < m) for k, m in zip(key, moment, strict=True)]
    count, total = past.of_each_row(past.prefix(value.take))
    assert count.tolist() == [one.sum() for one in before]
    assert total.tolist() == [value[one].sum() for one in before]
    newest = [sorted(one, key=lambda i: moment[i])[-2:] for one in chosen]  # stable, as the order of equal moments is
    assert older.newest(2).sum(past.prefix(value.take)).tolist() == [value[one].sum() for one in newest]

    seconds, now = 1e9 + 60.0 * moment, 1e9 + 60.0 * asked[:, 1]
    total, last = past.decayed(value.take, 1e9 + 60.0 * np.arange(7), 90.0), older.end[older.count > 0] - 1
    found = np.zeros(len(now))
    found[older.count > 0] = total[last] * 0.5 ** ((now[older.count > 0] - seconds[past.order[last]]) / 90.0)
    expected = [
        sum(value[i] * 0.5 ** ((n - seconds[i]) / 90.0) for i in one) for one, n in zip(chosen, now, strict=True)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("half_life", [1.0, 1e4])
def test_a_decayed_sum_of_many_rows_and_half_lives_is_that_of_the_series(half_life):
    moment = np.arange(5000)
    past = Past.sort([(np.zeros(5000, np.int64), moment, moment)], 5000, 5000)
    found = past.decayed(np.ones(5000).take, moment.astype(float), half_life)[-1]
    assert found == pytest.approx(np.exp2(-moment / half_life).sum(), rel=1e-12)
