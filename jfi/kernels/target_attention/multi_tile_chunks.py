"""Full tiles by TMA, and samples split into chunks of rows, for the multi-tile kernels.

A sample longer than a chunk is worked on by several programs, whose partial results are combined in the order of the
rows.  Work item b is the first chunk of sample b, found without a search.  Items B + i - 1 are the others: the sample
that holds row i · chunk - 1 and goes on from there owns that item, for its next chunk if it has one.

``history`` is (k_ptr, v_ptr, bias_ptr, offsets_ptr), v_ptr None where value = key.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from jfi.kernels import plan
from jfi.kernels.common.combine import UNSPLIT, ChunkPartials
from jfi.kernels.common.primitives import find_sample
from jfi.kernels.common.tiles import load_head, query_rows
from jfi.kernels.plan import AttentionProblem
from jfi.utils.operands import TargetAttentionInputs, ceil_div, power_of_two

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
