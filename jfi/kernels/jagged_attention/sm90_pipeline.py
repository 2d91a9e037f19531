"""The pipeline of the Hopper kernels of jagged attention, written in Gluon, Triton's lower level.

A program is warp-specialized: a producer, one warp, loads tiles into shared memory by TMA; consumers, warp groups of 64
rows each, compute on tensor cores.  They pass each ring of tiles back and forth by two barriers per stage: ``full``,
the bytes have arrived, and ``free``, every consumer has read them.  The n-th use of a ring has stage n % stages, and
its barriers complete their phase n // stages.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from jfi.kernels.common import tile_scheduler

load_work_tile = gluon.jit(tile_scheduler.load_work_tile.fn)
#: Its name since Triton 3.8, and its former one, which 3.9 refuses.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

#: Numbers of tiles on their way from the producer to the consumers.
_QUEUE = gl.constexpr(4)
#: Query rows or keys of a consumer: what one instruction of a warp group multiplies.
ROWS = gl.constexpr(64)


class Ring(NamedTuple):
    """The barriers of a ring of tiles in shared memory."""

    full: object
    free: object


class TileQueue(NamedTuple):
    """The ring of the numbers of the tiles that a program works on."""

    numbers: object
    ring: Ring


class Schedule(NamedTuple):
    """The schedule with which both roles find their work tiles."""

    tiles_ptr: object
    queue: TileQueue
    total: object
    window: object  # (left, right, edges), as `visible_keys` takes them


@gluon.jit
def barriers(number: gl.constexpr, count: gl.constexpr):
    """Returns [number] barriers, each completed by ``count`` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit
def ring(stages: gl.constexpr, arrivals: gl.constexpr, consumers: gl.constexpr):
    """Stages that are full after so many arrivals of the producer (or of TMA) and free after one of each consumer."""
    return Ring(barriers(stages, arrivals), barriers(stages, consumers))


