"""Jagged attention forward on Hopper: matrix products overlap with exponentials, and loads with both.

Each consumer owns 64 query rows (Shah et al., 'FlashAttention-3', 2024).  It starts the scores of the next tile of keys
and the product of the present weights with their values, and computes the softmax of the former during the latter;
while it waits, the other consumer or program has the tensor cores.  Programs are persistent: the first tiles of the
next work tile arrive while the results of the present one are stored.  Where value = key one tile in shared memory is
both, in a ring of as many stages as the two would have.

With splits (flash-decoding) the tiles of keys that a tile of queries sees are cut into equal parts, a work tile each:
few queries on long timelines then fill the GPU.  Partial results go to memory of their own, where the splits of a row
lie like further key heads, and `jfi.kernels.common.combine` combines them.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jfi.kernels.common.primitives import LN2
from jfi.kernels.common.tile_scheduler import FORWARD_COUNTER
from jfi.kernels.jagged_attention import sm90_pipeline as pipeline
from jfi.kernels.jagged_attention import sm90_primitives as tile
from jfi.kernels.jagged_attention.buckets import MAX_BUCKETS
from jfi.kernels.jagged_attention.sm90_pipeline import ROWS
from jfi.kernels.jagged_attention.sm90_primitives import INF


class Shared(NamedTuple):
    """Tiles in shared memory and their barriers."""

    q: object
    k: object
    v: object
    bias: object
    q_ring: object
    k_ring: object
    v_ring: object


@gluon.jit
def _keys_of_split(work_tile, number, schedule, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SPEC: gl.constexpr):
    """`visible_keys` of a work tile's split; work tile ``number`` is that of split number // G % num_splits."""
    first, shift, begin, steps = tile.visible_keys(work_tile, schedule.window, BLOCK_M, BLOCK_N, SPEC)
    if SPEC.num_splits > 1:
        split = number // SPEC.num_kv_heads % SPEC.num_splits
        skipped = steps * split // SPEC.num_splits
        begin += skipped * BLOCK_N
        steps = steps * (split + 1) // SPEC.num_splits - skipped
    return first, shift, begin, steps


@gluon.jit
def _load_values(desc, row, kv_head, step, tail, tail_bar, full, smem):
    """Start to load a tile; if it is cut off the barrier for that gets its bytes, since rows must be zeroed."""
    BLOCK_N: gl.constexpr = smem.shape[0]
    if (step == 0) & (tail < BLOCK_N):
        mbarrier.expect(tail_bar.index(0), BLOCK_N * smem.shape[1] * 2)
        pipeline.load_tile(desc, row, kv_head, tail_bar.index(0), smem)
    else:
        mbarrier.expect(full, BLOCK_N * smem.shape[1] * 2)
        pipeline.load_tile(desc, row, kv_head, full, smem)


