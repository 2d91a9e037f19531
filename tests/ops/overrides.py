"""Replaces constants of `jfi.kernels.plan`, for kernels and plans that small inputs would not reach."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from jfi.kernels import plan

#: With these a family takes every call that its kernels can compute.
FAMILIES = {
    "target_single_tile": {},
    "target_multi_tile": {"SINGLE_TILE_ROWS": 0, "SM90_MAX_ROWS": 0},
    "jagged_sm90": {"SINGLE_TILE_ROWS": 0, "FILLING_TILES_PER_SM": 0, "JAGGED_QUERY_ROWS": {64: (0, 0), 128: (0, 0)}},
    "jagged_triton": {"SM90_MAX_ROWS": 0},
}


def splits(number: int) -> dict[str, int]:
    """Constants with which the sm90 forward splits keys in so many, a power of two, where there are as many."""
    return {"SM90_SPLIT_KEYS": 1, "SM90_MAX_SPLITS": number, "SM90_TAPERING_SPLITS": 2**20, "SM90_EQUAL_SPLITS": 2**20}


@contextmanager
def override(num_sms: int | None = None, **values: object) -> Iterator[None]:
    """Replaces constants, as ``MIN_CHUNK=128``, and devices' number of SMs in the context; plans are made anew."""
    constants, device_of = vars(plan), plan.device_of
    if num_sms is not None:
        values["device_of"] = lambda device: replace(device_of(device), num_sms=num_sms)
    before = {name: constants[name] for name in values}
    try:
        constants.update(values)
        _clear_caches()
        yield
    finally:
        constants.update(before)
        _clear_caches()


def _clear_caches() -> None:
    for function in list(vars(plan).values()):
        if hasattr(function, "cache_clear"):
            function.cache_clear()
