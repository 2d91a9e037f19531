"""The private names of torch and Triton that jfi uses are as it uses them; after a failure read jfi/utils/compat.py."""

import ast
import functools
import importlib
import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from jfi.utils import compat

triton = pytest.importorskip("triton")
ROOT = Path(__file__).parents[1] / "jfi"
#: Names of PyTorch and TorchRec in the list of jfi/utils/compat.py.
LISTED = re.findall(r"^    ((?:torch|torchrec)\.[\w.]+)", compat.__doc__, re.MULTILINE)
#: Private by their names, but documented parts of Python's library.
STANDARD = {"_actions", "_asdict", "_exit", "_fields", "_replace"}
#: Buffers of PolicyModule, which registers them under computed names.
BUFFERS = {"_cap", "_edges", "_keep", "_weight"}


def private(name: str) -> list[str]:
    return [part for part in name.split(".") if part.startswith("_") and not part.startswith("__")]


@functools.cache
def defined_in(source: str) -> set[str]:
    """The names that a file defines: functions, classes, fields, variables, and attributes of self."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if getattr(node.value, "id", "") in ("self", "cls", "ctx") else set()
    return found


def foreign_names(source: str, files: dict[str, str]) -> set[str]:
    """The private names of other packages that a file uses; `files` has the sources of jfi's modules by name."""
    tree, own, imported, found = ast.parse(source), set(), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if not name.startswith("jfi"):
                found |= {name} if private(name) else set()
                imported.add(name.rpartition(".")[2])
            for module in {name, name.rpartition(".")[0]} & files.keys():  # base classes are there
                own |= defined_in(files[module])
    own |= defined_in(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in STANDARD | BUFFERS:
            if node.attr not in own or (isinstance(node.value, ast.Name) and node.value.id in imported):
                found.add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            found |= {name} if private(name) and name not in own | STANDARD else set()
    return found


def modules_of_jfi() -> dict[str, str]:
    return {
        ".".join(["jfi", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__"): path.read_text()
        for path in ROOT.rglob("*.py")
    }


def test_every_private_name_is_listed():
    files, parts = modules_of_jfi(), {part for name in LISTED for part in private(name)}
    used = {module: foreign_names(source, files) for module, source in files.items()}
    unlisted = {
        (module, name)
        for module, names in used.items()
        for name in names
        if not (name in parts if "." not in name else any(name == one or name.startswith(f"{one}.") for one in LISTED))
    }
    assert unlisted == set(), "list these names in jfi/utils/compat.py, with the reason"


def test_every_listed_name_is_used():
    text = "\n".join(source.removeprefix(f'"""{compat.__doc__}"""') for source in modules_of_jfi().values())
    words = set(re.findall(r"\w+", text))
    assert [name for name in LISTED if private(name)[-1] not in words] == []


def test_private_names_of_other_packages_are_found():
    source = """
import torch
from jfi.base import Base
from torch.utils import _pytree as pytree
from torchrec.sparse import jagged_tensor
class Own(Base):
    _field: int
    def __init__(self, x):
        self._x, self._seen = x._jt_dict, x._replace(a=1)
        torch._check(self._of_base and self._seen and hasattr(x, "_hooks") and self._field)
"""
    files = {"jfi.base": "class Base:\n    _check = None\n    def _of_base(self): ..."}
    assert foreign_names(source, files) == {"torch.utils._pytree", "_jt_dict", "_check", "_hooks"}


@pytest.mark.parametrize("name", LISTED)
def test_listed_names_exist(name):
    """As a module, as an attribute, or, for what instances have, in the source of the module."""
    if name.startswith("torchrec"):
        pytest.importorskip("torchrec")
    parts, last = name.split("."), None
    for end in range(len(parts), 0, -1):
        try:
            owner = last = importlib.import_module(".".join(parts[:end]))
            break
        except ModuleNotFoundError:
            continue
    for part in parts[end:]:
        owner, last = last, getattr(last, part, None)
        if last is None:
            module = sys.modules[getattr(owner, "__module__", None) or owner.__name__]
            assert part == parts[-1] and re.search(rf"\b{part}\b", inspect.getsource(module))


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
    assert "self._jt_dict" in inspect.getsource(jagged.KeyedJaggedTensor.to_dict)
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
    free = [parameter.do_not_specialize_on_alignment for parameter in kernel.params]
    assert free == [False, True, False, False]
    assert compat.specialized(kernel) == (True, True, False, True)
    assert kernel.arg_names == ["x_ptr", "y_ptr", "n", "BLOCK"] and kernel.fn is plain_kernel


def test_hooks_are_seen():
    from triton import knobs

    assert isinstance(knobs.runtime.launch_enter_hook, knobs.HookChain | None)
    assert isinstance(knobs.runtime.launch_exit_hook, knobs.HookChain | None)
    chain = knobs.HookChain()
    runtime = SimpleNamespace(launch_enter_hook=chain, launch_exit_hook=None)
    assert not compat.have_launch_hooks(runtime)
    chain.add(lambda metadata: None)
    assert compat.have_launch_hooks(runtime)


def test_a_compiled_kernel_has_what_its_launch_takes():
    """A descriptor is a map, the shape and the strides, in this order."""
    from triton.backends.nvidia import driver
    from triton.compiler import CompiledKernel

    source = inspect.getsource(CompiledKernel)
    assert "self.function" in source and "self.metadata" in source and "self.src" in source
    names = "num_ctas global_scratch_size profile_scratch_size launch_cooperative_grid launch_pdl tensordesc_meta"
    source = inspect.getsource(driver)
    assert all(name in source for name in names.split())
    meta = {"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [64, 64], "fp4_padded": False}
    expanded = driver.expand_signature(["tensordesc<fp16[64, 64]>", "*fp32", "i32"], [meta])
    assert expanded == ["nvTmaDesc", "i32", "i32", "i64", "i64", "*fp32", "i32"]
    assert "[cu_tensor_map, *shape, *strides]" in source


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
