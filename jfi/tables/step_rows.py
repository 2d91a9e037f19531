"""An optimizer's step of the rows of embedding tables that a batch has read, from the gradients of what it read.

    G[r] = Σ_{s: rows[s] = r} dY[s]          summed in a fixed order, each row once
    w[r], state[r] = step(w[r], state[r], G[r])

Rows that the batch has not read keep their values and states, so rows that the batch lacks cost no time. The formulas
are those of torch.optim and of TorchRec's RowWiseAdagrad, with t the number of steps, this one included:

    sgd               w -= lr g                                                p = 1
    adagrad           v += g²                w -= p lr g                       p = 1 / (√v + eps)
    rowwise_adagrad   v += mean(g²)          w -= p lr g                       the same, one v a row
    adam              m += (1 - β₁)(g - m)   v += (1 - β₂)(g² - v)             w -= p lr m̂,  p = 1 / (√v̂ + eps)
    adamw             the same, and p = 1 below

with m̂ = m / (1 - β₁ᵗ) and v̂ = v / (1 - β₂ᵗ). Weight decay is an L2 penalty of the whole table at every step. A row
gets the penalty of the k steps since it was last stepped, 1 in its first step, when it is stepped again, in proximal
form, which never overshoots (Duchi et al., "Adaptive Subgradient Methods", 2011):

    w /= 1 + k p lr weight_decay

where p is 0 as long as v is 0: a gradient that has always been 0 gives no scale. A moving average of the weights, a +=
(1 - d)(w - a) at every step, takes the k steps since a row was last stepped at once, since w was the same in all of
them: a = w + dᵏ (a - w). Before the first step of a row a = w, whatever its memory holds, and step 1 sets a = w, as
torch's AveragedModel does.

All is computed in float32, or in float64 for tables of it. New weights of tables in half precision are rounded to the
nearest number, or with seeds stochastically: to one of the two neighbours, to each with the probability that makes the
expected value the new weight itself. So steps below half of the distance between two numbers are not lost. The random
bits are a hash of the table's seed, the number of the step, the row and the column, so the same step has the same bits
everywhere. Infinities and NaN stay, and no number up to the largest finite one becomes infinite.

In PyTorch `embedding_bag` sums a row's gradients, one after another in the order of the batch, with the gradients as
its table and the sorted positions as its ids: [n, D] is never copied into the sorted order. Rows are stepped by blocks
that stay in the cache from the read to the write: 2.5 times as fast for 32,000 rows of a million.
"""

import math
import zlib
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from jfi.ops.checks import check_impl
from jfi.ops.dispatch import operator
from jfi.utils.operands import FLOAT16_TINY, ROW_FACTOR, RowOptimizer, SortedRows

#: Rows that `flush_average` reads at a time.
_FLUSHED = 65_536
#: Elements of a table that are stepped together on a CPU.
_BLOCK = 2**17
#: The bits of an unsigned number that a hash keeps.
_WORD = 2**32 - 1


def sort_rows(rows: Tensor, num_rows: int) -> SortedRows:
    """Sort the rows that a batch has read.

    Args:
        rows: [n], int32 or int64, from 0 to num_rows; num_rows is padding.
        num_rows: number of rows of all tables.

    Example:
        >>> import torch
        >>> sort_rows(torch.tensor([7, 2, 9, 2]), num_rows=9)
        SortedRows(rows=tensor([2, 2, 7, 9], dtype=torch.int32), order=tensor([1, 3, 0, 2], dtype=torch.int32))
    """
    rows, order = torch.sort(rows.to(torch.int32 if num_rows < 2**31 - 1 else torch.int64), stable=True)
    return SortedRows(rows, order.to(torch.int32))


