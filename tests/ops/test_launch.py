"""The launcher finds its compiled kernel only where the call is one that it was compiled for."""

from types import SimpleNamespace

import pytest
import torch

from jfi.kernels.common import launch

GRID = (3, 1, 1)


class Compiled:
    """Stands for a compiled kernel: notes how it is launched."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, calls: list):
        self.calls = calls

    def run(self, *args) -> None:
        self.calls.append(("run", args))

    def __getitem__(self, grid):
        return lambda *args: self.calls.append(("hooked", grid, args))


class Kernel:
    arg_names = ("x", "y", "n", "scale", "BLOCK")
    params = tuple(SimpleNamespace(do_not_specialize_on_alignment=name == "y") for name in arg_names)

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
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of a processor's device
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


def test_unaligned_tensors_and_long_integers_go_tritons_way(launcher):
    x = torch.zeros(64)
    launcher(GRID, (x[1:], None), (7, 0.5))
    launcher(GRID, (x, None), (2**31, 0.5))
    launcher(GRID, (x, None), (7, 0.5))
    launcher(GRID, (x[1:], None), (7, 0.5))
    launcher(GRID, (x, None), (7, 0.5))
    assert kinds(launcher) == ["compile", "compile", "compile", "compile", "run"]


def test_a_parameter_may_begin_anywhere(launcher):
    x = torch.zeros(64)
    launcher(GRID, (x, x[1:]), (7, 0.5))
    launcher(GRID, (x, x[3:]), (7, 0.5))
    assert kinds(launcher) == ["compile", "run"]


def test_a_profilers_hooks_are_served(launcher, monkeypatch):
    x = torch.zeros(64)
    launcher(GRID, (x, None), (7, 0.5))
    chain = launch.HookChain()
    chain.add(lambda metadata: None)
    monkeypatch.setattr(launch.knobs.runtime, "launch_enter_hook", chain)
    launcher(GRID, (x, None), (7, 0.5))
    assert kinds(launcher) == ["compile", "hooked"]
