"""Runs the Gluon kernels over digits: stream-K ranges of events for each tile of query rows, then the combine step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from jfi.kernels import plan
from jfi.kernels.common.combine import RangePartials
from jfi.kernels.common.launch import Launcher
from jfi.kernels.common.spec import AttentionSpec
from jfi.kernels.digit_attention.registers_bwd import digit_attention_registers_bwd_kernel
from jfi.kernels.digit_attention.registers_fwd import digit_attention_registers_fwd_kernel
from jfi.kernels.plan import AttentionPlan, AttentionProblem, KernelPlan, cached
from jfi.kernels.target_attention.single_tile_bwd import empty_dbias, sum_dbias
from jfi.kernels.target_attention.single_tile_events import query_tiles, sizes
from jfi.utils.operands import TargetAttentionInputs

_KERNELS = {
    "digit_attention_registers_fwd": digit_attention_registers_fwd_kernel,
    "digit_attention_registers_bwd": digit_attention_registers_bwd_kernel,
}


@cached
def _launcher(problem: AttentionProblem, kernel: KernelPlan) -> Launcher:
    spec = AttentionSpec.of(problem, kernel.block_m, kernel.block_n)
    return Launcher(_KERNELS[kernel.kernel], SPEC=spec, **kernel.constants)


def _ranges(
    x: TargetAttentionInputs, problem: AttentionProblem, kernel: KernelPlan
) -> tuple[tuple[int, int, int], RangePartials]:
    """Returns the grid of a kernel, ranges by tiles of query rows, and memory for the partial results of ranges."""
    batch, num_queries, num_heads, num_digits = x.query.shape
    chunk, programs = plan.stream_k(x.key.shape[0], batch, problem.device.num_sms, kernel.programs_per_sm)
    partials = RangePartials(programs, chunk, num_queries * num_heads, num_digits, x.query.device)
    return (programs, query_tiles(x, problem, kernel.block_m), 1), partials


def _events(x: TargetAttentionInputs) -> tuple:
    """Returns the pointers to words, biases and offsets, and those with a number per event."""
    words, index = (x.tables[0], x.indices[0]) if x.tables else (x.key, None)
    return (words, x.bias, x.offsets), index, x.bias_index, x.value_scale


def forward(x: TargetAttentionInputs, chosen: AttentionPlan, out: Tensor, lse: Tensor) -> None:
    """Fills in the output [B, T, H, L] and the log-sum-exp of the scores [B, T, H], -inf for an empty history."""
    problem, kernel = chosen.problem, chosen.forward[0]
    batch, num_queries, num_heads, _ = x.query.shape
    grid, partials = _ranges(x, problem, kernel)
    numbers = (batch, num_queries * num_heads, partials.chunk, *sizes(x, problem), x.scale)
    _launcher(problem, kernel)(grid, (x.query, *_events(x), (out, lse, partials.memory)), numbers)
    partials.combine_tiles(x.offsets, out, lse)


def backward(
    grad: Tensor, x: TargetAttentionInputs, out: Tensor, lse: Tensor, needed: Sequence[bool], chosen: AttentionPlan
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of query, key, value, bias and second: of query and bias if needed, else None."""
    problem, kernel = chosen.problem, chosen.backward[0]
    batch, num_queries, num_heads, _ = x.query.shape
    dquery = torch.empty_like(x.query) if needed[0] else None
    grid, partials = _ranges(x, problem, kernel)
    rows = sizes(x, problem)
    sums_table = rows[0] > 0 and kernel.constants["BLOCK_R"] > 0
    # By event the bias has a gradient of one query row, since the plan takes other kernels for several.
    count, parts = (grid[0], num_queries) if sums_table else (x.key.shape[0], 1)
    dbias = empty_dbias(x, count, parts, sums_table) if needed[3] else None
    queries, grads = (x.query, grad, out, lse), (dquery, dbias, partials.memory if needed[0] else None)
    numbers = (batch, num_queries * num_heads, partials.chunk, x.key.shape[0], *rows, x.scale)
    _launcher(problem, kernel)(grid, (queries, *_events(x), grads), numbers)
    if needed[0]:
        partials.combine_tiles(x.offsets, dquery, None)
    return dquery, None, None, sum_dbias(x, dbias, sums_table), None
