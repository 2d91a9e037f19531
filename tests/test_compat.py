"""The private names of torch and Triton that jfi uses are as it uses them; after a failure read jfi/utils/compat.py."""

import inspect
from dataclasses import fields

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from jfi.utils import compat

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


def test_torch_tells_of_forward_mode():
    seen = []

    def look(x):
        seen.append(compat.forward_mode_level() >= 0)
        return x.sum()

    x = torch.ones(2)
    look(x)
    torch.func.grad(look)(x)
    torch.vmap(look)(x[None])
    torch.func.jvp(look, (x,), (x,))
    assert seen == [False, False, False, True]


def test_torch_calls_back_at_the_end_of_a_backward_pass():
    seen = []

    def note(grad):
        seen.append(compat.current_backward())
        compat.call_after_backward(lambda: seen.append("end"))

    x = torch.ones(2, requires_grad=True)
    y, z = x * 2, x * 3
    for one in (y, z):
        one.register_hook(note)
    (y + z).sum().backward(retain_graph=True)
    y.sum().backward()
    first, again, *ends, second, last = seen
    assert first == again >= 0 and ends == ["end", "end"] and second != first and last == "end"


def test_atens_private_operators_have_the_arguments_that_are_passed():
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    schemas = {
        flash: "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, "
        "Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)",
        f"{flash}_backward": "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
        "float dropout_p, bool is_causal, *, Tensor? attn_mask=None, float? scale=None) -> "
        "(Tensor grad_query, Tensor grad_key, Tensor grad_value)",
        "_softmax_backward_data": "(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) -> Tensor",
    }
    for name, schema in schemas.items():
        assert str(getattr(torch.ops.aten, name).default._schema) == f"aten::{name}{schema}"


def test_torchrec_has_the_private_attributes_that_are_used():
    jagged = pytest.importorskip("torchrec.sparse.jagged_tensor")
    modules = pytest.importorskip("torchrec.modules.mc_embedding_modules")
    assert "self._jt_dict" in inspect.getsource(jagged.KeyedJaggedTensor.to_dict)
    assert "_embedding_collection" in inspect.getsource(modules.ManagedCollisionEmbeddingCollection)
    awaitable = pytest.importorskip("torchrec.distributed.types").LazyNoWait({})
    assert type(awaitable)._wait_async(awaitable) is awaitable._result == {}


def test_a_placeholder_keeps_its_key():
    from torch.fx._symbolic_trace import PHWithMeta

    assert PHWithMeta(ph_key="x").ph_key == "x"


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
