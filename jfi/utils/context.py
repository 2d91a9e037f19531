"""State around a call: compilers, tracers, what may be read, autocast, derivatives, TorchScript, padding of its batch.

The batches of a captured step are padded to a capacity: padding follows the values that the lengths of a key count.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import NamedTuple

import torch

from jfi.utils import compat

_NOTHING = nullcontext()
#: Types of devices whose tensors are read without waiting, and whether `jfi.ops.validation` waits for the others.
_READABLE = ("cpu",)
validates_on_gpu: ContextVar[bool] = ContextVar("validates_on_gpu", default=False)


def is_traced() -> bool:
    """Returns whether a compiler, a tracer or a dispatch mode (fake tensors, make_fx) is active."""
    return torch.compiler.is_compiling() or compat.is_in_torch_dispatch_mode() or torch.jit.is_tracing()


def may_read(x: torch.Tensor) -> bool:
    """Returns whether the contents of x exist, and reading them stalls no device or is wanted."""
    # First, since a compiler cannot trace ContextVar.get.
    if torch.compiler.is_compiling() or type(x) is not torch.Tensor or x.is_meta:
        return False
    return (x.device.type in _READABLE or validates_on_gpu.get()) and not is_traced()


def default_impl(like: torch.Tensor) -> str:
    """Returns what impl="auto" stands for."""
    return "triton" if like.is_cuda and like.dtype != torch.float64 else "torch"


def without_autocast(device_type: str) -> AbstractContextManager:
    """Returns a context without autocast; its 3 µs are spent only where autocast is enabled."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return _NOTHING
    return torch.autocast(device_type, enabled=False)


def once_differentiable(backward: Callable) -> Callable:
    """Decorates the backward of an autograd.Function that itself has no derivative: a second derivative raises.

    torch's decorator raises only where the incoming gradient requires a gradient, and not where gradients of some
    inputs alone are computed: else a second derivative is 0 without a word. The Function must save the inputs, or the
    outputs, that its gradient depends on.
    """

    @functools.wraps(backward)
    def call(ctx, *grads):
        if not torch.is_grad_enabled():  # it is only under create_graph=True
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        sources = [x for x in (*grads, *ctx.saved_tensors) if x is not None and x.requires_grad]
        return _FirstDerivative.apply(found, *sources)

    return call


class _FirstDerivative(torch.autograd.Function):
    """Returns gradients as functions of all that they depend on, which have no derivative."""

    @staticmethod
    def forward(ctx, found: tuple[torch.Tensor | None, ...], *sources: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return found

    @staticmethod
    def backward(ctx, *grads: torch.Tensor) -> None:
        raise RuntimeError("attention has no second derivatives: its gradients cannot be differentiated")


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


class _Batch(NamedTuple):
    is_padded: bool = False
    fixed_length_keys: frozenset[str] = frozenset()


_UNPADDED = _Batch()


class PaddingState:
    """State of the calling thread, or, in a backward pass, of the newest `padded_to_capacity` block of all threads.

    A backward pass runs in threads of its own, and activation checkpointing runs a part of the forward pass there.
    """

    def __init__(self) -> None:
        #: The open `padded_to_capacity` blocks of all threads.
        self.blocks: list[_Batch] = []
        self.of_thread = threading.local()

    def _batch(self) -> _Batch:
        if not self.blocks:
            return _UNPADDED
        if torch.compiler.is_compiling():  # its guards see a change of `blocks`, not one of a thread's state
            return self.blocks[-1]
        default = self.blocks[-1] if compat.current_backward() != -1 else _UNPADDED
        return getattr(self.of_thread, "batch", None) or default

    @property
    def is_padded(self) -> bool:
        """Returns whether jagged tensors may have padding behind their last sample."""
        return self._batch().is_padded

    @property
    def fixed_length_keys(self) -> frozenset[str]:
        """Returns the keys that have one value a sample, though their lengths are not read; they are not padded."""
        return self._batch().fixed_length_keys


padding_state = PaddingState()


@contextmanager
def padded_to_capacity(fixed_length_keys: frozenset[str] = frozenset()) -> Iterator[None]:
    """Declares that jagged tensors within the block may be padded, but for keys with one value a sample.

    Backward passes and compiled functions of other threads see the block as well: they look like its own.
    """
    state, batch = padding_state, _Batch(True, fixed_length_keys)
    outer = getattr(state.of_thread, "batch", None)
    state.blocks.append(batch)
    state.of_thread.batch = batch
    try:
        yield
    finally:
        state.of_thread.batch = outer
        last = max(i for i, block in enumerate(state.blocks) if block is batch)
        del state.blocks[last]
