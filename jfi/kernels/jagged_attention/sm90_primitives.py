"""What the kernels for Hopper share.  They are written in Gluon, Triton's lower level, whose products and copies are
started and waited for apart: warp groups of a program take roles, one fetches tiles and the others compute.

A barrier in shared memory is passed from the fetching warp (``full``) to the computing ones and back (``free``); a wait
names the phase, 0 and 1 in turn.
"""

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jfi.kernels.common import tile_scheduler
from jfi.kernels.common.primitives import LOG2E
from jfi.kernels.jagged_attention import tiles as tiles_module

slot_of = gluon.jit(tile_scheduler.slot_of.fn)
keys_met = gluon.jit(tiles_module.keys_met.fn)
queries_met = gluon.jit(tiles_module.queries_met.fn)
sees = gluon.jit(tiles_module.sees.fn)

INF = gl.constexpr(float("inf"))
#: Places of slots under way from the fetching warp to the computing ones.
_TICKETS = gl.constexpr(4)
#: Rows of a warp group: what one product of theirs takes.
ROWS = gl.constexpr(64)


@gluon.jit
def barriers(number: gl.constexpr, count: gl.constexpr):
    """[number] barriers, each passed by ``count`` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit
def tiles(desc, number: gl.constexpr):
    """Room for tiles as the descriptor fetches them."""
    shape: gl.constexpr = [number, desc.block_type.shape[0], desc.block_type.shape[1]]
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def numbers(count: gl.constexpr, length: gl.constexpr):
    """[count, length] float32 in shared memory."""
    return gl.allocate_shared_memory(gl.float32, [count, length], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def place_queue(readers: gl.constexpr):
    """Where the fetching warp says which place of the grid its program works on next."""
    places = gl.allocate_shared_memory(gl.int32, [_TICKETS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return places, barriers(_TICKETS, 1), barriers(_TICKETS, readers)


@gluon.jit
def take_place(counter_ptr, queue, turn):
    """The next place that no program has taken, for the fetching warp, which passes it on.

    Which program works on a place changes with time, what it works out does not.
    """
    places, full, free = queue
    at = turn % _TICKETS
    place = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
    mbarrier.wait(free.index(at), (turn // _TICKETS & 1) ^ 1)
    places.index(at).store(gl.full([1], place, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(full.index(at))
    return place


@gluon.jit
def taken_place(queue, turn):
    """What ``take_place`` gave at the same turn, for a computing warp group."""
    places, full, free = queue
    at = turn % _TICKETS
    mbarrier.wait(full.index(at), turn // _TICKETS & 1)
    place = gl.max(places.index(at).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    mbarrier.arrive(free.index(at))
    return place


@gluon.jit
def fetch(desc, row, group, bar, to):
    """Start to copy the tile of a head from a row on; the barrier gets its bytes."""
    tma.async_copy_global_to_shared(desc, [row, group * to.shape[1]], bar, to)


@gluon.jit
def seen_in_full(first, shift, keys, left, right, HEADS: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """(begin, end) of the keys that all query rows of a warp group see."""
    begin = keys * 0
    end = keys
    if HAS_LEFT:
        begin = (first + ROWS - 1) // HEADS + shift - left
    if HAS_RIGHT:
        end = gl.minimum(end, first // HEADS + shift + right + 1)
    return begin, end


@gluon.jit
def where_seen(x, n, view, other: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """x [M, N], ``other`` where a query does not see one of the keys from n on.

    A view is what a warp group's queries see: (their places, the sample's keys, seen_in_full, left, right).
    """
    BLOCK_N: gl.constexpr = x.shape[1]
    place, keys, full, left, right = view
    full_begin, full_end = full
    if (n < full_begin) | (n + BLOCK_N > full_end):
        key = n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, x.type.layout))
        seen = sees(key[None, :], place[:, None], left, right, HAS_LEFT, HAS_RIGHT) & (key < keys)[None, :]
        x = gl.where(seen, x, other)
    return x


@gluon.jit
def put_bias(bias_ptr, row, end, group, to, GROUPS: gl.constexpr):
    """The bias, in base 2, of a head for the keys from a row on, into shared memory; none past the end."""
    LENGTH: gl.constexpr = to.shape[0]
    at = row + gl.arange(0, LENGTH, gl.BlockedLayout([LENGTH // 32], [32], [1], [0]))
    bias = gl.load(bias_ptr + at.to(gl.int64) * GROUPS + group, mask=at < end, other=0.0)
    to.store(bias.to(gl.float32) * LOG2E)


@gluon.jit
def zero_tail(smem, rows):
    """Zeros in the rows of a tile from ``rows`` on: 0 times what the next sample holds there is not always 0."""
    LENGTH: gl.constexpr = smem.shape[0]
    WIDTH: gl.constexpr = smem.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [1, 1], [1, 0])
    for first in gl.static_range(0, LENGTH, 8):
        if rows < first + 8:
            part = smem.slice(first, 8)
            at = first + gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
            x = part.load(LAYOUT)
            part.store(gl.where((at < rows)[:, None], x, gl.zeros_like(x)))
    fence_async_shared()


@gluon.jit
def store_rows(ptr, x, row, end, group, GROUPS: gl.constexpr):
    """A head's [64, width] to the rows from ``row`` on, up to ``end``, of [rows, G, width]."""
    WIDTH: gl.constexpr = x.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    x = gl.convert_layout(x.to(ptr.dtype.element_ty), LAYOUT)
    at = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    col = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    to = ptr + (at.to(gl.int64) * (GROUPS * WIDTH) + group * WIDTH)[:, None] + col[None, :]
    gl.store(to, x, mask=(at < end)[:, None])


@cache
def _tile(rows: int, width: int, dtype: torch.dtype) -> tuple[list[int], gl.NVMMASharedLayout]:
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return [rows, width], gl.NVMMASharedLayout.get_default_for([rows, width], element)


def described(x: Tensor, rows: int, heads: int = 1) -> TensorDescriptor:
    """[rows, G, width] in tiles of [rows, width] of a head; heads that share the one key head are rows too.

    The class checks what it is made of, which takes longer than making it; what it checks is known here.
    """
    length, columns, width = x.shape
    if heads > 1:
        length, columns = length * columns, 1
    described = TensorDescriptor.__new__(TensorDescriptor)
    described.base = x
    described.shape = (length, columns * width)
    described.strides = (columns * width, 1)
    described.block_shape, described.layout = _tile(rows, width, x.dtype)
    return described
