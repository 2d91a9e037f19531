"""Print what a compiler takes the kernel that deals out tiles to write; a script, since it must not be interpreted.

A package for a GPU is compiled with that kernel inside.  Offsets that it seems to write would be copied first, by code
that AOTInductor cannot generate for slices of one tensor, as requests' inputs are.
"""

from unittest import mock

import torch
import torch._higher_order_ops.triton_kernel_wrap as wrap
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from jfi.kernels.common import tile_scheduler as schedule


def main() -> None:
    offsets, slots = torch.tensor([0, 3, 3, 8]), torch.zeros(8, schedule.FIELDS.value, dtype=torch.int32)
    arguments = {"tiled_ptr": offsets, "other_ptr": offsets, "slots_ptr": slots, "batch": 3, "heads": 1, "slots": 8}
    arguments |= {"BLOCK": 64, "OWN": schedule.OWN, "CHUNK": 128}
    identify = getattr(wrap, "identify_accessed_tensors", None) or wrap.identify_mutated_tensors  # torch 2.13, 2.11
    active = mock.Mock(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    with mock.patch.object(driver, "_active", active, create=True):
        found = identify(schedule._schedule_kernel, arguments, {})
    print(*(found if isinstance(found, list) else [dep.name for dep in found.read_writes.writes]))


if __name__ == "__main__":
    main()
