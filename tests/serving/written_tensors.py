"""Print which tensors Inductor takes the exported kernels to write and which operators of jfi are in a package, and
compile what Inductor generates of the kernels' sources.

A script, since it must not be interpreted. A package for a GPU is compiled with these kernels inside. Offsets that they
seemed to write would be copied first, by code that AOTInductor cannot generate for slices of one tensor, as requests'
inputs are. Inductor writes each kernel's source and constants into a module of its own: they must be whole there. A
package runs without Python, where only the operators that are made of kernel launches exist.
"""

import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
import torch._higher_order_ops.triton_kernel_wrap as wrap
from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel
from triton.runtime import driver

import jfi.ops
from jfi.cpu.bucket_edges import bucket_edges
from jfi.kernels import plan
from jfi.kernels.common.launch import Launcher
from jfi.kernels.jagged_attention import triton_fwd
from jfi.kernels.plan import A100, Device, plan_jagged_attention
from jfi.ops import _visibility
from jfi.serving.attention import Segments, attend
from jfi.utils.operands import JaggedAttentionInputs

operator = sys.modules[jfi.ops.jagged_attention.__module__]
TARGET = GPUTarget("cuda", 90, 32)
OPTIONS = ("num_warps", "num_stages")


def written(launcher: Launcher, arguments: tuple) -> list[str]:
    constants = {name: x for name, x in launcher.constants.items() if name not in OPTIONS}
    given = dict(zip(launcher.kernel.arg_names, arguments, strict=False)) | constants
    identify = getattr(wrap, "identify_accessed_tensors", None) or wrap.identify_mutated_tensors  # torch 2.13, 2.11
    active = mock.Mock(get_current_target=lambda: TARGET)
    with mock.patch.object(driver, "_active", active, create=True):
        found = identify(launcher.kernel, given, {})
    return found if isinstance(found, list) else [dep.name for dep in found.read_writes.writes]


def compile_generated(launcher: Launcher, arguments: tuple, folder: Path) -> None:
    """Compile the kernel from the source and the constants that Inductor would write."""
    name = launcher.kernel.fn.__name__
    source = user_defined_triton_kernel_transitive_closure_source_code(launcher.kernel)
    constants = {key: x for key, x in launcher.constants.items() if key not in OPTIONS}
    header = f"import triton\nimport triton.language as tl\n\nCONSTANTS = {constants!r}\n\n\n@triton.jit\n"
    path = folder / f"{name}.py"
    path.write_text(header + source)
    module = {"__name__": name}
    exec(compile(path.read_text(), path, "exec"), module)
    assert module["CONSTANTS"] == constants
    kernel, types = module[name], {torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
    signature = {
        key: "constexpr"
        if key in constants
        else types[x.dtype]
        if isinstance(x, torch.Tensor)
        else {int: "i32"}.get(type(x), "fp32")
        for key, x in zip(kernel.arg_names, (*arguments, *constants), strict=False)
    }
    places = {(kernel.arg_names.index(key),): x for key, x in module["CONSTANTS"].items()}
    compile_kernel(ASTSource(kernel, signature, places, {}), target=TARGET, options={"num_warps": 4})


def a100(device: torch.device) -> Device:
    return A100


def as_given(impl: str, like: torch.Tensor) -> str:
    return impl


def always(query: torch.Tensor, impl: str) -> bool:
    return True


class Encoding(torch.nn.Module):
    def forward(self, x: torch.Tensor, offsets: torch.Tensor, position_bias: torch.Tensor) -> torch.Tensor:
        events = Segments(offsets, None, None)
        return attend(x, x, x, queries=events, keys=events, causal=True, position_bias=position_bias, impl="triton")


def exported_operators() -> list[str]:
    """Of an encoder's attention with a relative bias, as if these were tensors on a GPU."""
    # Patched by functions with names: torch looks for Triton kernels in the sources of all functions it reaches.
    plan.device_of, operator.check_impl = a100, as_given
    operator.is_exported = _visibility.is_exported = always
    arguments = torch.randn(8, 4, 24), torch.tensor([0, 3, 3, 8]), torch.randn(5, 4)
    dynamic = {0: torch.export.Dim.DYNAMIC}
    with torch.no_grad():
        program = torch.export.export(Encoding(), arguments, dynamic_shapes=(dynamic, dynamic, {}))
    return sorted({str(node.target) for node in program.graph.nodes if str(node.target).startswith("jfi")})


def main() -> None:
    launches = []
    offsets, query = torch.tensor([0, 3, 3, 8]), torch.randn(8, 4, 24)
    tensors = (query, query[:, :1].clone(), None, offsets, offsets, torch.randn(8, 4))
    window = JaggedAttentionInputs(*tensors, *(None,) * 4, 0.3, None, 0, False)
    edges = bucket_edges(offsets, offsets, None, None, 8, True, None, 5, False)
    distance = JaggedAttentionInputs(*tensors, edges, torch.randn(5, 4), None, None, 0.3, None, None, True)

    def launch(launcher, grid, tensors, numbers):
        launches.append((launcher, (*tensors, *numbers)))

    for x in (window, distance):
        triton_fwd.forward(x, plan_jagged_attention(x, "triton", A100), launch)
    for launcher, arguments in launches:
        print(*written(launcher, arguments))
    with tempfile.TemporaryDirectory() as folder:
        for launcher, arguments in launches:
            compile_generated(launcher, arguments, Path(folder))
    print(*exported_operators())


if __name__ == "__main__":
    main()
