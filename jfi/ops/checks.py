"""Argument checks shared by the operators.

Shapes, dtypes and devices are always checked: that costs no synchronization.  The contents of offsets are checked on
the CPU, and on a GPU only under ``with jfi.ops.validation():``, since reading them there stalls the device.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from jfi.ops.dispatch import PLAIN
from jfi.utils.arguments import check_ascending
from jfi.utils.context import default_impl, interprets, is_traced, may_read, validates_on_gpu

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INDICES = (torch.int32, torch.int64)
IMPLEMENTATIONS = ("auto", "triton", "torch")


@contextmanager
def validation() -> Iterator[None]:
    """Check the contents of offsets and indices on a GPU too; each check synchronizes with the device.

    CPU tensors are always checked.  Without this block an index outside its table gives zeros on a GPU, and modules do
    not check the contents of their batches there.  Applies to the current thread or task only.

    Example:
        >>> import torch, jfi
        >>> with jfi.ops.validation():
        ...     jfi.ops.gather_rows((torch.zeros(5, 1),), (torch.tensor([0, 4]),)).shape
        torch.Size([2, 1])
    """
    token = validates_on_gpu.set(True)
    try:
        yield
    finally:
        validates_on_gpu.reset(token)


def check_floating(**tensors: Tensor | None) -> None:
    """Checks that tensors are floating, of one dtype and on one device; the first one sets the standard."""
    first_name, first = "", None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(tensor).__name__}")
        if first is None:
            check_dtype(name, tensor)
            first_name, first, dtype, device = name, tensor, tensor.dtype, tensor.device
        elif tensor.dtype != dtype:
            check_dtype(name, tensor)
            raise TypeError(f"{name} must have the dtype of {first_name}, {dtype}, got {tensor.dtype}")
        elif tensor.device != device:
            check_device(name, tensor, first_name, first)


def check_dense(name: str, tensor: Tensor | None) -> Tensor:
    """Returns a Tensor in memory that strides describe, not a sparse or a nested one."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(tensor).__name__}")
    if tensor.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got a nested one of layout {tensor.layout}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got one of layout {tensor.layout}")
    return tensor


def check_dim(name: str, tensor: Tensor, layout: str, **sizes: int | None) -> None:
    """Checks that tensor has the dimensions of its layout, such as "[S, D]", and no width of 0 behind the first.

    ``sizes`` are those that dimensions must have, by their letters; None leaves one free.
    """
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_nested:
        check_dense(name, tensor)
    shape = tensor.shape
    if len(shape) != layout.count(",") + 1:
        raise ValueError(f"{name} must be {layout}, got a tensor of shape {list(shape)}")
    if 0 in shape[1:]:
        raise ValueError(f"{name} must be {layout} with no width of 0, got shape {list(shape)}")
    for letter, want in sizes.items():
        if want is not None and (got := shape[layout.index(letter) // 3]) != want:
            raise ValueError(f"{name} must have {letter} = {want}, got {got}")


def check_device(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.device != like.device:
        raise ValueError(f"{name} must be on the device of {like_name}, {like.device}, got {tensor.device}")


def check_dtype(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...] = FLOATING) -> None:
    if tensor.dtype not in dtypes:
        *others, last = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        raise TypeError(f"{name} must be {', '.join(others)} or {last}, got {tensor.dtype}")


def check_index(name: str, index: Tensor, count: int | None, like_name: str, like: Tensor) -> None:
    """Checks that index is [S] of S = count, if given, int32 or int64, on the device of ``like``."""
    check_dim(name, index, "[S]", S=count)
    check_dtype(name, index, INDICES)
    check_device(name, index, like_name, like)


def check_history(key: Tensor, value: Tensor | None, bias: Tensor | None, num_heads: int, width: int) -> None:
    """Checks that key, value and bias fit each other and H query heads of width D."""
    check_dim("key", key, "[S, G, D]", D=width)
    if num_heads % key.shape[1]:
        raise ValueError(f"key must have G heads that divide the query's H = {num_heads}, got G = {key.shape[1]}")
    if value is not None:
        check_dim("value", value, "[S, G, E]", S=key.shape[0], G=key.shape[1])
    check_key_bias(bias, key.shape[0], num_heads)


def check_key_bias(bias: Tensor | None, num_events: int, num_heads: int) -> None:
    """Checks that bias is [S, H] or None."""
    if bias is not None:
        check_dim("key_bias", bias, "[S, H]", S=num_events, H=num_heads)


def check_untrained(name: str, x: Tensor | None) -> None:
    """Checks that x requires no gradient, for which no kernel is written."""
    if x is not None and x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} must not require a gradient, got one that does")


def check_events(
    key: Tensor,
    table: Tensor | None,
    buckets: Tensor | None,
    value_scale: Tensor | None,
    num_heads: int,
) -> None:
    """Checks that buckets name rows of a table [R, H] and, as the scale of values, come one to a row of key."""
    if table is not None:
        check_dense("key_bias", table)
        check_device("key_bias", table, "key", key)
    if value_scale is not None:
        check_dim("value_scale", value_scale, "[S]", S=key.shape[0])
        check_dtype("value_scale", value_scale)
        check_device("value_scale", value_scale, "key", key)
    if buckets is None:
        return
    check_index("key_bias_index", buckets, key.shape[0], "key", key)
    if table is None:
        raise ValueError("key_bias must be a table [N, H] where key_bias_index is given, got None")
    check_floating(key_bias=table)
    check_dim("key_bias", table, "[N, H]", H=num_heads)
    if may_read(buckets) and buckets.numel():
        low, high = map(int, torch.aminmax(buckets))
        if low < 0 or high >= table.shape[0]:
            must = f"from 0 to {table.shape[0] - 1}, rows of key_bias"
            raise ValueError(f"key_bias_index must be {must}, got {low} to {high}")


def check_scale(scale: float | None, width: int) -> float:
    """Returns the scale of the scores: what was given, or 1/sqrt(D)."""
    if scale is None:
        return 1 / math.sqrt(width)
    if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymFloat)):
        raise TypeError(f"scale must be a float or None, got {type(scale).__name__}")
    if not -math.inf < scale < math.inf:  # as math.isfinite, which takes no symbol of a compiler
        raise ValueError(f"scale must be finite, got {scale}")
    return float(scale)


