"""Launches kernels with a third of the host time of Triton's launcher, which recomputes a specialization key per call.

What Triton specializes on is the constants, the tensors' dtypes and device, pointers being multiples of 16 bytes, and
integers fitting 32 bits.  A launcher holds one set of constants; calls with aligned tensors and small integers find
their compiled kernel by device and dtypes, others go through Triton's own launcher.  A profiler's launch hooks are
served; hooks of a kernel (pre_run_hooks) and the check that its globals have not changed are not.

The compile-time constants of most kernels are one value, ``SPEC``, instead of a parameter each: a kernel declares
``SPEC: tl.constexpr`` and reads ``SPEC.head_dim``.  Every field must be a ``tl.constexpr`` when the kernel is launched
(Triton takes a plain int for a runtime value), and a spec cannot be built inside of a kernel.
"""

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


def empty_like(tensors: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
    """Memory for the gradient of each tensor that needs one; None for the others, and where there is no tensor."""
    return [torch.empty_like(x) if need and x is not None else None for x, need in zip(tensors, needed, strict=True)]


class Launcher:
    """``kernel[grid](*descriptors, *tensors, *numbers, **constants)``, Triton's options among the constants."""

    def __init__(self, kernel: JITFunction, **constants: object):
        self.kernel = kernel
        self.constants = constants
        self.alignment_free = () if INTERPRET.value else compat.alignment_free(kernel)
        #: By device, dtypes and None-ness of tensors and tiles of descriptors: the compiled kernel and its launch.
        self.compiled: dict[tuple, tuple] = {}

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
        device = (first[0] if type(first) is tuple else first).device
        if device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(grid, tensors, numbers, descriptors)
            return
        arguments, key, addresses = list(descriptors), [device.index], 0
        for descriptor in descriptors:
            key += (None,) if descriptor is None else (descriptor.base.dtype, *descriptor.block_shape)
        for x in tensors:
            if x is None:
                arguments.append(None)
                key.append(None)
            elif type(x) is tuple:
                nested = []
                for y in x:
                    if y is None:
                        nested.append(None)
                        key.append(None)
                    else:
                        address = y.data_ptr()
                        addresses |= address
                        nested.append(address)
                        key.append(y.dtype)
                arguments.append(tuple(nested))
            else:
                address = x.data_ptr()
                if not self.alignment_free[len(arguments)]:
                    addresses |= address
                arguments.append(address)
                key.append(x.dtype)
        key = tuple(key)
        usual = not addresses % 16 and max(numbers, default=0) < 2**31
        entry = self.compiled.get(key) if usual else None
        if entry is None:
            self._check(numbers, len(arguments))
            compiled = self.kernel[grid](*descriptors, *tensors, *numbers, **self.constants)
            if usual:
                constants = (None,) * (len(self.kernel.arg_names) - len(arguments) - len(numbers))
                self.compiled[key] = compiled, compat.launch_parts(compiled), constants
            return
        compiled, parts, constants = entry
        arguments += numbers
        arguments += constants  # whose values are compiled in
        if compat.is_hooked(knobs.runtime.launch_enter_hook) or compat.is_hooked(knobs.runtime.launch_exit_hook):
            compiled[grid](*arguments)
        else:
            compat.run_compiled(parts, grid, driver.active.get_current_stream(device.index), arguments)

    def _check(self, numbers: tuple[int | float, ...], first: int) -> None:
        """No integer is specialized on, or the kernel found by the key would be that of another value."""
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
