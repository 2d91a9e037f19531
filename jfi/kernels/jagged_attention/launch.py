"""Jagged attention in Triton: by Hopper's own means where the GPU and the installed Triton have them."""

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from jfi.kernels.common.primitives import INTERPRET
from jfi.kernels.jagged_attention import triton_bwd, triton_fwd


@cache
def _hopper(device: int) -> ModuleType | None:
    """The kernels for Hopper, on such a GPU and with a Triton that brings the language they are written in."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    try:
        from jfi.kernels.jagged_attention import sm90
    except ImportError:
        return None
    return sm90


def hopper_for(
    query: Tensor, key: Tensor, value: Tensor | None, bias: Tensor | None, scale: float
) -> ModuleType | None:
    """The kernels for Hopper where they take such a problem."""
    hopper = None if INTERPRET.value else _hopper(query.device.index)
    return hopper if hopper is not None and hopper.serves(query, key, value, bias, scale) else None


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    query_offsets: Tensor,
    key_offsets: Tensor,
    bias: Tensor | None,
    scale: float,
    *window: int | None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results as those of triton_fwd.forward."""
    inputs, offsets = (query, key, value), (query_offsets, key_offsets)
    if not (query.shape[0] and key.shape[0]):
        out = query.new_zeros(*query.shape[:2], (key if value is None else value).shape[2])
        return out, query.new_full(query.shape[:2], -torch.inf, dtype=torch.float32)
    hopper = hopper_for(*inputs, bias, scale)
    if hopper is not None:
        return hopper.forward(*inputs, *offsets, bias, scale, *window)
    return triton_fwd.forward(*inputs, *offsets, bias, scale, *window)


def backward(
    grad: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    query_offsets: Tensor,
    key_offsets: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    *window: int | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Arguments and results as those of triton_bwd.backward."""
    inputs, offsets = (query, key, value), (query_offsets, key_offsets)
    if not (query.shape[0] and key.shape[0]):
        return tuple(None if x is None else torch.zeros_like(x) for x in (*inputs, bias))
    hopper = hopper_for(*inputs, bias, scale)
    if hopper is not None and grad.data_ptr() % 16 == 0:
        return hopper.backward(grad, dlse, *inputs, *offsets, bias, out, lse, scale, *window)
    return triton_bwd.backward(grad, dlse, *inputs, *offsets, bias, out, lse, scale, *window)
