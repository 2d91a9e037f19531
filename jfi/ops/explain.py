"""Which kernels a call would run, and why."""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from jfi.kernels.plan import AttentionPlan, Device, device_of, plan_jagged_attention, plan_target_attention
from jfi.ops._nested import unpack_nested
from jfi.ops.digit_attention import digit_attention, prepare_digit_attention
from jfi.ops.jagged_attention import jagged_attention, prepare_jagged_attention
from jfi.ops.target_attention import prepare_target_attention, target_attention

#: By operator what checks its arguments and returns (inputs, impl), and what plans these and a device.
_PLANNERS: dict[Callable, tuple[Callable, Callable]] = {
    target_attention: (prepare_target_attention, plan_target_attention),
    digit_attention: (prepare_digit_attention, plan_target_attention),
    jagged_attention: (prepare_jagged_attention, plan_jagged_attention),
}


def explain(operator: Callable, /, *args: object, device: Device | None = None, **kwargs: object) -> AttentionPlan:
    """Returns the plan of a call, which kernels would run it and why, without running anything.

    Args:
        operator: `jfi.ops.target_attention`, `jfi.ops.digit_attention` or `jfi.ops.jagged_attention`.
        *args: its arguments; tensors may be real, fake or on the meta device.
        **kwargs: its arguments by name.
        device: the device to plan for, which this host need not have, such as ``H200``, ``A100``, ``MI300X`` or ``CPU``
            of `jfi.kernels.plan`.  Tensors are then taken to begin at multiples of 16 bytes, as TMA needs, wherever
            they begin.  None means their own device, which must not be meta; plain tensors count with their addresses.

    Returns:
        The plan.  It prints the family of kernels, why it was chosen, the device with its architecture and shared
        memory, the tiles of each kernel, forward and backward, and how its work is split.

    Raises:
        TypeError: an operator without a plan, or a device that is no `jfi.kernels.plan.Device`.
        ValueError, TypeError: an argument that the operator refuses.

    Example:
        >>> import torch, jfi
        >>> from jfi.kernels.plan import H200
        >>> query, history = torch.randn(3, 1, 4, 32), torch.randn(5, 1, 32)
        >>> offsets = torch.tensor([0, 2, 2, 5])
        >>> jfi.ops.explain(jfi.ops.target_attention, query, history, offsets=offsets).family
        'cpu'
        >>> plan = jfi.ops.explain(jfi.ops.target_attention, query, history, offsets=offsets, device=H200)
        >>> plan.family, plan.forward[0].kernel
        ('target_single_tile', 'target_attention_single_tile_fwd')
    """
    if operator not in _PLANNERS:
        known = ", ".join(x.__name__ for x in _PLANNERS)
        raise TypeError(f"operator must be one of {known}, got {getattr(operator, '__name__', operator)!r}")
    if not (device is None or isinstance(device, Device)):
        raise TypeError(f"device must be a Device of jfi.kernels.plan or None, got {type(device).__name__}")
    prepare, plan = _PLANNERS[operator]
    call = inspect.signature(operator).bind(*args, **kwargs)
    call.apply_defaults()
    unpack_nested(vars(operator)["packed"], call.arguments)
    first = call.arguments["query"]
    is_tensor = isinstance(first, Tensor)  # else prepare() raises the error
    if is_tensor and device is None and first.device.type == "meta":
        raise ValueError("device must be given where tensors are on the meta device, got None")
    if is_tensor and not (device is None and type(first) in (Tensor, torch.nn.Parameter)):
        device = device_of(first.device) if device is None else device
        call.arguments |= tree_map_only(Tensor, _on_meta, call.arguments)
        if call.arguments["impl"] == "auto" and device.type == "cuda" and first.dtype != torch.float64:
            call.arguments["impl"] = "triton"
    inputs, impl = prepare(*call.args, **call.kwargs)
    return plan(inputs, impl, device)


def _on_meta(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
