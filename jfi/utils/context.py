"""Compilers, tracers, interpreter, autocast and TorchScript around a call."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from jfi.utils import compat

_NOTHING = nullcontext()


def is_traced() -> bool:
    """Returns whether a compiler, a tracer or a dispatch mode (fake tensors, make_fx) is active."""
    return torch.compiler.is_compiling() or compat.is_in_torch_dispatch_mode() or torch.jit.is_tracing()


def without_autocast(device_type: str) -> AbstractContextManager:
    """Returns a context without autocast; its 3 µs are spent only where autocast is enabled."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return _NOTHING
    return torch.autocast(device_type, enabled=False)


def not_scriptable(name: str) -> Callable:
    """Returns a `__prepare_scriptable__` for a module or function; torch.jit.script calls it before it compiles."""

    def refuse(*_: object) -> None:
        raise NotImplementedError(
            f"torch.jit.script does not support {name}: use torch.export, torch.compile or torch.jit.trace"
        )

    return refuse


def interprets() -> bool:
    """Returns whether the kernels run through Triton's interpreter, which takes CPU tensors."""
    try:
        from triton import knobs
    except ImportError:  # a platform without Triton
        return False
    return bool(knobs.runtime.interpret)
