"""Compiles kernels as they would be launched, for GPUs that this host need not have, and checks that they fit.

A script, since it must not run under Triton's interpreter, which forgives what a compiler may not and runs no Gluon.
It exits with 1 if a kernel does not compile or takes more shared memory or tensor memory than its device has.

    python tests/ops/compile_kernels.py                  # Hopper: the first and the last launch of each kernel
    python tests/ops/compile_kernels.py --every          # Hopper: every launch
    python tests/ops/compile_kernels.py --devices MI300X L4 --dtypes float32 --widths 256   # a table of kernels
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from typing import NamedTuple

import launches
import torch
import triton.tools.tensor_descriptor
from overrides import override, splits
from row_optimizers import CLASSES
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jfi.kernels import plan
from jfi.kernels.common.launch import Launcher
from jfi.kernels.plan import A100, H200, Device
from jfi.table1.kernels import products
from jfi.utils.operands import MAX_STEPPED_WIDTH

DEVICES = ("A100", "RTX3090", "L4", "H200", "B200", "RTX5090", "MI300X", "MI350X")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
WIDTHS = (32, 64, 100, 128, 256)
#: Columns of tensor memory that an SM of sm_100 has.
TENSOR_MEMORY = 512
#: Bytes of shared memory of an SM of Hopper, and what each program takes in addition.
HOPPER_SM, HOPPER_RESERVED = 228 * 1024, 1024


class Launch(NamedTuple):
    """A launch to compile: the kernel's source, its options and its device, and the problem that it is for."""

    source: ASTSource
    options: dict[str, int]
    device: Device
    problem: str

    @property
    def kernel(self) -> str:
        return self.source.fn.__name__.removeprefix("_").removesuffix("_kernel")

    @property
    def key(self) -> tuple:
        """Equal for launches of the same compiled kernel."""
        source = self.source
        constants = sorted((path, str(x)) for path, x in source.constants.items())
        return source.fn, str(source.signature), str(constants), str(source.attrs), str(self.options), self.device.arch


class Compiled(NamedTuple):
    """What a compiled kernel takes: bytes of shared memory, registers that each thread spills; or why it failed."""

    shared: int = 0
    spills: int = 0
    error: str = ""


# --- Recording --------------------------------------------------------------------------------------------------------
@contextmanager
def recorded(device: Device, problem: str, found: list[Launch]) -> Iterator[None]:
    """Calls within the context launch nothing, take ``device`` for that of their tensors, and add to ``found``."""

    def record(self, grid, given, numbers=(), descriptors=()) -> None:
        found.append(_launch_of(self, (*descriptors, *given, *numbers), device, problem))

    kept = [(module, "device_of", module.device_of) for module in (plan, products)]
    kept.append((Launcher, "__call__", Launcher.__call__))
    for module, _, _ in kept[:-1]:
        module.device_of = lambda _: device
    Launcher.__call__ = record
    try:
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)


def _type_of(x: object) -> str | tuple:
    names = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
    names |= {torch.bool: "i1", torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64"}
    if isinstance(x, tuple):
        return tuple(map(_type_of, x))
    if isinstance(x, TensorDescriptor):
        return f"tensordesc<{names[x.base.dtype]}{x.block_shape},{x.layout!r}>"
    if isinstance(x, triton.tools.tensor_descriptor.TensorDescriptor):
        return f"tensordesc<{names[x.base.dtype]}{x.block_shape}>"
    if isinstance(x, torch.Tensor):
        return f"*{names[x.dtype]}"
    return {int: "i32", float: "fp32", type(None): "constexpr"}[type(x)]


def _launch_of(launcher: Launcher, arguments: tuple, device: Device, problem: str) -> Launch:
    kernel, constants = launcher.kernel, dict(launcher.constants)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in constants}
    given = dict(zip(kernel.arg_names, arguments, strict=False))
    signature = {name: "constexpr" if name in constants else _type_of(given[name]) for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): x for name, x in constants.items()}
    aligned = {}
    for i, name in enumerate(kernel.arg_names):
        x = given.get(name)
        for path, one in (((i, j), y) for j, y in enumerate(x)) if isinstance(x, tuple) else [((i,), x)]:
            if one is None:
                values.setdefault(path, None)
            elif isinstance(one, torch.Tensor):
                aligned[path] = [["tt.divisibility", 16]]
    kind = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    return Launch(kind(kernel, signature, values, aligned), options, device, problem)


