"""How much of its own Python one forward of the layer runs: what every eager call pays on the host."""

from benchmarks.calls import count_calls, one_forward

MOST_CALLS, MOST_MOVES = 110, 30


def test_one_forward_makes_few_calls_and_moves_between_few_files():
    calls = one_forward()
    assert 0 < calls.count <= MOST_CALLS
    assert 0 < calls.moves <= MOST_MOVES


def test_only_calls_into_jfi_count():
    assert count_calls(lambda: len("abc")).count == 0
