"""The buckets of positions, whose other cases the layer's tests cover."""

import torch

from jfi.modules import lookup


def test_log2_is_rounded_down_next_to_every_power_of_two():
    for dtype, bits in ((torch.int32, 31), (torch.int64, 63)):
        powers = [2**exponent for exponent in range(1, bits)]
        counts = [count for power in powers for count in (power - 1, power, power + 1)]
        for rows in (1, 5, 100):
            want = [min(count.bit_length(), rows) - 1 for count in counts]
            assert lookup._floor_log2(torch.tensor(counts, dtype=dtype), rows).tolist() == want
