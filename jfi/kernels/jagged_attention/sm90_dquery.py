"""The gradient of the queries on Hopper: as the forward, with the product dS K in the place of P V.

Each tile of queries also works out its statistics, log-sum-exp and Δ, and leaves them for the sweep of the keys.
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
    q_desc, grad_desc, k_desc, v_desc = descs
    q_smem, grad_smem, k_smem, v_smem, bias_smem = smem
    q_full, q_free, full, free = bars
    slots_ptr, queue, bias_ptr, total, left, right = work
    WARP_GROUPS: gl.constexpr = q_smem.shape[0]
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    Q_BYTES: gl.constexpr = WARP_GROUPS * ROWS * (q_smem.shape[2] + grad_smem.shape[2]) * 2
    BYTES: gl.constexpr = BLOCK_N * (k_smem.shape[2] + v_smem.shape[2]) * 2
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
            mbarrier.wait(q_free.index(0), (turn & 1) ^ 1)
            mbarrier.expect(q_full.index(0), Q_BYTES)
            for i in gl.static_range(WARP_GROUPS):
                row = q_low * HEADS + first + i * ROWS
                fetch(q_desc, row, group, q_full.index(0), q_smem.index(i))
                fetch(grad_desc, row, group, q_full.index(0), grad_smem.index(i))
            turn += 1
        # One round more than tiles: the tail is mended once the second tile is on its way.
        for step in range(steps + 1):
            stage = (count + step) % STAGES
            row = k_low + begin + (steps - 1 - step) * BLOCK_N
            if step < steps:
                mbarrier.wait(free.index(stage), ((count + step) // STAGES & 1) ^ 1)
                if (step == 0) & (tail < BLOCK_N):
                    mbarrier.expect(tail_bar.index(0), BYTES)
                    fetch(k_desc, row, group, tail_bar.index(0), k_smem.index(stage))
                    fetch(v_desc, row, group, tail_bar.index(0), v_smem.index(stage))
                else:
                    mbarrier.expect(full.index(stage), BYTES)
                    fetch(k_desc, row, group, full.index(stage), k_smem.index(stage))
                    fetch(v_desc, row, group, full.index(stage), v_smem.index(stage))
                if HAS_BIAS:
                    put_bias(bias_ptr, row, k_low + keys, group, bias_smem.index(stage), GROUPS)
                    mbarrier.arrive(full.index(stage))
            if (step == 1) & (tail < BLOCK_N):
                mbarrier.wait(tail_bar.index(0), tails & 1)
                tails += 1
                zero_tail(k_smem.index(count % STAGES), tail)
                mbarrier.arrive(full.index(count % STAGES))
        count += steps
        at = next_at
        slot = next_slot


@gluon.jit
def _scores_gradient(
    s,
    dp,
    lse,
    delta,
    n,
    view,
    scale2,
    bias_smem,
    HAS_BIAS: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """dS = P (dP - Δ) of a tile [M, N], 0 where hidden."""
    if HAS_BIAS:
        s = s * scale2 + bias_smem.load(gl.SliceLayout(0, s.type.layout))[None, :]
        scale2 = 1.0
    ds = gl.exp2(s * scale2 - lse[:, None]) * (dp - delta[:, None])
    return where_seen(ds, n, view, 0.0, HAS_LEFT, HAS_RIGHT)


@gluon.jit
def _delta(grad, out_ptr, row, end, group, GROUPS: gl.constexpr):
    """Σ_e dO · O of a tile's rows in shared memory, from row on in [rows, G, width]."""
    WIDTH: gl.constexpr = grad.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    at = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    col = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    places = (at.to(gl.int64) * (GROUPS * WIDTH) + group * WIDTH)[:, None] + col[None, :]
    out = gl.load(out_ptr + places, mask=(at < end)[:, None], other=0.0).to(gl.float32)
    # Fused with 0, for threads that hold the same row must agree on its sum: see target_attention_tiles.row_products.
    return gl.sum(gl.fma(grad.load(LAYOUT).to(gl.float32), out, gl.zeros_like(out)), 1)


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
    HAS_DLSE: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """The query rows from OWN on of each slot's tile."""
    q_smem, grad_smem, k_smem, v_smem, bias_smem = smem
    q_full, q_free, full_bars, free = bars
    slots_ptr, queue, _bias_ptr, total, left, right = work
    out_ptr, lse_ptr, dlse_ptr, stats_ptr, dq_ptr, rows, scale, scale2 = results
    WARP_GROUPS: gl.constexpr = q_smem.shape[0]
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    D: gl.constexpr = k_smem.shape[2]
    BIASES: gl.constexpr = bias_smem.shape[0]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    DS_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, Q_LAYOUT, 2)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    q = q_smem.index(OWN // ROWS)
    grad = grad_smem.index(OWN // ROWS)
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
        own = first + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
        place = own // HEADS + shift
        row = q_low * HEADS + first
        end = (q_low + queries) * HEADS
        mask = own < queries * HEADS
        # Row by head in [R, H]; [rows] of one head after another in the statistics.
        given = (q_low * HEADS + own).to(gl.int64) * GROUPS + group
        lse = gl.load(lse_ptr + given, mask=mask, other=-INF)
        seen_none = lse == -INF
        lse = gl.where(seen_none, INF, lse * LOG2E)
        full = seen_in_full(first, shift, keys, left, right, HEADS, HAS_LEFT, HAS_RIGHT)
        view = (place, keys, full, left, right)
        dq = gl.zeros([ROWS, D], gl.float32, Q_LAYOUT)
        stats = stats_ptr + group.to(gl.int64) * rows + q_low * HEADS + own
        gl.store(stats, lse, mask=mask)
        if steps > 0:
            n = begin + (steps - 1) * BLOCK_N
            stage = count % STAGES
            mbarrier.wait(q_full.index(0), turn & 1)
            delta = gl.convert_layout(_delta(grad, out_ptr, row, end, group, GROUPS), own.type.layout)
            if HAS_DLSE:
                delta -= gl.load(dlse_ptr + given, mask=mask, other=0.0)
            # Merging empty parts makes a dL of NaN, which 0 weights would not stop.
            delta = gl.where(seen_none, 0.0, delta)
            gl.store(stats + rows.to(gl.int64) * GROUPS, delta, mask=mask)
            mbarrier.wait(full_bars.index(stage), count // STAGES & 1)
            s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            dp = warpgroup_mma(grad, v_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            s, dp = warpgroup_mma_wait(0, [s, dp])
            bias = bias_smem.index(stage % BIASES)
            ds = _scores_gradient(s, dp, lse, delta, n, view, scale2, bias, HAS_BIAS, HAS_LEFT, HAS_RIGHT)
            ds = gl.convert_layout(ds.to(k_smem.dtype), DS_LAYOUT)
            following = count + 1
            mbarrier.wait(full_bars.index(following % STAGES), following // STAGES & 1, pred=steps > 1)
            for step in range(1, steps):
                n -= BLOCK_N
                last = count % STAGES
                count += 1
                stage = count % STAGES
                s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
                dp = warpgroup_mma(grad, v_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
                dq = warpgroup_mma(ds, k_smem.index(last), dq, is_async=True)
                s, dp = warpgroup_mma_wait(1, [s, dp])
                bias = bias_smem.index(stage % BIASES)
                next_ds = _scores_gradient(s, dp, lse, delta, n, view, scale2, bias, HAS_BIAS, HAS_LEFT, HAS_RIGHT)
                # Before the one wait and named in the other, as in the forward.  The tile waited for comes while two
                # are held, so there must be three stages.
                next_ds = gl.convert_layout(next_ds.to(k_smem.dtype), DS_LAYOUT)
                following = count + 1
                mbarrier.wait(full_bars.index(following % STAGES), following // STAGES & 1, pred=step + 1 < steps)
                dq, ds, next_ds = warpgroup_mma_wait(0, [dq, ds, next_ds])
                mbarrier.arrive(free.index(last))
                ds = next_ds
            mbarrier.arrive(q_free.index(0))
            last = count % STAGES
            dq = warpgroup_mma(ds, k_smem.index(last), dq, is_async=True)
            dq = warpgroup_mma_wait(0, [dq])
            mbarrier.arrive(free.index(last))
            count += 1
            turn += 1
        else:
            gl.store(stats + rows.to(gl.int64) * GROUPS, gl.zeros_like(lse), mask=mask)
        store_rows(dq_ptr, dq * scale, row, end, group, GROUPS)
        at = next_at
        slot = next_slot


@gluon.jit(do_not_specialize=["total", "rows", "left", "right"])
def jagged_attention_hopper_dquery_kernel(
    q_desc,
    grad_desc,
    k_desc,
    v_desc,
    slots_ptr,
    bias_ptr,
    out_ptr,
    lse_ptr,
    dlse_ptr,
    stats_ptr,
    dq_ptr,
    total,
    rows,
    left,
    right,
    scale,
    scale2,
    HEADS: gl.constexpr,
    GROUPS: gl.constexpr,
    WARP_GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_DLSE: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):
    """dq, and the statistics [2, G, rows]: log-sum-exp in base 2, inf where a query sees nothing, and Δ - dL."""
    gl.static_assert(STAGES >= 3)
    BIASES: gl.constexpr = STAGES if HAS_BIAS else 1
    bias_smem = numbers(BIASES, k_desc.block_type.shape[0])
    q_smem, grad_smem = tiles(q_desc, WARP_GROUPS), tiles(grad_desc, WARP_GROUPS)
    smem = (q_smem, grad_smem, tiles(k_desc, STAGES), tiles(v_desc, STAGES), bias_smem)
    # A stage is full with the bytes of its tiles, and with the bias.
    ARRIVALS: gl.constexpr = 2 if HAS_BIAS else 1
    bars = (barriers(1, 1), barriers(1, WARP_GROUPS), barriers(STAGES, ARRIVALS), barriers(STAGES, WARP_GROUPS))
    tail_bar = barriers(1, 1)
    fence_async_shared()
    descs = (q_desc, grad_desc, k_desc, v_desc)
    work = (slots_ptr, place_queue(WARP_GROUPS), bias_ptr, total, left, right)
    results = (out_ptr, lse_ptr, dlse_ptr, stats_ptr, dq_ptr, rows, scale, scale2)
    if WARP_GROUPS == 1:
        gl.warp_specialize(
            [
                (_attend, (smem, bars, work, results, 0, HEADS, GROUPS, HAS_BIAS, HAS_DLSE, HAS_LEFT, HAS_RIGHT)),
                (_fetch, (descs, smem, bars, tail_bar, work, HEADS, GROUPS, HAS_BIAS, HAS_LEFT, HAS_RIGHT)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (smem, bars, work, results, 0, HEADS, GROUPS, HAS_BIAS, HAS_DLSE, HAS_LEFT, HAS_RIGHT)),
                (_attend, (smem, bars, work, results, ROWS, HEADS, GROUPS, HAS_BIAS, HAS_DLSE, HAS_LEFT, HAS_RIGHT)),
                (_fetch, (descs, smem, bars, tail_bar, work, HEADS, GROUPS, HAS_BIAS, HAS_LEFT, HAS_RIGHT)),
            ],
            [4, 1],
            [240, 24],
        )
