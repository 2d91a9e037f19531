"""The encoding that training and serving share: its rules at their edges, and both sides against each other."""

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jfi.data.schema.columns import CodedColumn, cut, encode, learn_edges, learn_vocabulary, moments
from jfi.utils.encoding import UNKNOWN, Vocabulary, age_buckets, quantile_ids, standardize
from jfi.utils.errors import suggest


def test_a_vocabulary_counts_from_one():
    vocabulary = Vocabulary(["b", "a"])
    assert (vocabulary.ids(["a", "c", None, "b"]).tolist(), vocabulary.num_ids) == ([2, UNKNOWN, UNKNOWN, 1], 3)
    assert vocabulary.ids([]).dtype == np.int64


@given(st.lists(st.sampled_from(["a", "b", "10", "9", None]), min_size=1))
def test_a_column_has_the_ids_of_its_vocabulary(values):
    train = np.arange(len(values)) % 2 == 0
    column = CodedColumn.of(pa.array(values, pa.string()))
    vocabulary = learn_vocabulary(column, train)
    assert set(vocabulary.values) == {value for value in values[::2] if value is not None}
    assert encode(column, vocabulary).ids.tolist() == vocabulary.ids(values).tolist()


@given(st.lists(st.floats(), min_size=1), st.integers(1, 5))
def test_a_numeric_column_has_the_ids_of_its_edges(values, num_quantiles):
    values = np.array(values)
    with np.errstate(all="ignore"):  # quantiles between huge numbers overflow
        edges = learn_edges(values, np.ones(len(values), bool), num_quantiles)
    wanted = [1 + sum(edge <= value for edge in edges) if math.isfinite(value) else 0 for value in values]
    assert cut(values, edges).ids.tolist() == quantile_ids(values, edges).tolist() == wanted


@given(st.lists(st.floats(0, allow_nan=False, allow_infinity=False)), st.integers(1, 40))
def test_ages_fall_in_the_bucket_of_their_logarithm(ages, num_buckets):
    given = np.array(ages, np.float64)
    found = age_buckets(given, num_buckets)
    assert given.tolist() == ages  # the input is left alone
    assert found.tolist() == [min(math.frexp(age)[1], num_buckets - 1) if age >= 1 else 0 for age in ages]


def test_missing_numbers_become_the_mean():
    assert standardize(np.array([np.nan, np.inf, -np.inf, 3.0]), 1.0, 2.0).tolist() == [0.0, 0.0, 0.0, 1.0]


@given(st.lists(st.floats(), min_size=1), st.data())
def test_numbers_of_any_size_are_standardized_to_finite_ones_without_a_warning(values, data):
    values = np.array(values)
    weights = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(values), max_size=len(values))))
    with np.errstate(all="raise", under="ignore"):
        mean, deviation = moments(values, weights)
        scaled = standardize(values, mean, deviation)
    assert math.isfinite(mean) and 0 < deviation < math.inf
    assert np.isfinite(scaled).all() and np.square(scaled).max() < np.inf


def test_a_number_beyond_float32_is_missing_in_training_and_prediction():
    values, weights = np.array([1.0, 3.0, 1e300, -1e39]), np.ones(4, np.int64)
    assert moments(values, weights) == (2.0, 1.0)
    assert standardize(values, 2.0, 1.0).tolist() == [-1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("Ratng", ["rating", "timestamp"], "did you mean 'rating'?"),
        ("x", ["Rating", "rating"], "known: Rating, rating"),
        ("x", [], "known: none"),
        ("rating" * 20, ["rating" * 20], f"known: {'rating' * 20}"),  # too long to compare
    ],
)
def test_hints(name, known, hint):
    assert suggest(name, iter(known)) == hint


def test_hints_of_a_section():
    hint = suggest("lr", ["name", "learning_rate"], cutoff=0.0, prefix="dense.")
    assert hint == "did you mean 'dense.learning_rate'?"
    assert suggest("x", ["a", "b"], prefix="dense.") == "known: dense.a, dense.b"
