"""Compile Hopper's kernels as they would be launched; a script, since it must not run under Triton's interpreter."""

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import compile as compile_kernel
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jfi.kernels import jagged_attention_hopper
from jfi.kernels.launch import Launcher


def tensors(rows: int, groups: int, width: int) -> tuple[torch.Tensor, ...]:
    """Query, key and value."""
    return tuple(torch.randn(rows, heads, width).half() for heads in (4, groups, groups))


def attend(query, key, value, bias=None, window=(None, None)) -> None:
    """Forward and backward of two samples."""
    offsets = torch.tensor([0, query.shape[0] // 2, query.shape[0]])
    inputs = (query, key, value, offsets, offsets, bias)
    out, lse = jagged_attention_hopper.forward(*inputs, 0.125, *window)
    dlse = None if bias is None else torch.randn_like(lse)
    jagged_attention_hopper.backward(torch.randn_like(out), dlse, *inputs, out, lse, 0.125, *window)


def type_of(x: object) -> str:
    if isinstance(x, TensorDescriptor):
        return f"tensordesc<fp16{x.block_shape},{x.layout!r}>"
    if isinstance(x, torch.Tensor):
        return {torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32"}[x.dtype]
    return {int: "i32", float: "fp32"}[type(x)]


def check(launcher: Launcher, arguments: tuple) -> None:
    """Compile for sm_90, and see that as many programs as are meant to find room on a multiprocessor."""
    kernel, constants = launcher.kernel, dict(launcher.constants)
    options = {name: constants.pop(name) for name in ("num_warps", "maxnreg")}
    given = dict(zip(kernel.arg_names, arguments, strict=False))
    constants |= {name: None for name, x in given.items() if x is None}
    signature = {name: "constexpr" if name in constants else type_of(given[name]) for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): x for name, x in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
    source = GluonASTSource(kernel, signature, places, aligned)
    binary = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options)
    programs = 1 if options["maxnreg"] is None else 65536 // (options["maxnreg"] * 256)
    assert (binary.metadata.shared + 1024) * programs <= 228 * 1024, (kernel.__name__, binary.metadata.shared)


def main() -> None:
    launches = {}
    Launcher.__call__ = lambda self, grid, given, numbers, descriptors=(): launches.setdefault(
        self, (*descriptors, *given, *numbers)
    )
    jagged_attention_hopper.multiprocessors = lambda device: 132
    for width, groups, biased, window in (
        (64, 4, True, (None, None)),
        (64, 1, False, (5, 0)),
        (128, 4, True, (None, 0)),
    ):
        for rows in (300, 4000):
            attend(*tensors(rows, groups, width), torch.randn(rows, 4).half() if biased else None, window)
    kernels = {x: arguments for x, arguments in launches.items() if isinstance(x.kernel, GluonJITFunction)}
    assert len(kernels) == 3 * 4
    for launcher, arguments in kernels.items():
        check(launcher, arguments)


if __name__ == "__main__":
    main()
