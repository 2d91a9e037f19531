"""Jagged attention forward on Hopper: products run beside the exponentials, and tiles arrive while others are used.

Warp groups of a program have roles (Shah et al., 'FlashAttention-3', 2024): one fetches tiles of keys and values with
the copy engine, the others each own 64 query rows.  Each of those starts the scores of the next tile and the product of
the weights at hand with its values, and works on the softmax of the one while the other is under way; while it waits,
its neighbour has the matrix units.  Programs take slots of the schedule in turn, so the first tiles of the next slot
arrive while the last of this one is stored.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jfi.kernels.schedule import schedule

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
INF = gl.constexpr(float("inf"))
#: Query rows of a warp group.
ROWS = gl.constexpr(64)


@gluon.jit
def _entry(slots_ptr, at, total, GROUPS: gl.constexpr):
    """What the schedule says of a slot; nothing past the end."""
    to = slots_ptr + (at // GROUPS).to(gl.int64) * 8
    keep = at < total
    tile = gl.load(to + 1, mask=keep, other=0)
    q_low = gl.load(to + 2, mask=keep, other=0)
    queries = gl.load(to + 3, mask=keep, other=0)
    k_low = gl.load(to + 4, mask=keep, other=0)
    keys = gl.load(to + 5, mask=keep, other=0)
    return tile, q_low, queries, k_low, keys


@gluon.jit
def _range(entry, left, right, HEADS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Of a slot: (first query row, end of the sample's, the first query's place among the keys, first key, steps)."""
    tile, q_low, queries, _k_low, keys = entry
    if HAS_RIGHT:
        # The last queries see the most keys: they go first.
        tile = gl.maximum((queries * HEADS + BLOCK_M - 1) // BLOCK_M - 1 - tile, 0)
    first = tile * BLOCK_M
    place = first // HEADS + keys - queries
    end = keys
    if HAS_RIGHT:
        end = gl.minimum(end, place + (BLOCK_M - 1) // HEADS + right + 1)
    begin = end * 0
    if HAS_LEFT:
        begin = gl.maximum(begin, place - left) // BLOCK_N * BLOCK_N
    steps = gl.maximum(end - begin + BLOCK_N - 1, 0) // BLOCK_N
    if queries == 0:
        steps = 0
    return q_low * HEADS + first, (q_low + queries) * HEADS, place, begin, steps


@gluon.jit
def _zero_tail(smem, rows):
    """Zeros in the rows of a tile from ``rows`` on: 0 times what the next sample holds there is not always 0."""
    BLOCK_N: gl.constexpr = smem.shape[0]
    WIDTH: gl.constexpr = smem.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [1, 1], [1, 0])
    for first in gl.static_range(0, BLOCK_N, 8):
        if rows < first + 8:
            part = smem.slice(first, 8)
            at = first + gl.arange(0, 8, gl.SliceLayout(1, layout))
            x = part.load(layout)
            part.store(gl.where((at < rows)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()


@gluon.jit
def _load(
    descs, smem, v_tail, work, left, right,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):
    q_desc, k_desc, v_desc = descs
    q_smem, k_smem, v_smem, q_full, q_free, k_full, k_free, v_full, v_free = smem
    slots_ptr, total = work
    Q_STAGES: gl.constexpr = q_full.shape[0]
    CONSUMERS: gl.constexpr = q_smem.shape[0] // Q_STAGES
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    D: gl.constexpr = k_smem.shape[2]
    E: gl.constexpr = v_smem.shape[2]
    count = 0
    turn = 0
    tails = 0
    entry = _entry(slots_ptr, gl.program_id(0), total, GROUPS)
    for at in range(gl.program_id(0), total, gl.num_programs(0)):
        following = _entry(slots_ptr, at + gl.num_programs(0), total, GROUPS)
        group = at % GROUPS
        _tile, _q_low, _queries, k_low, keys = entry
        q_row, _q_end, _place, begin, steps = _range(entry, left, right, HEADS, HAS_LEFT, HAS_RIGHT, CONSUMERS * ROWS, BLOCK_N)
        # Rows of the first tile fetched, the last of the keys, that are the sample's.
        tail = keys - begin - (steps - 1) * BLOCK_N
        if steps > 0:
            q_stage = turn % Q_STAGES
            mbarrier.wait(q_free.index(q_stage), (turn // Q_STAGES & 1) ^ 1)
            mbarrier.expect(q_full.index(q_stage), CONSUMERS * ROWS * D * 2)
            for i in gl.static_range(CONSUMERS):
                to = q_smem.index(q_stage * CONSUMERS + i)
                tma.async_copy_global_to_shared(q_desc, [q_row + i * ROWS, group * D], q_full.index(q_stage), to)
            turn += 1
        # One round more than tiles: the first tile's values are mended once the second's keys are on their way.
        for step in range(steps + 1):
            stage = (count + step) % STAGES
            phase = ((count + step) // STAGES & 1) ^ 1
            row = k_low + begin + (steps - 1 - step) * BLOCK_N
            if step < steps:
                mbarrier.wait(k_free.index(stage), phase)
                mbarrier.expect(k_full.index(stage), BLOCK_N * D * 2)
                tma.async_copy_global_to_shared(k_desc, [row, group * D], k_full.index(stage), k_smem.index(stage))
            if (step == 1) & (tail < BLOCK_N):
                first = count % STAGES
                mbarrier.wait(v_tail, tails & 1)
                tails += 1
                _zero_tail(v_smem.index(first), tail)
                mbarrier.arrive(v_full.index(first))
            if step < steps:
                mbarrier.wait(v_free.index(stage), phase)
                full = v_full.index(stage)
                if (step == 0) & (tail < BLOCK_N):
                    mbarrier.expect(v_tail, BLOCK_N * E * 2)
                    tma.async_copy_global_to_shared(v_desc, [row, group * E], v_tail, v_smem.index(stage))
                else:
                    mbarrier.expect(full, BLOCK_N * E * 2)
                    tma.async_copy_global_to_shared(v_desc, [row, group * E], full, v_smem.index(stage))
        count += steps
        entry = following


@gluon.jit
def _weigh(
    s, top, total, n, place, keys, left, right, full_begin, full_end, scale2,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):
    """The weights of a tile of scores by the new maximum, that maximum (base 2), sum, and what the old ones shrink by."""
    S_LAYOUT: gl.constexpr = s.type.layout
    BLOCK_N: gl.constexpr = s.shape[1]
    if (n < full_begin) | (n + BLOCK_N > full_end):
        at = n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
        keep = (at < keys)[None, :]
        if HAS_RIGHT:
            keep = keep & (at[None, :] <= (place + right)[:, None])
        if HAS_LEFT:
            keep = keep & (at[None, :] >= (place - left)[:, None])
        s = gl.where(keep, s, -INF)
    new_top = gl.maximum(top, gl.max(s, 1) * scale2)
    base = gl.where(new_top == -INF, 0.0, new_top)
    p = gl.exp2(s * scale2 - base[:, None])
    shrink = gl.exp2(top - base)
    total = total * shrink + gl.sum(p, 1)
    return p, new_top, total, shrink


@gluon.jit
def _attend(
    smem, work, results, left, right, scale2,
    CONSUMER: gl.constexpr, HEADS: gl.constexpr, GROUPS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):
    q_smem, k_smem, v_smem, q_full, q_free, k_full, k_free, v_full, v_free = smem
    slots_ptr, all_slots = work
    out_ptr, lse_ptr = results
    Q_STAGES: gl.constexpr = q_full.shape[0]
    CONSUMERS: gl.constexpr = q_smem.shape[0] // Q_STAGES
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    E: gl.constexpr = v_smem.shape[2]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    OUT_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // E, E // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = k_smem.dtype
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    own = CONSUMER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
    own_out = CONSUMER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, OUT_LAYOUT))
    col = gl.arange(0, E, gl.SliceLayout(0, OUT_LAYOUT))
    count = 0
    turn = 0
    entry = _entry(slots_ptr, gl.program_id(0), all_slots, GROUPS)
    for at in range(gl.program_id(0), all_slots, gl.num_programs(0)):
        following_entry = _entry(slots_ptr, at + gl.num_programs(0), all_slots, GROUPS)
        group = at % GROUPS
        _tile, _q_low, _queries, _k_low, keys = entry
        q_row, q_end, place0, begin, steps = _range(entry, left, right, HEADS, HAS_LEFT, HAS_RIGHT, CONSUMERS * ROWS, BLOCK_N)
        # Where a row's query stands among the keys.
        place = place0 + own // HEADS
        full_end = keys
        full_begin = 0
        if HAS_RIGHT:
            full_end = gl.minimum(full_end, place0 + CONSUMER * ROWS // HEADS + right + 1)
        if HAS_LEFT:
            full_begin = place0 + (CONSUMER * ROWS + ROWS - 1) // HEADS - left
        acc = gl.zeros([ROWS, E], gl.float32, O_LAYOUT)
        top = gl.full([ROWS], -INF, gl.float32, gl.SliceLayout(1, S_LAYOUT))
        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
        if steps > 0:
            q_stage = turn % Q_STAGES
            mbarrier.wait(q_full.index(q_stage), turn // Q_STAGES & 1)
            q = q_smem.index(q_stage * CONSUMERS + CONSUMER)
            n = begin + (steps - 1) * BLOCK_N
            stage = count % STAGES
            mbarrier.wait(k_full.index(stage), count // STAGES & 1)
            s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, [s])
            mbarrier.arrive(k_free.index(stage))
            p, top, total, shrink = _weigh(s, top, total, n, place, keys, left, right, full_begin, full_end, scale2, HAS_LEFT, HAS_RIGHT)
            p = gl.convert_layout(p.to(dtype), P_LAYOUT)
            following = count + 1
            mbarrier.wait(k_full.index(following % STAGES), following // STAGES & 1, pred=steps > 1)
            for step in range(1, steps):
                n -= BLOCK_N
                last = count % STAGES
                last_phase = count // STAGES & 1
                count += 1
                stage = count % STAGES
                s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(last), last_phase)
                acc = warpgroup_mma(p, v_smem.index(last), acc, is_async=True)
                s = warpgroup_mma_wait(1, [s])
                mbarrier.arrive(k_free.index(stage))
                weights, top, total, shrink = _weigh(s, top, total, n, place, keys, left, right, full_begin, full_end, scale2, HAS_LEFT, HAS_RIGHT)
                # Named in the second wait and before the first, they are computed beside the product.
                weights = gl.convert_layout(weights.to(dtype), P_LAYOUT)
                following = count + 1
                mbarrier.wait(k_full.index(following % STAGES), following // STAGES & 1, pred=step + 1 < steps)
                acc, p, weights = warpgroup_mma_wait(0, [acc, p, weights])
                mbarrier.arrive(v_free.index(last))
                acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))[:, None]
                p = weights
            mbarrier.arrive(q_free.index(q_stage))
            last = count % STAGES
            mbarrier.wait(v_full.index(last), count // STAGES & 1)
            acc = warpgroup_mma(p, v_smem.index(last), acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(v_free.index(last))
            count += 1
            turn += 1
        total_or_one = gl.where(total == 0.0, 1.0, total)
        lse = gl.where(total == 0.0, -INF, (top + gl.log2(total_or_one)) * LN2)
        gl.store(lse_ptr + (q_row + own).to(gl.int64) * GROUPS + group, lse, mask=q_row + own < q_end)
        inverse = gl.convert_layout(1.0 / total_or_one, gl.SliceLayout(1, O_LAYOUT))
        out = gl.convert_layout((acc * inverse[:, None]).to(dtype), OUT_LAYOUT)
        row = q_row + own_out
        to = out_ptr + (row.to(gl.int64) * (GROUPS * E) + group * E)[:, None] + col[None, :]
        gl.store(to, out, mask=(row < q_end)[:, None])
        entry = following_entry


@gluon.jit(do_not_specialize=["total", "left", "right"])
def _jagged_attention_fwd_kernel(
    q_desc, k_desc, v_desc, slots_ptr, out_ptr, lse_ptr, total, left, right, scale2,
    HEADS: gl.constexpr, GROUPS: gl.constexpr, CONSUMERS: gl.constexpr, Q_STAGES: gl.constexpr, STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [Q_STAGES * CONSUMERS, ROWS, q_desc.block_type.shape[1]], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, k_desc.block_type.shape[0], k_desc.block_type.shape[1]], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, v_desc.block_type.shape[0], v_desc.block_type.shape[1]], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    v_tail = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(v_tail, count=1)
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_free.index(i), count=CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=CONSUMERS)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_free.index(i), count=CONSUMERS)
    fence_async_shared()

    smem = (q_smem, k_smem, v_smem, q_full, q_free, k_full, k_free, v_full, v_free)
    descs = (q_desc, k_desc, v_desc)
    work = (slots_ptr, total)
    results = (out_ptr, lse_ptr)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_attend, (smem, work, results, left, right, scale2, 0, HEADS, GROUPS, HAS_LEFT, HAS_RIGHT)),
                (_load, (descs, smem, v_tail, work, left, right, HEADS, GROUPS, HAS_LEFT, HAS_RIGHT)),
            ],
            [1],
            [24],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_attend, (smem, work, results, left, right, scale2, 0, HEADS, GROUPS, HAS_LEFT, HAS_RIGHT)),
                (_attend, (smem, work, results, left, right, scale2, 1, HEADS, GROUPS, HAS_LEFT, HAS_RIGHT)),
                (_load, (descs, smem, v_tail, work, left, right, HEADS, GROUPS, HAS_LEFT, HAS_RIGHT)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (smem, work, results, left, right, scale2, 0, HEADS, GROUPS, HAS_LEFT, HAS_RIGHT)),
                (_attend, (smem, work, results, left, right, scale2, 1, HEADS, GROUPS, HAS_LEFT, HAS_RIGHT)),
                (_attend, (smem, work, results, left, right, scale2, 2, HEADS, GROUPS, HAS_LEFT, HAS_RIGHT)),
                (_load, (descs, smem, v_tail, work, left, right, HEADS, GROUPS, HAS_LEFT, HAS_RIGHT)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


def described(x: Tensor, rows: int, packed: bool) -> TensorDescriptor:
    width = x.shape[2]
    flat = x.view(-1, width) if packed else x.view(x.shape[0], -1)
    block = [rows, width]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16)
    return TensorDescriptor.from_tensor(flat, block, layout)


def forward(query, key, value, q_offsets, k_offsets, left, right, scale, consumers=2, stages=2, block_n=128, q_stages=1, per_sm=1, maxnreg=None):
    rows, heads, width = query.shape
    groups = key.shape[1]
    packed = heads // groups
    out = query.new_empty(rows, heads, value.shape[2])
    lse = query.new_empty(rows, heads, dtype=torch.float32)
    slots = schedule(q_offsets, k_offsets, rows, packed, consumers * 64)
    total = slots.shape[0] * groups
    grid = total if per_sm is None else min(total, 132 * per_sm)
    _jagged_attention_fwd_kernel[(grid,)](
        described(query, 64, packed > 1), described(key, block_n, False), described(value, block_n, False),
        slots, out, lse, total, left or 0, right or 0, scale * 1.4426950408889634,
        HEADS=packed, GROUPS=groups, CONSUMERS=consumers, Q_STAGES=q_stages, STAGES=stages,
        HAS_LEFT=left is not None, HAS_RIGHT=right is not None, num_warps=4, maxnreg=maxnreg)
    return out, lse
