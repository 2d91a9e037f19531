"""Every private name of torch, TorchRec and Triton that jfi relies on; tests/test_compat.py fails where one differs.

Torch:
    torch._C._are_functorch_transforms_active      no public way to see vmap or grad at work
    torch.autograd.forward_ad._current_level       no public way to see forward mode at work (jfi/ops/_dispatch.py)
    torch._C._current_graph_task_id                which backward pass is running (jfi/utils/padding.py and
                                                   jfi/modules/fused_tables.py)
    torch.autograd.Variable._execution_engine.queue_callback    a call at the end of that pass
    torch._softmax_backward_data                   the gradient of a softmax from its output alone
    aten._scaled_dot_product_flash_attention_for_cpu, .._backward    no public way to the log-sum-exp
    torch.fx._symbolic_trace.PHWithMeta            placeholders of TorchRec's train pipelines (jfi/data/batch.py)
    torch.autograd._profiler_enabled               no public way to see a profiler at work
    Optimizer._warned_capturable_if_run_uncaptured    silences a warning for steps before a capture (build.py)
    torch.utils._python_dispatch                   is_in_torch_dispatch_mode: fake tensors, make_fx
    torch.distributed._symmetric_memory            empty, rendezvous, and of what that returns buffer_ptrs and barrier
                                                   (jfi/distributed/peer_memory.py)

TorchRec:
    KeyedJaggedTensor._jt_dict                     the cache of to_dict, which fails at stride 0 (jfi/modules/inputs.py)
                                                  and stays where it was in `to` (jfi/cuda_graphs/static_batch.py)
    ManagedCollisionEmbeddingCollection._embedding_collection    the tables inside (jfi/modules/validation.py)
    LazyAwaitable._wait_async                      waits once, for all that read the awaitable (jfi/modules/inputs.py)

Triton, for launches past ``kernel[grid](...)``, which takes three times the host time:
    JITFunction.params                             what a kernel is not specialized on
    CompiledKernel.run, .function, .packed_metadata   the launch itself, in this order of arguments
    knobs.HookChain.calls                          whether a profiler wants to see launches
    driver.active.get_current_stream               the current CUDA stream's handle
    gluon's TensorDescriptor.__new__               a descriptor without its checks (jagged_attention/sm90_primitives.py)
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

functorch_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
profiler_enabled: Callable[[], bool] = torch.autograd._profiler_enabled
#: How many dual_level() of forward-mode differentiation are entered, less one; a partial has no Python frame.
forward_mode_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level")
#: A number of the backward pass that is running, another one for each.
current_backward: Callable[[], int] = torch._C._current_graph_task_id
#: Registers a call without arguments for the end of the backward pass that is running.
call_after_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
softmax_backward: Callable[..., torch.Tensor] = torch._softmax_backward_data
flash_attention_for_cpu: Callable = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_for_cpu_backward: Callable = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

__all__ = [
    "alignment_free",
    "call_after_backward",
    "current_backward",
    "expect_capture",
    "flash_attention_for_cpu",
    "flash_attention_for_cpu_backward",
    "forward_mode_level",
    "functorch_transforms_active",
    "is_hooked",
    "is_in_torch_dispatch_mode",
    "launch_parts",
    "profiler_enabled",
    "run_compiled",
    "softmax_backward",
    "specialized",
    "symmetric_memory",
]


def expect_capture(optimizer: torch.optim.Optimizer) -> None:
    """Silences the warning of an optimizer with capturable=True that a step of it is not captured."""
    optimizer._warned_capturable_if_run_uncaptured = True


def symmetric_memory(
    size: int, device: torch.device, group: torch.distributed.ProcessGroup
) -> tuple[torch.Tensor, Any]:
    """Memory of `size` bytes that the other GPUs of a host can write to, and its handle; all ranks call it together."""
    import torch.distributed._symmetric_memory as symmetric

    memory = symmetric.empty(size, dtype=torch.uint8, device=device)
    return memory, symmetric.rendezvous(memory, group)


def alignment_free(kernel) -> tuple[bool, ...]:
    """By parameter of a triton.JITFunction, whether its tensor may begin at any address without another compilation."""
    return tuple(parameter.do_not_specialize_on_alignment for parameter in kernel.params)


def specialized(kernel) -> tuple[bool, ...]:
    """By parameter of a triton.JITFunction, whether another integer there may be another compilation."""
    return tuple(not parameter.do_not_specialize for parameter in kernel.params)


def is_hooked(hook) -> bool:
    """Whether somebody, such as a profiler, has added to a triton.knobs.HookChain."""
    return hook is not None and bool(hook.calls)


def launch_parts(compiled) -> tuple:
    """What `run_compiled` needs of a compiled kernel that has been launched once."""
    return compiled.run, compiled.function, compiled.packed_metadata


def run_compiled(parts: tuple, grid: tuple[int, int, int], stream: int, arguments: list) -> None:
    """Launch a compiled kernel: addresses for tensors, anything for constants, no launch hooks."""
    run, function, packed_metadata = parts
    run(*grid, stream, function, packed_metadata, None, None, None, *arguments)
