"""Ragged batches with names: the lengths around a tile's edge, and the ones that break things."""

import pytest
import torch
from torch import Tensor

#: Marks of cases that take the interpreter long.
SLOW_HERE = [] if torch.cuda.is_available() else [pytest.mark.slow]
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9

LENGTHS = {
    "edges": [0, 1, 15, 16, 17, 63, 64, 65],
    "all_empty": [0, 0, 0],
    "no_samples": [],
    "one_event": [1],
    "one_long_among_empties": [0, 0, 400, 0],
    "starts_and_ends_empty": [0, 7, 3, 0],
    "many_tiny": [i % 3 for i in range(40 if torch.cuda.is_available() else 14)],
}


def offsets_of(lengths: list[int], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    return ends.to(device=device, dtype=dtype)


#: (case, dtype): half precision costs the interpreter as much again and shows little there, so it gets one case, and
#: float16, whose rounding is the finer one, a slow one.
CASES = [
    pytest.param(name, dtype, id=f"{name}-{dtype}", marks=[pytest.mark.slow] if dtype == torch.float16 else [])
    for name in LENGTHS
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    if torch.cuda.is_available() or dtype == torch.float32 or name == "edges"
]