@gluon.jit
def _produce(descs, shared, tail_bar, bias_ptr, schedule, SPEC: gl.constexpr):
    """The last tile of keys comes first, since it is the one that may be cut off."""
    q_desc, k_desc, v_desc = descs
    q_ring, k_ring, v_ring = shared.q_ring, shared.k_ring, shared.v_ring
    Q_STAGES: gl.constexpr = q_ring.full.shape[0]
    WARP_GROUPS: gl.constexpr = shared.q.shape[0] // Q_STAGES
    STAGES: gl.constexpr = shared.k.shape[0]
    BLOCK_N: gl.constexpr = shared.k.shape[1]
    Q_BYTES: gl.constexpr = WARP_GROUPS * ROWS * shared.q.shape[2] * 2
    K_BYTES: gl.constexpr = BLOCK_N * shared.k.shape[2] * 2
    num_k_tiles = 0
    num_q_tiles = 0
    num_tails = 0
    num_taken = 0
    number, work_tile = pipeline.first_tile(schedule, SPEC)
    while number < schedule.total:
        next_number, next_work_tile = pipeline.produce_tile(schedule, num_taken, FORWARD_COUNTER, SPEC)
        num_taken += 1
        kv_head = number % SPEC.num_kv_heads
        _tile, q_start, _num_queries, k_start, num_keys = work_tile
        first, _shift, begin, steps = _keys_of_split(work_tile, number, schedule, WARP_GROUPS * ROWS, BLOCK_N, SPEC)
        # Rows of the first tile loaded that are the sample's.
        tail = num_keys - begin - (steps - 1) * BLOCK_N
        if steps > 0:
            q_stage = num_q_tiles % Q_STAGES
            full = q_ring.full.index(q_stage)
            pipeline.wait_free(q_ring, num_q_tiles)
            mbarrier.expect(full, Q_BYTES)
            for i in gl.static_range(WARP_GROUPS):
                row = q_start * SPEC.qheads_per_kvhead + first + i * ROWS
                pipeline.load_tile(q_desc, row, kv_head, full, shared.q.index(q_stage * WARP_GROUPS + i))
            num_q_tiles += 1
        # One round more than tiles: the tail's values are zeroed once the second tile's keys are being loaded.
        for step in range(steps + 1):
            n = num_k_tiles + step
            stage = n % STAGES
            row = k_start + begin + (steps - 1 - step) * BLOCK_N
            if step < steps:
                full = k_ring.full.index(stage)
                pipeline.wait_free(k_ring, n)
                if SPEC.shared_kv:
                    _load_values(k_desc, row, kv_head, step, tail, tail_bar, full, shared.k.index(stage))
                else:
                    mbarrier.expect(full, K_BYTES)
                    pipeline.load_tile(k_desc, row, kv_head, full, shared.k.index(stage))
                if SPEC.has_bias:
                    tile.load_bias(bias_ptr, row, k_start + num_keys, kv_head, shared.bias.index(stage), SPEC)
                    mbarrier.arrive(full)
            if (step == 1) & (tail < BLOCK_N):
                tail_stage = num_k_tiles % STAGES
                mbarrier.wait(tail_bar.index(0), num_tails & 1)
                num_tails += 1
                pipeline.zero_tail(shared.v.index(tail_stage), tail)
                mbarrier.arrive(v_ring.full.index(tail_stage))
            if not SPEC.shared_kv:  # noqa: SIM102, at compile time
                if step < steps:
                    pipeline.wait_free(v_ring, n)
                    full = v_ring.full.index(stage)
                    _load_values(v_desc, row, kv_head, step, tail, tail_bar, full, shared.v.index(stage))
        num_k_tiles += steps
        number = next_number
        work_tile = next_work_tile


@gluon.jit
def _softmax_update(scores, maximum, total, n, visible, scale2, bias_smem, SPEC: gl.constexpr):
    """`online_softmax_update`, where scores [M, N] are scaled after their maximum is found: one fused operation each.

    Returns (P, maximum, sum of weights, factor of earlier sums).
    """
    scores, scale2 = tile.add_bias(scores, scale2, bias_smem, SPEC)
    scores = tile.mask_scores(scores, n, visible, -INF, SPEC)
    new_maximum = gl.maximum(maximum, gl.max(scores, 1) * scale2)
    base = tile.reference_of(new_maximum)
    p = gl.exp2(scores * scale2 - base[:, None])
    factor = gl.exp2(maximum - base)
    return p, new_maximum, total * factor + gl.sum(p, 1), factor


