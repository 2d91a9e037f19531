"""The launcher launches a compiled kernel only where the call is one that it was compiled for."""

import ast
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ops.ragged import offsets_of

import jfi
from jfi.kernels.common import launch
from jfi.utils import compat

GRID = (3, 1, 1)
HERE = Path(__file__).parent


class Kernel:
    arg_names = ("x", "y", "n", "scale", "BLOCK")
    params = tuple(SimpleNamespace(do_not_specialize=name == "n") for name in arg_names)
    fn = SimpleNamespace(__name__="kernel")

    def __init__(self):
        self.calls: list = []

    def __getitem__(self, grid):
        return lambda *args, **constants: self.calls.append(("compile", grid, args, constants))


@pytest.fixture
def launcher(monkeypatch):
    class Interpret:
        value = False

    def compiled_launch(kernel, compiled, *like):
        def run(grid, stream, *arguments):
            fits = arguments[0][0] is like[0][0]
            kernel.calls.append(("run" if fits else "refused", grid, stream, arguments))
            return fits

        return None if like[0][0].numel() == 1 else run

    monkeypatch.setattr(launch, "INTERPRET", Interpret)
    monkeypatch.setattr(compat, "compiled_launch", compiled_launch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of a CPU's device
    monkeypatch.setattr(launch.driver, "_active", type("Driver", (), {"get_current_stream": lambda *_: "stream"})())
    return launch.Launcher(Kernel(), BLOCK=64, num_warps=4)


def kinds(launcher) -> list[str]:
    return [call[0] for call in launcher.kernel.calls]


def test_a_second_call_compiles_nothing(launcher):
    x = torch.zeros(64)
    for _ in range(2):
        launcher(GRID, (x, None), (7, 0.5))
    assert launcher.kernel.calls == [
        ("compile", GRID, (x, None, 7, 0.5), {"BLOCK": 64, "num_warps": 4}),
        ("run", GRID, "stream", ((x, None), (7, 0.5), ())),
    ]


def test_what_no_compiled_kernel_takes_goes_through_triton(launcher):
    x, y, one = torch.zeros(64), torch.zeros(8), torch.zeros(1)
    for tensors in ((one, None), (one, None), (x, None), (y, None), (y, None)):
        launcher(GRID, tensors, (7, 0.5))
    assert kinds(launcher) == ["compile", "compile", "compile", "refused", "compile", "refused", "run"]


def test_an_integer_that_a_kernel_is_specialized_on_is_refused(launcher):
    x = torch.zeros(64)
    with pytest.raises(TypeError, match="every integer of kernel must be in its do_not_specialize"):
        launcher(GRID, (x, None), (7, 5))


def test_a_profilers_hooks_are_served(launcher, monkeypatch):
    x = torch.zeros(64)
    launcher(GRID, (x, None), (7, 0.5))
    chain = launch.knobs.HookChain()
    chain.add(lambda metadata: None)
    monkeypatch.setattr(launch.knobs.runtime, "launch_enter_hook", chain)
    launcher(GRID, (x, None), (7, 0.5))
    assert kinds(launcher) == ["compile", "compile"]


def test_parameters_are_those_that_cuda_reads(tmp_path):
    """Beside a driver that records them; what the kernel was not compiled for is refused."""
    from sysconfig import get_paths

    from triton.backends.nvidia import driver

    flags = [
        "-shared",
        "-fPIC",
        "-w",
        f"-I{get_paths()['include']}",
        *(f"-I{folder}" for folder in driver.include_dirs),
    ]
    sources = {"jfi_launcher.so": Path(launch.__file__).parent / "launcher.c", "libcuda.so.1": HERE / "launcher_stub.c"}
    for name, source in sources.items():
        subprocess.run(["cc", *flags, f"-Wl,-soname,{name}", source, "-o", tmp_path / name], check=True)
    command = [sys.executable, "-I", HERE / "launcher_calls.py", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "all calls are right\n", done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("width", [32, 64])
def test_tritons_launcher_gives_the_same_bits(width, device, monkeypatch):
    offsets = offsets_of([0, 70, 3, 200], device)
    query, key, value = (torch.randn(273, 2, width, device=device).bfloat16().requires_grad_() for _ in range(3))
    target = torch.randn(4, 1, 2, width, device=device).bfloat16().requires_grad_()

    def results() -> list[torch.Tensor]:
        out = jfi.ops.jagged_attention(query, key, value, query_offsets=offsets, impl="triton")
        pooled = jfi.ops.target_attention(target, key, value, offsets=offsets, impl="triton")
        leaves = (query, key, value, target)
        return [out, pooled, *torch.autograd.grad([out.sum(), pooled.sum()], leaves)]

    launched = []
    made = compat.compiled_launch
    recording = lambda *args: (launched.append(made(*args)), launched[-1])[1]  # noqa: E731
    monkeypatch.setattr(launch.compat, "compiled_launch", recording)
    for launcher in _launchers():
        launcher.compiled.clear()
    first, fast = results(), results()
    assert launched and None not in launched
    monkeypatch.setattr(launch.compat, "compiled_launch", lambda *_: None)
    for launcher in _launchers():
        launcher.compiled.clear()
    for got in (first, fast):
        for a, b in zip(got, results(), strict=True):
            assert torch.equal(a, b)


def _launchers() -> list[launch.Launcher]:
    import gc

    return [one for one in gc.get_objects() if type(one) is launch.Launcher]


def test_kernels_read_all_their_parameters():
    files = sorted(Path(launch.__file__).parents[1].rglob("*.py"))
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    kernels = [x for x in functions if any(".jit" in ast.unparse(decorator) for decorator in x.decorator_list)]
    assert len(kernels) > 50
    for kernel in kernels:
        read = {node.id for line in kernel.body for node in ast.walk(line) if isinstance(node, ast.Name)}
        assert {x.arg for x in kernel.args.args} <= read, kernel.name
