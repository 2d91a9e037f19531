"""Attention over digits, as planned: stream-K ranges of events for each tile of query rows, then the combine step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from jfi import plan, reference
from jfi.kernels.common.combine import RangePartials
from jfi.kernels.common.launch import Launcher
from jfi.kernels.digit_attention.tiles import DigitSpec, event_pointers
from jfi.operands import DigitAttentionInputs
from jfi.plan import AttentionPlan, DigitProblem, KernelPlan, cached, ceil_div, plan_digit_attention


@cached
def _launcher(problem: DigitProblem, kernel: KernelPlan) -> Launcher:
    if kernel.kernel == "digit_attention_fwd":
        from jfi.kernels.digit_attention.triton_fwd import digit_attention_fwd_kernel as function
    elif kernel.kernel == "digit_attention_bwd":
        from jfi.kernels.digit_attention.triton_bwd import digit_attention_bwd_kernel as function
    elif kernel.kernel == "digit_attention_registers_fwd":
        from jfi.kernels.digit_attention.registers_fwd import digit_attention_registers_fwd_kernel as function
    else:
        from jfi.kernels.digit_attention.registers_bwd import digit_attention_registers_bwd_kernel as function
    return Launcher(function, SPEC=DigitSpec.of(problem, kernel.block_m, kernel.block_n), **kernel.constants)


def _ranges(
    x: DigitAttentionInputs, chosen: AttentionPlan, kernel: KernelPlan
) -> tuple[tuple[int, int, int], RangePartials]:
    """The grid of a kernel, ranges by tiles of query rows, and room for what its ranges leave."""
    batch, num_queries, num_heads, num_digits = x.query.shape
    rows = num_queries * num_heads
    chunk, programs = plan.stream_k(x.num_events, batch, chosen.problem.device.num_sms, kernel.programs_per_sm)
    partials = RangePartials(programs, chunk, rows, num_digits, x.query.device)
    return (programs, ceil_div(rows, kernel.block_m), 1), partials


def forward(x: DigitAttentionInputs, chosen: AttentionPlan | None = None) -> tuple[Tensor, Tensor]:
    """The output [B, T, H, L] and the log-sum-exp of the scores [B, T, H], -inf for an empty history.

    Args:
        x: contiguous operands.
        chosen: None means `plan_digit_attention`.
    """
    chosen = plan_digit_attention(x, "triton") if chosen is None else chosen
    batch, num_queries, num_heads, _ = x.query.shape
    out = torch.empty_like(x.query)
    lse = x.query.new_empty(batch, num_queries, num_heads, dtype=torch.float32)
    if batch:
        kernel = chosen.forward[0]
        grid, partials = _ranges(x, chosen, kernel)
        tensors = (x.query, *event_pointers(x), (out, lse, partials.memory))
        table_rows = x.bias.shape[0] if x.bias_index is not None else 0
        numbers = (batch, num_queries * num_heads, partials.chunk, table_rows, x.digits.shape[0], x.scale)
        _launcher(chosen.problem, kernel)(grid, tensors, numbers)
        partials.combine_tiles(x.offsets, out, lse)
    return out, lse


def backward(
    grad: Tensor,
    x: DigitAttentionInputs,
    out: Tensor,
    lse: Tensor,
    needed: Sequence[bool],
    chosen: AttentionPlan | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of query and bias, None for one that is not needed."""
    chosen = plan_digit_attention(x, "triton") if chosen is None else chosen
    batch, num_queries, num_heads, _ = x.query.shape
    needs_query, needs_bias = needed
    dquery = torch.empty_like(x.query) if needs_query else None
    if not batch:
        return dquery, torch.zeros_like(x.bias) if needs_bias else None
    kernel, device = chosen.backward[0], x.query.device
    grid, partials = _ranges(x, chosen, kernel)
    table_rows = x.bias.shape[0] if x.bias_index is not None else 0
    sums_table = table_rows > 0 and kernel.constants["BLOCK_R"] > 0
    # Parts that are summed: by query in registers, which sum an event's bias for one query only, else by tile.
    parts = grid[1] if kernel.kernel == "digit_attention_bwd" else num_queries
    if not needs_bias:
        dbias = None
    elif sums_table:
        dbias = torch.empty(grid[0], parts, table_rows, num_heads, dtype=torch.float32, device=device)
    else:
        dtype = torch.float32 if table_rows or parts > 1 else x.bias.dtype
        dbias = torch.empty(parts, x.num_events, num_heads, dtype=dtype, device=device)
    queries, grads = (x.query, grad, out, lse), (dquery, dbias, partials.memory if needs_query else None)
    rows = table_rows, x.digits.shape[0]
    numbers = (batch, num_queries * num_heads, partials.chunk, x.num_events, *rows, x.scale)
    _launcher(chosen.problem, kernel)(grid, (queries, *event_pointers(x), grads), numbers)
    if needs_query:
        partials.combine_tiles(x.offsets, dquery, None)
    if not needs_bias:
        return dquery, None
    if sums_table:
        dbias = dbias.sum((0, 1)).to(x.bias.dtype)
    else:
        dbias = dbias[0] if parts == 1 else dbias.sum(0)
        if table_rows:
            # Sorts the events by index: no sum in an order that changes from run to run. It leaves out -1.
            index = reference.bound_ids(x.bias_index, table_rows)
            dbias = torch.ops.aten.embedding_dense_backward(dbias, index, table_rows, -1, False)
        dbias = dbias.to(x.bias.dtype)
    return dquery, dbias
