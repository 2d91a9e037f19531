"""The gradients of keys and values on Hopper: a consumer owns 64 keys, and the queries that see them pass by.

Scores are [N, M] here, so that P and dS go from registers into the products that give dv and dk.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from jfi.kernels.common.primitives import LOG2E
from jfi.kernels.common.tile_scheduler import SECOND_COUNTER
from jfi.kernels.jagged_attention import sm90_pipeline as pipeline
from jfi.kernels.jagged_attention import sm90_primitives as tile
from jfi.kernels.jagged_attention.buckets import MAX_BUCKETS
from jfi.kernels.jagged_attention.sm90_pipeline import ROWS
from jfi.kernels.jagged_attention.sm90_primitives import INF


@gluon.jit
def _locate(work_tile, schedule, WARP_GROUPS: gl.constexpr, BLOCK_M: gl.constexpr, SPEC: gl.constexpr):
    _tile, k_start, _num_keys, q_start, num_queries = work_tile
    first, _shift, begin, steps = tile.seeing_queries(work_tile, schedule.window, BLOCK_M, WARP_GROUPS * ROWS, SPEC)
    QHEADS_PER_KVHEAD: gl.constexpr = SPEC.qheads_per_kvhead
    return k_start + first, q_start * QHEADS_PER_KVHEAD, num_queries * QHEADS_PER_KVHEAD, begin, steps


class LseDelta(NamedTuple):
    """The statistics of each tile of query rows in shared memory, and pointers to where they come from.

    Buckets follow from clocks in float64: floating times as they are, integer times less that of the work tile's newest
    key, or positions among the keys less that key's.
    """

    stats_ptr: object
    rows: object
    edges_ptr: object
    table_ptr: object
    times: object  # pointers to query_time and key_time, None where buckets go by distance
    lse: object  # [stages, M]
    delta: object  # [stages, M]
    begin: object  # [stages, M]: the first key that a query sees
    end: object
    last_begin: object  # [stages, 1]: that of the tile's last query
    first_end: object
    clock: object  # [stages, M]
    bias: object  # [stages · consumers, M]: that of the consumer's newest key
    is_mixed: object  # [stages · consumers, 1]: whether a query has other buckets for the consumer's other keys


@gluon.jit
def _since(time, start):
    """The clock of a time: an integer less ``start``, a difference that float64 holds up to 2^53."""
    if time.dtype.is_int():
        return (time.to(gl.int64) - start).to(gl.float64)
    else:
        return time


@gluon.jit
def _key_clock(times, k_start, num_keys, key, newest):
    """The clock of keys of a sample; of those behind its last, the last's.  newest: of the work tile."""
    _query_time_ptr, key_time_ptr = times
    key = gl.minimum(key, num_keys - 1)
    if key_time_ptr is not None:
        first = key_time_ptr + k_start.to(gl.int64)
        return _since(gl.load(first + key), gl.load(first + newest))
    else:
        return (key - newest).to(gl.float64)


@gluon.jit
def _query_clock(times, query, end, k_start, newest, mask, SPEC: gl.constexpr):
    query_time_ptr, key_time_ptr = times
    if query_time_ptr is not None:
        start = gl.load(key_time_ptr + k_start.to(gl.int64) + newest)
        return _since(gl.load(query_time_ptr + query, mask=mask, other=0), start)
    else:
        return (end - SPEC.is_causal - newest).to(gl.float64)


@gluon.jit
def _bucket(query_clock, key_clock, SPEC: gl.constexpr):
    return tile.exponent_bucket(gl.maximum(query_clock - key_clock, 0.0), SPEC.num_buckets)


@gluon.jit
def _load_bias(table_ptr, bucket, head, SPEC: gl.constexpr):
    """Returns the biases of buckets for heads, in base 2."""
    bias = gl.load(table_ptr + bucket * (SPEC.num_kv_heads * SPEC.qheads_per_kvhead) + head)
    return bias.to(gl.float32) * LOG2E


