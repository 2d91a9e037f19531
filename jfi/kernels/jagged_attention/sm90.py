"""Launches the Hopper kernels of jagged attention as a plan says."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jfi.kernels.common.combine import SplitPartials
from jfi.kernels.common.launch import Launcher, empty_like, launchers_of
from jfi.kernels.common.primitives import LOG2E
from jfi.kernels.common.tile_scheduler import schedule_tiles
from jfi.kernels.jagged_attention.sm90_dkey import jagged_attention_sm90_dkey_kernel
from jfi.kernels.jagged_attention.sm90_dquery import jagged_attention_sm90_dquery_kernel
from jfi.kernels.jagged_attention.sm90_fwd import jagged_attention_sm90_fwd_kernel
from jfi.kernels.jagged_attention.sm90_pipeline import ROWS
from jfi.kernels.jagged_attention.sm90_primitives import tensor_descriptor
from jfi.kernels.jagged_attention.visibility import Visibility, add_totals, bounds, query_parts
from jfi.kernels.plan import AttentionPlan, AttentionProblem, KernelPlan, Split
from jfi.utils.operands import JaggedAttentionInputs

_fwd_launcher = launchers_of(jagged_attention_sm90_fwd_kernel)
_dquery_launcher = launchers_of(jagged_attention_sm90_dquery_kernel)
_dkey_launcher = launchers_of(jagged_attention_sm90_dkey_kernel)


def _launch(
    launchers: Callable[..., Launcher],
    plan: KernelPlan,
    problem: AttentionProblem,
    visibility: Visibility,
    descriptors: tuple[TensorDescriptor, ...],
    tensors: tuple,
    numbers: tuple[int | float, ...],
) -> None:
    """Persistent programs: as many as run at once, or as there are work tiles."""
    launcher = launchers(problem, plan, visibility)
    total = tensors[0].shape[0] * problem.num_kv_heads * plan.num_splits
    programs = min(total, problem.device.num_sms * plan.programs_per_sm)
    launcher((programs, 1, 1), tensors, (total, *numbers), descriptors)


def forward(x: JaggedAttentionInputs, plan: AttentionPlan) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the output, its log-sum-exp and the schedule, see `execute.forward`."""
    (kernel,), problem = plan.forward, plan.problem
    qheads_per_kvhead = problem.qheads_per_kvhead
    out = torch.empty_like(x.query)
    rows, num_heads, _ = x.query.shape
    lse = torch.empty(rows, num_heads, dtype=torch.float32, device=x.query.device)
    tapers = kernel.split is Split.TAPERING
    tiles = schedule_tiles(x.query_offsets, x.key_offsets, rows, qheads_per_kvhead, kernel.block_m, tapers=tapers)
    key = tensor_descriptor(x.key, kernel.block_n)
    value = key if x.value is None else tensor_descriptor(x.value, kernel.block_n)
    descriptors = (tensor_descriptor(x.query, ROWS.value, qheads_per_kvhead), key, value)
    numbers = (*bounds(x.left, x.right), x.scale * LOG2E.value)
    partials = SplitPartials(out, problem.num_kv_heads, kernel.num_splits) if kernel.num_splits > 1 else None
    results = (out, lse) if partials is None else (partials.values, partials.lse)
    tensors = (tiles, (x.bias, x.edges, x.table), *results)
    _launch(_fwd_launcher, kernel, problem, Visibility.of(x), descriptors, tensors, numbers)
    if partials is not None:
        partials.combine(out, lse)
    return out, lse, tiles if kernel.block_m == plan.backward[0].block_m else None


def backward(
    grad: Tensor,
    dlse: Tensor | None,
    x: JaggedAttentionInputs,
    out: Tensor,
    lse: Tensor,
    needed: Sequence[bool],
    plan: AttentionPlan,
    schedule: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Returns the gradients, see `execute.backward`; dquery's kernel always runs, since dkey's reads its statistics."""
    (dquery_plan, dkey_plan), problem = plan.backward, plan.problem
    qheads_per_kvhead, rows = problem.qheads_per_kvhead, x.query.shape[0]
    dquery, dkey, dvalue, dbias = empty_like((x.query, x.key, x.value, x.bias), needed[:4])
    stats = torch.empty(2, problem.num_kv_heads, rows * qheads_per_kvhead, dtype=torch.float32, device=x.query.device)
    # Tiles have 64 rows but for the queries of dkey, so both kernels have the same descriptors.
    key = tensor_descriptor(x.key, ROWS.value)
    value = key if x.value is None else tensor_descriptor(x.value, ROWS.value)
    descriptors = (
        tensor_descriptor(x.query, ROWS.value, qheads_per_kvhead),
        tensor_descriptor(grad, ROWS.value, qheads_per_kvhead),
        key,
        value,
    )
    numbers = (*bounds(x.left, x.right), x.scale, x.scale * LOG2E.value)
    block_m, block_n = dquery_plan.block_m, dkey_plan.block_n
    biases, times = (x.bias, x.edges, x.table), (x.query_time, x.key_time)
    totals, visibility = [], Visibility.of(x)
    for first, count, offsets, sums in query_parts(x, needed[4]):
        tiles = schedule  # of all rows
        if tiles is None or count != rows:
            tiles = schedule_tiles(offsets, x.key_offsets, count, qheads_per_kvhead, block_m)
        tensors = (tiles, (*biases, out, lse, dlse), (stats, dquery, sums))
        own_numbers = (rows * qheads_per_kvhead, first, *numbers)
        _launch(_dquery_launcher, dquery_plan, problem, visibility, descriptors, tensors, own_numbers)
        if sums is not None:
            totals.append(sums.sum(0))
    dtable = add_totals(totals, x.table)
    if not any(needed[1:4]):
        return dquery, None, None, None, dtable
    # In self-attention with a key head per query head, both sides are cut into the same tiles.
    same_tiles = qheads_per_kvhead == 1 and block_m == block_n and count == rows
    if not (same_tiles and x.query_offsets.data_ptr() == x.key_offsets.data_ptr()):
        tiles = schedule_tiles(x.key_offsets, x.query_offsets, x.key.shape[0], 1, block_n)
    tensors = (tiles, biases, (*times, stats), (dkey, dvalue, dbias))
    if dkey_plan.block_m != ROWS.value:
        queries = (tensor_descriptor(y, dkey_plan.block_m, qheads_per_kvhead) for y in (x.query, grad))
        descriptors = (*queries, key, value)
    _launch(_dkey_launcher, dkey_plan, problem, visibility, descriptors, tensors, (rows * qheads_per_kvhead, *numbers))
    return dquery, dkey, dvalue, dbias, dtable
