"""How much of its own Python one forward of the layer runs: what every eager call pays on the host."""

import pytest

from benchmarks.calls import count_calls, embedding_collections, one_forward

#: By embedding collection the most calls and files of one forward, and moves from file to file; one version of Python
#: counts a comprehension as a call, another does not.
LIMITS = {
    "EmbeddingCollection": (57, 9, 20),
    "FusedEmbeddingCollection": (95, 13, 35),
    "embeddings": (56, 9, 19),
}


@pytest.mark.parametrize("name", LIMITS)
def test_one_forward_makes_few_calls_and_moves_between_few_files(name):
    calls = one_forward(embedding_collections()[name])
    most_calls, most_files, most_moves = LIMITS[name]
    assert 0 < calls.count <= most_calls
    assert 0 < calls.files <= most_files
    assert 0 < calls.moves <= most_moves


@pytest.mark.parametrize(
    ("name", "calls"), [("EmbeddingCollection", 2), ("FusedEmbeddingCollection", 4), ("embeddings", 2)]
)
def test_a_call_asks_once_whether_it_may_read_and_is_traced(name, calls):
    """The layer and its operator each; a fused collection and the reader of its rows too."""
    names = [function for _, function in one_forward(embedding_collections()[name]).made]
    assert names.count("may_read") <= names.count("is_traced") == calls


@pytest.mark.parametrize("name", LIMITS)
def test_no_file_is_entered_more_than_twice_on_the_way_of_a_batch(name):
    assert max(one_forward(embedding_collections()[name]).entries("modules/").values()) <= 2


def test_only_calls_into_jfi_count():
    assert count_calls(lambda: len("abc")).count == 0