@gluon.jit
def _own_steps(first, q_start, num_queries, begin, steps, schedule, BLOCK_N: gl.constexpr, SPEC: gl.constexpr):
    """Returns how many tiles of keys rows from ``first`` on see; others may be visible to the other consumer's only."""
    last = q_start + gl.minimum((first + ROWS - 1) // SPEC.qheads_per_kvhead, num_queries - 1)
    end = gl.load(schedule.window[2] + last.to(gl.int64) * (SPEC.num_buckets + 1), mask=steps > 0, other=0)
    own_steps = gl.minimum(gl.maximum(end // MAX_BUCKETS - begin + BLOCK_N - 1, 0) // BLOCK_N, steps)
    if first >= num_queries * SPEC.qheads_per_kvhead:
        own_steps = steps * 0
    return own_steps


@gluon.jit
def _skip_tiles(shared, own_steps, steps, num_k_tiles, num_q_tiles, SPEC: gl.constexpr):
    """Releases the tiles that the other consumer's rows alone see; returns the numbers of tiles of keys and queries."""
    for _ in range(own_steps, steps):
        pipeline.wait_full(shared.k_ring, num_k_tiles)
        pipeline.release(shared.k_ring, num_k_tiles)
        if not SPEC.shared_kv:
            pipeline.wait_full(shared.v_ring, num_k_tiles)
            pipeline.release(shared.v_ring, num_k_tiles)
        num_k_tiles += 1
    if (own_steps == 0) & (steps > 0):
        pipeline.wait_full(shared.q_ring, num_q_tiles)
        pipeline.release(shared.q_ring, num_q_tiles)
        num_q_tiles += 1
    return num_k_tiles, num_q_tiles


@gluon.jit
def _store_output(results, maximum, total, acc, first, work_tile, number, kv_head, SPEC: gl.constexpr):
    """Stores the output and the log-sum-exp of a work tile's query rows from ``first`` on."""
    out_ptr, lse_ptr, _table_ptr, _scale2 = results
    _tile, q_start, num_queries, _k_start, _num_keys = work_tile
    divisor = tile.nonzero(total)
    lse = gl.where(total == 0.0, -INF, (maximum + gl.log2(divisor)) * LN2)
    row = q_start * SPEC.qheads_per_kvhead + first
    end = (q_start + num_queries) * SPEC.qheads_per_kvhead
    own = row + gl.arange(0, ROWS, total.type.layout)
    OUT_HEADS: gl.constexpr = SPEC.num_kv_heads * SPEC.num_splits
    out_head = kv_head
    if SPEC.num_splits > 1:
        out_head = number % OUT_HEADS
    gl.store(lse_ptr + own.to(gl.int64) * OUT_HEADS + out_head, lse, mask=own < end)
    acc = acc * gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, acc.type.layout))[:, None]
    tile.store_rows(out_ptr, acc, row, end, out_head, OUT_HEADS)


@gluon.jit
def _consume(shared, results, schedule, SPEC: gl.constexpr, OWN: gl.constexpr):
    q_ring, k_ring, v_ring = shared.q_ring, shared.k_ring, shared.v_ring
    _out_ptr, _lse_ptr, table_ptr, scale2 = results
    biases = (schedule.window[2], table_ptr)
    Q_STAGES: gl.constexpr = q_ring.full.shape[0]
    WARP_GROUPS: gl.constexpr = shared.q.shape[0] // Q_STAGES
    STAGES: gl.constexpr = shared.k.shape[0]
    BLOCK_N: gl.constexpr = shared.k.shape[1]
    E: gl.constexpr = shared.v.shape[2]
    BIASES: gl.constexpr = shared.bias.shape[0]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    scale_left = scale2
    if SPEC.has_table:
        scale_left = 1.0  # the bias is added to scaled scores
    num_k_tiles = 0
    num_q_tiles = 0
    num_taken = 0
    number, work_tile = pipeline.first_tile(schedule, SPEC)
    while number < schedule.total:
        next_number, next_work_tile = pipeline.consume_tile(schedule, num_taken, SPEC)
        num_taken += 1
        kv_head = number % SPEC.num_kv_heads
        _tile, q_start, num_queries, _k_start, _num_keys = work_tile
        first, shift, begin, steps = _keys_of_split(work_tile, number, schedule, WARP_GROUPS * ROWS, BLOCK_N, SPEC)
        first += OWN
        own_row = first + gl.arange(0, ROWS, S_ROW)
        mask = own_row < num_queries * SPEC.qheads_per_kvhead
        rows, visible, newest = tile.visible_rows(own_row, mask, first, shift, work_tile, kv_head, schedule, SPEC)
        if SPEC.num_buckets:
            own_steps = _own_steps(first, q_start, num_queries, begin, steps, schedule, BLOCK_N, SPEC)
            num_k_tiles, num_q_tiles = _skip_tiles(shared, own_steps, steps, num_k_tiles, num_q_tiles, SPEC)
            steps = own_steps
            if SPEC.has_table:
                if SPEC.num_splits > 1:
                    newest = tile.bucket_behind(biases[0], rows, newest, mask, begin + steps * BLOCK_N, SPEC)
                buckets = tile.begin_buckets(biases, rows, newest, mask, SPEC)
        acc = gl.zeros([ROWS, E], gl.float32, O_LAYOUT)
        maximum = gl.full([ROWS], -INF, gl.float32, S_ROW)
        total = gl.zeros([ROWS], gl.float32, S_ROW)
        if steps > 0:
            q = shared.q.index(num_q_tiles % Q_STAGES * WARP_GROUPS + OWN // ROWS)
            n = begin + (steps - 1) * BLOCK_N
            stage = num_k_tiles % STAGES
            pipeline.wait_full(q_ring, num_q_tiles)
            pipeline.wait_full(k_ring, num_k_tiles)
            s = warpgroup_mma(q, shared.k.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, [s])
            bias = shared.bias.index(stage % BIASES)
            if SPEC.has_table:
                s, buckets, _passes = tile.scale_and_add_bias(s, n, biases, rows, buckets, scale2, SPEC)
            p, maximum, total, _factor = _softmax_update(s, maximum, total, n, visible, scale_left, bias, SPEC)
            if not SPEC.shared_kv:
                pipeline.release(k_ring, num_k_tiles)
            p = gl.convert_layout(p.to(shared.v.dtype), P_LAYOUT)
            pipeline.wait_full(k_ring, num_k_tiles + 1, steps > 1)
            for step in range(1, steps):
                n -= BLOCK_N
                last = num_k_tiles
                num_k_tiles += 1
                stage = num_k_tiles % STAGES
                s = warpgroup_mma(q, shared.k.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
                if not SPEC.shared_kv:
                    pipeline.wait_full(v_ring, last)
                acc = warpgroup_mma(p, shared.v.index(last % STAGES), acc, is_async=True)
                s = warpgroup_mma_wait(1, [s])
                if not SPEC.shared_kv and not SPEC.has_bias:
                    pipeline.release(k_ring, num_k_tiles)
                bias = shared.bias.index(stage % BIASES)
                if SPEC.has_table:
                    s, buckets, _passes = tile.scale_and_add_bias(s, n, biases, rows, buckets, scale2, SPEC)
                next_p, maximum, total, factor = _softmax_update(s, maximum, total, n, visible, scale_left, bias, SPEC)
                if not SPEC.shared_kv and SPEC.has_bias:
                    pipeline.release(k_ring, num_k_tiles)
                # Converted before the first wait and named in the second, or the assembler moves it before the softmax.
                next_p = gl.convert_layout(next_p.to(shared.v.dtype), P_LAYOUT)
                pipeline.wait_full(k_ring, num_k_tiles + 1, step + 1 < steps)
                acc, p, next_p = warpgroup_mma_wait(0, [acc, p, next_p])
                pipeline.release(v_ring, last)
                acc = acc * gl.convert_layout(factor, O_ROW)[:, None]
                p = next_p
            pipeline.release(q_ring, num_q_tiles)
            if not SPEC.shared_kv:
                pipeline.wait_full(v_ring, num_k_tiles)
            acc = warpgroup_mma(p, shared.v.index(num_k_tiles % STAGES), acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            pipeline.release(v_ring, num_k_tiles)
            num_k_tiles += 1
            num_q_tiles += 1
        _store_output(results, maximum, total, acc, first, work_tile, number, kv_head, SPEC)
        number = next_number
        work_tile = next_work_tile


@gluon.jit(do_not_specialize=["total", "left", "right"])
def jagged_attention_sm90_fwd_kernel(
    q_desc, k_desc, v_desc, tiles_ptr, biases, out_ptr, lse_ptr, total, left, right, scale2, SPEC: gl.constexpr
):
    """Store the output and its log-sum-exp, or with splits those of each: [rows, splits, G, E] and [rows, splits, G].

    scale2 > 0 is the scale in base 2; biases: pointers to the bias by key, the edges and the biases by bucket.
    """
    bias_ptr, edges_ptr, table_ptr = biases
    WARP_GROUPS: gl.constexpr = SPEC.block_m // ROWS
    # Two tiles of queries let the next work tile start early; two consumers leave no shared memory for it.
    Q_STAGES: gl.constexpr = 3 - WARP_GROUPS
    STAGES: gl.constexpr = SPEC.stages * (2 if SPEC.shared_kv else 1)
    bias_smem = pipeline.allocate_rows(STAGES if SPEC.has_bias else 1, k_desc.block_type.shape[0])
    q_smem = pipeline.allocate_tiles(q_desc, Q_STAGES * WARP_GROUPS)
    k_smem = pipeline.allocate_tiles(k_desc, STAGES)
    v_smem = k_smem if SPEC.shared_kv else pipeline.allocate_tiles(v_desc, STAGES)
    q_ring = pipeline.ring(Q_STAGES, 1, WARP_GROUPS)
    # A stage of keys is full with the bytes of its tile and with its bias.
    k_ring = pipeline.ring(STAGES, 2 if SPEC.has_bias else 1, WARP_GROUPS)
    v_ring = k_ring if SPEC.shared_kv else pipeline.ring(STAGES, 1, WARP_GROUPS)
    tail_bar = pipeline.barriers(1, 1)
    fence_async_shared()
    shared = Shared(q_smem, k_smem, v_smem, bias_smem, q_ring, k_ring, v_ring)
    schedule = pipeline.Schedule(tiles_ptr, pipeline.tile_queue(WARP_GROUPS), total, (left, right, edges_ptr))
    pipeline.specialize(
        _consume,
        (shared, (out_ptr, lse_ptr, table_ptr, scale2), schedule, SPEC),
        _produce,
        ((q_desc, k_desc, v_desc), shared, tail_bar, bias_ptr, schedule, SPEC),
        WARP_GROUPS,
    )
