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
"""

import zlib

import torch
from torch import Tensor

from jfi.ops.checks import check_impl
from jfi.ops.dispatch import operator
from jfi.utils.operands import ROW_FACTOR, RowOptimizer, SortedRows

#: Rows that `flush_average` reads at a time.
_FLUSHED = 65_536


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
    else:
        from jfi.tables.step_rows_cpu import step_rows as run

    run(tables, states, sorted_rows, grads, sizes, optimizer, learning_rate, step, seeds, flushed_at)


@torch.no_grad()
def flush_average(
    table: Tensor, average: Tensor, stepped_at: Tensor, flushed_at: Tensor, decay: float, step: Tensor
) -> None:
    """Bring the moving average of every row of a table to a step, in place; the caller then sets flushed_at to it.

    Args:
        table: [N, D].
        average: [N, D].
        stepped_at: [N], int32, the step at which each row was last stepped, 0 for never.
        flushed_at: [], int64, the step of the last flush, 0 for none.
        decay: d.
        step: [], int64, number of steps so far.
    """
    for first in range(0, table.shape[0], _FLUSHED):
        rows = slice(first, first + _FLUSHED)
        at = stepped_at[rows]
        kept = decay ** (step - torch.maximum(at, flushed_at)).to(average.dtype)
        weight = table[rows].to(average.dtype)
        # lerp with a weight of exactly 1 gives the average itself.
        moved = torch.lerp(weight, average[rows], kept.unsqueeze(1))
        average[rows] = torch.where((at == 0).unsqueeze(1), weight, moved)
