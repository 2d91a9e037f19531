"""The buckets of positions, whose other cases the layer's tests cover."""

import torch

from jfi.modules import lookup


def test_log2_is_rounded_down_next_to_every_power_of_two():
    powers = [2**exponent for exponent in range(1, 53)]
    counts = torch.tensor([count for power in powers for count in (power - 1, power, power + 1)])
    want = [count.bit_length() - 1 for count in counts.tolist()]
    assert lookup._floor_log2(counts).tolist() == want
