"""Clocks of a GPU with the GPU taken out."""

import time

import pytest
import torch

from benchmarks import measure


def test_the_wall_time_of_calls_that_follow_each_other(monkeypatch):
    waits, made = [], []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(len(made)))
    clock = iter(range(10_000))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))  # a second between two looks
    calls = [lambda: made.append("a"), lambda: made.append("b")]
    # A repeat takes a second whatever it calls: 10 rounds of two calls, 20 in all.
    assert measure.wall_us(calls, 0.0) == pytest.approx(1e6 / 20)
    rounds = [2, 1] + [10] * measure.WALL_REPEATS
    assert made == ["a", "b"] * sum(rounds)
    assert waits == [2 * x for count in range(len(rounds)) for x in (sum(rounds[:count]), sum(rounds[: count + 1]))]


def test_the_peak_of_a_first_call_leaves_out_what_is_kept(monkeypatch):
    made = []
    for name, value in {"synchronize": None, "memory_allocated": 4e6, "reset_peak_memory_stats": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 4e6 + 5e6 * len(made))
    assert measure.first_peak_mb(lambda: made.append(1), lambda: 2e6 * len(made)) == 3.0
