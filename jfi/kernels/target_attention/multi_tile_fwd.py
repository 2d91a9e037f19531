"""Target attention forward for many query rows: many candidates, or many heads, to one history.

Arithmetic outweighs bytes here.  A program handles a tile of query rows and a chunk of a sample's rows; the programs of
a chunk run at the same time, so that its rows come from the L2 cache.  Full tiles of rows need no mask and are loaded
by TMA; a sample's last rows are loaded separately.  Several small programs per SM overlap the exponentials of one with
the GEMMs of another.  Scores are kept in base 2: one multiply-add and one instruction for an exponential.

A sample longer than a chunk is worked on by several programs, whose partial results are combined in the order of the
rows.  Work item b is the first chunk of sample b, found without a search.  Items B + i - 1 are the others: the sample
that holds row i · chunk - 1 and goes on from there owns that item, for its next chunk if it has one.

``history`` is (k_ptr, v_ptr, bias_ptr, offsets_ptr), v_ptr None where value = key.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from jfi.kernels import plan
from jfi.kernels.common.combine import UNSPLIT, ChunkPartials, chunk_partial
from jfi.kernels.common.launch import launchers_of
from jfi.kernels.common.online_softmax import finish, no_sums, online_softmax_update
from jfi.kernels.common.primitives import LOG2E, find_sample
from jfi.kernels.common.tiles import load_bias_tile, load_head, load_rows, query_rows, store_rows
from jfi.kernels.plan import AttentionPlan, AttentionProblem
from jfi.utils.operands import TargetAttentionInputs, ceil_div, power_of_two

# --- Chunks and loads -------------------------------------------------------------------------------------------------
#: The statistics of query rows are padded to a multiple of this, so that a tile of them is loaded without a mask.
STATISTICS = tl.constexpr(64)
#: Chunks are a multiple of this, so that all but a sample's last consist of full tiles.
CHUNK_MULTIPLE = 128


def split_into_chunks(
    x: TargetAttentionInputs, problem: AttentionProblem, block_m: int, width: int
) -> tuple[ChunkPartials, tuple[int, int, int], tuple[int, int, int, int]]:
    """Split long samples into chunks, and query rows into tiles of block_m.

    Returns:
        (memory for partial results of that width, the grid, and the integers that the kernels take: batch size, query
        rows of a key head, tiles of these, rows of a chunk).
    """
    batch, num_queries, num_heads, _ = x.query.shape
    num_keys, num_kv_heads = x.key.shape[0], problem.num_kv_heads
    num_rows = num_queries * problem.qheads_per_kvhead
    tiles = ceil_div(num_rows, block_m)
    programs = plan.CHUNKED_PROGRAMS_PER_SM
    chunk, _ = plan.stream_k(num_keys * tiles * num_kv_heads, batch, problem.device.num_sms, programs)
    chunk = ceil_div(chunk, CHUNK_MULTIPLE) * CHUNK_MULTIPLE
    # The chunk is symbolic under torch.export.
    if isinstance(chunk, int) and chunk >= (num_keys if x.max_seqlen is None else x.max_seqlen):
        chunk = UNSPLIT  # no sample needs two
    partials = ChunkPartials(num_keys, chunk, num_queries * num_heads, width, x.query.device)
    # Work items that no chunk needs are empty.
    grid = ((batch + num_keys // chunk) * tiles, num_kv_heads, 1)
    return partials, grid, (batch, num_rows, tiles, chunk)


@triton.jit
def find_chunk(offsets_ptr, batch, item, chunk):
    """(sample, its first row, first row of the chunk, end of the sample); an empty item begins at the end or after."""
    sample = item.to(tl.int64)
    later = sample - batch + 1
    if later > 0:
        sample = find_sample(offsets_ptr, batch, later * chunk - 1, 1, 0)
    low = tl.load(offsets_ptr + sample).to(tl.int64)
    high = tl.load(offsets_ptr + sample + 1).to(tl.int64)
    n = low
    if later > 0:
        n += (later - low // chunk) * chunk
    return sample, low, n, high


def history_descriptor(x: Tensor | None, block_n: int) -> TensorDescriptor | None:
    """Returns [rows, G, width] in tiles of [block_n, width] of a head."""
    if x is None:
        return None
    rows, num_kv_heads, width = x.shape
    return TensorDescriptor.from_tensor(x.view(rows, num_kv_heads * width), [block_n, power_of_two(width)])


def query_descriptor(x: Tensor, num_kv_heads: int, block_m: int) -> TensorDescriptor:
    """Returns [B, T, H, width] in tiles of [1, block_m, width] of the rows of a key head; where G is 1 or H."""
    batch, num_queries, num_heads, width = x.shape
    rows = x.view(batch, num_queries * num_heads // num_kv_heads, num_kv_heads * width)
    return TensorDescriptor.from_tensor(rows, [1, block_m, power_of_two(width)])


@triton.jit
def load_history(desc, history, n, at, mask, kv_head, SPEC: tl.constexpr, BY_TMA: tl.constexpr):
    """Keys [N, D] and values [N, E] of the rows from n on; one load where they are shared.

    TMA takes no mask: with it, all of the tile must be the sample's.
    """
    D: tl.constexpr = SPEC.head_dim
    E: tl.constexpr = SPEC.value_dim
    if BY_TMA:
        k = desc[0].load([n.to(tl.int32), kv_head * D])
    else:
        k = load_head(history[0], n, at, mask, kv_head, D, SPEC.block_d, SPEC)
    if SPEC.shared_kv:
        v = k
    elif BY_TMA:
        v = desc[1].load([n.to(tl.int32), kv_head * E])
    else:
        v = load_head(history[1], n, at, mask, kv_head, E, SPEC.block_e, SPEC)
    return k, v


@triton.jit
def query_positions(first, at, kv_head, SPEC: tl.constexpr):
    """Returns the positions of query rows ``at``, from ``first`` on, in a sample: (a row in 64 bits, distances to it).

    With one key head the distances take 32 bits, half the registers that are held for the output through the sweep.
    """
    start = tl.zeros((), tl.int64)
    if SPEC.num_kv_heads == 1:
        return start + first, at - first
    else:
        return start, query_rows(at.to(tl.int64), kv_head, SPEC)


@triton.jit
def sum_heads(ds, at, q_mask, SPEC: tl.constexpr):
    """Returns [N, block_h]: dS [N, M], 0 outside the mask, added up by query head."""
    QHEADS_PER_KVHEAD: tl.constexpr = SPEC.qheads_per_kvhead
    if SPEC.block_h == QHEADS_PER_KVHEAD and ds.shape[1] % QHEADS_PER_KVHEAD == 0:
        return tl.sum(tl.reshape(ds, (ds.shape[0], ds.shape[1] // QHEADS_PER_KVHEAD, QHEADS_PER_KVHEAD)), 1)
    of_head = ((at % QHEADS_PER_KVHEAD)[:, None] == tl.arange(0, SPEC.block_h)[None, :]) & q_mask[:, None]
    return tl.dot(ds, of_head.to(tl.float32), input_precision=SPEC.sum_precision)


# --- Forward ----------------------------------------------------------------------------------------------------------
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
    """Fills in the output and the log-sum-exp, see `execute.forward`."""
    problem, kernel = chosen.problem, chosen.forward[0]
    query, scale = (-x.query, -x.scale) if x.scale < 0 else (x.query, x.scale)
    partials, grid, numbers = split_into_chunks(x, problem, kernel.block_m, problem.value_dim)
    descriptors = (None, None)
    if kernel.options["BY_TMA"]:
        descriptors = tuple(history_descriptor(y, kernel.block_n) for y in (x.key, x.value))
    tensors = (query, (x.key, x.value, x.bias, x.offsets), (out, lse, partials.values, partials.lse))
    launch(_launcher(problem, kernel), grid, tensors, (*numbers, scale), descriptors)
    partials.combine(x.offsets, out, lse, launch)