def check_count(name: str, count: int | None, least: int = 0) -> None:
    """Checks that count is an int from ``least`` on that 64 bits hold, or None."""
    if count is None:
        return
    if isinstance(count, bool) or not isinstance(count, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int or None, got {type(count).__name__}")
    if count < least:
        raise ValueError(f"{name} must be at least {least}, got {count}")
    if count >= 2**63:
        raise ValueError(f"{name} must be below 2**63, got {count}")


def check_offsets(
    name: str,
    offsets: Tensor | None,
    rows: int | None,
    rows_of: str,
    like: Tensor,
    batch_size: int | None = None,
) -> Tensor:
    """Returns offsets [B+1], int32 or int64, on the device of ``like``, which ascend from 0 if they may be read."""
    offsets = check_dense(name, offsets)
    check_dtype(name, offsets, INDICES)
    if offsets.dim() != 1 or offsets.shape[0] == 0:
        raise ValueError(f"{name} must be [B+1] with at least one entry, got shape {list(offsets.shape)}")
    check_device(name, offsets, "the values", like)
    if batch_size is not None and offsets.shape[0] != batch_size + 1:
        raise ValueError(f"{name} must have B+1 = {batch_size + 1} entries, got {offsets.shape[0]}")
    if not may_read(offsets):
        return offsets
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0:
        raise ValueError(f"{name} must start at 0, got {first}")
    if rows is not None and last != rows:
        raise ValueError(f"{name} must end at {rows}, the rows of {rows_of}, got {last}")
    if bool((offsets[1:] < offsets[:-1]).any()):
        at = int((offsets[1:] < offsets[:-1]).nonzero()[0])
        raise ValueError(
            f"{name} must not decrease, got {int(offsets[at])} then {int(offsets[at + 1])} at entry {at + 1}"
        )
    return offsets


def check_times(
    query_time: Tensor | None,
    key_time: Tensor | None,
    query_offsets: Tensor,
    key_offsets: Tensor,
    rows: int,
    key: Tensor,
) -> None:
    """Checks that times come one to a query [R] and to a key [S]; if readable, that none decreases in a sample."""
    if not (isinstance(query_time, Tensor) and isinstance(key_time, Tensor)):
        name, odd = ("query_time", query_time) if isinstance(key_time, Tensor) else ("key_time", key_time)
        raise TypeError(f"query_time and key_time must both be tensors or None, got {name} of {type(odd).__name__}")
    sides = {
        "query_time": (query_time, rows, "R", query_offsets),
        "key_time": (key_time, key.shape[0], "S", key_offsets),
    }
    for name, (time, count, what, offsets) in sides.items():
        check_dtype(name, time, (*INDICES, torch.float64))
        check_dim(name, time, f"[{what}]", **{what: count})
        check_device(name, time, "key", key)
        if may_read(time) and time.numel():
            check_ascending(name, time, offsets, "entry")
    if query_time.dtype != key_time.dtype:
        raise TypeError(f"key_time must have the dtype of query_time, {query_time.dtype}, got {key_time.dtype}")


def check_impl(impl: str, like: Tensor) -> str:
    """Resolve "auto": Triton for CUDA tensors, plain PyTorch otherwise.  An explicit choice never falls back."""
    if not isinstance(impl, str) or impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(map(repr, IMPLEMENTATIONS))}, got {impl!r}")
    if impl == "auto":
        return default_impl(like)
    if impl == "triton" and like.dtype == torch.float64:
        raise TypeError("impl='triton' takes float32, bfloat16 or float16, got torch.float64: use impl='torch'")
    if impl == "triton" and like.device.type == "cpu" and not (is_traced() or interprets()):
        raise ValueError(f"impl='triton' must come with tensors on a GPU, got {like.device}: use impl='torch'")
    return impl
