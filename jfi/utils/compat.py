"""Private names of PyTorch, TorchRec and Triton that jfi uses: why each, and what fails without it.

tests/test_compat.py finds every use in jfi, checks that it is listed and that the name still exists: where that fails
after an upgrade, look here. Some names are documented, but lie in private modules.

PyTorch:
    torch._C._are_functorch_transforms_active    sees vmap and grad, for which no public name exists: operators would
        pass torch.func by, with wrong gradients
    torch.autograd.forward_ad._current_level     sees forward-mode differentiation: operators would drop tangents
    torch.autograd._profiler_enabled             sees a profiler: traces would miss the operators' names
    torch.utils._python_dispatch.is_in_torch_dispatch_mode    sees fake tensors and make_fx: kernels would run on them
    torch.utils._pytree                          takes batches and arguments apart
    torch._C._current_graph_task_id              tells backward passes apart: fused table updates, padding of captured
        steps in threads of autograd
    torch._C._autograd._get_current_graph_task_keep_graph    sees retain_graph=True: rows that a second backward pass
        of the graph needs would have been stepped
    torch.Tensor._version                        counts changes in place: tables that were stepped after attention read
        their rows by id
    torch.autograd.Variable._execution_engine    calls back at the end of a backward pass: fused table updates
    torch._softmax_backward_data                 gradient of a softmax from its output: jagged_softmax on a CPU
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu    returns the log-sum-exp: jagged attention on a CPU
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward    its gradient
    torch._check                                 documented; tells torch.export that two sizes are equal
    torch._assert_async                          refuses what only the device knows, without a wait: histories too long
    torch._foreach_copy_                         copies many tensors in one launch: moving averages of parameters
    torch._ops.OpOverload                        type of an operator in an exported program: export_module
    torch._ops.OpOverload._schema                its name
    torch._inductor.aoti_compile_and_package     documented; writes an artifact's package
    torch._inductor.aoti_load_package            documented; loads it
    torch._inductor.runtime.cache_dir_utils.cache_dir    names the folder in an error of a full disk: export
    torch.fx._symbolic_trace.PHWithMeta          placeholder of TorchRec's train pipelines: Batch.to_proxy_tuple
    torch.nested._internal.nested_tensor.NestedTensor    the type of nested tensors of the jagged layout: reading their
        layout takes 5 µs
    torch.nested._internal.nested_tensor.NestedTensor._ragged_idx    sees a transposed one, whose values are
        not packed rows
    torch.nested._internal.nested_tensor.NestedTensor._maybe_max_seqlen    the longest length, if the host knows it:
        max_seqlen of operators
    torch.nested._internal.nested_tensor.NestedTensor._maybe_min_seqlen    likewise, for results
    torch.nn.Module._forward_hooks               sees hooks: tables with hooks would be read past them
    torch.nn.Module._forward_pre_hooks           likewise
    torch.nn.Module._parameters                  reads parameters of stacked attention without nn.Module.__getattr__
    torch.optim.Optimizer._warned_capturable_if_run_uncaptured    silences the warning for steps before a capture
    torch.distributed._shard.metadata.ShardMetadata    where the rows of a table lie: sharded tables
    torch.distributed._shard.sharded_tensor.ShardedTensor    TorchRec's type of a sharded table: pretrained tables,
        weight decay of sharded tables
    torch.distributed._shard.sharded_tensor.ShardedTensor._init_from_local_shards_and_global_metadata    makes one
        without communication
    torch.distributed._shard.sharded_tensor.Shard    its parts
    torch.distributed._shard.sharded_tensor.ShardedTensorMetadata    its shape and that of its parts
    torch.distributed._shard.sharded_tensor.TensorProperties    its type
    torch.distributed.remote_device._remote_device    a shard's rank and device: planned groups of tables
    torch.distributed._symmetric_memory          memory that GPUs of a host write to: peer memory of sharded attention
    torch.distributed.optim.apply_optimizer_in_backward._in_backward_optimizers    which tables have an optimizer:
        require_optimizer_in_backward

TorchRec:
    torchrec.sparse.jagged_tensor.KeyedJaggedTensor._jt_dict    cache of to_dict: it fails at stride 0, and stays on the
        old device in `to`
    torchrec.modules.embedding_modules.EmbeddingBagCollection._is_weighted    FusedEmbeddingBagCollection
    torchrec.modules.embedding_modules.EmbeddingBagCollection._embedding_names    likewise
    torchrec.modules.embedding_modules.EmbeddingBagCollection._lengths_per_embedding    likewise
    torchrec.distributed.types.LazyAwaitable._wait_async    waits once, for all that read the awaitable: sharded tables
    torchrec.distributed.embedding.ShardedEmbeddingCollection._lookups    local tables: their fused optimizers
    torchrec.distributed.embedding_lookup.GroupedEmbeddingsLookup._emb_modules    likewise
    torchrec.distributed.embedding.ShardedEmbeddingCollection._has_uninitialized_input_dist    False tells TorchRec's
        pipelines that there is none to set up

Triton, for launches past ``kernel[grid](...)``, which takes the host longer; these names have no underscore:
    JITFunction.params                             what a kernel is not specialized on
    CompiledKernel.function, .metadata, .src.signature    what `kernels/common/launcher.c` launches
    runtime.build.compile_module_from_src, backends.nvidia.driver.include_dirs    build it
    knobs.runtime.launch_enter_hook, launch_exit_hook, HookChain.calls    whether a profiler wants to see launches
    driver.active.get_current_stream               the current CUDA stream's handle
    gluon's TensorDescriptor.__new__               a descriptor without its checks (jagged_attention/sm90_primitives.py)
"""

