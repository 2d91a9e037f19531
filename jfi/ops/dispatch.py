"""Ways to an operator: through torch.library where a graph is made, directly where tensors are plain.

A custom operator is one node with known shapes to torch.compile, torch.export and fake tensors, but costs the host
35 µs a call each way, more than launching its kernels.  So an eager call on plain tensors goes past it: to the function
itself, or through one torch.autograd.Function if a gradient is wanted.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function_variadic
from torch.utils._pytree import tree_leaves

from jfi.ops._nested import have_nested, nest, unpack_nested
from jfi.utils import compat
from jfi.utils.context import is_traced, not_scriptable

#: Types of tensors whose operators do what their names say.
PLAIN = (Tensor, torch.nn.Parameter)
#: These and the usual types of other arguments, for which an operator's function is called directly.
_DIRECT = frozenset((*PLAIN, type(None), int, float, bool, str, list, torch.dtype))
_SEQUENCES = frozenset((list, tuple))

#: What ``operator`` made, by name, so that the operators can be each other's gradients.
operators = SimpleNamespace()


def operator(
    name: str,
    function: Callable,
    fake: Callable,
    save: Callable | None = None,
    differentiate: Callable | None = None,
    schema: str | None = None,
    exported: Callable[[], Callable] | None = None,
    keeps: bool = False,
) -> Callable:
    """Register ``torch.ops.jfi.<name>`` and return the callable that takes the shorter way where it can.

    Keyword arguments, such as a plan, spare the function work; only a direct call passes them on.  The callable's
    ``node`` is the torch.autograd.Function of a direct call, for a caller that has checked its tensors.

    Args:
        function: the work, on real tensors. Lists of tensors have no gradient.
        fake: the shapes of its outputs.
        save, differentiate: as ``setup_context`` and ``backward`` of torch.library.register_autograd; None where the
            operator has no gradient.
        schema: the operator's, as torch.library.infer_schema writes it; None to infer it from annotations.
        exported: returns the operator used instead where `is_exported` is true of the first and the last argument; None
            where there is none.
        keeps: the function takes ctx, in which it keeps what ``differentiate`` can do without but would find again.
    """
    registered = torch.library.custom_op(f"jfi::{name}", function, mutates_args=(), schema=schema)
    registered.register_fake(fake)
    direct = None
    if differentiate is not None:
        registered.register_autograd(differentiate, setup_context=save)

        def forward(ctx, *args):
            output = function(*args, ctx=ctx) if keeps else function(*args)
            save(ctx, args, output)
            return output

        def backward(ctx, *grads):
            # To torch.library a list of tensors has a list of gradients, to autograd.Function it is no tensor.
            return tuple([None if type(x) is list else x for x in differentiate(ctx, *grads)])

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        direct = type(name, (torch.autograd.Function,), methods)

    def call(*args, **known):
        if is_traced() or compat.profiler_enabled():  # a profile shows the operator's name
            return (registered if exported is None or not is_exported(args[0], args[-1]) else exported())(*args)
        if compat.functorch_transforms_active():  # of a backward pass; `public` refuses those of a forward
            raise refusal(f"jfi::{name}")
        first = args[0]
        if (first[0] if type(first) is list else first).is_meta:
            return registered(*args)
        kinds = {*map(type, args)}
        if list in kinds:
            kinds |= {type(y) for x in args if type(x) is list for y in x}
        if not kinds <= _DIRECT and any([issubclass(kind, Tensor) for kind in kinds - _DIRECT]):
            return registered(*args)
        if torch.is_grad_enabled():
            for x in args:
                if type(x) in PLAIN and x.requires_grad:
                    return registered(*args) if direct is None else direct.apply(*args)
        return function(*args, **known)

    call.node = direct
    setattr(operators, name, call)
    return call


def is_exported(query: Tensor, impl: str) -> bool:
    """Returns whether the kernels become part of a package, where no operator of jfi exists."""
    # Dynamo takes is_exporting() for true in torch 2.11, also where nothing is exported.
    exports = impl == "triton" and torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    return exports and query.is_cuda


def public(
    function: Callable, packed: Mapping[str, Sequence[str]] = MappingProxyType({}), result: str | None = None
) -> Callable:
    """Decorate a public operator: it accepts whatever implements ``__torch_function__``, and refuses torch.func.

    A ``torch.fx.Proxy`` implements it, so that the tracers of torch.fx and TorchRec record one call of the public
    function.  Costs 1.4 µs per call with three tensors.

    Args:
        function: the operator of plain tensors.
        packed: by the parameter of offsets those whose rows they divide, which may be nested tensors.
        result: the one of ``packed`` whose offsets divide the rows of the result too; None if none does.
    """
    package = function.__module__.rpartition(".")[0]
    name, signature = f"{package}.{function.__name__}", inspect.signature(function)

    def call_nested(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        nested = unpack_nested(packed, bound.arguments)
        out = call(*bound.args, **bound.kwargs)
        if result not in nested:
            return out
        like = nested[result]
        return tuple([nest(x, like) for x in out]) if isinstance(out, tuple) else nest(out, like)

    @functools.wraps(function)
    def call(*args, **kwargs):
        arguments = (*args, *kwargs.values())
        if not _SEQUENCES.isdisjoint(map(type, arguments)):
            arguments = [y for x in arguments for y in (x if type(x) in _SEQUENCES else (x,))]
        if torch.compiler.is_compiling():  # a compiler traces the function itself
            if compat.forward_mode_level() >= 0:
                raise refusal(name)
            return call_nested(*args, **kwargs) if have_nested(arguments) else function(*args, **kwargs)
        if has_torch_function_variadic(*arguments):
            if have_nested(arguments):
                return call_nested(*args, **kwargs)
            return handle_torch_function(call, arguments, *args, **kwargs)
        if compat.functorch_transforms_active() or (compat.forward_mode_level() >= 0 and _have_tangents(arguments)):
            raise refusal(name)
        return function(*args, **kwargs)

    call.__prepare_scriptable__ = not_scriptable(name)
    call.packed = packed
    return call


def refusal(name: str) -> NotImplementedError:
    """The error for transforms, which kernels do not see and custom operators would drop without a word."""
    return NotImplementedError(
        f"{name} takes no transform of torch.func (vmap, grad, jvp, jacrev) and no dual tensors: use torch.autograd"
    )


def _have_tangents(inputs: Sequence[object]) -> bool:
    """Returns whether one of the inputs is a dual tensor of forward-mode differentiation, or a tuple that holds one."""
    tensors = [x for x in tree_leaves(inputs) if isinstance(x, Tensor)]
    return any([forward_ad.unpack_dual(x).tangent is not None for x in tensors])
