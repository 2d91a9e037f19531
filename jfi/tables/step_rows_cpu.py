"""The step of rows on a CPU: only rows of the batch are read and written.

A row's gradients are summed one after another in the order of the batch. `embedding_bag` does it, with the gradients
as its table and the sorted positions as its ids: [n, D] is never copied into the sorted order. Rows are stepped by
blocks that stay in the cache from the read to the write: 2.5 times as fast for 32,000 rows of a million.
"""

import math
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from jfi.utils.operands import FLOAT16_TINY, ROW_FACTOR, RowOptimizer, SortedRows

#: Elements of a table that are stepped together.
_BLOCK = 2**17
#: The bits of an unsigned number that a hash keeps.
_WORD = 2**32 - 1


def step_rows(
    tables: list[Tensor],
    states: list[tuple[Tensor, ...]],
    sorted_rows: SortedRows,
    grads: list[Tensor | None],
    sizes: list[int],
    optimizer: RowOptimizer,
    learning_rate: Tensor,
    step: Tensor,
    seeds: list[tuple[int, int]] | None,
    flushed_at: Tensor | None,
) -> None:
    """Steps the rows, as `jfi.tables.step_rows.step_rows` says."""
    first = [0, *accumulate(table.shape[0] for table in tables)]
    bounds = torch.tensor(first, dtype=sorted_rows.rows.dtype, device=sorted_rows.rows.device)
    used = int(torch.searchsorted(sorted_rows.rows, bounds[-1]))  # padding lies behind
    if not used:
        return
    rows, counts = torch.unique_consecutive(sorted_rows.rows[:used], return_counts=True)
    order, joined = sorted_rows.order[:used], _join(grads, sizes, tables[0])
    ends = counts.cumsum(0)
    starts = (ends - counts).to(order.dtype)
    begins = torch.searchsorted(rows, bounds).tolist()
    lr, count = float(learning_rate), int(step)
    flushed = 0 if flushed_at is None else int(flushed_at)
    block = max(1, _BLOCK // joined.shape[1])
    for t, (table, state) in enumerate(zip(tables, states, strict=True)):
        own = rows[begins[t] : begins[t + 1]].long() - first[t]
        for begin in range(begins[t], begins[t + 1], block):
            part = slice(begin, min(begin + block, begins[t + 1]))
            low, high = int(starts[begin]), int(ends[part.stop - 1])
            g = F.embedding_bag(order[low:high], joined, starts[part] - low, mode="sum")
            keys = None if seeds is None else _keys(rows[part], seeds)
            _step(table, state, own[begin - begins[t] :][: len(g)], g, optimizer, lr, count, flushed, keys)


def _join(grads: list[Tensor | None], sizes: list[int], table: Tensor) -> Tensor:
    """[n, D]: the gradients in the order of the batch, in float32 or float64."""
    dtype = torch.float64 if table.dtype == torch.float64 else torch.float32
    width = table.shape[1]
    parts = [
        table.new_zeros(size, width, dtype=dtype) if grad is None else grad.to(dtype)
        for grad, size in zip(grads, sizes, strict=True)
    ]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


def _read(table: Tensor, rows: Tensor) -> Tensor:
    """Rows [U] of a table."""
    if table.dim() == 1 or table.dtype != torch.float32:
        return table.index_select(0, rows)
    # It fetches the rows ahead of their turn, which index_select leaves to the CPU.
    return F.embedding_bag(rows, table, torch.arange(rows.shape[0], device=rows.device), mode="sum")


def _step(
    table: Tensor,
    state: tuple[Tensor, ...],
    rows: Tensor,
    g: Tensor,
    optimizer: RowOptimizer,
    lr: float,
    t: int,
    flushed: int,
    keys: Tensor | None,
) -> None:
    """Steps rows [U] of one table by the gradient g [U, D], which may be overwritten."""
    name, decay, average, eps = optimizer.name, optimizer.weight_decay, optimizer.ema_decay, optimizer.eps
    w = _read(table, rows).to(g.dtype)
    before = w.clone() if average is not None else w
    at = state[-1].index_select(0, rows) if average is not None or decay else None
    # What the gradient is divided by, and with it the penalty: a number, [U, D] or [U, 1].
    root: float | Tensor = 1.0
    if name == "sgd":
        w.add_(g, alpha=-lr)
    elif name in ("adagrad", "rowwise_adagrad"):
        total = _read(state[0], rows)
        total = total.addcmul_(g, g) if name == "adagrad" else total.add_(g.square().mean(1))
        state[0].index_copy_(0, rows, total)
        root = total.sqrt_().add_(eps)
        root = root if name == "adagrad" else root.unsqueeze(1)
        w.addcdiv_(g, root, value=-lr)
    else:
        mean, square = (_read(one, rows) for one in state[:2])
        mean.lerp_(g, 1 - optimizer.beta1)
        square.mul_(optimizer.beta2).addcmul_(g, g, value=1 - optimizer.beta2)
        state[0].index_copy_(0, rows, mean)
        state[1].index_copy_(0, rows, square)
        root = square.sqrt_().div_(math.sqrt(1 - optimizer.beta2**t)).add_(eps)
        w.addcdiv_(mean, root, value=-lr / (1 - optimizer.beta1**t))
    if decay:
        penalty = torch.where(at == 0, 1, t - at).to(g.dtype).mul_(lr * decay).unsqueeze(1)
        if name not in ("sgd", "adamw"):
            penalty = torch.where(root > eps, penalty / root, 0.0)
        if name in ("adagrad", "adam"):
            w.div_(1 + penalty)
        else:  # one division a row
            w.mul_(1 / (1 + penalty))
    stored = w.to(table.dtype) if keys is None else round_stochastically(w, table.dtype, keys, t)
    table.index_copy_(0, rows, stored)
    if average is not None:
        _average(state[-2], at, rows, before, stored.to(g.dtype), average, t, flushed)
    if at is not None:
        state[-1].index_fill_(0, rows, t)


def _average(
    average: Tensor, at: Tensor, rows: Tensor, before: Tensor, after: Tensor, decay: float, t: int, flushed: int
) -> None:
    """Moves the averages of rows [U], last stepped `at`, over the steps since then or the flush, and over this one."""
    if t == 1:
        moved = after.to(average.dtype)
    else:
        kept = decay ** (t - 1 - at.clamp(min=flushed)).to(before.dtype)
        # lerp with a weight of exactly 1 gives the average itself.
        moved = torch.lerp(before, _read(average, rows).to(before.dtype), kept.unsqueeze(1))
        moved = torch.where((at == 0).unsqueeze(1), before, moved)
        moved = moved.lerp_(after, 1 - decay).to(average.dtype)
    average.index_copy_(0, rows, moved)


def _keys(rows: Tensor, seeds: list[tuple[int, int]]) -> Tensor:
    """Returns the key [U] int64 of each row: (its number in its table) ROW_FACTOR + the table's crc32, modulo 2**32."""
    firsts, shifts = zip(*[(first, seed - first * ROW_FACTOR & _WORD) for first, seed in seeds], strict=True)
    of = torch.bucketize(rows, torch.tensor(firsts[1:], dtype=rows.dtype, device=rows.device), right=True)
    return rows.long() * ROW_FACTOR + torch.tensor(shifts, device=rows.device)[of] & _WORD


def round_stochastically(x: Tensor, dtype: torch.dtype, keys: Tensor, step: int) -> Tensor:
    """Returns rows x [U, D] float32 with keys [U] in float16 or bfloat16, see `jfi.tables.step_rows`.

    Random bits are added where the mantissa's last bits are cut off: a carry rounds away from zero. For a row and a
    step they are the upper bits of h c[column], with h a hash of the step and the row's key, and c odd numbers.
    """
    columns = _mix(2 * torch.arange(x.shape[1], device=x.device) + 1) | 1
    random = _mix(keys ^ _mix(step & _WORD)).to(torch.int32).unsqueeze(1) * columns.to(torch.int32)
    shift, offset, raised = 16, None, x.contiguous()
    if dtype == torch.float16:
        # Subnormal numbers have a fixed point, which a sum with the smallest normal number has too.
        smallest = torch.full_like(x, FLOAT16_TINY).copysign_(x)
        shift, offset = 19, torch.where(x.abs() < FLOAT16_TINY, smallest, 0.0)
        raised = x + offset
    kept = 32 - shift  # bits of the random number
    random = random >> shift & (1 << kept) - 1
    raised = (raised.view(torch.int32) + random & -1 << kept).view(torch.float32)
    if offset is not None:
        raised -= offset
    return torch.where(x.isnan(), x, raised).to(dtype)


def _mix(x: Tensor | int) -> Tensor | int:
    """Returns a hash of a number below 2**32, or of each of int64: the finalizer of MurmurHash3's kind."""
    x = (x ^ x >> 16) * 0x7FEB352D & _WORD
    x = (x ^ x >> 15) * 0x846CA68B & _WORD
    return x ^ x >> 16