# --- Compiling --------------------------------------------------------------------------------------------------------
def compile_launch(launch: Launch) -> Compiled:
    """Compiles a launch, and says if it does not fit its device."""
    device, options = launch.device, launch.options
    target = GPUTarget("hip", device.arch, 64) if device.is_amd else GPUTarget("cuda", int(device.arch[3:]), 32)
    try:
        unknown = [name for name in options if device.is_amd and name == "maxnreg"]
        if unknown:
            return Compiled(error=f"{device.arch} has no option {unknown[0]}")
        binary = compile_kernel(launch.source, target=target, options=options)
    except Exception as error:  # of any kind: Triton's compilers raise what they like
        return Compiled(error=f"{type(error).__name__}: {str(error).strip()[-300:]}")
    shared, error = binary.metadata.shared, ""
    if shared > device.shared_memory:
        error = f"{shared} bytes of shared memory, {device.arch} has {device.shared_memory}"
    elif (getattr(binary.metadata, "tmem_size", 0) or 0) > TENSOR_MEMORY:
        error = f"{binary.metadata.tmem_size} columns of tensor memory, an SM has {TENSOR_MEMORY}"
    elif device.capability[0] == 9 and options.get("maxnreg"):
        programs = 65536 // (options["maxnreg"] * 256)  # as many as are meant to run at once
        if (shared + HOPPER_RESERVED) * programs > HOPPER_SM:
            error = f"{shared} bytes of shared memory are too many for {programs} programs on an SM"
    return Compiled(shared, _spills(binary, device), error)


def _spills(binary, device: Device) -> int:
    """Registers of a thread that are kept in memory, as Triton counts them: its local memory in words on NVIDIA."""
    if device.is_amd:
        return int(re.search(r"\.vgpr_spill_count:\s*(\d+)", binary.asm["amdgcn"])[1])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    return sum(int(number) for number in re.search(r"STACK:(\d+).*LOCAL:(\d+)", usage).groups()) // 4


_launches: list[Launch] = []  # of forked processes, which cannot be sent them


def _compile_number(number: int) -> Compiled:
    return compile_launch(_launches[number])


def compile_all(found: Iterable[Launch]) -> list[tuple[Launch, Compiled]]:
    """Compiles different launches once each, in two processes."""
    _launches[:] = {launch.key: launch for launch in found}.values()
    with get_context("fork").Pool(2) as pool:
        return list(zip(_launches, pool.imap(_compile_number, range(len(_launches))), strict=True))


def ends(found: Iterable[Launch]) -> list[Launch]:
    """The first and the last launch of each kernel for each device and problem."""
    by_kernel: dict[tuple, list[Launch]] = {}
    for launch in found:
        by_kernel.setdefault((launch.source.fn, launch.device, launch.problem), []).append(launch)
    return [launch for one in by_kernel.values() for launch in one[:1] + one[1:][-1:]]


# --- What is compiled -------------------------------------------------------------------------------------------------
def hopper() -> list[Launch]:
    """Launches of Hopper's kernels and of what else has many ways through it, with each gradient by itself."""
    found: list[Launch] = []
    with recorded(H200, "hopper", found):
        for width, num_kv_heads, biased, window in (
            (64, 4, True, (None, None)),
            (64, 1, False, (5, 0)),
            (128, 4, True, (None, 0)),
        ):
            for rows in (300, 4000):
                bias = torch.randn(rows, 4).half() if biased else None
                made = launches.attend(*launches.tensors(rows, num_kv_heads, width), bias, window)
                assert made.family == "jagged_sm90", made
        gluon = {launch.key: launch.source.fn for launch in found if isinstance(launch.source, GluonASTSource)}
        assert (len(gluon), len(set(gluon.values()))) == (12, 3), gluon  # short and long share the backward's
        with override(**splits(4)):
            launches.attend(*launches.tensors(300, 4, 64), torch.randn(300, 4).half(), (5, 0))
            query, key, _ = launches.tensors(300, 1, 128)
            launches.attend_by_time(query, key, None, "ages", H200)  # value = key
        _hopper_by_time_and_bucket()
        _hopper_by_id_and_digits()
        for name in CLASSES:
            launches.step_tables(name, 64, torch.float32, torch.float16, 0.999)
            launches.step_tables(name, 100, torch.bfloat16, torch.bfloat16, None)
        for name, width, ema_decay in (("adam", 1, 0.999), ("adam", 256, 0.999), ("sgd", MAX_STEPPED_WIDTH, None)):
            launches.step_tables(name, width, torch.float32, torch.float32, ema_decay)
        for dtype, num_ranks, columns in ((torch.bfloat16, 2, 1), (torch.float32, 1, 3), (torch.bfloat16, 8, 2)):
            launches.exchange(dtype, num_ranks, columns)
        for num_queries, dtype in ((1, torch.float16), (32, torch.float16), (2, torch.float32)):
            launches.multiply_weights(num_queries, 128, dtype)
    return found


