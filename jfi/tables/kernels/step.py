"""The optimizer's step of the rows of a batch: each row's gradient is summed in a fixed order, then the row is stepped.

Ids are sorted by row beforehand, so that the events of a row are neighbours.  A program takes a chunk of the sorted
events, a block at a time, adds up along each row and steps the rows that end there.  Rows that begin in an earlier
chunk or go on into a later one leave partial sums, which a second kernel adds up in order.  So a popular row costs no
more than as many rare ones, and no sum depends on timing.

A warp takes whole rows of a block, so each thread adds up its own columns without another thread's help.

The optimizers are those of `jfi.utils.operands.RowOptimizer`.
"""

from functools import cache
from itertools import chain

import torch
import triton
import triton.language as tl
from torch import Tensor

from jfi.kernels import plan
from jfi.kernels.common.launch import Launcher, spec_of
from jfi.kernels.common.primitives import widen
from jfi.kernels.common.tiles import COPY_ELEMENTS, tile_mask
from jfi.tables.kernels.rounding import round_to, rounding_keys
from jfi.utils.operands import MAX_STEPPED_WIDTH, ROW_FACTOR, RowOptimizer, aligned, ceil_div, power_of_two

#: Gradients that a launch takes; more are concatenated before.
MAX_GRADS = 8
#: Tables that a launch takes; the rows of more are stepped by several launches.
MAX_STEPPED_TABLES = 32

#: Instead of an optimizer where the sums themselves are wanted.
_SUM = RowOptimizer("sum")


