"""Launches kernels from C; Triton's own launcher recomputes a specialization key in Python at each call.

What Triton specializes on is the constants, the tensors' dtypes and device, pointers being multiples of 16 bytes, and
integers fitting 32 bits.  A launcher holds one set of constants; launcher.c launches what was compiled for the dtypes
of a call's tensors, and other calls go through Triton.  A profiler's launch hooks are served by Triton too; hooks of a
kernel (pre_run_hooks) and the check that its globals have not changed are not.

The compile-time constants of most kernels are one value, ``SPEC``, instead of a parameter each: a kernel declares
``SPEC: tl.constexpr`` and reads ``SPEC.head_dim``.  Every field must be a ``tl.constexpr`` when the kernel is launched
(Triton takes a plain int for a runtime value), and a spec cannot be built inside of a kernel.
"""

import math
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache, partial

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime import JITFunction, driver

from jfi.kernels.common.primitives import INTERPRET
from jfi.kernels.plan import AttentionProblem, KernelPlan, Split
from jfi.utils import compat
from jfi.utils.operands import power_of_two

#: A kernel's tensor arguments: addresses, None where there is none, or tuples of these.
Tensors = tuple[Tensor | tuple[Tensor | None, ...] | None, ...]
#: Compiled kernels of a launcher and a device that launcher.c launches; others are left to Triton.
MAX_COMPILED = 64


def empty_like(tensors: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
    """Memory for the gradient of each tensor that needs one; None for the others, and where there is no tensor."""
    return [torch.empty_like(x) if need and x is not None else None for x, need in zip(tensors, needed, strict=True)]


class Launcher:
    """``kernel[grid](*descriptors, *tensors, *numbers, **constants)``, Triton's options among the constants."""

    def __init__(self, kernel: JITFunction, **constants: object):
        self.kernel = kernel
        self.constants = constants
        #: By device and by what Triton has compiled: launches it, or returns False where the arguments are others; None
        #: where Triton alone launches it.
        self.compiled: dict[int | None, dict[object, Callable[..., bool] | None]] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Tensors,
        numbers: tuple[int | float, ...] = (),
        descriptors: tuple[object, ...] = (),
    ) -> None:
        """Launch on the device of the first tensor.

        Args:
            grid: programs in each dimension.
            tensors: the kernel's pointers, after the descriptors; a tuple for a parameter that is a tuple of pointers,
                which must all be aligned to be fast.
            numbers: the kernel's integers, each in its do_not_specialize, and floats.
            descriptors: tensor descriptors, the kernel's first parameters.
        """
        if INTERPRET.value:
            self.kernel[grid](*descriptors, *tensors, *numbers, **self.constants)
            return
        first = tensors[0]
        index = (first[0] if type(first) is tuple else first).device.index
        is_hooked = compat.have_launch_hooks(knobs.runtime)
        if not is_hooked and (launches := self.compiled.get(index)):
            stream = driver.active.get_current_stream(index)
            for launch in launches.values():
                if launch is not None and launch(grid, stream, tensors, numbers, descriptors):
                    return
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self(grid, tensors, numbers, descriptors)
            return
        self._check(grid, numbers, len(descriptors) + len(tensors))
        compiled = self.kernel[grid](*descriptors, *tensors, *numbers, **self.constants)
        launches = self.compiled.get(index, {})
        if not is_hooked and compiled not in launches and len(launches) < MAX_COMPILED:
            launch = compat.compiled_launch(self.kernel, compiled, index, tensors, numbers, descriptors)
            self.compiled[index] = {**launches, compiled: launch}  # a new one, since threads read the old one

    def _check(self, grid: tuple[int, int, int], numbers: tuple[int | float, ...], first: int) -> None:
        """Raises for what would be launched wrongly: grids that Triton counts in 32 bits, integers as constants."""
        if min(grid) < 0 or max(grid[1:]) >= 2**16 or math.prod(grid) >= 2**31:
            must = "must be of 0 to 2**31 - 1 programs, at most 65535 in the second and in the third dimension"
            raise ValueError(f"the grid of {self.kernel.fn.__name__} {must}, got {grid}")
        specialized = compat.specialized(self.kernel)[first : first + len(numbers)]
        for number, changes_kernel in zip(numbers, specialized, strict=True):
            if changes_kernel and isinstance(number, int):
                raise TypeError(f"every integer of {self.kernel.fn.__name__} must be in its do_not_specialize")


# --- Constants --------------------------------------------------------------------------------------------------------
class Constant(tl.constexpr, dict):
    """A tl.constexpr that is also a dict: Triton's compile hooks dump constants as JSON, which knows dicts."""

    def __init__(self, value: object):
        super().__init__(value)
        dict.update(self, constexpr=self.value)


class _Spec:
    """The methods of a named tuple of constants, whose class cannot be imported."""

    def __reduce__(self) -> tuple:
        return partial(spec_of, **{name: x.value for name, x in self._asdict().items()}), ()

    def __repr__(self) -> str:
        """An expression that makes it in any scope: Inductor writes an exported kernel's constants into its code."""
        return f"__import__({__name__!r}, fromlist=['spec_of']).spec_of(**{self.__reduce__()[0].keywords!r})"


@cache
def _type_of(names: tuple[str, ...]) -> type:
    return type("Spec", (_Spec, namedtuple("Spec", names)), {})


def spec_of(**values: object) -> tuple:
    """Returns a named tuple of constants."""
    return _type_of(tuple(values))(*map(Constant, values.values()))


def attention_spec(problem: AttentionProblem, kernel: KernelPlan, more: tuple | None = None) -> tuple:
    """Returns the constants of an attention kernel: of its problem, of its plan with all options, and more."""
    names = [field.name for field in fields(problem)]
    values = {name: getattr(problem, name) for name in names[: names.index("padded_queries")]}
    values |= {"block_m": kernel.block_m, "block_n": kernel.block_n}
    values |= {"block_d": problem.block_d, "block_e": problem.block_e}
    # Sums of float32 over query rows keep its precision in every dtype.
    values["sum_precision"] = "ieee" if problem.device.is_amd else "tf32x3"
    values |= {"stages": kernel.num_stages, "num_splits": kernel.num_splits}
    values["program_per_sample"] = kernel.split in (Split.SAMPLE, Split.LONGEST_FIRST)
    values["longest_first"] = kernel.split is Split.LONGEST_FIRST
    values["block_h"] = power_of_two(problem.qheads_per_kvhead)
    values |= {name.lower(): x for name, x in kernel.options.items()}
    return spec_of(**values, **(more._asdict() if more else {}))


def launchers_of(function: JITFunction) -> Callable[..., Launcher]:
    """Returns a function of (problem, plan, more) that returns the launcher of a kernel, one for the same values.

    ``more`` is a named tuple of constants in addition to those of the problem and the plan.
    """

    @cache
    def launcher(problem: AttentionProblem, kernel: KernelPlan, more: tuple | None = None) -> Launcher:
        return Launcher(function, SPEC=attention_spec(problem, kernel, more), **kernel.launch)

    return launcher
