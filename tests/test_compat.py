"""The private names of torch and Triton that jfi uses are as it uses them; a failure here means: read jfi/compat.py."""

import inspect
from dataclasses import fields

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from jfi import compat

triton = pytest.importorskip("triton")


def test_torch_tells_who_looks_on():
    assert not compat.functorch_transforms_active() and not compat.is_in_torch_dispatch_mode()
    seen = []
    torch.vmap(lambda x: seen.append(compat.functorch_transforms_active()) or x)(torch.zeros(2))
    with FakeTensorMode():
        seen.append(compat.is_in_torch_dispatch_mode())
    assert seen == [True, True]
    assert not compat.profiler_enabled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert compat.profiler_enabled()


def plain_kernel(x_ptr, y_ptr, n, BLOCK: triton.language.constexpr):
    pass


def test_a_kernel_tells_what_it_is_specialized_on():
    options = {"do_not_specialize": ["n"], "do_not_specialize_on_alignment": ["y_ptr"]}
    kernel = triton.runtime.JITFunction(plain_kernel, **options)
    assert compat.alignment_free(kernel) == (False, True, False, False)
    assert compat.specialized(kernel) == (True, True, False, True)
    assert kernel.arg_names == ["x_ptr", "y_ptr", "n", "BLOCK"] and kernel.fn is plain_kernel


def test_hooks_are_seen():
    from triton import knobs

    assert isinstance(knobs.runtime.launch_enter_hook, knobs.HookChain | None)
    chain = knobs.HookChain()
    assert not compat.is_hooked(chain) and not compat.is_hooked(None)
    chain.add(lambda metadata: None)
    assert compat.is_hooked(chain)


def test_a_compiled_kernel_is_launched_as_its_own_launcher_does():
    """The arguments before a kernel's own: grid, stream, function, metadata and three for hooks."""
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.compiler import CompiledKernel

    assert isinstance(CompiledKernel.run, property)
    source = inspect.getsource(triton.runtime.JITFunction.run)
    call = source[source.rindex("kernel.run(") :]
    names = ("grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata", "*bound_args")
    assert all(name in " ".join(call.split()) for name in names)
    assert "knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook," in " ".join(call.split())
    parameters = list(inspect.signature(CudaLauncher.__call__).parameters)
    assert parameters[:6] == ["self", "gridX", "gridY", "gridZ", "stream", "function"] and parameters[-1] == "args"
    assert "packed_metadata" in inspect.getsource(CompiledKernel)


def test_tuples_of_pointers_are_taken():
    """Types of nested arguments, and that alignment is told for each."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    x = torch.zeros(64)
    kinds, keys = native_specialize_impl(CUDABackend, (x, None, x[1:]), False, True, True)
    assert kinds == ("*fp32", "constexpr", "*fp32") and keys == ("D", None, "")


def test_gluons_descriptor_has_the_fields_that_are_set():
    hopper = pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    names = [field.name for field in fields(hopper.TensorDescriptor)]
    assert names[:5] == ["base", "shape", "strides", "block_shape", "layout"] and "padding" in names