@gluon.jit
def wait_full(ring, n, pred=True):
    """Consumer: wait for the n-th tile."""
    STAGES: gl.constexpr = ring.full.shape[0]
    mbarrier.wait(ring.full.index(n % STAGES), n // STAGES & 1, pred=pred)


@gluon.jit
def release(ring, n):
    """Consumer: the n-th tile has been read."""
    STAGES: gl.constexpr = ring.full.shape[0]
    mbarrier.arrive(ring.free.index(n % STAGES))


@gluon.jit
def wait_free(ring, n):
    """Producer: wait until the n-th tile may be written."""
    STAGES: gl.constexpr = ring.full.shape[0]
    mbarrier.wait(ring.free.index(n % STAGES), (n // STAGES & 1) ^ 1)


@gluon.jit
def allocate_tiles(desc, number: gl.constexpr):
    """Returns [number] tiles in shared memory, as the descriptor loads them."""
    shape: gl.constexpr = [number, desc.block_type.shape[0], desc.block_type.shape[1]]
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def allocate_rows(number: gl.constexpr, length: gl.constexpr, dtype: gl.constexpr = gl.float32):
    """Returns [number, length] in shared memory."""
    return gl.allocate_shared_memory(dtype, [number, length], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def store_integer(smem, number):
    """Stores a number; called by the producer."""
    smem.store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def load_integer(smem):
    """Returns a stored number; called by a consumer."""
    return gl.max(smem.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def tile_queue(consumers: gl.constexpr):
    return TileQueue(allocate_rows(_QUEUE, 1, gl.int32), ring(_QUEUE, 1, consumers))


@gluon.jit
def first_tile(schedule, SPEC: gl.constexpr):
    """Returns (number, work tile) that the program begins with."""
    number = gl.program_id(0)
    return number, load_work_tile(schedule.tiles_ptr, number, schedule.total, SPEC.num_kv_heads * SPEC.num_splits)


@gluon.jit
def produce_tile(schedule, n, COUNTER: gl.constexpr, SPEC: gl.constexpr):
    """Producer: take the next work tile that no program has taken, as the n-th, and tell the consumers.

    Which program computes a tile varies from run to run, the result does not.
    """
    queue = schedule.queue
    number = gl.num_programs(0) + gl.atomic_add(schedule.tiles_ptr + COUNTER, 1, sem="relaxed")
    wait_free(queue.ring, n)
    stage = n % _QUEUE
    store_integer(queue.numbers.index(stage), number)
    mbarrier.arrive(queue.ring.full.index(stage))
    return number, load_work_tile(schedule.tiles_ptr, number, schedule.total, SPEC.num_kv_heads * SPEC.num_splits)


@gluon.jit
def consume_tile(schedule, n, SPEC: gl.constexpr):
    """Consumer: the work tile that the producer took as the n-th."""
    queue = schedule.queue
    wait_full(queue.ring, n)
    number = load_integer(queue.numbers.index(n % _QUEUE))
    release(queue.ring, n)
    return number, load_work_tile(schedule.tiles_ptr, number, schedule.total, SPEC.num_kv_heads * SPEC.num_splits)


@gluon.jit
def _run(role, args, OWN: gl.constexpr):
    if OWN is None:
        role(*args)
    else:
        role(*args, OWN)


@gluon.jit
def specialize(
    consumer, consumer_args, producer, producer_args, WARP_GROUPS: gl.constexpr, REGISTERS: gl.constexpr = 24
):
    """Run the roles; a consumer's last argument is the first of its 64 rows in a tile.  REGISTERS: of the producer."""
    if WARP_GROUPS == 1:
        gl.warp_specialize(
            [(_run, (consumer, consumer_args, 0)), (_run, (producer, producer_args, None))], [1], [REGISTERS]
        )
    else:
        gl.warp_specialize(
            [
                (_run, (consumer, consumer_args, 0)),
                (_run, (consumer, consumer_args, ROWS)),
                (_run, (producer, producer_args, None)),
            ],
            [4, 1],
            [252 - REGISTERS // 2, REGISTERS],
        )


@gluon.jit
def load_tile(desc, row, kv_head, bar, smem):
    """Start to load a head's tile from a row on; the barrier gets its bytes."""
    async_load(desc, [row, kv_head * smem.shape[1]], bar, smem)


class Side(NamedTuple):
    """The two tensors of one side in a kernel of the backward: queries and dO, or keys and values."""

    descs: object
    smems: object
    ring: Ring


@gluon.jit
def _load_pair(side, row, kv_head, bar, at):
    for i in gl.static_range(2):
        load_tile(side.descs[i], row, kv_head, bar, side.smems[i].index(at))


@gluon.jit
def zero_tail(smem, rows):
    """Zero the rows of a tile from ``rows`` on: 0 times what the next sample has there could be NaN."""
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
def produce_pairs(
    own,
    other,
    tail_bar,
    more,
    schedule,
    COUNTER: gl.constexpr,
    locate,
    load_more,
    ZEROED: gl.constexpr,
    SPEC: gl.constexpr,
):
    """The producer of a kernel of the backward.

    Of each work tile it loads the own side's tile once and then the other side's tiles, the last one first, since it is
    the one that may be cut off.

    Args:
        own, other: the sides.
        tail_bar: has the bytes of the tile that is cut off.
        more: what ``load_more`` loads for each of the other tiles, by its own stores: (pointers and shared memory).
        locate: (first row of the own tile, sample's first row on the other side, rows there, first of them to be
            loaded, number of tiles) of a work tile.
        load_more: a function of (more, tile, SPEC); tile: (stage, row, end of the sample's rows, own row, work tile,
            key head).
        ZEROED: of the tile that is cut off the first so many tensors are zeroed behind the sample's rows.
    """
    WARP_GROUPS: gl.constexpr = own.smems[0].shape[0]
    STAGES: gl.constexpr = other.smems[0].shape[0]
    BLOCK: gl.constexpr = other.smems[0].shape[1]
    OWN_BYTES: gl.constexpr = WARP_GROUPS * ROWS * (own.smems[0].shape[2] + own.smems[1].shape[2]) * 2
    BYTES: gl.constexpr = BLOCK * (other.smems[0].shape[2] + other.smems[1].shape[2]) * 2
    num_tiles = 0  # of the other side
    num_own = 0
    num_tails = 0
    num_taken = 0
    number, work_tile = first_tile(schedule, SPEC)
    while number < schedule.total:
        next_number, next_work_tile = produce_tile(schedule, num_taken, COUNTER, SPEC)
        num_taken += 1
        kv_head = number % SPEC.num_kv_heads
        own_row, start, rows, begin, steps = locate(work_tile, schedule, WARP_GROUPS, BLOCK, SPEC)
        # Rows of the first tile loaded that are the sample's.
        tail = rows - begin - (steps - 1) * BLOCK
        if steps > 0:
            full = own.ring.full.index(0)
            wait_free(own.ring, num_own)
            mbarrier.expect(full, OWN_BYTES)
            for i in gl.static_range(WARP_GROUPS):
                _load_pair(own, own_row + i * ROWS, kv_head, full, i)
            num_own += 1
        # One round more than tiles: the tail is zeroed once the second tile is being loaded.
        for step in range(steps + 1):
            n = num_tiles + step
            row = start + begin + (steps - 1 - step) * BLOCK
            if step < steps:
                full = other.ring.full.index(n % STAGES)
                wait_free(other.ring, n)
                if (step == 0) & (tail < BLOCK):
                    mbarrier.expect(tail_bar.index(0), BYTES)
                    _load_pair(other, row, kv_head, tail_bar.index(0), n % STAGES)
                else:
                    mbarrier.expect(full, BYTES)
                    _load_pair(other, row, kv_head, full, n % STAGES)
                if load_more is not None:
                    load_more(more, (n % STAGES, row, start + rows, own_row, work_tile, kv_head), SPEC)
                    mbarrier.arrive(full)
            if (step == 1) & (tail < BLOCK):
                mbarrier.wait(tail_bar.index(0), num_tails & 1)
                num_tails += 1
                for i in gl.static_range(ZEROED):
                    zero_tail(other.smems[i].index(num_tiles % STAGES), tail)
                mbarrier.arrive(other.ring.full.index(num_tiles % STAGES))
        num_tiles += steps
        number = next_number
        work_tile = next_work_tile
