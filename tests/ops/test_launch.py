"""The launcher launches a compiled kernel only where the call is one that it was compiled for."""

import ast
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ops import launcher_calls
from ops.ragged import offsets_of

import jfi
from jfi.kernels.common import launch
from jfi.utils import compat

GRID = (3, 1, 1)
HERE = Path(__file__).parent


class Kernel:
    """Compiles once for each first tensor."""

    arg_names = ("x", "y", "n", "scale", "BLOCK")
    params = tuple(SimpleNamespace(do_not_specialize=name == "n") for name in arg_names)
    fn = SimpleNamespace(__name__="kernel")

    def __init__(self):
        self.calls: list = []

    def __getitem__(self, grid):
        def compile_and_launch(*args, **constants):
            self.calls.append(("compile", grid, args, constants))
            return id(args[0])

        return compile_and_launch


@pytest.fixture
def launcher(monkeypatch):
    """A launcher whose compiled kernels take the first tensor they were compiled for; one of one element none."""

    class Interpret:
        value = False

    def compiled_launch(kernel, compiled, index, *like):
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


def test_a_grid_that_cuda_does_not_take_is_refused(launcher):
    for grid in ((2**31, 1, 1), (2**15, 2**15, 2), (1, 2**16, 1), (1, 1, 2**16), (-1, 1, 1)):
        with pytest.raises(ValueError, match=r"the grid of kernel must be of 0 to 2\*\*31 - 1 programs, .* got \("):
            launcher(grid, (torch.zeros(64), None), (7, 0.5))
    assert kinds(launcher) == []


def test_a_call_that_nothing_takes_is_kept_once(launcher, monkeypatch):
    """What its arguments differ in may be what no compiled kernel sees."""
    x, refuse = torch.zeros(64), lambda *_: lambda *_: launcher.kernel.calls.append(("refused",))
    monkeypatch.setattr(compat, "compiled_launch", refuse)
    for _ in range(3):
        launcher(GRID, (x, None), (7, 0.5))
    assert kinds(launcher) == ["compile", "refused", "compile", "refused", "compile"]


def test_a_launcher_keeps_few_compiled_kernels(launcher):
    tensors = [torch.zeros(64) for _ in range(launch.MAX_COMPILED + 9)]
    for x in tensors:
        launcher(GRID, (x, None), (7, 0.5))
    assert [*map(len, launcher.compiled.values())] == [launch.MAX_COMPILED]
    launcher.kernel.calls.clear()
    launcher(GRID, (tensors[0], None), (7, 0.5))
    launcher(GRID, (tensors[-1], None), (7, 0.5))
    assert kinds(launcher) == ["run", *["refused"] * launch.MAX_COMPILED, "compile"]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("is_chain", [True, False])
def test_a_profilers_hooks_are_served(launcher, monkeypatch, hook, is_chain):
    x, chain = torch.zeros(64), launch.knobs.HookChain()
    chain.add(lambda metadata: None)
    with monkeypatch.context() as patched:
        patched.setattr(launch.knobs.runtime, hook, chain if is_chain else lambda metadata: None)
        for _ in range(2):
            launcher(GRID, (x, None), (7, 0.5))
    for _ in range(2):
        launcher(GRID, (x, None), (7, 0.5))
    assert kinds(launcher) == ["compile", "compile", "compile", "run"]


