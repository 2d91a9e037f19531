"""Launching a kernel at a third of the host time of Triton's own launcher, which works out anew at each call what a
call's arguments make of the kernel.

That depends on the constants, the tensors' dtypes and device, on pointers being multiples of 16 bytes, and on integers
fitting 32 bits.  A launcher stands for one set of constants and dtypes; calls where the last two hold find their
compiled kernel by the device alone, others go Triton's way.  A profiler's launch hooks are served; hooks of a kernel
(pre_run_hooks) and the check that its globals have not changed are not.
"""

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.knobs import HookChain
from triton.runtime import JITFunction, driver

from jfi.kernels.common.primitives import INTERPRET


def _are_set(hooks: HookChain | None) -> bool:
    return hooks is not None and bool(hooks.calls)


class Launcher:
    """``kernel[grid](*tensors, *numbers, **constants)``, Triton's options (num_warps, ...) among the constants."""

    def __init__(self, kernel: JITFunction, **constants: object):
        self.kernel = kernel
        #: Places of tensors that may begin at any address.
        self.unaligned = set()
        if not INTERPRET.value:
            self.unaligned = {i for i, x in enumerate(kernel.params) if x.do_not_specialize_on_alignment}
        self.constants = constants
        self.compiled: dict[int, CompiledKernel] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[int | float, ...],
        descriptors: tuple[object, ...] = (),
    ) -> None:
        """Launch on the device of the first tensor; tensor descriptors are the kernel's first arguments.

        At every call tensors come with the same dtypes, None in the same places, and descriptors of the same tiles; an
        integer's parameter is in the kernel's do_not_specialize.
        """
        if INTERPRET.value:
            self.kernel[grid](*descriptors, *tensors, *numbers, **self.constants)
            return
        device = tensors[0].device
        if device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(grid, tensors, numbers, descriptors)
            return
        addresses = [None if x is None else x.data_ptr() for x in tensors]
        together = 0
        for i, address in enumerate(addresses, len(descriptors)):
            if address is not None and i not in self.unaligned:
                together |= address
        usual = not together % 16 and max(numbers, default=0) < 2**31
        compiled = self.compiled.get(device.index) if usual else None
        if compiled is not None:
            # Addresses are not asked for a second time; what stands for the constants is not looked at.
            arguments = (*descriptors, *addresses, *numbers, *self.placeholders)
            if _are_set(knobs.runtime.launch_enter_hook) or _are_set(knobs.runtime.launch_exit_hook):
                compiled[grid](*arguments)
            else:
                stream = driver.active.get_current_stream(device.index)
                rest = compiled.function, compiled.packed_metadata, None, None, None
                compiled.run(*grid, stream, *rest, *arguments)
            return
        compiled = self.kernel[grid](*descriptors, *tensors, *numbers, **self.constants)
        if usual:
            self.placeholders = (None,) * (len(self.kernel.arg_names) - len(descriptors) - len(tensors) - len(numbers))
            self.compiled[device.index] = compiled
