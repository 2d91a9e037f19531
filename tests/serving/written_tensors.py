"""Print which tensors Inductor takes the exported kernels to write, and compile what it generates of their sources.

A script, since it must not be interpreted. A package for a GPU is compiled with these kernels inside. Offsets that they
seemed to write would be copied first, by code that AOTInductor cannot generate for slices of one tensor, as requests'
inputs are. Inductor writes each kernel's source and constants into a module of its own: they must be whole there.
"""

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

from jfi.kernels.common.launch import Launcher
from jfi.kernels.jagged_attention import triton_fwd
from jfi.plan import A100, JaggedAttentionInputs, plan_jagged_attention

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


def main() -> None:
    launches = []
    offsets, query = torch.tensor([0, 3, 3, 8]), torch.randn(8, 4, 24)
    x = JaggedAttentionInputs(
        query, query[:, :1].clone(), None, offsets, offsets, torch.randn(8, 4), *(None,) * 4, 0.3, None, 0, False
    )

    def launch(launcher, grid, tensors, numbers):
        launches.append((launcher, (*tensors, *numbers)))

    triton_fwd.forward(x, plan_jagged_attention(x, "triton", A100), launch)
    for launcher, arguments in launches:
        print(*written(launcher, arguments))
    with tempfile.TemporaryDirectory() as folder:
        for launcher, arguments in launches:
            compile_generated(launcher, arguments, Path(folder))


if __name__ == "__main__":
    main()