@triton.jit
def _cols(SPEC: tl.constexpr):
    """The columns, of which each thread takes so many that a warp takes a row."""
    cols = tl.arange(0, SPEC.block_d)
    if SPEC.block_d > 32:
        cols = tl.max_contiguous(cols, SPEC.block_d // 32)
    return cols


@triton.jit
def _offsets(tables, FIELD: tl.constexpr, row, STRIDE: tl.constexpr, SPEC: tl.constexpr):
    """Returns the offset of each row of a field, in elements from the first table's pointer."""
    FIRST: tl.constexpr = FIELD * SPEC.num_tables
    BYTES: tl.constexpr = tables[FIRST].dtype.element_ty.primitive_bitwidth // 8
    FIRSTS: tl.constexpr = SPEC.firsts
    offset = (row - FIRSTS[0]) * STRIDE
    for i in tl.static_range(1, SPEC.num_tables):
        distance = (tables[FIRST + i].to(tl.int64) - tables[FIRST].to(tl.int64)) // BYTES
        offset = tl.where(row >= FIRSTS[i], distance + (row - FIRSTS[i]) * STRIDE, offset)
    if SPEC.aligned and (STRIDE * BYTES) % 16 == 0:
        offset = tl.multiple_of(offset, 16 // BYTES)
    return offset


@triton.jit
def _load_states(row, mask, tables, SPEC: tl.constexpr):
    """Returns what a step of these rows reads, ahead of their gradients, each with where it lies.

    ``tables`` are pointers to all tables' weights, then to their first states, second states, averages and the steps
    of these; the last fields may be left out, and None stands for a field that the optimizer lacks.
    """
    N: tl.constexpr = SPEC.num_tables
    cols = _cols(SPEC)[None, :]
    keep = tile_mask(mask, SPEC.width, SPEC.block_d)
    row = row.to(tl.int64)
    at = _offsets(tables, 0, row, SPEC.width, SPEC)[:, None] + cols
    old = 0.0
    state1_at, state1, state2_at, state2, ema_at, ema, last_step_at, last_step = at, 0.0, at, 0.0, at, 0.0, at, 0
    if SPEC.name != "sum":
        old = tl.load(tables[0] + at, mask=keep, other=0.0).to(tl.float32)
    if SPEC.name == "rowwise_adagrad":
        state1_at = _offsets(tables, 1, row, 1, SPEC)
        state1 = tl.load(tables[N] + state1_at, mask=mask, other=0.0)
    elif SPEC.name != "sum" and SPEC.name != "sgd":
        state1_at = _offsets(tables, 1, row, SPEC.width, SPEC)[:, None] + cols
        state1 = tl.load(tables[N] + state1_at, mask=keep, other=0.0)
    if SPEC.name == "adam" or SPEC.name == "adamw":
        state2_at = _offsets(tables, 2, row, SPEC.width, SPEC)[:, None] + cols
        state2 = tl.load(tables[2 * N] + state2_at, mask=keep, other=0.0)
    if SPEC.ema_decay > 0:
        ema_at = _offsets(tables, 3, row, SPEC.width, SPEC)[:, None] + cols
        ema = tl.load(tables[3 * N] + ema_at, mask=keep, other=0.0)
    if SPEC.ema_decay > 0 or SPEC.weight_decay > 0:
        last_step_at = _offsets(tables, 4, row, 1, SPEC)
        last_step = tl.load(tables[4 * N] + last_step_at, mask=mask, other=0)
    return at, old, state1_at, state1, state2_at, state2, ema_at, ema, last_step_at, last_step


@triton.jit
def _step_rows(row, mask, g, states, tables, schedule, keys, SPEC: tl.constexpr):
    """Steps the rows of the mask by their gradients g [rows, BLOCK_D], 0 from column D on."""
    N: tl.constexpr = SPEC.num_tables
    at, old, state1_at, state1, state2_at, state2, ema_at, ema, last_step_at, last_step = states
    learning_rate_ptr, step_ptr, flushed_ptr = schedule
    keep = tile_mask(mask, SPEC.width, SPEC.block_d)
    if SPEC.name == "sum":
        tl.store(tables[0] + at, g.to(tables[0].dtype.element_ty), mask=keep)
    else:
        lr = tl.load(learning_rate_ptr)
        new = old
        penalty = 0.0
        if SPEC.weight_decay > 0:
            missed = tl.where(last_step == 0, 1, tl.load(step_ptr) - last_step).to(tl.float32)
            penalty = (missed * (lr * SPEC.weight_decay))[:, None]
        if SPEC.name == "sgd":
            new -= lr * g
        elif SPEC.name == "rowwise_adagrad":
            state1 += tl.sum(g * g, 1) / SPEC.width
            tl.store(tables[N] + state1_at, state1, mask=mask)
            root = tl.sqrt(state1) + SPEC.eps
            new -= g * (lr / root)[:, None]
            penalty = tl.where((root > SPEC.eps)[:, None], penalty / root[:, None], 0.0)
        elif SPEC.name == "adagrad":
            state1 += g * g
            tl.store(tables[N] + state1_at, state1, mask=keep)
            root = tl.sqrt(state1) + SPEC.eps
            new -= lr * g / root
            penalty = tl.where(root > SPEC.eps, penalty / root, 0.0)
        else:
            state1 += (g - state1) * (1.0 - SPEC.beta1)
            tl.store(tables[N] + state1_at, state1, mask=keep)
            state2 = state2 * SPEC.beta2 + (1.0 - SPEC.beta2) * g * g
            tl.store(tables[2 * N] + state2_at, state2, mask=keep)
            # In float64: 1 - beta of the first steps has few digits.
            step = tl.load(step_ptr).to(tl.float64)
            bias1 = (1.0 - tl.exp2(step * tl.log2(tl.full((), SPEC.beta1, tl.float64)))).to(tl.float32)
            bias2 = (1.0 - tl.exp2(step * tl.log2(tl.full((), SPEC.beta2, tl.float64)))).to(tl.float32)
            root = tl.sqrt(state2) / tl.sqrt(bias2) + SPEC.eps
            new -= (lr / bias1) * state1 / root
            if SPEC.name == "adam":
                penalty = tl.where(root > SPEC.eps, penalty / root, 0.0)
        if SPEC.weight_decay > 0:
            if SPEC.name == "adagrad" or SPEC.name == "adam":
                new /= 1.0 + penalty
            else:  # one division a row
                new *= 1.0 / (1.0 + penalty)
        new = round_to(tables[0].dtype.element_ty, new, row, keys, SPEC)
        tl.store(tables[0] + at, new, mask=keep)
        if SPEC.ema_decay > 0:
            new = new.to(tl.float32)
            step = tl.load(step_ptr)
            missed = (step - 1 - tl.maximum(last_step, tl.load(flushed_ptr))).to(tl.float32)
            decay = tl.exp2(missed * tl.log2(tl.full((), SPEC.ema_decay, tl.float32)))
            ema = tl.where(last_step[:, None] == 0, old, old + decay[:, None] * (ema - old))
            ema = tl.where(step == 1, new, ema + (1.0 - SPEC.ema_decay) * (new - ema))
            tl.store(tables[3 * N] + ema_at, ema, mask=keep)
        if SPEC.ema_decay > 0 or SPEC.weight_decay > 0:
            now = tl.load(step_ptr).to(tl.int32)
            tl.store(tables[4 * N] + last_step_at, tl.zeros(last_step_at.shape, tl.int32) + now, mask=mask)


@triton.jit
def _load_gradients(grads, starts, position, mask, SPEC: tl.constexpr, NUM_GRADS: tl.constexpr):
    """[events, BLOCK_D]: the gradients of events in their own order; gradient k has those from starts[k] on."""
    BYTES: tl.constexpr = grads[0].dtype.element_ty.primitive_bitwidth // 8
    D: tl.constexpr = SPEC.width
    position = position.to(tl.int64)
    at = position * D
    for i in tl.static_range(1, NUM_GRADS):
        # How far the rows of this gradient lie from the first one's: one load for all.
        distance = (grads[i].to(tl.int64) - grads[0].to(tl.int64)) // BYTES
        at = tl.where(position >= starts[i - 1], distance + (position - starts[i - 1]) * D, at)
    if (D * BYTES) % 16 == 0:
        at = tl.multiple_of(at, 16 // BYTES)
    keep = tile_mask(mask, D, SPEC.block_d)
    return widen(tl.load(grads[0] + at[:, None] + _cols(SPEC)[None, :], mask=keep, other=0.0))


@triton.jit
def _add_in_row(x, x_row, y, y_row):
    """Combines two elements of a scan over sorted events: a sum restarts where a row begins."""
    return tl.where(x_row == y_row, x, 0.0) + y, y_row


@triton.jit(do_not_specialize=["count", "chunk", *[f"start_{i}" for i in range(1, 8)]])
def step_rows_kernel(
    batch,
    grads,
    tables,
    schedule,
    count,
    chunk,
    start_1,
    start_2,
    start_3,
    start_4,
    start_5,
    start_6,
    start_7,
    SPEC: tl.constexpr,
    NUM_GRADS: tl.constexpr,
):
    """A program per chunk of sorted events: it steps the rows that lie in it wholly, and leaves the others' sums.

    ``batch`` are the rows, their order and the partial sums; ``schedule`` the learning rate, the number of steps and
    the step of the averages' last flush.
    """
    rows_ptr, order_ptr, partial_ptr = batch
    LOW: tl.constexpr = SPEC.firsts[0]
    HIGH: tl.constexpr = SPEC.firsts[SPEC.num_tables]
    BLOCK: tl.constexpr = SPEC.block
    at = tl.arange(0, BLOCK)
    starts = (start_1, start_2, start_3, start_4, start_5, start_6, start_7)
    program = tl.program_id(0).to(tl.int64)
    begin = program * chunk
    end = tl.minimum(begin + chunk, count)
    # The row that began in an earlier chunk, and the one that goes on from the last block with its sum so far.
    head = tl.load(rows_ptr + begin - 1, mask=program > 0, other=-1)
    open_row = head
    to = partial_ptr + 2 * program * SPEC.block_d + _cols(SPEC)
    total = tl.zeros((SPEC.block_d,), tl.float32)
    keys = rounding_keys(schedule[1], _cols(SPEC), SPEC)
    for first in range(begin, end, BLOCK):
        mask = first + at < end
        row = tl.load(rows_ptr + first + at, mask=mask, other=HIGH)
        following = tl.load(rows_ptr + first + at + 1, mask=first + at + 1 < count, other=-1)
        position = tl.load(order_ptr + first + at, mask=mask, other=0)
        valid = mask & (row >= LOW) & (row < HIGH)
        ends = valid & (row != following)
        states = _load_states(row, ends & (row != head), tables, SPEC)
        g = _load_gradients(grads, starts, position, valid, SPEC, NUM_GRADS).to(tl.float32)
        goes_on = (at == 0) & (row == open_row)
        g = tl.where(goes_on[:, None], g + total[None, :], g)
        rows = tl.broadcast_to(row[:, None], g.shape)
        sums, _ = tl.associative_scan((g, rows), 0, _add_in_row)
        is_last = at == BLOCK - 1
        total = tl.sum(tl.where(is_last[:, None], sums, 0.0), 0)
        open_row = tl.sum(tl.where(is_last, row, 0), 0)
        _step_rows(row, ends & (row != head), sums, states, tables, schedule, keys, SPEC)
        is_head = ends & (row == head)
        tl.store(to[None, :] + at[:, None] * 0, sums, mask=is_head[:, None])
    after = tl.load(rows_ptr + end, mask=end < count, other=-1)
    if (after == open_row) & (open_row >= LOW) & (open_row < HIGH):
        tl.store(to + tl.where(open_row == head, 0, SPEC.block_d), total)


@triton.jit(do_not_specialize=["count", "chunk"])
def step_split_rows_kernel(batch, tables, schedule, count, chunk, SPEC: tl.constexpr, CHUNKS: tl.constexpr):
    """A program per chunk: a row that begins in it and goes on is summed over its chunks and stepped."""
    rows_ptr, partial_ptr = batch
    LOW: tl.constexpr = SPEC.firsts[0]
    HIGH: tl.constexpr = SPEC.firsts[SPEC.num_tables]
    program = tl.program_id(0).to(tl.int64)
    begin = program * chunk
    end = begin + chunk
    if end >= count:
        return
    row = tl.load(rows_ptr + end)
    before = tl.load(rows_ptr + begin - 1, mask=program > 0, other=-1)
    if (tl.load(rows_ptr + end - 1) != row) | (row == before) | (row < LOW) | (row >= HIGH):
        return
    cols = tl.arange(0, SPEC.block_d)
    total = tl.load(partial_ptr + (2 * program + 1) * SPEC.block_d + cols)
    at = program + 1 + tl.arange(0, CHUNKS)
    goes_on = True
    while goes_on:
        mask = at * chunk < count
        mask = mask & (tl.load(rows_ptr + at * chunk, mask=mask, other=-1) == row)
        partials = (2 * at * SPEC.block_d)[:, None] + cols[None, :]
        total += tl.sum(tl.load(partial_ptr + partials, mask=mask[:, None], other=0.0), 0)
        goes_on = tl.min(mask.to(tl.int32), 0) > 0
        at += CHUNKS
    # One row of a tile.
    one = tl.arange(0, 1)
    states = _load_states(one + row, one == 0, tables, SPEC)
    keys = rounding_keys(schedule[1], _cols(SPEC), SPEC)
    _step_rows(one + row, one == 0, total[None, :], states, tables, schedule, keys, SPEC)


def step_tiles(width: int) -> tuple[int, int]:
    """Returns (sorted events that a program steps at a time, programs per SM) for rows of that padded width.

    A warp takes whole rows.  At D = 64 blocks of 16 rows, or 128 registers at most, take 1.3 to 3.4 times as long.  An
    SM runs 8 or 16 programs at a time: kernels of another stream, such as a dense optimizer's, begin between them.
    """
    return (32, 32) if width <= 64 else (8, 32)


@cache
def _launchers(
    optimizer: RowOptimizer,
    firsts: tuple[int, ...],
    width: int,
    num_grads: int,
    aligned: bool,
    seeds: tuple[tuple[int, int], ...],
) -> tuple[Launcher, Launcher]:
    """Returns the launchers of both kernels.

    ``firsts`` are the numbers of the tables' first rows, and behind them the end; ``aligned`` says whether all tables
    and states begin at multiples of 16 bytes; ``seeds`` are those of stochastic rounding, or none.
    """
    block_d = power_of_two(width)
    block, _ = step_tiles(block_d)
    values = {**optimizer._asdict(), "ema_decay": optimizer.ema_decay or 0.0, "firsts": firsts, "aligned": aligned}
    # What is added to (the number of a row) ROW_FACTOR, from each first row on.
    seeds_of_0 = tuple([(seed - number * ROW_FACTOR) % 2**32 for number, seed in seeds])
    values |= {"seeds": seeds_of_0, "seed_firsts": tuple([number for number, _ in seeds]), "num_seeds": len(seeds)}
    spec = spec_of(**values, num_tables=len(firsts) - 1, width=width, block_d=block_d, block=block)
    chunks = max(COPY_ELEMENTS // block_d, 1)
    return (
        Launcher(step_rows_kernel, SPEC=spec, NUM_GRADS=num_grads, num_warps=1, num_stages=1),
        Launcher(step_split_rows_kernel, SPEC=spec, CHUNKS=chunks, num_warps=4),
    )


def step_rows(
    tables: list[Tensor],
    states: list[tuple[Tensor, ...]],
    sorted_rows: tuple[Tensor, Tensor],
    grads: list[Tensor | None],
    sizes: list[int],
    optimizer: RowOptimizer,
    learning_rate: Tensor | None,
    step: Tensor | None,
    seeds: list[tuple[int, int]] | None = None,
    flushed_at: Tensor | None = None,
) -> None:
    """Steps rows, see `jfi.tables.step_rows.step_rows`; "sum" writes the sums themselves to the rows."""
    rows, order = sorted_rows
    count, width = rows.shape[0], tables[0].shape[1]
    if width > MAX_STEPPED_WIDTH:
        raise ValueError(
            f"tables must be at most {MAX_STEPPED_WIDTH} wide for impl='triton', got {width}: use impl='torch'"
        )
    if not count:
        return
    grads, starts = _join(grads, sizes, width, tables[0])
    first, block_d = 0, power_of_two(width)
    block, programs_per_sm = step_tiles(block_d)
    programs = plan.device_of(rows.device).num_sms * programs_per_sm
    chunk = ceil_div(ceil_div(count, programs), block) * block
    programs = ceil_div(count, chunk)
    partial = torch.empty(2 * programs, block_d, device=rows.device)
    for some in range(0, len(tables), MAX_STEPPED_TABLES):
        own = slice(some, some + MAX_STEPPED_TABLES)
        firsts = [first]
        for table in tables[own]:
            firsts.append(firsts[-1] + table.shape[0])
        first = firsts[-1]
        aligned = all([x.data_ptr() % 16 == 0 for x in chain(tables[own], *states[own])])
        constants = tuple(firsts), width, len(grads), aligned, tuple(seeds or ())
        step_launch, split_launch = _launchers(optimizer, *constants)
        fields = [tables[own], *zip(*states[own], strict=True)]
        # The steps of rows lie behind both states and the average, the average behind both states.
        lacks, behind = [[None] * len(tables[own])] * (5 - len(fields)), 2 if optimizer.ema_decay else 1
        if optimizer.ema_decay or optimizer.weight_decay:
            fields[-behind:-behind] = lacks
        arrays = (tuple(chain(*fields)), (learning_rate, step, flushed_at))
        step_launch((programs, 1, 1), ((rows, order, partial), tuple(grads), *arrays), (count, chunk, *starts))
        split_launch((programs, 1, 1), ((rows, partial), *arrays), (count, chunk))


def _join(grads: list[Tensor | None], sizes: list[int], width: int, like: Tensor) -> tuple[list[Tensor], list[int]]:
    """At most MAX_GRADS gradients of one dtype, and where among all events those after the first begin."""
    dtypes = {grad.dtype for grad in grads if grad is not None}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    if dtype == torch.float64:
        dtype = torch.float32
    pairs = [
        (size, torch.zeros(size, width, dtype=dtype, device=like.device) if grad is None else aligned(grad.to(dtype)))
        for size, grad in zip(sizes, grads, strict=True)
        if size
    ]
    while len(pairs) > MAX_GRADS:  # the two neighbours with the fewest rows
        at = min(range(len(pairs) - 1), key=lambda i: pairs[i][0] + pairs[i + 1][0])
        joined = torch.cat([pairs[at][1], pairs[at + 1][1]])
        pairs[at : at + 2] = [(joined.shape[0], joined)]
    starts, end = [], 0
    for size, _ in pairs:
        end += size
        starts.append(end)
    return [grad for _, grad in pairs], (starts[:-1] + [0] * MAX_GRADS)[: MAX_GRADS - 1]


def sum_rows(grad: Tensor, sorted_rows: tuple[Tensor, Tensor], num_rows: int, dtype: torch.dtype) -> Tensor:
    """The dense gradient [num_rows, D] of a table, of the gradients [n, D] of the events that were sorted."""
    out = torch.zeros(num_rows, grad.shape[1], dtype=dtype, device=grad.device)
    step_rows([out], [()], sorted_rows, [grad], [grad.shape[0]], _SUM, None, None)
    return out
