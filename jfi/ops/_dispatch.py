"""How an operator is reached: through torch.library where a graph is made, directly where tensors are plain.

A custom operator is one node with known shapes to torch.compile, torch.export and fake tensors, but costs the host
35 µs a call each way, more than launching its kernels.  So an eager call on plain tensors goes past it: to the function
itself, or through one torch.autograd.Function if a gradient is wanted.
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from jfi import compat
from jfi.context import is_traced

#: Types of tensors whose operators do what their names say.
PLAIN = (Tensor, torch.nn.Parameter)

#: What ``operator`` made, by name, so that the operators can be each other's gradients.
operators = SimpleNamespace()


def aligned(x: Tensor) -> Tensor:
    """The tensor, contiguous and from a multiple of 16 bytes on, as TMA and the fast launcher want it."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def operator(
    name: str,
    function: Callable,
    fake: Callable,
    save: Callable | None = None,
    differentiate: Callable | None = None,
) -> Callable:
    """Register ``torch.ops.jfi.<name>`` and return the callable that takes the shorter way where it can.

    Args:
        function: the work, on real tensors; its annotations give the operator's schema.
        fake: the shapes of its outputs.
        save, differentiate: as ``setup_context`` and ``backward`` of torch.library.register_autograd; None where the
            operator has no gradient.
    """
    registered = torch.library.custom_op(f"jfi::{name}", function, mutates_args=())
    registered.register_fake(fake)
    direct = None
    if differentiate is not None:
        registered.register_autograd(differentiate, setup_context=save)

        def forward(ctx, *args):
            output = function(*args)
            save(ctx, args, output)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(differentiate)}
        direct = type(name, (torch.autograd.Function,), methods)

    def call(*args):
        if is_traced() or compat.profiler_enabled():  # a profile shows the operator's name
            return registered(*args)
        wants_grad = False
        for x in args:
            if isinstance(x, Tensor):
                if type(x) not in PLAIN:
                    return registered(*args)
                wants_grad = wants_grad or x.requires_grad
        if wants_grad and torch.is_grad_enabled():
            return registered(*args) if direct is None else direct.apply(*args)
        return function(*args)

    setattr(operators, name, call)
    return call
