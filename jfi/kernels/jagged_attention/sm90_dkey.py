"""The gradients of keys and values on Hopper: a computing warp group owns 64 keys, the queries that see them pass by.

Scores are [N, M] here, so that P and dS go from registers into the products that give dv and dk.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jfi.kernels.common.primitives import LOG2E
from jfi.kernels.common.tile_scheduler import OTHER_COUNTER
from jfi.kernels.jagged_attention.sm90_primitives import (
    INF,
    ROWS,
    barriers,
    fetch,
    numbers,
    place_queue,
    queries_met,
    sees,
    slot_of,
    store_rows,
    take_place,
    taken_place,
    tiles,
    zero_tail,
)


@gluon.jit
def _fetch(
    descs,
    smem,
    bars,
    tail_bar,
    work,
    stats_ptr,
    rows,
    HEADS: gl.constexpr,
    GROUPS: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """The last tile of queries comes first, since it is the one that may be cut off."""
    q_desc, grad_desc, k_desc, v_desc = descs
    k_smem, v_smem, q_smem, grad_smem, lse_smem, delta_smem = smem
    k_full, k_free, full, free = bars
    slots_ptr, queue, total, left, right = work
    WARP_GROUPS: gl.constexpr = k_smem.shape[0]
    STAGES: gl.constexpr = q_smem.shape[0]
    BLOCK_M: gl.constexpr = q_smem.shape[1]
    K_BYTES: gl.constexpr = WARP_GROUPS * ROWS * (k_smem.shape[2] + v_smem.shape[2]) * 2
    BYTES: gl.constexpr = BLOCK_M * (q_smem.shape[2] + grad_smem.shape[2]) * 2
    own = gl.arange(0, BLOCK_M, gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0]))
    count = 0  # tiles of queries so far
    turn = 0  # slots with any
    tails = 0
    taken = 0
    at = gl.program_id(0)
    slot = slot_of(slots_ptr, at, total, GROUPS)
    while at < total:
        next_at = take_place(slots_ptr + OTHER_COUNTER, queue, taken)
        next_slot = slot_of(slots_ptr, next_at, total, GROUPS)
        taken += 1
        group = at % GROUPS
        _tile, k_low, _keys, q_low, queries = slot
        first, _shift, begin, steps = queries_met(
            slot, left, right, HEADS, HAS_LEFT, HAS_RIGHT, BLOCK_M, WARP_GROUPS * ROWS
        )
        # Rows of the first tile fetched that are the sample's.
        tail = queries * HEADS - begin - (steps - 1) * BLOCK_M
        if steps > 0:
            mbarrier.wait(k_free.index(0), (turn & 1) ^ 1)
            mbarrier.expect(k_full.index(0), K_BYTES)
            for i in gl.static_range(WARP_GROUPS):
                fetch(k_desc, k_low + first + i * ROWS, group, k_full.index(0), k_smem.index(i))
                fetch(v_desc, k_low + first + i * ROWS, group, k_full.index(0), v_smem.index(i))
            turn += 1
        # One round more than tiles: the tail is mended once the second tile is on its way.
        for step in range(steps + 1):
            stage = (count + step) % STAGES
            query = begin + (steps - 1 - step) * BLOCK_M
            row = q_low * HEADS + query
            if step < steps:
                mbarrier.wait(free.index(stage), ((count + step) // STAGES & 1) ^ 1)
                if (step == 0) & (tail < BLOCK_M):
                    mbarrier.expect(tail_bar.index(0), BYTES)
                    fetch(q_desc, row, group, tail_bar.index(0), q_smem.index(stage))
                    fetch(grad_desc, row, group, tail_bar.index(0), grad_smem.index(stage))
                else:
                    mbarrier.expect(full.index(stage), BYTES)
                    fetch(q_desc, row, group, full.index(stage), q_smem.index(stage))
                    fetch(grad_desc, row, group, full.index(stage), grad_smem.index(stage))
                stats = stats_ptr + group.to(gl.int64) * rows + row + own
                mask = query + own < queries * HEADS
                lse_smem.index(stage).store(gl.load(stats, mask=mask, other=INF))
                delta_smem.index(stage).store(gl.load(stats + rows.to(gl.int64) * GROUPS, mask=mask, other=0.0))
                mbarrier.arrive(full.index(stage))
            if (step == 1) & (tail < BLOCK_M):
                mbarrier.wait(tail_bar.index(0), tails & 1)
                tails += 1
                zero_tail(q_smem.index(count % STAGES), tail)
                zero_tail(grad_smem.index(count % STAGES), tail)
                mbarrier.arrive(full.index(count % STAGES))
        count += steps
        at = next_at
        slot = next_slot


@gluon.jit
def _attend(
    smem,
    bars,
    work,
    results,
    OWN: gl.constexpr,
    HEADS: gl.constexpr,
    GROUPS: gl.constexpr,
    SHARED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """The keys from OWN on of each slot's tile."""
    k_smem, v_smem, q_smem, grad_smem, lse_smem, delta_smem = smem
    k_full, k_free, full, free = bars
    slots_ptr, queue, total, left, right = work
    bias_ptr, dk_ptr, dv_ptr, dbias_ptr, scale, scale2 = results
    WARP_GROUPS: gl.constexpr = k_smem.shape[0]
    STAGES: gl.constexpr = q_smem.shape[0]
    BLOCK_M: gl.constexpr = q_smem.shape[1]
    D: gl.constexpr = q_smem.shape[2]
    E: gl.constexpr = grad_smem.shape[2]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    K_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    V_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    zero = gl.zeros([ROWS, BLOCK_M], gl.float32, S_LAYOUT)
    k = k_smem.index(OWN // ROWS)
    v = v_smem.index(OWN // ROWS)
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
        _tile, k_low, keys, _q_low, _queries = slot
        first, shift, begin, steps = queries_met(
            slot, left, right, HEADS, HAS_LEFT, HAS_RIGHT, BLOCK_M, WARP_GROUPS * ROWS
        )
        first += OWN
        key = first + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
        dk = gl.zeros([ROWS, D], gl.float32, K_LAYOUT)
        dv = gl.zeros([ROWS, E], gl.float32, V_LAYOUT)
        if HAS_BIAS:
            bias_at = (k_low + key).to(gl.int64) * GROUPS + group
            bias = gl.load(bias_ptr + bias_at, mask=key < keys, other=0.0).to(gl.float32) * LOG2E
        dbias = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
        if steps > 0:
            mbarrier.wait(k_full.index(0), turn & 1)
            for step in range(steps):
                stage = count % STAGES
                query = begin + (steps - 1 - step) * BLOCK_M
                mbarrier.wait(full.index(stage), count // STAGES & 1)
                s = warpgroup_mma(k, q_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
                dp = warpgroup_mma(v, grad_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
                lse = lse_smem.index(stage).load(COLUMN)
                s = warpgroup_mma_wait(1, [s])
                if HAS_BIAS:
                    p = gl.exp2(s * scale2 + (bias[:, None] - lse[None, :]))
                else:
                    p = gl.exp2(s * scale2 - lse[None, :])
                if HAS_LEFT or HAS_RIGHT:
                    hides = False
                    if HAS_RIGHT:
                        hides = hides | (first + ROWS - 1 > query // HEADS + shift + right)
                    if HAS_LEFT:
                        hides = hides | (first < (query + BLOCK_M - 1) // HEADS + shift - left)
                    if hides:
                        place = (query + gl.arange(0, BLOCK_M, COLUMN)) // HEADS + shift
                        seen = sees(key[:, None], place[None, :], left, right, HAS_LEFT, HAS_RIGHT)
                        p = gl.where(seen, p, 0.0)
                weights = gl.convert_layout(p.to(q_smem.dtype), gl.DotOperandLayout(0, V_LAYOUT, 2))
                dv = warpgroup_mma(weights, grad_smem.index(stage), dv, is_async=True)
                delta = delta_smem.index(stage).load(COLUMN)
                dp = warpgroup_mma_wait(1, [dp])
                ds = p * (dp - delta[None, :])
                if HAS_BIAS:
                    dbias += gl.sum(ds, 1)
                ds = gl.convert_layout(ds.to(q_smem.dtype), gl.DotOperandLayout(0, K_LAYOUT, 2))
                dk = warpgroup_mma(ds, q_smem.index(stage), dk, is_async=True)
                dv, weights, dk, ds = warpgroup_mma_wait(0, [dv, weights, dk, ds])
                mbarrier.arrive(free.index(stage))
                count += 1
            mbarrier.arrive(k_free.index(0))
            turn += 1
        if HAS_BIAS:
            gl.store(dbias_ptr + bias_at, dbias.to(dbias_ptr.dtype.element_ty), mask=key < keys)
        dk = dk * scale
        if SHARED:
            dk = dk + dv
        else:
            store_rows(dv_ptr, dv, k_low + first, k_low + keys, group, GROUPS)
        store_rows(dk_ptr, dk, k_low + first, k_low + keys, group, GROUPS)
        at = next_at
        slot = next_slot


@gluon.jit(do_not_specialize=["total", "rows", "left", "right"])
def jagged_attention_hopper_dkey_kernel(
    q_desc,
    grad_desc,
    k_desc,
    v_desc,
    slots_ptr,
    bias_ptr,
    stats_ptr,
    dk_ptr,
    dv_ptr,
    dbias_ptr,
    total,
    rows,
    left,
    right,
    scale,
    scale2,
    HEADS: gl.constexpr,
    GROUPS: gl.constexpr,
    SHARED: gl.constexpr,
    WARP_GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """dk (and dv in it if SHARED, value = key), dv and dbias."""
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[0]
    lse_smem, delta_smem = numbers(STAGES, BLOCK_M), numbers(STAGES, BLOCK_M)
    k_smem, v_smem = tiles(k_desc, WARP_GROUPS), tiles(v_desc, WARP_GROUPS)
    smem = (k_smem, v_smem, tiles(q_desc, STAGES), tiles(grad_desc, STAGES), lse_smem, delta_smem)
    # A stage is full with the bytes of its tiles and with its statistics.
    bars = (barriers(1, 1), barriers(1, WARP_GROUPS), barriers(STAGES, 2), barriers(STAGES, WARP_GROUPS))
    tail_bar = barriers(1, 1)
    fence_async_shared()
    descs = (q_desc, grad_desc, k_desc, v_desc)
    work = (slots_ptr, place_queue(WARP_GROUPS), total, left, right)
    results = (bias_ptr, dk_ptr, dv_ptr, dbias_ptr, scale, scale2)
    if WARP_GROUPS == 1:
        gl.warp_specialize(
            [
                (_attend, (smem, bars, work, results, 0, HEADS, GROUPS, SHARED, HAS_BIAS, HAS_LEFT, HAS_RIGHT)),
                (_fetch, (descs, smem, bars, tail_bar, work, stats_ptr, rows, HEADS, GROUPS, HAS_LEFT, HAS_RIGHT)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (smem, bars, work, results, 0, HEADS, GROUPS, SHARED, HAS_BIAS, HAS_LEFT, HAS_RIGHT)),
                (_attend, (smem, bars, work, results, ROWS, HEADS, GROUPS, SHARED, HAS_BIAS, HAS_LEFT, HAS_RIGHT)),
                (_fetch, (descs, smem, bars, tail_bar, work, stats_ptr, rows, HEADS, GROUPS, HAS_LEFT, HAS_RIGHT)),
            ],
            [4, 1],
            [240, 24],
        )
