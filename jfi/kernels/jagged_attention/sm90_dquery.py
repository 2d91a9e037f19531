"""The gradient of the queries on Hopper: the loop of the forward with the product dS K instead of P V.

Each tile of queries also computes its statistics, log-sum-exp and Δ, and stores them for the kernel of the keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from jfi.kernels.common.primitives import LOG2E
from jfi.kernels.common.tile_scheduler import COUNTER
from jfi.kernels.jagged_attention import sm90_pipeline as pipeline
from jfi.kernels.jagged_attention import sm90_primitives as tile
from jfi.kernels.jagged_attention.sm90_pipeline import ROWS
from jfi.kernels.jagged_attention.sm90_primitives import INF


@gluon.jit
def _locate(work_tile, schedule, WARP_GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, SPEC: gl.constexpr):
    _tile, q_start, _num_queries, k_start, num_keys = work_tile
    first, _shift, begin, steps = tile.visible_keys(work_tile, schedule.window, WARP_GROUPS * ROWS, BLOCK_N, SPEC)
    return q_start * SPEC.qheads_per_kvhead + first, k_start, num_keys, begin, steps


@gluon.jit
def _load_bias(more, where, SPEC: gl.constexpr):
    stage, row, end, _own_row, _work_tile, kv_head = where
    bias_ptr, bias_smem = more
    tile.load_bias(bias_ptr, row, end, kv_head, bias_smem.index(stage), SPEC)


@gluon.jit
def _produce(own, other, bias, tail_bar, schedule, SPEC: gl.constexpr):
    load_more: gl.constexpr = _load_bias if SPEC.has_bias else None
    pipeline.produce_pairs(own, other, tail_bar, bias, schedule, COUNTER, _locate, load_more, 1, SPEC)


@gluon.jit
def _delta(grad, out_ptr, row, end, kv_head, SPEC: gl.constexpr):
    """Σ_e dO · O of a tile's rows in shared memory, from row on in [rows, G, width]."""
    at_out, at = tile.head_rows(out_ptr, row, kv_head, grad.shape[1], SPEC.num_kv_heads)
    out = gl.load(at_out, mask=(at < end)[:, None], other=0.0).to(gl.float32)
    # Fused with 0, since threads that hold the same row must agree on its sum: see `row_products`.
    return gl.sum(gl.fma(grad.load(out.type.layout).to(gl.float32), out, gl.zeros_like(out)), 1)


@gluon.jit
def _tile_gradient(
    s, dp, lse, delta, n, visible, rows, mask, buckets, bucket_sum, bias, biases, sums_ptr, scale2, SPEC: gl.constexpr
):
    """Returns (dS, buckets, bucket_sum) after the tile of keys from n on, of its products S and dP.

    Args:
        lse: the log-sum-exp of the query rows, in base 2.
        rows: (query, head) of each row.
        buckets: the state of `scale_and_add_bias` with a table of biases by bucket, and bucket_sum the sum of dS in the
            present bucket; else unused.
    """
    scale_left = scale2
    if SPEC.has_table:
        scale_left = 1.0  # the bias is added to scaled scores
        passed, passed_edge = buckets[0], buckets[2]
        s, buckets, passes = tile.scale_and_add_bias(s, n, biases, rows, buckets, scale2, SPEC)
    s, scale_left = tile.add_bias(s, scale_left, bias, SPEC)
    ds = tile.scores_gradient(gl.exp2(s * scale_left - lse[:, None]), dp, delta[:, None])
    ds = tile.mask_scores(ds, n, visible, 0.0, SPEC)
    if sums_ptr is not None:
        key = n + gl.arange(0, ds.shape[1], gl.SliceLayout(0, ds.type.layout))
        state = (passed, passed_edge, bucket_sum)
        bucket_sum = tile.add_bucket_sums(biases, sums_ptr, rows, state, passes, ds, key, n, mask, SPEC)
    return ds, buckets, bucket_sum