@gluon.jit
def _load_stats(more, where, SPEC: gl.constexpr):
    """Log-sum-exp and Δ of the query rows; inf and 0, so that weights are 0, behind the sample's."""
    stage, row, end, own_row, work_tile, kv_head = where
    BLOCK_M: gl.constexpr = more.lse.shape[1]
    QHEADS_PER_KVHEAD: gl.constexpr = SPEC.qheads_per_kvhead
    at = row + gl.arange(0, BLOCK_M, gl.BlockedLayout([BLOCK_M // 32], [32], [1], [0]))
    mask = at < end
    stats = more.stats_ptr + kv_head.to(gl.int64) * more.rows + at
    more.lse.index(stage).store(gl.load(stats, mask=mask, other=INF))
    more.delta.index(stage).store(gl.load(stats + more.rows.to(gl.int64) * SPEC.num_kv_heads, mask=mask, other=0.0))
    if SPEC.num_buckets:
        EDGES: gl.constexpr = SPEC.num_buckets + 1
        query = (at // QHEADS_PER_KVHEAD).to(gl.int64)
        begin, query_end, _newest = tile.visible_range(more.edges_ptr, query, mask, SPEC)
        last = (gl.minimum(row + BLOCK_M, end) - 1) // QHEADS_PER_KVHEAD
        first_end = gl.load(more.edges_ptr + (row // QHEADS_PER_KVHEAD).to(gl.int64) * EDGES) // MAX_BUCKETS
        last_begin = gl.load(more.edges_ptr + last.to(gl.int64) * EDGES + SPEC.num_buckets)
        if SPEC.has_table:
            WARP_GROUPS: gl.constexpr = SPEC.block_n // ROWS
            _tile, k_start, num_keys, _q_start, _num_queries = work_tile
            head = kv_head * QHEADS_PER_KVHEAD + at % QHEADS_PER_KVHEAD
            first = own_row - k_start
            newest = gl.minimum(first + WARP_GROUPS * ROWS, num_keys) - 1
            clock = _query_clock(more.times, query, query_end, k_start, newest, mask, SPEC)
            more.clock.index(stage).store(clock)
            for consumer in gl.static_range(WARP_GROUPS):
                own = stage * WARP_GROUPS + consumer
                key = first + consumer * ROWS
                young = _bucket(clock, _key_clock(more.times, k_start, num_keys, key + ROWS - 1, newest), SPEC)
                old = _bucket(clock, _key_clock(more.times, k_start, num_keys, key, newest), SPEC)
                more.bias.index(own).store(_load_bias(more.table_ptr, young, head, SPEC))
                pipeline.store_integer(more.is_mixed.index(own), gl.max(old - young, 0))
        more.begin.index(stage).store(begin)
        more.end.index(stage).store(query_end)
        pipeline.store_integer(more.first_end.index(stage), first_end)
        pipeline.store_integer(more.last_begin.index(stage), last_begin)


@gluon.jit
def _produce(own, other, statistics, tail_bar, schedule, SPEC: gl.constexpr):
    pipeline.produce_pairs(own, other, tail_bar, statistics, schedule, SECOND_COUNTER, _locate, _load_stats, 2, SPEC)


@gluon.jit
def _mask_weights(p, key, first, row, shift, stage, statistics, window, COLUMN: gl.constexpr, SPEC: gl.constexpr):
    """Returns weights [N, M] with 0 where a query, of the tile from ``row`` on, does not see a key."""
    left, right, _edges_ptr = window
    BLOCK_M: gl.constexpr = p.shape[1]
    if SPEC.has_left or SPEC.has_right:
        hides = False
        if SPEC.has_right:
            hides = hides | (first + ROWS - 1 > row // SPEC.qheads_per_kvhead + shift + right)
        if SPEC.has_left:
            hides = hides | (first < (row + BLOCK_M - 1) // SPEC.qheads_per_kvhead + shift - left)
        if hides:
            position = (row + gl.arange(0, BLOCK_M, COLUMN)) // SPEC.qheads_per_kvhead + shift
            p = gl.where(tile.is_visible(key[:, None], position[None, :], left, right, SPEC), p, 0.0)
    if SPEC.num_buckets:
        hides = pipeline.load_integer(statistics.first_end.index(stage)) < first + ROWS
        if hides | (pipeline.load_integer(statistics.last_begin.index(stage)) > first):
            seen_from = statistics.begin.index(stage).load(COLUMN)
            seen = (key[:, None] >= seen_from[None, :]) & (
                key[:, None] < statistics.end.index(stage).load(COLUMN)[None, :]
            )
            p = gl.where(seen, p, 0.0)
    return p


@gluon.jit
def _consume(own, other, statistics, bias_ptr, results, schedule, SPEC: gl.constexpr, OWN: gl.constexpr):
    k_smem, v_smem = own.smems
    q_smem, grad_smem = other.smems
    dk_ptr, dv_ptr, dbias_ptr, scale, scale2 = results
    # Products of gradients that nobody needs are left out.
    NEEDS_DS: gl.constexpr = dk_ptr is not None or dbias_ptr is not None
    NEEDS_DV: gl.constexpr = dv_ptr is not None or (SPEC.shared_kv and dk_ptr is not None)
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
    num_q_tiles = 0
    num_k_tiles = 0
    num_taken = 0
    number, work_tile = pipeline.first_tile(schedule, SPEC)
    while number < schedule.total:
        next_number, next_work_tile = pipeline.consume_tile(schedule, num_taken, SPEC)
        num_taken += 1
        kv_head = number % SPEC.num_kv_heads
        _tile, k_start, num_keys, _q_start, _num_queries = work_tile
        first, shift, begin, steps = tile.seeing_queries(work_tile, schedule.window, BLOCK_M, WARP_GROUPS * ROWS, SPEC)
        first += OWN
        key = first + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
        if SPEC.has_table:
            newest = gl.minimum(first - OWN + WARP_GROUPS * ROWS, num_keys) - 1
            key_clock = _key_clock(statistics.times, k_start, num_keys, key, newest)
        dk = gl.zeros([ROWS, D], gl.float32, K_LAYOUT)
        dv = gl.zeros([ROWS, E], gl.float32, V_LAYOUT)
        if SPEC.has_bias:
            bias_at = (k_start + key).to(gl.int64) * SPEC.num_kv_heads + kv_head
            bias = gl.load(bias_ptr + bias_at, mask=key < num_keys, other=0.0).to(gl.float32) * LOG2E
        dbias = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
        if steps > 0:
            pipeline.wait_full(own.ring, num_k_tiles)
            for step in range(steps):
                stage = num_q_tiles % STAGES
                row = begin + (steps - 1 - step) * BLOCK_M
                pipeline.wait_full(other.ring, num_q_tiles)
                s = warpgroup_mma(k, q_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
                if NEEDS_DS:
                    dp = warpgroup_mma(v, grad_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
                lse = statistics.lse.index(stage).load(COLUMN)
                s = warpgroup_mma_wait(1 if NEEDS_DS else 0, [s])
                if SPEC.has_table:
                    at = stage * WARP_GROUPS + OWN // ROWS
                    if pipeline.load_integer(statistics.is_mixed.index(at)) != 0:
                        own_row = row + gl.arange(0, BLOCK_M, COLUMN)
                        head = kv_head * SPEC.qheads_per_kvhead + own_row % SPEC.qheads_per_kvhead
                        clock = statistics.clock.index(stage).load(COLUMN)
                        bucket = _bucket(clock[None, :], key_clock[:, None], SPEC)
                        head = gl.expand_dims(head, 0) + bucket * 0
                        s = s * scale2 + _load_bias(statistics.table_ptr, bucket, head, SPEC)
                    else:
                        s = s * scale2 + statistics.bias.index(at).load(COLUMN)[None, :]
                    p = gl.exp2(s - lse[None, :])
                elif SPEC.has_bias:
                    p = gl.exp2(s * scale2 + (bias[:, None] - lse[None, :]))
                else:
                    p = gl.exp2(s * scale2 - lse[None, :])
                p = _mask_weights(p, key, first, row, shift, stage, statistics, schedule.window, COLUMN, SPEC)
                if NEEDS_DV:
                    weights = gl.convert_layout(p.to(q_smem.dtype), gl.DotOperandLayout(0, V_LAYOUT, 2))
                    dv = warpgroup_mma(weights, grad_smem.index(stage), dv, is_async=True)
                if NEEDS_DS:
                    delta = statistics.delta.index(stage).load(COLUMN)
                    dp = warpgroup_mma_wait(1 if NEEDS_DV else 0, [dp])
                    ds = tile.scores_gradient(p, dp, delta[None, :])
                    if SPEC.has_bias:
                        dbias += gl.sum(ds, 1)
                    if dk_ptr is not None:
                        ds = gl.convert_layout(ds.to(q_smem.dtype), gl.DotOperandLayout(0, K_LAYOUT, 2))
                        dk = warpgroup_mma(ds, q_smem.index(stage), dk, is_async=True)
                # Operands in registers are named, since a product reads them until it has been waited for.
                if NEEDS_DV:
                    dv, weights = warpgroup_mma_wait(0, [dv, weights])
                if dk_ptr is not None:
                    dk, ds = warpgroup_mma_wait(0, [dk, ds])
                pipeline.release(other.ring, num_q_tiles)
                num_q_tiles += 1
            pipeline.release(own.ring, num_k_tiles)
            num_k_tiles += 1
        if dbias_ptr is not None:
            gl.store(dbias_ptr + bias_at, dbias.to(dbias_ptr.dtype.element_ty), mask=key < num_keys)
        if dv_ptr is not None:
            tile.store_rows(dv_ptr, dv, k_start + first, k_start + num_keys, kv_head, SPEC.num_kv_heads)
        if dk_ptr is not None:
            dk = dk * scale
            if SPEC.shared_kv:
                dk = dk + dv
            tile.store_rows(dk_ptr, dk, k_start + first, k_start + num_keys, kv_head, SPEC.num_kv_heads)
        number = next_number
        work_tile = next_work_tile


@gluon.jit(do_not_specialize=["total", "rows", "left", "right"])
def jagged_attention_sm90_dkey_kernel(
    q_desc,
    grad_desc,
    k_desc,
    v_desc,
    tiles_ptr,
    biases,
    saved,
    results,
    total,
    rows,
    left,
    right,
    scale,
    scale2,
    SPEC: gl.constexpr,
):
    """dk (if value = key with dv added), dv and dbias.

    Args:
        biases: pointers to the bias by key, the edges and the table of biases by bucket.
        saved: pointers to the times of queries and keys, None where buckets go by distance, and to the statistics.
        results: pointers to the three gradients, None for those that are not needed.
    """
    bias_ptr, edges_ptr, table_ptr = biases
    query_time_ptr, key_time_ptr, stats_ptr = saved
    WARP_GROUPS: gl.constexpr = SPEC.block_n // ROWS
    STAGES: gl.constexpr = SPEC.stages
    BLOCK_M: gl.constexpr = q_desc.block_type.shape[0]
    BY_STAGE: gl.constexpr = STAGES if SPEC.num_buckets else 1
    BY_CLOCK: gl.constexpr = STAGES if SPEC.has_table else 1
    BY_CONSUMER: gl.constexpr = STAGES * WARP_GROUPS if SPEC.has_table else 1
    statistics = LseDelta(
        stats_ptr,
        rows,
        edges_ptr,
        table_ptr,
        (query_time_ptr, key_time_ptr),
        pipeline.allocate_rows(STAGES, BLOCK_M),
        pipeline.allocate_rows(STAGES, BLOCK_M),
        pipeline.allocate_rows(BY_STAGE, BLOCK_M, gl.int32),
        pipeline.allocate_rows(BY_STAGE, BLOCK_M, gl.int32),
        pipeline.allocate_rows(BY_STAGE, 1, gl.int32),
        pipeline.allocate_rows(BY_STAGE, 1, gl.int32),
        pipeline.allocate_rows(BY_CLOCK, BLOCK_M, gl.float64),
        pipeline.allocate_rows(BY_CONSUMER, BLOCK_M),
        pipeline.allocate_rows(BY_CONSUMER, 1, gl.int32),
    )
    own_smems = pipeline.allocate_tiles(k_desc, WARP_GROUPS), pipeline.allocate_tiles(v_desc, WARP_GROUPS)
    other_smems = pipeline.allocate_tiles(q_desc, STAGES), pipeline.allocate_tiles(grad_desc, STAGES)
    own = pipeline.Side((k_desc, v_desc), own_smems, pipeline.ring(1, 1, WARP_GROUPS))
    # A stage is full with the bytes of its tiles and with its statistics.
    other = pipeline.Side((q_desc, grad_desc), other_smems, pipeline.ring(STAGES, 2, WARP_GROUPS))
    tail_bar = pipeline.barriers(1, 1)
    fence_async_shared()
    schedule = pipeline.Schedule(tiles_ptr, pipeline.tile_queue(WARP_GROUPS), total, (left, right, edges_ptr))
    dk_ptr, dv_ptr, dbias_ptr = results
    results = (dk_ptr, dv_ptr, dbias_ptr, scale, scale2)
    pipeline.specialize(
        _consume,
        (own, other, statistics, bias_ptr, results, schedule, SPEC),
        _produce,
        (own, other, statistics, tail_bar, schedule, SPEC),
        WARP_GROUPS,
        40 if SPEC.has_table else 24,
    )