def _sum_rows(grad: Tensor, rows: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    from jfi.tables.kernels.step import sum_rows

    return sum_rows(grad, sort_rows(rows, num_rows), num_rows, dtype)


operator("table_gradient", _sum_rows, lambda x, _, rows, dtype: x.new_empty(rows, x.shape[1], dtype=dtype))


def rounding_seed(table: str, first_row: int = 0) -> int:
    """Returns the seed of stochastic rounding of a table by its name, or of its shard that begins at a row.

    A row has the same random bits in the whole table and in a shard of it.
    """
    return (zlib.crc32(table.encode()) + first_row * ROW_FACTOR) % 2**32


@torch.no_grad()
def step_rows(
    tables: list[Tensor],
    states: list[tuple[Tensor, ...]],
    sorted_rows: SortedRows,
    grads: list[Tensor | None],
    sizes: list[int],
    optimizer: RowOptimizer,
    learning_rate: Tensor,
    step: Tensor,
    impl: str = "auto",
    seeds: list[tuple[int, int]] | None = None,
    flushed_at: Tensor | None = None,
) -> None:
    """Step the rows that a batch has read, in place. Nothing synchronizes with a GPU.

    Rows are numbered through all tables: row r of table t is first[t] + r, where first are the cumulative sums of N_t.

    Args:
        tables: [N_t, D] each, of one dtype.
        states: by table the optimizer's tensors: () for sgd; ([N, D],) for adagrad; ([N],) for rowwise_adagrad;
            ([N, D], [N, D]), the moments, for adam and adamw. With `optimizer.ema_decay` one more: the average [N, D].
            With it or a weight decay one more: the step [N], int32, at which each row was last stepped, 0 for never.
        sorted_rows: the rows that were read.
        grads: [n_k, D] each, floating: the gradients of what was read, part by part; None for zeros.
        sizes: n_k of each part, n in all.
        optimizer: what to compute.
        learning_rate: [], floating, on the tables' device.
        step: [], int64, on the tables' device: number of steps, this one included.
        impl: "triton" (tables of at most 2,048 columns), "torch" (on a GPU with synchronizations), or "auto": Triton
            for CUDA tensors except float64, PyTorch otherwise.
        seeds: for stochastic rounding of float16 and bfloat16, of each table or shard the number of its first row and
            its `rounding_seed`, ascending from row 0; None rounds to nearest.
        flushed_at: [], int64, the step up to which `flush_average` has brought the averages, 0 for none; with
            `optimizer.ema_decay` alone.

    Example:
        >>> import torch
        >>> table = torch.zeros(4, 2)
        >>> batch = sort_rows(torch.tensor([3, 1, 3]), num_rows=4)
        >>> lr, step = torch.tensor(0.5), torch.tensor(1)
        >>> step_rows([table], [()], batch, [torch.ones(3, 2)], [3], RowOptimizer("sgd"), lr, step)
        >>> table
        tensor([[ 0.0000,  0.0000],
                [-0.5000, -0.5000],
                [ 0.0000,  0.0000],
                [-1.0000, -1.0000]])
    """
    if tables[0].dtype.itemsize > 2:
        seeds = None
    if check_impl(impl, tables[0]) == "triton":
        from jfi.tables.kernels.step import step_rows as run

        run(tables, states, sorted_rows, grads, sizes, optimizer, learning_rate, step, seeds, flushed_at)
        return
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


@torch.no_grad()
def flush_average(
    table: Tensor, average: Tensor, stepped_at: Tensor, flushed_at: Tensor, decay: float, step: Tensor
) -> None:
    """Bring the moving average [N, D] of a table [N, D] to a step, in place; the caller then sets flushed_at to it.

    The tensors are those of `step_rows`, with ``decay`` for d.
    """
    for first in range(0, table.shape[0], _FLUSHED):
        rows = slice(first, first + _FLUSHED)
        at, weight = stepped_at[rows], table[rows].to(average.dtype)
        average[rows] = _caught_up(weight, average[rows], at, step - torch.maximum(at, flushed_at), decay)


def _caught_up(weight: Tensor, average: Tensor, at: Tensor, missed: Tensor, decay: float) -> Tensor:
    """Returns the averages [U, D] of rows last stepped ``at``, 0 for never, after so many missed steps."""
    kept = decay ** missed.to(weight.dtype)
    # lerp with a weight of exactly 1 gives the average itself.
    return torch.where((at == 0).unsqueeze(1), weight, torch.lerp(weight, average.to(weight.dtype), kept.unsqueeze(1)))


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
        moved = _caught_up(before, _read(average, rows), at, t - 1 - at.clamp(min=flushed), decay)
        moved = moved.lerp_(after, 1 - decay).to(average.dtype)
    average.index_copy_(0, rows, moved)


def _keys(rows: Tensor, seeds: list[tuple[int, int]]) -> Tensor:
    """Returns the key [U] int64 of each row: (its number in its table) ROW_FACTOR + the table's crc32, modulo 2**32."""
    firsts, shifts = zip(*[(first, seed - first * ROW_FACTOR & _WORD) for first, seed in seeds], strict=True)
    of = torch.bucketize(rows, torch.tensor(firsts[1:], dtype=rows.dtype, device=rows.device), right=True)
    return rows.long() * ROW_FACTOR + torch.tensor(shifts, device=rows.device)[of] & _WORD


def round_stochastically(x: Tensor, dtype: torch.dtype, keys: Tensor, step: int) -> Tensor:
    """Returns rows x [U, D] float32 with keys [U] in float16 or bfloat16.

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
