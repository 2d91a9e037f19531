"""The quantiles that are found 16 bits at a time, where the bits of the values have digits of 0, 1 and 2."""

import numpy as np
import pytest

from jfi.data.schema import coded


@pytest.mark.parametrize("places", [[0], [16], [32], [48], [0, 16], [16, 32], [32, 48]])
def test_values_that_differ_in_few_digits_of_their_bits(places):
    rng = np.random.default_rng(0)
    for _ in range(10):
        digits = sum(rng.integers(0, 4, 30).astype(np.uint64) << np.uint64(place) for place in places)
        values = digits.view(np.float64) * rng.choice([-1, 1], 30)
        at = np.linspace(0, 1, 30)
        assert coded.quantiles(values, np.ones(30, bool), at).tolist() == np.quantile(values, at).tolist()
