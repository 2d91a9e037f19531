"""The launcher finds its compiled kernel only where the call is one that it was compiled for."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from jfi.kernels.common import launch

GRID = (3, 1, 1)


class Compiled:
    """Instead of a compiled kernel: records how it is launched."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, calls: list):
        self.calls = calls

    def run(self, *args) -> None:
        self.calls.append(("run", args))

    def __getitem__(self, grid):
        return lambda *args: self.calls.append(("hooked", grid, args))


class Kernel:
    arg_names = ("x", "y", "n", "scale", "BLOCK")
    params = tuple(
        SimpleNamespace(do_not_specialize_on_alignment=name == "y", do_not_specialize=name == "n") for name in arg_names
    )
    fn = SimpleNamespace(__name__="kernel")

    def __init__(self):
        self.calls: list = []

    def __getitem__(self, grid):
        def compile_and_launch(*args, **constants):
            self.calls.append(("compile", grid, args, constants))
            return Compiled(self.calls)

        return compile_and_launch


@pytest.fixture
def launcher(monkeypatch):
    class Interpret:
        value = False

    monkeypatch.setattr(launch, "INTERPRET", Interpret)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of a CPU's device
    monkeypatch.setattr(launch.driver, "_active", type("Driver", (), {"get_current_stream": lambda *_: "stream"})())
    return launch.Launcher(Kernel(), BLOCK=64, num_warps=4)


def kinds(launcher) -> list[str]:
    return [call[0] for call in launcher.kernel.calls]


def test_a_second_call_compiles_nothing_and_passes_addresses(launcher):
    x = torch.zeros(64)
    for _ in range(2):
        launcher(GRID, (x, None), (7, 0.5))
    assert kinds(launcher) == ["compile", "run"]
    assert launcher.kernel.calls[0][1:] == (GRID, (x, None, 7, 0.5), {"BLOCK": 64, "num_warps": 4})
    rest = ("stream", "function", "metadata", None, None, None)
    assert launcher.kernel.calls[1][1] == (*GRID, *rest, x.data_ptr(), None, 7, 0.5, None)


def test_addresses_are_nested_as_the_tensors_are(launcher):
    x, y = torch.zeros(64), torch.zeros(8)
    for _ in range(2):
        launcher(GRID, ((x, None, y), y), (7, 0.5))
    assert launcher.kernel.calls[1][1][9:] == ((x.data_ptr(), None, y.data_ptr()), y.data_ptr(), 7, 0.5, None)


def test_other_dtypes_or_absent_tensors_are_other_kernels(launcher):
    x, y = torch.zeros(64), torch.zeros(64)
    for tensors in (((x, y), y), ((x.half(), y), y), ((x, y.half()), y), ((x, None), y), ((x, y), y.half())):
        launcher(GRID, tensors, (7, 0.5))
    assert kinds(launcher) == ["compile"] * 5
    launcher(GRID, ((x.half(), y), y), (7, 0.5))
    assert kinds(launcher)[5:] == ["run"]


def test_other_tiles_of_a_descriptor_are_other_kernels(launcher):
    x = torch.zeros(64)

    def descriptor(rows, dtype=torch.float16):
        return SimpleNamespace(base=torch.zeros(64, dtype=dtype), block_shape=[rows, 64])

    for first in (descriptor(64), descriptor(32), descriptor(64, torch.bfloat16), None, descriptor(64)):
        launcher(GRID, (x,), (7, 0.5), (first,))
    assert kinds(launcher) == ["compile"] * 4 + ["run"]


def test_unaligned_tensors_and_long_integers_go_tritons_way(launcher):
    x = torch.zeros(64)
    launcher(GRID, (x[1:], None), (7, 0.5))
    launcher(GRID, (x, None), (2**31, 0.5))
    launcher(GRID, (x, None), (7, 0.5))
    launcher(GRID, (x[1:], None), (7, 0.5))
    launcher(GRID, ((x, x[1:]), None), (7, 0.5))
    launcher(GRID, (x, None), (7, 0.5))
    assert kinds(launcher) == ["compile", "compile", "compile", "compile", "compile", "run"]


def test_a_parameter_may_begin_anywhere(launcher):
    x = torch.zeros(64)
    launcher(GRID, (x, x[1:]), (7, 0.5))
    launcher(GRID, (x, x[3:]), (7, 0.5))
    assert kinds(launcher) == ["compile", "run"]


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
    assert kinds(launcher) == ["compile", "hooked"]


def test_kernels_read_all_their_parameters():
    files = sorted(Path(launch.__file__).parents[1].rglob("*.py"))
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    kernels = [x for x in functions if any(".jit" in ast.unparse(decorator) for decorator in x.decorator_list)]
    assert len(kernels) > 50
    for kernel in kernels:
        read = {node.id for line in kernel.body for node in ast.walk(line) if isinstance(node, ast.Name)}
        assert {x.arg for x in kernel.args.args} <= read, kernel.name
