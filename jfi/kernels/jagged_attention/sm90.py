"""Jagged attention on Hopper: what its kernels are launched with."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import JITFunction

from jfi.kernels.common.launch import Launcher
from jfi.kernels.common.primitives import LOG2E
from jfi.kernels.common.stream_k import multiprocessors
from jfi.kernels.common.tile_scheduler import schedule
from jfi.kernels.jagged_attention.sm90_dkey import jagged_attention_hopper_dkey_kernel
from jfi.kernels.jagged_attention.sm90_dquery import jagged_attention_hopper_dquery_kernel
from jfi.kernels.jagged_attention.sm90_fwd import jagged_attention_hopper_fwd_kernel
from jfi.kernels.jagged_attention.sm90_primitives import ROWS, described
from jfi.kernels.jagged_attention.tiles import bounds


@dataclass(frozen=True)
class Config:
    """Attributes:
    block: rows a step of the side that passes by.
    warp_groups: those that compute, 64 rows each.
    stages: tiles of the side that passes by in shared memory.
    programs: how many a multiprocessor runs.
    q_stages: tiles of queries in shared memory, in the forward.
    """

    block: int
    warp_groups: int
    stages: int
    programs: int
    q_stages: int = 1

    @property
    def rows(self) -> int:
        return self.warp_groups * ROWS.value

    def constants(self) -> dict[str, int | None]:
        """Registers are shared out evenly over the programs; the compiler then gives the computing warps their part."""
        threads = 128 * (self.warp_groups + 1)
        registers = 65536 // (self.programs * threads) // 8 * 8
        return {
            "WARP_GROUPS": self.warp_groups,
            "STAGES": self.stages,
            "num_warps": 4,
            "maxnreg": None if self.programs == 1 else registers,
        }


# The best of those measured on an H200.
FORWARD_WIDE = Config(block=128, warp_groups=2, stages=2, programs=1)
FORWARD_WIDE_SHORT = Config(block=64, warp_groups=1, stages=2, programs=2, q_stages=2)
FORWARD = Config(block=128, warp_groups=1, stages=2, programs=2, q_stages=2)
FORWARD_SHORT = Config(block=64, warp_groups=1, stages=2, programs=3, q_stages=2)
DQUERY_WIDE = Config(block=64, warp_groups=2, stages=4, programs=1)
DQUERY = Config(block=64, warp_groups=1, stages=3, programs=3)
DKEY_WIDE = Config(block=64, warp_groups=2, stages=2, programs=1)
DKEY = Config(block=64, warp_groups=1, stages=2, programs=2)
#: By width, mean keys of a sample up to which tiles of 64 keys are faster; the other kernel is compiled when it is
#: first wanted.
SHORT = {64: 768, 128: 384}


class Kernels:
    """What one kind of problem is worked on with: of each kernel its configuration and its launcher."""

    def __init__(
        self,
        heads: int,
        groups: int,
        width: int,
        shared: bool,
        has_bias: bool,
        has_left: bool,
        has_right: bool,
        has_dlse: bool,
    ):
        window = {"HAS_LEFT": has_left, "HAS_RIGHT": has_right}
        constants = {"HEADS": heads, "GROUPS": groups, "HAS_BIAS": has_bias, **window}

        def kernel(function: JITFunction, config: Config, **more: int) -> tuple[Config, Launcher]:
            return config, Launcher(function, **constants, **config.constants(), **more)

        def forward(config: Config) -> tuple[Config, Launcher]:
            return kernel(jagged_attention_hopper_fwd_kernel, config, Q_STAGES=config.q_stages)

        wide = width > 64
        self.heads, self.groups = heads, groups
        self.forward = forward(FORWARD_WIDE if wide else FORWARD)
        self.forward_short = forward(FORWARD_WIDE_SHORT if wide else FORWARD_SHORT)
        self.dquery = kernel(jagged_attention_hopper_dquery_kernel, DQUERY_WIDE if wide else DQUERY, HAS_DLSE=has_dlse)
        self.dkey = kernel(jagged_attention_hopper_dkey_kernel, DKEY_WIDE if wide else DKEY, SHARED=shared)


@cache
def _kernels(dtype: torch.dtype, *kind: int | bool) -> Kernels:
    """One for each kind of problem; a launcher stands for one dtype."""
    return Kernels(*kind)


def _kernels_of(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    bias: Tensor | None,
    left: int | None,
    right: int | None,
    dlse: Tensor | None = None,
) -> Kernels:
    _, heads, width = query.shape
    groups = key.shape[1]
    flags = (value is None, bias is not None, left is not None, right is not None, dlse is not None)
    return _kernels(query.dtype, heads // groups, groups, width, *flags)


def serves(query: Tensor, key: Tensor, value: Tensor | None, bias: Tensor | None, scale: float) -> bool:
    """Whether these kernels take it: half precision, 64 or 128 wide, one key head for all query heads or for each."""
    rows, heads, width = query.shape
    key_rows, groups, _ = key.shape
    addresses = query.data_ptr() | key.data_ptr() | (0 if value is None else value.data_ptr())
    return (
        query.element_size() == 2
        and width in (64, 128)
        and (value is None or value.shape[2] == width)
        and groups in (1, heads)
        and (bias is None or groups == heads)
        # The greatest score is found before it is scaled, so the scale must be positive, in float32.
        and scale > 1e-30
        and max(rows * heads, key_rows * groups) < 2**31 - 256
        and addresses % 16 == 0
    )


def _run(
    kernel: tuple[Config, Launcher],
    slots: Tensor,
    groups: int,
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[int | float, ...],
    descriptors: tuple[TensorDescriptor, ...],
) -> None:
    """Programs that take the slots in turn."""
    config, launch = kernel
    total = slots.shape[0] * groups
    programs = min(total, multiprocessors(slots.device) * config.programs)
    launch((programs, 1, 1), (slots, *tensors), (total, *numbers), descriptors)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    query_offsets: Tensor,
    key_offsets: Tensor,
    bias: Tensor | None,
    scale: float,
    left: int | None,
    right: int | None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results as those of jagged_attention_fwd.forward."""
    kernels = _kernels_of(query, key, value, bias, left, right)
    short = key.shape[0] <= SHORT[query.shape[2]] * (key_offsets.shape[0] - 1)
    config, _ = kernel = kernels.forward_short if short else kernels.forward
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    slots = schedule(query_offsets, key_offsets, query.shape[0], kernels.heads, config.rows)
    keys = described(key, config.block)
    descriptors = (
        described(query, ROWS.value, kernels.heads),
        keys,
        keys if value is None else described(value, config.block),
    )
    numbers = (*bounds(left, right), scale * LOG2E.value)
    _run(kernel, slots, kernels.groups, (bias, out, lse), numbers, descriptors)
    return out, lse


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
    left: int | None,
    right: int | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Arguments and results as those of jagged_attention_bwd.backward."""
    kernels = _kernels_of(query, key, value, bias, left, right, dlse)
    heads, groups, rows = kernels.heads, kernels.groups, query.shape[0]
    dquery, dkey = torch.empty_like(query), torch.empty_like(key)
    dvalue = None if value is None else torch.empty_like(value)
    dbias = None if bias is None else torch.empty_like(bias)
    stats = torch.empty(2, groups, rows * heads, dtype=torch.float32, device=query.device)
    # All tiles are of 64 rows, so both sweeps have the same descriptors.
    keys = described(key, ROWS.value)
    descriptors = (
        described(query, ROWS.value, heads),
        described(grad, ROWS.value, heads),
        keys,
        keys if value is None else described(value, ROWS.value),
    )
    numbers = (rows * heads, *bounds(left, right), scale, scale * LOG2E.value)
    slots = schedule(query_offsets, key_offsets, rows, heads, kernels.dquery[0].rows)
    _run(kernels.dquery, slots, groups, (bias, out, lse, dlse, stats, dquery), numbers, descriptors)
    # Among a history's own events, a head of keys to each of queries, both sides are cut up alike.
    alike = heads == 1 and query_offsets.data_ptr() == key_offsets.data_ptr()
    if not alike or kernels.dquery[0].rows != kernels.dkey[0].rows:
        slots = schedule(key_offsets, query_offsets, key.shape[0], 1, kernels.dkey[0].rows)
    _run(kernels.dkey, slots, groups, (bias, stats, dkey, dvalue, dbias), numbers, descriptors)
    return dquery, dkey, dvalue, dbias