@gluon.jit
def _consume(own, other, bias_smem, saved, results, schedule, SPEC: gl.constexpr, OWN: gl.constexpr):
    q_smem, grad_smem = own.smems
    k_smem, v_smem = other.smems
    out_ptr, lse_ptr, dlse_ptr = saved
    stats_ptr, dq_ptr, sums_ptr, table_ptr, num_rows, scale, scale2 = results
    biases = (schedule.window[2], table_ptr)
    WARP_GROUPS: gl.constexpr = q_smem.shape[0]
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    D: gl.constexpr = k_smem.shape[2]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    DS_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, Q_LAYOUT, 2)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    q = q_smem.index(OWN // ROWS)
    grad = grad_smem.index(OWN // ROWS)
    num_k_tiles = 0
    num_q_tiles = 0
    num_taken = 0
    number, work_tile = pipeline.first_tile(schedule, SPEC)
    while number < schedule.total:
        next_number, next_work_tile = pipeline.consume_tile(schedule, num_taken, SPEC)
        num_taken += 1
        kv_head = number % SPEC.num_kv_heads
        _tile, q_start, num_queries, _k_start, _num_keys = work_tile
        first, shift, begin, steps = tile.visible_keys(work_tile, schedule.window, WARP_GROUPS * ROWS, BLOCK_N, SPEC)
        first += OWN
        own_row = first + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
        row = q_start * SPEC.qheads_per_kvhead + first
        end = (q_start + num_queries) * SPEC.qheads_per_kvhead
        mask = own_row < num_queries * SPEC.qheads_per_kvhead
        # Rows by heads in [R, H]; [rows] of one key head after another in the statistics.
        at = (q_start * SPEC.qheads_per_kvhead + own_row).to(gl.int64) * SPEC.num_kv_heads + kv_head
        lse = gl.load(lse_ptr + at, mask=mask, other=-INF)
        sees_none = lse == -INF
        lse = gl.where(sees_none, INF, lse * LOG2E)
        rows, visible, newest = tile.visible_rows(own_row, mask, first, shift, work_tile, kv_head, schedule, SPEC)
        if SPEC.has_table:
            buckets = tile.begin_buckets(biases, rows, newest, mask, SPEC)
            bucket_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S_LAYOUT))
        else:
            buckets, bucket_sum = (scale2,), scale2
        dq = gl.zeros([ROWS, D], gl.float32, Q_LAYOUT)
        stats = stats_ptr + kv_head.to(gl.int64) * num_rows + q_start * SPEC.qheads_per_kvhead + own_row
        gl.store(stats, lse, mask=mask)
        if steps > 0:
            n = begin + (steps - 1) * BLOCK_N
            stage = num_k_tiles % STAGES
            pipeline.wait_full(own.ring, num_q_tiles)
            delta = gl.convert_layout(_delta(grad, out_ptr, row, end, kv_head, SPEC), own_row.type.layout)
            if dlse_ptr is not None:
                delta -= gl.load(dlse_ptr + at, mask=mask, other=0.0)
            # Combining empty parts makes a dL of NaN, which weights of 0 would not stop.
            delta = gl.where(sees_none, 0.0, delta)
            gl.store(stats + num_rows.to(gl.int64) * SPEC.num_kv_heads, delta, mask=mask)
            pipeline.wait_full(other.ring, num_k_tiles)
            s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            dp = warpgroup_mma(grad, v_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            s, dp = warpgroup_mma_wait(0, [s, dp])
            bias = bias_smem.index(stage % bias_smem.shape[0])
            ds, buckets, bucket_sum = _tile_gradient(
                s, dp, lse, delta, n, visible, rows, mask, buckets, bucket_sum, bias, biases, sums_ptr, scale2, SPEC
            )
            ds = gl.convert_layout(ds.to(k_smem.dtype), DS_LAYOUT)
            pipeline.wait_full(other.ring, num_k_tiles + 1, steps > 1)
            for step in range(1, steps):
                n -= BLOCK_N
                last = num_k_tiles
                num_k_tiles += 1
                stage = num_k_tiles % STAGES
                s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
                dp = warpgroup_mma(grad, v_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
                dq = warpgroup_mma(ds, k_smem.index(last % STAGES), dq, is_async=True)
                s, dp = warpgroup_mma_wait(1, [s, dp])
                bias = bias_smem.index(stage % bias_smem.shape[0])
                next_ds, buckets, bucket_sum = _tile_gradient(
                    s, dp, lse, delta, n, visible, rows, mask, buckets, bucket_sum, bias, biases, sums_ptr, scale2, SPEC
                )
                # Converted before the one wait and named in the other, as in the forward.  The next tile is waited for
                # while two are held, so there must be three stages.
                next_ds = gl.convert_layout(next_ds.to(k_smem.dtype), DS_LAYOUT)
                pipeline.wait_full(other.ring, num_k_tiles + 1, step + 1 < steps)
                dq, ds, next_ds = warpgroup_mma_wait(0, [dq, ds, next_ds])
                pipeline.release(other.ring, last)
                ds = next_ds
            pipeline.release(own.ring, num_q_tiles)
            dq = warpgroup_mma(ds, k_smem.index(num_k_tiles % STAGES), dq, is_async=True)
            dq = warpgroup_mma_wait(0, [dq])
            pipeline.release(other.ring, num_k_tiles)
            num_k_tiles += 1
            num_q_tiles += 1
        else:
            gl.store(stats + num_rows.to(gl.int64) * SPEC.num_kv_heads, gl.zeros_like(lse), mask=mask)
        if sums_ptr is not None:
            to = sums_ptr + (rows[0] * (SPEC.num_kv_heads * SPEC.qheads_per_kvhead) + rows[1]) * SPEC.num_buckets
            gl.store(to + buckets[0], bucket_sum, mask=mask)
        if dq_ptr is not None:
            tile.store_rows(dq_ptr, dq * scale, row, end, kv_head, SPEC.num_kv_heads)
        number = next_number
        work_tile = next_work_tile


@gluon.jit(do_not_specialize=["total", "rows", "first_query", "left", "right"])
def jagged_attention_sm90_dquery_kernel(
    q_desc,
    grad_desc,
    k_desc,
    v_desc,
    tiles_ptr,
    inputs,
    results,
    total,
    rows,
    first_query,
    left,
    right,
    scale,
    scale2,
    SPEC: gl.constexpr,
):
    """dq, and the statistics [2, G, rows]: log-sum-exp in base 2, inf where a query sees nothing, and Δ - dL.

    Args:
        inputs: pointers to the bias by key, the edges, the table of biases by bucket, the output, its log-sum-exp, and
            the latter's gradient or None.
        results: pointers to the statistics, to dq and to the sums of the gradient by bucket, the last two None if not
            needed.
        first_query: of the launch, whose sums come first.
    """
    bias_ptr, edges_ptr, table_ptr, out_ptr, lse_ptr, dlse_ptr = inputs
    saved = (out_ptr, lse_ptr, dlse_ptr)
    WARP_GROUPS: gl.constexpr = SPEC.block_m // ROWS
    STAGES: gl.constexpr = SPEC.stages
    gl.static_assert(STAGES >= 3)
    bias_smem = pipeline.allocate_rows(STAGES if SPEC.has_bias else 1, k_desc.block_type.shape[0])
    own_smems = pipeline.allocate_tiles(q_desc, WARP_GROUPS), pipeline.allocate_tiles(grad_desc, WARP_GROUPS)
    other_smems = pipeline.allocate_tiles(k_desc, STAGES), pipeline.allocate_tiles(v_desc, STAGES)
    own = pipeline.Side((q_desc, grad_desc), own_smems, pipeline.ring(1, 1, WARP_GROUPS))
    # A stage is full with the bytes of its tiles, and with the bias.
    other = pipeline.Side((k_desc, v_desc), other_smems, pipeline.ring(STAGES, 2 if SPEC.has_bias else 1, WARP_GROUPS))
    tail_bar = pipeline.barriers(1, 1)
    fence_async_shared()
    schedule = pipeline.Schedule(tiles_ptr, pipeline.tile_queue(WARP_GROUPS), total, (left, right, edges_ptr))
    stats_ptr, dq_ptr, sums_ptr = results
    if sums_ptr is not None:
        sums_ptr -= first_query.to(gl.int64) * (SPEC.num_kv_heads * SPEC.qheads_per_kvhead * SPEC.num_buckets)
    results = (stats_ptr, dq_ptr, sums_ptr, table_ptr, rows, scale, scale2)
    pipeline.specialize(
        _consume,
        (own, other, bias_smem, saved, results, schedule, SPEC),
        _produce,
        (own, other, (bias_ptr, bias_smem), tail_bar, schedule, SPEC),
        WARP_GROUPS,
    )
