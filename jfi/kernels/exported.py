"""Attention for torch.export: launches are nodes of the graph, and AOTInductor compiles the kernels into a package.

A package runs in processes without Python, where the operators that jfi registers do not exist.  Only the kernels for
any GPU can be exported: AOTInductor takes no Gluon.
"""

import linecache
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from inspect import Parameter, Signature
from typing import Any

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton
from triton.runtime import JITFunction

from jfi.kernels import plan
from jfi.kernels.common.launch import Launcher, Tensors
from jfi.kernels.jagged_attention import triton_fwd
from jfi.kernels.target_attention import execute
from jfi.utils.operands import JaggedAttentionInputs, TargetAttentionInputs


def operator(name: str) -> Callable:
    """Registers ``torch.ops.jfi.<name>_exported_fwd`` over the operands of an attention and impl."""
    operands, forward = _FORWARDS[name]

    def run(*operands_and_impl: Any) -> tuple[Tensor, Tensor]:
        return forward(operands(*operands_and_impl[:-1]))

    kinds = operands.__annotations__ | {"impl": str}
    parameters = [Parameter(field, Parameter.POSITIONAL_OR_KEYWORD, annotation=kind) for field, kind in kinds.items()]
    run.__signature__ = Signature(parameters, return_annotation=tuple[Tensor, Tensor])  # of the operator's schema
    return triton_op(f"jfi::{name}_exported_fwd", run, mutates_args=())


def jagged_attention_fwd(x: JaggedAttentionInputs) -> tuple[Tensor, Tensor]:
    """Runs the forward of queries and keys that may not be empty."""
    return triton_fwd.forward(x, plan.plan_jagged_attention(x, "triton", _device_of(x.query)), launch)


def target_attention_fwd(x: TargetAttentionInputs) -> tuple[Tensor, Tensor]:
    """Runs the forward of a batch with samples."""
    # Inductor takes offsets for written, since addresses follow from them, and would copy them: of slices of one
    # tensor, as a request's may be, AOTInductor cannot.  This is a tensor of its own; the first offset is 0.
    x = x._replace(offsets=F.pad(x.offsets[1:], (1, 0)))
    return execute.forward(x, plan.plan_target_attention(x, "triton", _device_of(x.query)), launch)


_FORWARDS = {
    "jagged_attention": (JaggedAttentionInputs, jagged_attention_fwd),
    "target_attention": (TargetAttentionInputs, target_attention_fwd),
}


def _device_of(query: Tensor) -> plan.Device:
    return replace(plan.device_of(query.device), exported=True)


def launch(
    launcher: Launcher,
    grid: tuple,
    tensors: Tensors,
    numbers: tuple = (),
    descriptors: tuple[None, ...] = (),
) -> None:
    """Launches the kernel; arguments as those of `Launcher`, without a descriptor.

    An absent tensor is never read, but Inductor of torch 2.11 fails on None.  It is none of the others, since Inductor
    may take it for written.
    """
    pointers: list[Tensor | None] = []
    for x in tensors:
        pointers += x if isinstance(x, tuple) else (x,)
    sizes = tuple(len(x) if isinstance(x, tuple) else 0 for x in tensors)
    kernel = flat(launcher.kernel, len(descriptors), sizes, tuple(isinstance(x, float) for x in numbers))
    absent = pointers[0].new_empty(1) if any(x is None for x in pointers) else None
    arguments = [absent if x is None else x for x in pointers]
    # Inductor does not know this option, and would pass it to the kernel as an argument.
    constants = {name: x for name, x in launcher.constants.items() if name != "maxnreg"}
    wrap_triton(kernel)[grid](*arguments, *numbers, **constants)


@cache
def flat(kernel: JITFunction, descriptors: int, sizes: Sequence[int], is_float: Sequence[bool]) -> JITFunction:
    """Returns a kernel with a parameter for each pointer and number, which calls the given one.

    Inductor takes no tuple of pointers; it makes a constant of an integer that is 1 and passes other numbers in 64 bits
    or 32.

    Args:
        kernel: its parameters are descriptors, pointers and tuples of them, numbers and constants, in this order.
        descriptors: the number of descriptors, which are None.
        sizes: of each tuple of pointers, 0 for a single one.
        is_float: of each number.
    """
    names = iter(kernel.arg_names[descriptors:])
    parameters, arguments = [], ["None"] * descriptors
    for size, name in zip(sizes, names, strict=False):
        elements = [f"{name}_{i}" for i in range(size)] or [name]
        parameters += elements
        arguments.append(f"({', '.join(elements)},)" if size else name)
    for floating, name in zip(is_float, names, strict=False):
        parameters.append(name)
        arguments.append(f"tl.full((), {name}, tl.{'float32' if floating else 'int32'})")
    constants = list(names)
    kernel_name, flat_name = kernel.fn.__name__, f"{kernel.fn.__name__}_flat"
    parameter_list = ", ".join([*parameters, *[f"{name}: tl.constexpr" for name in constants]])
    lines = [f"def {flat_name}({parameter_list}):\n", f"    {kernel_name}({', '.join([*arguments, *constants])})\n"]
    path = f"<{flat_name}{(descriptors, *sizes, *is_float)}>"
    linecache.cache[path] = sum(map(len, lines)), None, lines, path  # where Triton and Inductor read the source
    scope = {"__name__": __name__, "tl": tl, kernel_name: kernel}
    exec(compile("".join(lines), path, "exec"), scope)
    return triton.jit(scope[flat_name])
