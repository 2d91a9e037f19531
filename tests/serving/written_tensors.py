"""Print which tensors Inductor takes the exported kernels to write and which operators of jfi are in a package, and
compile what Inductor generates of the kernels' sources.

A script, since it must not be interpreted. A package for a GPU is compiled with these kernels inside. Offsets that they
seemed to write would be copied first, by code that AOTInductor cannot generate for slices of one tensor, as requests'
inputs are. Inductor writes each kernel's source and constants into a module of its own: they must be whole there. A
package runs without Python, where only the operators that are made of kernel launches exist.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch._higher_order_ops.triton_kernel_wrap as wrap
from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel
from triton.runtime import JITFunction, driver

import jfi.ops
from jfi.cpu.bucket_edges import bucket_edges
from jfi.kernels import exported, plan
from jfi.kernels.jagged_attention import triton_fwd
from jfi.kernels.plan import A100, Device, plan_jagged_attention, plan_target_attention
from jfi.kernels.target_attention import execute
from jfi.ops import _visibility, dispatch
from jfi.serving.attention import PackedUsers, attend
from jfi.serving.own_module import _forms, operators_of
from jfi.utils.operands import JaggedAttentionInputs, TargetAttentionInputs

OPTIONS = ("num_warps", "num_stages")
TARGET = GPUTarget("cuda", 90, 32)
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64"}


class Launch(NamedTuple):
    """A launch that a graph would hold."""

    kernel: JITFunction
    grid: tuple
    arguments: tuple
    constants: dict

    def given(self) -> dict:
        """The arguments by name, without Triton's options."""
        constants = {name: x for name, x in self.constants.items() if name not in OPTIONS}
        return dict(zip(self.kernel.arg_names, self.arguments, strict=False)) | constants


def written(launch: Launch) -> list[str]:
    identify = getattr(wrap, "identify_accessed_tensors", None) or wrap.identify_mutated_tensors  # torch 2.13, 2.11
    active = mock.Mock(get_current_target=lambda: TARGET)
    with mock.patch.object(driver, "_active", active, create=True):
        found = identify(launch.kernel, launch.given(), {})
    return found if isinstance(found, list) else [dep.name for dep in found.read_writes.writes]


def compile_generated(launch: Launch, folder: Path) -> None:
    """Compile the kernel from the source and the constants that Inductor would write.

    Inductor passes numbers in 32 bits or, as here, in 64, and makes a constant of an integer that is 1.
    """
    name = launch.kernel.fn.__name__
    source = user_defined_triton_kernel_transitive_closure_source_code(launch.kernel)
    given, written_constants = launch.given(), {}
    for key, x in given.items():
        if key in launch.constants or (isinstance(x, int) and x == 1):
            written_constants[key] = x
    header = f"import triton\nimport triton.language as tl\n\nCONSTANTS = {written_constants!r}\n\n\n@triton.jit\n"
    path = folder / f"{name}.py"
    path.write_text(header + source)
    module = {"__name__": name}
    exec(compile(path.read_text(), path, "exec"), module)
    assert module["CONSTANTS"] == written_constants
    kernel = module[name]
    signature = {
        key: "constexpr"
        if key in written_constants
        else TYPES[x.dtype]
        if isinstance(x, torch.Tensor)
        else {int: "i64", float: "fp64"}[type(x)]
        for key, x in ((key, given[key]) for key in kernel.arg_names)
    }
    places = {(kernel.arg_names.index(key),): x for key, x in module["CONSTANTS"].items()}
    options = {name: x for name, x in launch.constants.items() if name in OPTIONS}
    compile_kernel(ASTSource(kernel, signature, places, {}), target=TARGET, options=options)


def a100(device: torch.device) -> Device:
    return A100


def as_given(impl: str, like: torch.Tensor) -> str:
    return impl


def always(query: torch.Tensor, impl: str) -> bool:
    return True


class Encoding(torch.nn.Module):
    def forward(self, x: torch.Tensor, offsets: torch.Tensor, position_bias: torch.Tensor) -> torch.Tensor:
        events = PackedUsers(offsets, None, None)
        return attend(x, x, x, queries=events, keys=events, causal=True, position_bias=position_bias, impl="triton")


