"""Which kernels a call would run, and why."""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from jfi.plan import AttentionPlan, Device, device_of

#: By operator: what checks its arguments and returns its kernels' inputs and implementation, and what plans these.
_planners: dict[Callable, tuple[Callable, Callable]] = {}


def explains(operator: Callable, prepare: Callable, plan: Callable) -> None:
    """Let `explain` take an operator.

    Args:
        operator: the public function.
        prepare: with the operator's parameters, returns (inputs, impl): a NamedTuple whose first field is the query.
        plan: of (inputs, impl, device).
    """
    _planners[operator] = prepare, plan


def explain(operator: Callable, /, *args: object, device: Device | None = None, **kwargs: object) -> AttentionPlan:
    """The plan of a call: which kernels would run it, and why.  Nothing is run.

    Args:
        operator: `jfi.ops.target_attention` or `jfi.ops.jagged_attention`.  The attention of
            `jfi.ops.absorbed_target_attention` is that of target_attention with queries [F · B, T, H, D_x] and keys
            [S, 1, D_x].
        *args: its arguments; tensors may be real, fake or on the meta device.
        **kwargs: its arguments by name.
        device: the kind of device to plan for, which this host need not have, such as ``H200``, ``A100`` or ``CPU`` of
            `jfi.plan`.  Tensors are then taken to begin at multiples of 16 bytes, as TMA needs, wherever they begin.
            None means the tensors' own device, which must not be meta; plain tensors count with their addresses.

    Returns:
        The plan.  It prints the family of kernels, why it was chosen, and the tiles of each kernel, forward and
        backward, and how its work is split.

    Raises:
        TypeError: an operator without a plan.
        ValueError, TypeError: an argument that the operator refuses.

    Example:
        >>> import torch, jfi
        >>> from jfi.plan import H200
        >>> query, history = torch.randn(3, 1, 4, 32), torch.randn(5, 1, 32)
        >>> offsets = torch.tensor([0, 2, 2, 5])
        >>> jfi.ops.explain(jfi.ops.target_attention, query, history, offsets=offsets).family
        'cpu'
        >>> plan = jfi.ops.explain(jfi.ops.target_attention, query, history, offsets=offsets, device=H200)
        >>> plan.family, plan.forward[0].kernel
        ('target_few', 'target_attention_few_fwd')
    """
    if operator not in _planners:
        known = ", ".join(x.__name__ for x in _planners)
        raise TypeError(f"operator must be one of {known}, got {getattr(operator, '__name__', operator)!r}")
    prepare, plan = _planners[operator]
    call = inspect.signature(operator).bind(*args, **kwargs)
    call.apply_defaults()
    query = next(x for x in call.args if isinstance(x, Tensor))
    if device is None and query.device.type == "meta":
        raise ValueError("device must be given where tensors are on the meta device, got None")
    if device is None and type(query) in (Tensor, torch.nn.Parameter):
        inputs, impl = prepare(*call.args, **call.kwargs)
        return plan(inputs, impl, None)
    device = device_of(query.device) if device is None else device
    for name, x in call.arguments.items():
        if isinstance(x, Tensor):
            call.arguments[name] = torch.empty(x.shape, dtype=x.dtype, device="meta")
    if call.arguments["impl"] == "auto" and device.type == "cuda" and query.dtype != torch.float64:
        call.arguments["impl"] = "triton"
    inputs, impl = prepare(*call.args, **call.kwargs)
    return plan(inputs, impl, device)
