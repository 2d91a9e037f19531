"""Compile kernels for Hopper as they would be launched; a script, since it must not run under Triton's interpreter.

Those written in Gluon, which no interpreter runs, and those with many ways through them: what the interpreter forgives,
a compiler may not.
"""

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jfi.kernels.absorbed_weights import bwd as absorbed_weights_bwd
from jfi.kernels.absorbed_weights import fwd as absorbed_weights
from jfi.kernels.common import stream_k as shares
from jfi.kernels.common.launch import Launcher
from jfi.kernels.jagged_attention import sm90 as jagged_attention_hopper
from jfi.kernels.target_attention import few_bwd as target_attention_bwd
from jfi.kernels.target_attention import few_fwd as target_attention_fwd


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


def attend_by_bucket(width: int, rows: int, longest: int | None, halves: bool) -> None:
    """Forward and backward of few queries, with a bias table of so many rows and a scale of values."""
    query, key = torch.randn(8, 1, 4, width).half(), torch.randn(800, 1, width // (2 if halves else 1)).half()
    offsets, table = torch.arange(0, 801, 100), torch.randn(rows, 4)
    events = (table, torch.zeros(800, dtype=torch.int64), torch.rand(800), key[:, 0].clone() if halves else None)
    out, lse = target_attention_fwd.forward(query, key, None, offsets, *events, 0.125, longest)
    target_attention_bwd.backward(out, query, key, None, offsets, *events, out, lse, 0.125, longest)


def multiply_weights(times: int, width: int, dtype: torch.dtype) -> None:
    shapes = (times * width, width), (times * width,), (width, width), (width, width), (width, times * width)
    weights = tuple(torch.randn(1, *shape) for shape in shapes)
    absorbed_weights.absorb(weights, times, 4, dtype)
    sizes = (times * 4 * width, width) * 2
    absorbed_weights_bwd.gradients(
        tuple(torch.randn(1, 600, size).to(dtype) for size in sizes), weights, dtype, times, 4
    )


def type_of(x: object) -> str:
    if isinstance(x, TensorDescriptor):
        return f"tensordesc<fp16{x.block_shape},{x.layout!r}>"
    if isinstance(x, torch.Tensor):
        return {torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}[x.dtype]
    return {int: "i32", float: "fp32"}[type(x)]


def check(launcher: Launcher, arguments: tuple) -> None:
    """Compile for sm_90, and see that as many programs as are meant to find room on a multiprocessor."""
    kernel, constants = launcher.kernel, dict(launcher.constants)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in constants}
    given = dict(zip(kernel.arg_names, arguments, strict=False))
    constants |= {name: None for name, x in given.items() if x is None}
    signature = {name: "constexpr" if name in constants else type_of(given[name]) for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): x for name, x in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
    source = (GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource)(kernel, signature, places, aligned)
    binary = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options)
    programs = 65536 // (options["maxnreg"] * 256) if options.get("maxnreg") else 1
    assert (binary.metadata.shared + 1024) * programs <= 228 * 1024, (kernel.__name__, binary.metadata.shared)


def main() -> None:
    launches = {}
    Launcher.__call__ = lambda self, grid, given, numbers, descriptors=(): launches.setdefault(
        self, (*descriptors, *given, *numbers)
    )
    for module in (jagged_attention_hopper, absorbed_weights_bwd, shares):
        module.multiprocessors = lambda device: 132
    for width, groups, biased, window in (
        (64, 4, True, (None, None)),
        (64, 1, False, (5, 0)),
        (128, 4, True, (None, 0)),
    ):
        for rows in (300, 4000):
            attend(*tensors(rows, groups, width), torch.randn(rows, 4).half() if biased else None, window)
    assert sum(isinstance(launcher.kernel, GluonJITFunction) for launcher in launches) == 3 * 4
    for rows in (32, 100):
        for longest in (None, 100, 400):
            attend_by_bucket(64, rows, longest, halves=rows == 100)
    for times, dtype in ((1, torch.float16), (32, torch.float16), (2, torch.float32)):
        multiply_weights(times, 128, dtype)
    for launcher, arguments in launches.items():
        check(launcher, arguments)


if __name__ == "__main__":
    main()
