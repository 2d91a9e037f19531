"""Jagged attention forward on Hopper: products run beside the exponentials, tiles arrive while others are used.

Each computing warp group owns 64 query rows (Shah et al., 'FlashAttention-3', 2024).  It starts the scores of the next
tile of keys and the product of the weights at hand with their values, and works on the softmax of the former while the
latter is under way; while it waits, its neighbour has the matrix units.  Programs take slots of the schedule in turn,
so the first tiles of the next slot arrive while the last results of this one are stored.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jfi.kernels.common.primitives import LN2
from jfi.kernels.common.tile_scheduler import COUNTER
from jfi.kernels.jagged_attention.sm90_primitives import (
    INF,
    ROWS,
    barriers,
    fetch,
    keys_met,
    numbers,
    place_queue,
    put_bias,
    seen_in_full,
    slot_of,
    store_rows,
    take_place,
    taken_place,
    tiles,
    where_seen,
    zero_tail,
)


@gluon.jit
def _fetch(
    descs,
    smem,
    bars,
    tail_bar,
    work,
    HEADS: gl.constexpr,
    GROUPS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """The last tile of keys comes first, since it is the one that may be cut off."""
    q_desc, k_desc, v_desc = descs
    q_smem, k_smem, v_smem, bias_smem = smem
    q_full, q_free, k_full, k_free, v_full, v_free = bars
    slots_ptr, queue, bias_ptr, total, left, right = work
    Q_STAGES: gl.constexpr = q_full.shape[0]
    WARP_GROUPS: gl.constexpr = q_smem.shape[0] // Q_STAGES
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    Q_BYTES: gl.constexpr = WARP_GROUPS * ROWS * q_smem.shape[2] * 2
    K_BYTES: gl.constexpr = BLOCK_N * k_smem.shape[2] * 2
    V_BYTES: gl.constexpr = BLOCK_N * v_smem.shape[2] * 2
    count = 0  # tiles of keys so far
    turn = 0  # slots with any
    tails = 0
    taken = 0
    at = gl.program_id(0)
    slot = slot_of(slots_ptr, at, total, GROUPS)
    while at < total:
        next_at = take_place(slots_ptr + COUNTER, queue, taken)
        next_slot = slot_of(slots_ptr, next_at, total, GROUPS)
        taken += 1
        group = at % GROUPS
        _tile, q_low, _queries, k_low, keys = slot
        first, _shift, begin, steps = keys_met(
            slot, left, right, HEADS, HAS_LEFT, HAS_RIGHT, WARP_GROUPS * ROWS, BLOCK_N
        )
        # Rows of the first tile fetched that are the sample's.
        tail = keys - begin - (steps - 1) * BLOCK_N
        if steps > 0:
            q_stage = turn % Q_STAGES
            full = q_full.index(q_stage)
            mbarrier.wait(q_free.index(q_stage), (turn // Q_STAGES & 1) ^ 1)
            mbarrier.expect(full, Q_BYTES)
            for i in gl.static_range(WARP_GROUPS):
                to = q_smem.index(q_stage * WARP_GROUPS + i)
                fetch(q_desc, q_low * HEADS + first + i * ROWS, group, full, to)
            turn += 1
        # One round more than tiles: the tail's values are mended once the second tile's keys are on their way.
        for step in range(steps + 1):
            stage = (count + step) % STAGES
            phase = ((count + step) // STAGES & 1) ^ 1
            row = k_low + begin + (steps - 1 - step) * BLOCK_N
            if step < steps:
                mbarrier.wait(k_free.index(stage), phase)
                mbarrier.expect(k_full.index(stage), K_BYTES)
                fetch(k_desc, row, group, k_full.index(stage), k_smem.index(stage))
                if HAS_BIAS:
                    put_bias(bias_ptr, row, k_low + keys, group, bias_smem.index(stage), GROUPS)
                    mbarrier.arrive(k_full.index(stage))
            if (step == 1) & (tail < BLOCK_N):
                tail_stage = count % STAGES
                mbarrier.wait(tail_bar.index(0), tails & 1)
                tails += 1
                zero_tail(v_smem.index(tail_stage), tail)
                mbarrier.arrive(v_full.index(tail_stage))
            if step < steps:
                mbarrier.wait(v_free.index(stage), phase)
                if (step == 0) & (tail < BLOCK_N):
                    mbarrier.expect(tail_bar.index(0), V_BYTES)
                    fetch(v_desc, row, group, tail_bar.index(0), v_smem.index(stage))
                else:
                    mbarrier.expect(v_full.index(stage), V_BYTES)
                    fetch(v_desc, row, group, v_full.index(stage), v_smem.index(stage))
        count += steps
        at = next_at
        slot = next_slot


@gluon.jit
def _weigh(
    s,
    top,
    weight,
    n,
    view,
    scale2,
    bias_smem,
    HAS_BIAS: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """Of a tile: (weights by the new maximum, that maximum in base 2, sum so far, what older ones shrink by)."""
    if HAS_BIAS:
        s = s * scale2 + bias_smem.load(gl.SliceLayout(0, s.type.layout))[None, :]
        scale2 = 1.0
    s = where_seen(s, n, view, -INF, HAS_LEFT, HAS_RIGHT)
    new_top = gl.maximum(top, gl.max(s, 1) * scale2)
    base = gl.where(new_top == -INF, 0.0, new_top)
    p = gl.exp2(s * scale2 - base[:, None])
    shrink = gl.exp2(top - base)
    return p, new_top, weight * shrink + gl.sum(p, 1), shrink


@gluon.jit
def _attend(
    smem,
    bars,
    work,
    results,
    OWN: gl.constexpr,
    HEADS: gl.constexpr,
    GROUPS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """The query rows from OWN on of each slot's tile."""
    q_smem, k_smem, v_smem, bias_smem = smem
    q_full, q_free, k_full, k_free, v_full, v_free = bars
    slots_ptr, queue, _bias_ptr, total, left, right = work
    out_ptr, lse_ptr, scale2 = results
    Q_STAGES: gl.constexpr = q_full.shape[0]
    WARP_GROUPS: gl.constexpr = q_smem.shape[0] // Q_STAGES
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    E: gl.constexpr = v_smem.shape[2]
    BIASES: gl.constexpr = bias_smem.shape[0]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    count = 0
    turn = 0
    taken = 0
    at = gl.program_id(0)
    slot = slot_of(slots_ptr, at, total, GROUPS)
    while at < total:
        next_at = taken_place(queue, taken)
        next_slot = slot_of(slots_ptr, next_at, total, GROUPS)
        taken += 1
        group = at % GROUPS
        _tile, q_low, queries, _k_low, keys = slot
        first, shift, begin, steps = keys_met(
            slot, left, right, HEADS, HAS_LEFT, HAS_RIGHT, WARP_GROUPS * ROWS, BLOCK_N
        )
        first += OWN
        place = (first + gl.arange(0, ROWS, S_ROW)) // HEADS + shift
        full = seen_in_full(first, shift, keys, left, right, HEADS, HAS_LEFT, HAS_RIGHT)
        view = (place, keys, full, left, right)
        acc = gl.zeros([ROWS, E], gl.float32, O_LAYOUT)
        top = gl.full([ROWS], -INF, gl.float32, S_ROW)
        weight = gl.zeros([ROWS], gl.float32, S_ROW)
        if steps > 0:
            q_stage = turn % Q_STAGES
            q = q_smem.index(q_stage * WARP_GROUPS + OWN // ROWS)
            n = begin + (steps - 1) * BLOCK_N
            stage = count % STAGES
            mbarrier.wait(q_full.index(q_stage), turn // Q_STAGES & 1)
            mbarrier.wait(k_full.index(stage), count // STAGES & 1)
            s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, [s])
            bias = bias_smem.index(stage % BIASES)
            p, top, weight, _shrink = _weigh(s, top, weight, n, view, scale2, bias, HAS_BIAS, HAS_LEFT, HAS_RIGHT)
            mbarrier.arrive(k_free.index(stage))
            p = gl.convert_layout(p.to(v_smem.dtype), P_LAYOUT)
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
                if not HAS_BIAS:
                    mbarrier.arrive(k_free.index(stage))
                bias = bias_smem.index(stage % BIASES)
                next_p, top, weight, shrink = _weigh(
                    s, top, weight, n, view, scale2, bias, HAS_BIAS, HAS_LEFT, HAS_RIGHT
                )
                if HAS_BIAS:
                    mbarrier.arrive(k_free.index(stage))
                # Before the one wait and named in the other, which the assembler else moves ahead of the softmax.
                next_p = gl.convert_layout(next_p.to(v_smem.dtype), P_LAYOUT)
                following = count + 1
                mbarrier.wait(k_full.index(following % STAGES), following // STAGES & 1, pred=step + 1 < steps)
                acc, p, next_p = warpgroup_mma_wait(0, [acc, p, next_p])
                mbarrier.arrive(v_free.index(last))
                acc = acc * gl.convert_layout(shrink, O_ROW)[:, None]
                p = next_p
            mbarrier.arrive(q_free.index(q_stage))
            last = count % STAGES
            mbarrier.wait(v_full.index(last), count // STAGES & 1)
            acc = warpgroup_mma(p, v_smem.index(last), acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(v_free.index(last))
            count += 1
            turn += 1
        weight_or_one = gl.where(weight == 0.0, 1.0, weight)
        lse = gl.where(weight == 0.0, -INF, (top + gl.log2(weight_or_one)) * LN2)
        row = q_low * HEADS + first
        end = (q_low + queries) * HEADS
        own = row + gl.arange(0, ROWS, S_ROW)
        gl.store(lse_ptr + own.to(gl.int64) * GROUPS + group, lse, mask=own < end)
        acc = acc * gl.convert_layout(1.0 / weight_or_one, O_ROW)[:, None]
        store_rows(out_ptr, acc, row, end, group, GROUPS)
        at = next_at
        slot = next_slot


@gluon.jit(do_not_specialize=["total", "left", "right"])
def jagged_attention_hopper_fwd_kernel(
    q_desc,
    k_desc,
    v_desc,
    slots_ptr,
    bias_ptr,
    out_ptr,
    lse_ptr,
    total,
    left,
    right,
    scale2,
    HEADS: gl.constexpr,
    GROUPS: gl.constexpr,
    WARP_GROUPS: gl.constexpr,
    Q_STAGES: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """scale2 > 0 is the scale in base 2."""
    BIASES: gl.constexpr = STAGES if HAS_BIAS else 1
    bias_smem = numbers(BIASES, k_desc.block_type.shape[0])
    smem = (tiles(q_desc, Q_STAGES * WARP_GROUPS), tiles(k_desc, STAGES), tiles(v_desc, STAGES), bias_smem)
    q_full, q_free = barriers(Q_STAGES, 1), barriers(Q_STAGES, WARP_GROUPS)
    # Keys are there with the bytes of their tile, and with their bias.
    K_ARRIVALS: gl.constexpr = 2 if HAS_BIAS else 1
    k_full, k_free = barriers(STAGES, K_ARRIVALS), barriers(STAGES, WARP_GROUPS)
    v_full, v_free = barriers(STAGES, 1), barriers(STAGES, WARP_GROUPS)
    tail_bar = barriers(1, 1)
    fence_async_shared()
    bars = (q_full, q_free, k_full, k_free, v_full, v_free)
    descs = (q_desc, k_desc, v_desc)
    work = (slots_ptr, place_queue(WARP_GROUPS), bias_ptr, total, left, right)
    results = (out_ptr, lse_ptr, scale2)
    if WARP_GROUPS == 1:
        gl.warp_specialize(
            [
                (_attend, (smem, bars, work, results, 0, HEADS, GROUPS, HAS_BIAS, HAS_LEFT, HAS_RIGHT)),
                (_fetch, (descs, smem, bars, tail_bar, work, HEADS, GROUPS, HAS_BIAS, HAS_LEFT, HAS_RIGHT)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (smem, bars, work, results, 0, HEADS, GROUPS, HAS_BIAS, HAS_LEFT, HAS_RIGHT)),
                (_attend, (smem, bars, work, results, ROWS, HEADS, GROUPS, HAS_BIAS, HAS_LEFT, HAS_RIGHT)),
                (_fetch, (descs, smem, bars, tail_bar, work, HEADS, GROUPS, HAS_BIAS, HAS_LEFT, HAS_RIGHT)),
            ],
            [4, 1],
            [240, 24],
        )