class Pooling(torch.nn.Module):
    """Attention of ``num_queries`` queries to rows of two tables, with all that varies by event."""

    def forward(self, query, tables, offsets, ids, bias, ages, scale) -> torch.Tensor:
        history = {"offsets": offsets, "indices": (ids, ids), "key_bias": bias, "key_bias_index": ages}
        return jfi.ops.target_attention(query, (tables, tables), **history, value_scale=scale, impl="triton")


def exported_operators(module: torch.nn.Module, arguments: tuple, varies: str) -> list[str]:
    """Of attention as if these were tensors on a GPU; ``varies`` marks the arguments whose first size does."""
    # Patched by functions with names: torch looks for Triton kernels in the sources of all functions it reaches.
    plan.device_of, dispatch.is_exported, _visibility.is_exported = a100, always, always
    for operator in (jfi.ops.jagged_attention, jfi.ops.target_attention):
        sys.modules[operator.__module__].check_impl = as_given
    dynamic = tuple({0: torch.export.Dim.DYNAMIC} if mark == "x" else {} for mark in varies)
    with torch.no_grad():
        program = torch.export.export(module, arguments, dynamic_shapes=dynamic)
    return operators_of(program.run_decompositions(_forms()))


def launches() -> list[Launch]:
    """The launches of jagged attention and of target attention, one of each kernel and set of constants."""
    found: list[Launch] = []
    device = replace(A100, exported=True)

    def record(kernel: JITFunction) -> mock.MagicMock:
        got = mock.MagicMock()
        got.__getitem__ = lambda _, grid: lambda *x, **constants: found.append(Launch(kernel, grid, x, constants))
        return got

    offsets, query = torch.tensor([0, 3, 3, 8]), torch.randn(8, 4, 24)
    tensors = (query, query[:, :1].clone(), None, offsets, offsets, torch.randn(8, 4))
    window = JaggedAttentionInputs(*tensors, *(None,) * 4, 0.3, None, 0, False)
    edges = bucket_edges(offsets, offsets, None, None, 8, True, None, 5, False)
    distance = JaggedAttentionInputs(*tensors, edges, torch.randn(5, 4), None, None, 0.3, None, None, True)
    with mock.patch.object(exported, "wrap_triton", record):
        for x in (window, distance):
            triton_fwd.forward(x, plan_jagged_attention(x, "triton", device), exported.launch)
        key, ages = torch.randn(8, 1, 32), torch.zeros(8, dtype=torch.int32)
        second, table = torch.randn(8, 16), torch.randn(9, 32, dtype=torch.bfloat16)
        half, many = torch.randn(3, 4, 4, 32, dtype=torch.bfloat16), torch.randn(3, 20, 4, 32)
        long = torch.randn(600, 1, 32)  # in several chunks
        heads, bias = torch.randn(3, 1, 4, 32), torch.randn(8, 4)
        for operands in (
            (torch.randn(3, 1, 1, 32), key, None, offsets, None, None, None, None, [], []),
            (heads, key, key.clone(), offsets, bias, ages, torch.rand(8), None, [], []),
            (heads, key[..., :16].clone(), None, offsets, None, None, None, second, [], []),
            (half, key.bfloat16(), None, offsets, None, None, None, None, [table, table], [ages, ages]),
            (many, long, long.clone(), torch.tensor([0, 3, 3, 600]), torch.randn(600, 4), None, None, None, [], []),
            (many.bfloat16(), key.bfloat16(), None, offsets, None, None, None, None, [], []),
        ):
            x = TargetAttentionInputs(*operands, 0.3, None)
            chosen = plan_target_attention(x, "triton", device)
            execute.forward(x, chosen, exported.launch)
    return found


def main() -> None:
    made = launches()
    for launch in made:
        print(launch.kernel.fn.__name__.removesuffix("_flat"), *written(launch))
    with tempfile.TemporaryDirectory() as folder:
        for launch in made:
            compile_generated(launch, Path(folder))
    rows, offsets = torch.randn(8, 4, 24), torch.tensor([0, 3, 3, 8])
    print(*exported_operators(Encoding(), (rows, offsets, torch.randn(5, 4)), "xx."))
    by_event = (offsets, torch.tensor([1] * 8), torch.randn(5, 4), torch.tensor([1] * 8), torch.rand(8))
    for num_queries in (1, 20):
        arguments = (torch.randn(3, num_queries, 4, 24), torch.randn(9, 1, 24), *by_event)
        print(*exported_operators(Pooling(), arguments, "x.xx.xx"))


if __name__ == "__main__":
    main()
