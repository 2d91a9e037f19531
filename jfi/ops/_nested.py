"""Nested tensors of PyTorch's jagged layout, [B, j, ...], as packed values [S, ...] and offsets [B+1]."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from jfi.utils.compat import NestedTensor

#: The parameter that makes another one a table: it says which rows are read.
_ROWS_OF = {"key": "indices", "key_bias": "key_bias_index"}


def have_nested(arguments: Iterable[object]) -> bool:
    """Returns whether one of the arguments is a nested tensor of the jagged layout."""
    return any([isinstance(x, NestedTensor) for x in arguments])


def unpack_nested(packed: Mapping[str, Sequence[str]], arguments: dict[str, Any]) -> dict[str, NestedTensor]:
    """Replaces nested tensors by their values, and the offsets that are left out by theirs.

    Args:
        packed: by the parameter of offsets those whose rows they divide.
        arguments: all arguments of a call by name; changed.

    Returns:
        By the parameter of offsets the first nested tensor that has them.
    """
    offsets_of = {name: offsets for offsets, names in packed.items() for name in names}
    found: dict[str, tuple[str, NestedTensor]] = {}
    for name, given in arguments.items():
        parts = given if type(given) in (tuple, list) else (given,)
        if not have_nested(parts):
            continue
        if name not in offsets_of or arguments.get(_ROWS_OF.get(name, "")) is not None:
            raise TypeError(f"{name} must be a dense tensor, got a nested one of layout torch.jagged")
        offsets = offsets_of[name]
        if arguments.get(offsets) is not None:
            raise ValueError(f"{offsets} must be None where {name} is nested and has its own, got both")
        values = list(parts)
        for k, x in enumerate(parts):
            if isinstance(x, NestedTensor):
                own = f"{name}[{k}]" if parts is given else name
                first_name, first = found.setdefault(offsets, (own, x))
                _check_packed(own, x, first_name, first)
                values[k] = x.values()
        arguments[name] = type(given)(values) if parts is given else values[0]
    for offsets, (_, x) in found.items():
        if offsets in arguments:
            arguments[offsets] = x.offsets()
        if arguments.get("max_seqlen", 0) is None:
            arguments["max_seqlen"] = x._maybe_max_seqlen  # None where reading it would wait for a GPU
    return {offsets: x for offsets, (_, x) in found.items()}


def nest(values: Tensor, like: NestedTensor) -> Tensor:
    """Returns packed values as a nested tensor with the offsets of another one."""
    bounds = {"min_seqlen": like._maybe_min_seqlen, "max_seqlen": like._maybe_max_seqlen}
    return torch.nested.nested_tensor_from_jagged(values, like.offsets(), **bounds)


def _check_packed(name: str, x: NestedTensor, first_name: str, first: NestedTensor) -> None:
    """Checks that the values of x are packed rows, divided by the offsets of the first nested tensor."""
    if x._ragged_idx != 1:
        raise ValueError(f"{name} must be [B, j, ...], jagged in dimension 1, got {x._ragged_idx}: transpose it")
    if x.lengths() is not None:
        raise ValueError(f"{name} must be packed, got a nested tensor with lengths: call its contiguous()")
    if x is not first and x.size(1) != first.size(1):
        raise ValueError(f"{name} must have the offsets of {first_name}, the same tensor, got others")