@pytest.mark.parametrize("version", [13010, 13020])
def test_parameters_are_those_that_cuda_reads(version, tmp_path):
    """With a driver that records them; what the kernel was not compiled for is refused."""
    from sysconfig import get_paths

    from triton.backends.nvidia import driver

    flags = ["-shared", "-fPIC", "-w", f"-I{get_paths()['include']}"]
    flags += [f"-I{folder}" for folder in driver.include_dirs]
    sources = {"jfi_launcher.so": Path(launch.__file__).parent / "launcher.c", "libcuda.so.1": HERE / "launcher_stub.c"}
    for name, source in sources.items():
        subprocess.run(["cc", *flags, f"-Wl,-soname,{name}", source, "-o", tmp_path / name], check=True)
    command = [sys.executable, "-I", launcher_calls.__file__, tmp_path, str(version)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "all calls are right\n", done.stderr


@pytest.fixture
def build(monkeypatch):
    """The builds of the launcher that are tried, each of which an error of the fixture ends."""
    from triton.runtime import build

    tried = SimpleNamespace(error=ImportError, number=0)

    def compile_module_from_src(**_):
        tried.number += 1
        raise tried.error

    monkeypatch.setattr(build, "compile_module_from_src", compile_module_from_src)
    compat._launcher.cache_clear()
    yield tried
    compat._launcher.cache_clear()


COMPILED = SimpleNamespace(metadata=SimpleNamespace(num_ctas=1, global_scratch_size=0, profile_scratch_size=0))
ERRORS = [ImportError("libcuda.so.1"), RuntimeError("no C compiler"), subprocess.CalledProcessError(1, "cc"), OSError()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_triton_launches_where_nothing_can_be_built(build, error):
    build.error = error
    for _ in range(2):
        assert compat.compiled_launch(Kernel(), COMPILED, 0, (), (), ()) is None
    assert build.number == 1


def test_triton_launches_on_amd(build, monkeypatch):
    """Whose kernels have other metadata."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert compat.compiled_launch(Kernel(), COMPILED, 0, (), (), ()) is None and build.number == 0


def test_triton_launches_what_has_too_many_parameters(monkeypatch):
    def refuse(*_):
        raise ValueError("a kernel has more parameters than the launcher takes")

    monkeypatch.setattr(compat, "_launcher", lambda: SimpleNamespace(Kernel=refuse))
    options = {"num_warps": 4, "shared": 0, "launch_pdl": False, "launch_cooperative_grid": False}
    compiled = SimpleNamespace(
        metadata=SimpleNamespace(**vars(COMPILED.metadata), **options), src=SimpleNamespace(signature={}), function=7
    )
    assert compat.compiled_launch(Kernel(), compiled, 0, (), (), ()) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("width", [32, 64, 256])
def test_tritons_launcher_gives_the_same_bits(width, device, monkeypatch):
    offsets = offsets_of([0, 70, 3, 200], device)
    query, key, value = (torch.randn(273, 2, width, device=device).bfloat16().requires_grad_() for _ in range(3))
    target, several = (torch.randn(4, t, 2, width, device=device).bfloat16().requires_grad_() for t in (1, 40))

    def results() -> list[torch.Tensor]:
        out = jfi.ops.jagged_attention(query, key, value, query_offsets=offsets, impl="triton")
        pooled = [jfi.ops.target_attention(x, key, value, offsets=offsets, impl="triton") for x in (target, several)]
        leaves = (query, key, value, target, several)
        return [out, *pooled, *torch.autograd.grad([out.sum(), *[x.sum() for x in pooled]], leaves)]

    by_triton, check = [], launch.Launcher._check
    recording = lambda self, *args: (by_triton.append(self.kernel), check(self, *args))[1]  # noqa: E731
    monkeypatch.setattr(launch.Launcher, "_check", recording)
    for launcher in _launchers():
        launcher.compiled.clear()
    first = results()
    assert by_triton
    by_triton.clear()
    fast = results()
    assert not by_triton
    monkeypatch.setattr(launch.compat, "compiled_launch", lambda *_: None)
    for launcher in _launchers():
        launcher.compiled.clear()
    for got in (first, fast):
        for a, b in zip(got, results(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_threads_launch(device):
    """One that has no context of CUDA until then."""
    query, offsets = torch.randn(73, 2, 64, device=device).bfloat16(), offsets_of([0, 70, 3], device)
    attend = lambda: jfi.ops.jagged_attention(query, query, query_offsets=offsets, impl="triton")  # noqa: E731
    want = [attend() for _ in range(2)][1]
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(attend).result(), want)


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