import struct
import subprocess
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.nested._internal.nested_tensor import NestedTensor as NestedTensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode as is_in_torch_dispatch_mode

functorch_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
profiler_enabled: Callable[[], bool] = torch.autograd._profiler_enabled
#: Number of open dual_level() blocks of forward-mode differentiation, less one; a partial has no Python frame.
forward_mode_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level")
#: Number of the running backward pass, distinct for each; -1 outside.
current_backward: Callable[[], int] = torch._C._current_graph_task_id
#: Returns whether the running backward pass keeps its graph for another one.
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
#: Registers a call without arguments for the end of the running backward pass.
call_after_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
# torch 2.13 renames it, and warns of the old name.
all_gather: Callable = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
softmax_backward: Callable[..., torch.Tensor] = torch._softmax_backward_data
flash_attention_for_cpu: Callable = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_for_cpu_backward: Callable = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def symmetric_memory(
    size: int, device: torch.device, group: torch.distributed.ProcessGroup
) -> tuple[torch.Tensor, Any]:
    """Returns memory of `size` bytes that the other GPUs of a host can write to, and its handle; all ranks call it."""
    import torch.distributed._symmetric_memory as symmetric

    memory = symmetric.empty(size, dtype=torch.uint8, device=device)
    return memory, symmetric.rendezvous(memory, group)


def specialized(kernel) -> tuple[bool, ...]:
    """Returns for each parameter of a kernel whether another integer may need another compilation."""
    return tuple(not parameter.do_not_specialize for parameter in kernel.params)


def have_launch_hooks(runtime: Any) -> bool:
    """Returns whether anyone, such as a profiler, wants to see Triton's launches; runtime: triton.knobs.runtime."""
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook  # HookChains, unless a user has set others
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


#: The types of a TMA descriptor as CUDA numbers them.
_TMA_TYPES = {torch.float16: 6, torch.bfloat16: 9}
#: launcher.c's Tile, and the types of numbers as it takes them.
_TILE, _NUMBERS = "14i", {"i32": "i", "i64": "l", "fp32": "f"}


@cache
def _launcher() -> Any:
    """Returns the module of launcher.c, built at its first use; None without an NVIDIA GPU and a C compiler."""
    if torch.version.hip is not None:
        return None
    try:
        from triton.backends.nvidia.driver import include_dirs
        from triton.runtime.build import compile_module_from_src

        source = (Path(__file__).parents[1] / "kernels/common/launcher.c").read_text()
        return compile_module_from_src(src=source, name="jfi_launcher", include_dirs=include_dirs)
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError):
        return None


def compiled_launch(
    kernel: Any, compiled: Any, device: int, tensors: tuple, numbers: tuple[int | float, ...], descriptors: tuple
) -> Callable[..., bool] | None:
    """Returns what launches a kernel that Triton has compiled for these arguments; None for what Triton alone launches.

    It takes (grid, stream, tensors, numbers, descriptors), and returns False where they are not like these.
    """
    launcher, metadata = _launcher(), getattr(compiled, "metadata", None)  # None if a hook of Triton compiles later
    if launcher is None or metadata is None or metadata.num_ctas != 1 or metadata.launch_cooperative_grid:
        return None
    if metadata.launch_pdl or metadata.global_scratch_size or metadata.profile_scratch_size:
        return None
    dtypes, is_aligned, tiles = [None if x is None else x.base.dtype for x in descriptors], [], b""
    for parameter, x in zip(kernel.params[len(descriptors) :], tensors, strict=False):
        own = not parameter.do_not_specialize_on_alignment
        for one in x if isinstance(x, tuple) else (x,):
            if own and one is not None and one.data_ptr() % 16:
                return None
            dtypes.append(None if one is None else one.dtype)
            is_aligned.append(own)
    described = iter(getattr(metadata, "tensordesc_meta", None) or ())
    for x in descriptors:
        if x is None:
            tiles += bytes(struct.calcsize(_TILE))
            continue
        tile = next(described, None)
        if tile is None or tile["fp4_padded"] or x.base.dtype not in _TMA_TYPES or x.padding != "zero":
            return None
        own, loaded = ([*sides, *[0] * 5][:5] for sides in (x.block_shape, reversed(tile["block_size"])))
        kinds = len(x.block_shape), tile["swizzle"], tile["elem_size"], _TMA_TYPES[x.base.dtype]
        tiles += struct.pack(_TILE, *kinds, *own, *loaded)
    first = len(descriptors) + len(tensors)
    types = [compiled.src.signature[name] for name in kernel.arg_names[first : first + len(numbers)]]
    if not {*types} <= _NUMBERS.keys():
        return None
    kinds = "".join(map(_NUMBERS.get, types)).encode()
    size = metadata.num_warps * 32, metadata.shared
    try:
        return launcher.Kernel(compiled.function, device, *size, tuple(dtypes), tiles, bytes(is_aligned), kinds).launch
    except ValueError:  # too many parameters
        return None
