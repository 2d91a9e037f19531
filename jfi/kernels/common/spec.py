"""The compile-time constants of a kernel: one value, ``SPEC``, instead of a parameter each.

A kernel declares ``SPEC: tl.constexpr`` and reads ``SPEC.head_dim``.  Every field must be a ``tl.constexpr`` when the
kernel is launched (Triton takes a plain int for a runtime value), and a spec cannot be built inside of a kernel.
"""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import fields
from functools import cache, partial

import triton.language as tl
from triton.runtime import JITFunction

from jfi.kernels.common.launch import Launcher
from jfi.kernels.plan import AttentionProblem, KernelPlan, Split
from jfi.utils.operands import power_of_two


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