def _hopper_by_time_and_bucket() -> None:
    for num_kv_heads, kind, device in (
        (1, "ages", H200),
        (4, "distances", H200),
        (1, "older", H200),
        (1, "float64", A100),
    ):
        width = 128 if kind == "ages" else 64
        made = launches.attend_by_time(*launches.tensors(300, num_kv_heads, width), kind, device)
        assert made.family == ("jagged_sm90" if device is H200 else "jagged_triton"), made
    for rows in (32, 100):
        for longest in (None, 100, 400):
            launches.attend_by_bucket(64, rows, longest, halves=rows == 100)
    # Gradients that are not needed are left out.
    launches.attend(*launches.tensors(300, 4, 64), torch.randn(300, 4).half(), every=True)
    for num_kv_heads, device in ((4, H200), (1, A100)):
        query, key, value = launches.tensors(300, num_kv_heads, 64)
        launches.attend_by_time(query, key, value if num_kv_heads > 1 else None, "ages", device, every=True)
    launches.attend_by_bucket(64, 32, 100, halves=False, every=True)
    launches.attend_by_bucket(64, 100, None, halves=True, every=True)
    for num_queries, own_values in ((40, True), (100, False), (100, True)):
        launches.attend_many(num_queries, own_values)


def _hopper_by_id_and_digits() -> None:
    half = torch.bfloat16
    for dtype, table_dtype in ((half, half), (half, torch.float32), (torch.float32, torch.float32)):
        for width, count, longest in ((64, 1, None), (128, 2, 100)):
            launches.attend_by_id(dtype, table_dtype, width, count, longest)
    for dtype, num_digits, biased, device, every in (
        (half, 25, True, H200, False),
        (half, 64, False, H200, False),
        (half, 100, True, H200, False),
        (torch.float32, 40, True, H200, False),
        (half, 40, True, A100, True),
        (half, 40, True, H200, True),
    ):
        made = launches.attend_to_digits(dtype, num_digits, biased, device, every)
        in_registers = device is H200 and dtype != torch.float32
        assert made.family == ("digits_registers" if in_registers else "target_single_tile"), made
    for num_digits, kind in ((25, None), (66, "bias"), (66, "ages")):
        made = launches.attend_ragged_to_digits(half, num_digits, kind, H200)
        assert made.family == "jagged_triton", made
    launches.attend_ragged_to_digits(torch.float32, 40, "bias", A100)


def of_devices(devices: Iterable[str], dtypes: Iterable[str], widths: Iterable[int]) -> list[Launch]:
    """Launches of every kernel for each device, dtype and width."""
    found: list[Launch] = []
    for name in devices:
        for dtype in dtypes:
            for width in widths:
                device = getattr(plan, name)
                with recorded(device, f"{dtype}, width {width}", found):
                    for _ in launches.launch_all(device, DTYPES[dtype], width):
                        pass
    return found


# --- The table --------------------------------------------------------------------------------------------------------
def table(results: list[tuple[Launch, Compiled]]) -> str:
    """Markdown: by kernel and device the most shared memory in KB and, where registers are spilt, the most of them."""
    devices = list(dict.fromkeys(launch.device.name for launch, _ in results))
    cells: dict[tuple[str, str], list[Compiled]] = {}
    for launch, compiled in results:
        cells.setdefault((launch.kernel, launch.device.name), []).append(compiled)
    lines = ["| kernel | " + " | ".join(devices) + " |", "|---" * (len(devices) + 1) + "|"]
    for kernel in sorted({launch.kernel for launch, _ in results}):
        row = [kernel]
        for device in devices:
            found = cells.get((kernel, device), [])
            shared, spills = (max((getattr(x, name) for x in found), default=0) for name in ("shared", "spills"))
            row.append((f"{shared / 1024:.1f}" + (f" ({spills} spilt)" if spills else "")) if found else "")
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> int:
    """Compiles what the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", choices=DEVICES, help="GPUs; without it the launches chosen for Hopper")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES])
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS)
    parser.add_argument("--kernels", default="", help="a regular expression of kernels' names")
    parser.add_argument("--every", action="store_true", help="not only the first and the last launch of each kernel")
    options = parser.parse_args()
    found = of_devices(options.devices, options.dtypes, options.widths) if options.devices else hopper()
    found = [launch for launch in found if re.search(options.kernels, launch.kernel)]
    results = compile_all(found if options.every else ends(found))
    if options.devices:
        print(table(results))
    failed = [(launch, compiled) for launch, compiled in results if compiled.error]
    for launch, compiled in failed:
        print(f"{launch.kernel}, {launch.device}, {launch.problem}: {compiled.error}", file=sys.stderr)
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main())
