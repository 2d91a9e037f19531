"""Target attention forward for many query rows: many candidates, or many heads, to one history.

Arithmetic outweighs bytes here.  A program handles a tile of query rows and a chunk of a sample's rows; the programs of
a chunk run at the same time, so that its rows come from the L2 cache.  Full tiles of rows need no mask and are loaded
by TMA; a sample's last rows are loaded separately.  Several small programs per SM overlap the exponentials of one with
the GEMMs of another.  Scores are kept in base 2: one multiply-add and one instruction for an exponential.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels.common.combine import chunk_partial
from jfi.kernels.common.online_softmax import finish, no_sums, online_softmax_update
from jfi.kernels.common.primitives import LOG2E
from jfi.kernels.common.spec import launchers_of
from jfi.kernels.common.tiles import load_bias_tile, load_rows, store_rows
from jfi.kernels.plan import AttentionPlan
from jfi.kernels.target_attention.multi_tile_chunks import (
    find_chunk,
    history_descriptor,
    load_history,
    query_positions,
    split_into_chunks,
)
from jfi.utils.operands import TargetAttentionInputs


@triton.jit
def _attend(q, desc, history, n, mask, at, kv_head, state, scale2, MASKED: tl.constexpr, SPEC: tl.constexpr):
    """The running maximum (base 2), sum and weighted sum after the tile of rows from n on; scale2 >= 0."""
    maximum, total, acc = state
    k_at = tl.arange(0, SPEC.block_n)
    k, v = load_history(desc, history, n, k_at, mask, kv_head, SPEC, SPEC.by_tma and not MASKED)
    s = tl.dot(q, tl.trans(k), input_precision=SPEC.precision)
    if SPEC.has_bias or MASKED:
        s = s * scale2
        if SPEC.has_bias:
            s += load_bias_tile(history[2], n, k_at, mask, at, kv_head, SPEC)
        if MASKED:
            s = tl.where(mask[None, :], s, -float("inf"))
        p, maximum, factor = online_softmax_update(s, maximum)
    else:
        # Every score is finite: scaled where the maximum is subtracted, in one multiply-add.
        new_maximum = tl.maximum(maximum, tl.max(s, 1) * scale2)
        p = tl.exp2(s * scale2 - new_maximum[:, None])
        factor = tl.exp2(maximum - new_maximum)
        maximum = new_maximum
    total = total * factor + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * factor[:, None], input_precision=SPEC.precision)
    return maximum, total, acc


@triton.jit(do_not_specialize=["batch", "num_rows", "tiles", "chunk"])
def target_attention_multi_tile_fwd_kernel(
    k_desc, v_desc, q_ptr, history, outputs, batch, num_rows, tiles, chunk, scale, SPEC: tl.constexpr
):
    D: tl.constexpr = SPEC.head_dim
    E: tl.constexpr = SPEC.value_dim
    out_ptr, lse_ptr, partial_ptr, partial_lse_ptr = outputs
    program, kv_head = tl.program_id(0), tl.program_id(1)
    sample, low, n, high = find_chunk(history[3], batch, program // tiles, chunk)
    if (n >= high) & (n > low):
        return
    first = program % tiles * SPEC.block_m
    at = first + tl.arange(0, SPEC.block_m)
    start, q_at = query_positions(first, at, kv_head, SPEC)
    q_mask = at < num_rows
    k_at = tl.arange(0, SPEC.block_n)
    sample_rows = (num_rows * SPEC.num_kv_heads).to(tl.int64)
    row = sample * sample_rows + start
    q = load_rows(q_ptr + row * D, q_at, q_mask, D, D, SPEC.block_d)
    maximum, total, acc = no_sums(SPEC.block_m, SPEC.block_e)
    left = tl.minimum(high - n, chunk).to(tl.int32)
    full = left // SPEC.block_n * SPEC.block_n
    desc = (k_desc, v_desc)
    # The interpreter takes a number below float32's normal ones for float64.
    scale2 = tl.full((), scale * LOG2E, tl.float32)
    for ahead in range(0, full, SPEC.block_n):
        state = (maximum, total, acc)
        mask = k_at < SPEC.block_n
        maximum, total, acc = _attend(q, desc, history, n + ahead, mask, at, kv_head, state, scale2, False, SPEC)
    if full < left:
        state = (maximum, total, acc)
        mask = k_at < left - full
        maximum, total, acc = _attend(q, desc, history, n + full, mask, at, kv_head, state, scale2, True, SPEC)
    out, lse = finish(maximum, total, acc)
    if high - low <= chunk:
        store_rows(out_ptr + row * E, out, q_at, q_mask, E, E, SPEC.block_e)
        tl.store(lse_ptr + row + q_at, lse, mask=q_mask)
    else:
        partial = chunk_partial(low, n, chunk) * sample_rows + start
        store_rows(partial_ptr + partial * E, out, q_at, q_mask, E, E, SPEC.block_e)
        tl.store(partial_lse_ptr + partial + q_at, lse, mask=q_mask)


_launcher = launchers_of(target_attention_multi_tile_fwd_kernel)


def forward(
    x: TargetAttentionInputs, chosen: AttentionPlan, out: Tensor, lse: Tensor, launch: Callable[..., None]
) -> None:
    """Fill in the output [B, T, H, E] and the log-sum-exp of the scores [B, T, H], -inf for an empty history.

    ``launch`` calls a launcher with its arguments.
    """
    problem, kernel = chosen.problem, chosen.forward[0]
    query, scale = (-x.query, -x.scale) if x.scale < 0 else (x.query, x.scale)
    partials, grid, numbers = split_into_chunks(x, problem, kernel.block_m, problem.value_dim)
    descriptors = (None, None)
    if kernel.options["BY_TMA"]:
        descriptors = tuple(history_descriptor(y, kernel.block_n) for y in (x.key, x.value))
    tensors = (query, (x.key, x.value, x.bias, x.offsets), (out, lse, partials.values, partials.lse))
    launch(_launcher(problem, kernel), grid, tensors, (*numbers, scale), descriptors)
    partials.combine(x.offsets, out, lse, launch)
