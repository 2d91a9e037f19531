"""Launching a kernel at a third of the host time of Triton's own launcher, which works out anew at each call what a
call's arguments make of the kernel.

That depends on the constants, the tensors' dtypes and device, on pointers being multiples of 16 bytes, and on integers
fitting 32 bits.  A launcher stands for one set of constants and dtypes; calls where the last two hold find their
compiled kernel by the device alone, others go Triton's way.
"""

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

from jfi.kernels.tiles import INTERPRET

_HOOKS = knobs.runtime


class Launcher:
    """``kernel[grid](*tensors, *numbers, **constants)``, Triton's options (num_warps, ...) among the constants."""

    def __init__(self, kernel: JITFunction, **constants: object):
        self.kernel = kernel
        self.constants = constants
        self.compiled: dict[int, CompiledKernel] = {}

    def __call__(
        self, grid: tuple[int, int, int], tensors: tuple[Tensor | None, ...], numbers: tuple[int | float, ...]
    ) -> None:
        """Launch on the device of the first tensor.

        Tensors come with the same dtypes at every call; a number's parameter is in the kernel's do_not_specialize.
        """
        if INTERPRET.value:
            self.kernel[grid](*tensors, *numbers, **self.constants)
            return
        device = tensors[0].device
        if device.index != torch.cuda.current_device():
            if device.type != "cuda":
                raise ValueError(f"impl='triton' needs tensors on a GPU, got {device}")
            with torch.cuda.device(device):
                self(grid, tensors, numbers)
            return
        addresses = [None if x is None else x.data_ptr() for x in tensors]
        together = 0
        for address in addresses:
            if address is not None:
                together |= address
        usual = not together % 16 and max(numbers, default=0) < 2**31
        compiled = self.compiled.get(device.index) if usual else None
        if compiled is not None:
            # Addresses are not asked for a second time; what stands for the constants is not looked at.
            arguments = (*addresses, *numbers, *self.placeholders)
            if _HOOKS.launch_enter_hook.calls or _HOOKS.launch_exit_hook.calls:
                compiled[grid](*arguments)
            else:
                stream = driver.active.get_current_stream(device.index)
                rest = compiled.function, compiled.packed_metadata, None, None, None
                compiled.run(*grid, stream, *rest, *arguments)
            return
        compiled = self.kernel[grid](*tensors, *numbers, **self.constants)
        if usual:
            self.placeholders = (None,) * (len(self.kernel.arg_names) - len(tensors) - len(numbers))
            self.compiled[device.index] = compiled
