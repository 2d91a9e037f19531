"""Jagged attention on Hopper: what its kernels are launched with."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from jfi.kernels.hopper import ROWS, described
from jfi.kernels.jagged_attention_hopper_dkey import jagged_attention_hopper_dkey_kernel
from jfi.kernels.jagged_attention_hopper_dquery import jagged_attention_hopper_dquery_kernel
from jfi.kernels.jagged_attention_hopper_fwd import jagged_attention_hopper_fwd_kernel
from jfi.kernels.jagged_attention_tiles import bounds, statistics
from jfi.kernels.launch import Launcher
from jfi.kernels.schedule import schedule
from jfi.kernels.shares import multiprocessors
from jfi.kernels.tiles import LOG2E


@dataclass(frozen=True)
class Config:
    """Attributes:
    block: rows a step of the side that passes by.
    warp_groups: those that compute, 64 rows each.
    stages: tiles of the side that passes by in shared memory.
    programs: a multiprocessor.
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
FORWARD = Config(block=128, warp_groups=1, stages=2, programs=2, q_stages=2)
FORWARD_SHORT = Config(block=64, warp_groups=1, stages=2, programs=3, q_stages=2)
DQUERY_WIDE = Config(block=64, warp_groups=2, stages=4, programs=1)
DQUERY = Config(block=64, warp_groups=1, stages=3, programs=3)
DKEY_WIDE = Config(block=64, warp_groups=2, stages=2, programs=1)
DKEY = Config(block=64, warp_groups=1, stages=2, programs=2)
#: Mean keys of a sample up to which tiles of 64 keys are faster; the other kernel is compiled when it is first wanted.
SHORT = 768


@dataclass(frozen=True)
class Problem:
    """What kernels are compiled for.  Launchers are kept by it, so it names the dtype too."""

    heads: int  # that share a key head
    groups: int
    width: int
    shared: bool
    has_bias: bool
    has_left: bool
    has_right: bool
    dtype: torch.dtype

    def constants(self) -> dict[str, int | bool]:
        flags = {"HAS_BIAS": self.has_bias, "HAS_LEFT": self.has_left, "HAS_RIGHT": self.has_right}
        return {"HEADS": self.heads, "GROUPS": self.groups, **flags}


def serves(query: Tensor, key: Tensor, value: Tensor | None, bias: Tensor | None, scale: float) -> bool:
    """Whether these kernels take it: half precision, 64 or 128 wide, one key head for all query heads or for each."""
    heads, width = query.shape[1:]
    groups = key.shape[1]
    tensors = [query, key] if value is None else [query, key, value]
    return (
        query.element_size() == 2
        and width in (64, 128)
        and (value is None or value.shape[2] == width)
        and groups in (1, heads)
        and (bias is None or groups == heads)
        # The greatest score is found before it is scaled, so the scale must be positive, in float32.
        and scale > 1e-30
        and all(x.shape[0] * x.shape[1] < 2**31 - 256 and x.data_ptr() % 16 == 0 for x in tensors)
    )


def _problem(
    query: Tensor, key: Tensor, value: Tensor | None, bias: Tensor | None, left: int | None, right: int | None
) -> tuple[Problem, int]:
    """What to compile for, and the multiprocessors to launch on."""
    heads, groups = query.shape[1], key.shape[1]
    flags = (value is None, bias is not None, left is not None, right is not None)
    problem = Problem(heads // groups, groups, query.shape[2], *flags, query.dtype)
    return problem, multiprocessors(query.device)


@cache
def _forward_launcher(problem: Problem, config: Config) -> Launcher:
    constants = {**problem.constants(), **config.constants(), "Q_STAGES": config.q_stages}
    return Launcher(jagged_attention_hopper_fwd_kernel, **constants)


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
    problem, processors = _problem(query, key, value, bias, left, right)
    batch = key_offsets.shape[0] - 1
    config = FORWARD_WIDE if problem.width > 64 else FORWARD if key.shape[0] > SHORT * batch else FORWARD_SHORT
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:2], dtype=torch.float32)
    slots = schedule(query_offsets, key_offsets, query.shape[0], problem.heads, config.rows)
    total = slots.shape[0] * problem.groups
    keys = described(key, config.block)
    descriptors = (
        described(query, ROWS.value, problem.heads),
        keys,
        keys if value is None else described(value, config.block),
    )
    launch = _forward_launcher(problem, config)
    grid = (min(total, processors * config.programs), 1, 1)
    launch(grid, (slots, bias, out, lse), (total, *bounds(left, right), scale * LOG2E.value), descriptors)
    return out, lse


@cache
def _backward_launchers(problem: Problem, dquery: Config, dkey: Config) -> tuple[Launcher, Launcher]:
    return (
        Launcher(jagged_attention_hopper_dquery_kernel, **problem.constants(), **dquery.constants()),
        Launcher(jagged_attention_hopper_dkey_kernel, SHARED=problem.shared, **problem.constants(), **dkey.constants()),
    )


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
    problem, processors = _problem(query, key, value, bias, left, right)
    wide = problem.width > 64
    dquery_config, dkey_config = (DQUERY_WIDE, DKEY_WIDE) if wide else (DQUERY, DKEY)
    launch_dquery, launch_dkey = _backward_launchers(problem, dquery_config, dkey_config)
    dquery, dkey = torch.empty_like(query), torch.empty_like(key)
    dvalue = None if value is None else torch.empty_like(value)
    dbias = None if bias is None else torch.empty_like(bias)
    stats = statistics(grad, out, lse, dlse, problem.groups)
    # All tiles are of 64 rows, so both sweeps have the same descriptors.
    keys = described(key, ROWS.value)
    descriptors = (
        described(query, ROWS.value, problem.heads),
        described(grad, ROWS.value, problem.heads),
        keys,
        keys if value is None else described(value, ROWS.value),
    )
    numbers = (query.shape[0] * problem.heads, *bounds(left, right), scale, scale * LOG2E.value)
    slots = schedule(query_offsets, key_offsets, query.shape[0], problem.heads, dquery_config.rows)
    total = slots.shape[0] * problem.groups
    grid = (min(total, processors * dquery_config.programs), 1, 1)
    launch_dquery(grid, (slots, bias, stats, dquery), (total, *numbers), descriptors)
    slots = schedule(key_offsets, query_offsets, key.shape[0], 1, dkey_config.rows)
    total = slots.shape[0] * problem.groups
    grid = (min(total, processors * dkey_config.programs), 1, 1)
    launch_dkey(grid, (slots, bias, stats, dkey, dvalue, dbias), (total, *numbers), descriptors)
    return dquery, dkey, dvalue, dbias
