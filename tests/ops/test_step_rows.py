"""The step of rows against torch.optim's optimizers of the rows that a batch has read."""

import pytest
import torch
from ops.row_optimizers import CLASSES, states_of, torch_step

from jfi.ops.step_rows import RowOptimizer, flush_average, sort_rows, step_rows

SIZES = [7, 1, 40]


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", CLASSES)
def test_steps_are_those_of_torch_of_the_rows_of_the_batch(name, decay, device):
    optimizer = RowOptimizer(name, 1e-8, 0.8, 0.95, decay)
    tables = [torch.randn(size, 6, device=device) for size in SIZES]
    expected = [table.double().cpu() for table in tables]
    states, wide = [states_of(name, table) for table in tables], [states_of(name, table) for table in expected]
    first = torch.tensor([0, 7, 8, 48])
    for t in range(1, 31):
        rows = torch.randint(0, 49, (25,))  # 48 is padding
        if t == 7:
            rows = rows.clamp(max=7)  # a table without a row in the batch
        grads = [torch.randn(10, 6), None, torch.randn(12, 6)]
        lr = torch.tensor(0.3 / t, device=device)
        own = [grad if grad is None else grad.to(device) for grad in grads]
        batch = sort_rows(rows.to(device), 48)
        step_rows(tables, states, batch, own, [10, 3, 12], optimizer, lr, torch.tensor(t, device=device))

        joined = torch.cat([grads[0], torch.zeros(3, 6), grads[2]]).double()
        total = torch.zeros(49, 6, dtype=torch.float64).index_add_(0, rows, joined)
        for k, table in enumerate(expected):
            mine = rows[(rows >= first[k]) & (rows < first[k + 1])].unique()
            torch_step(optimizer, table, wide[k], mine - first[k], total[mine], lr.item(), t)
    for k, table in enumerate(expected):
        torch.testing.assert_close(tables[k].cpu().double(), table, rtol=1e-5, atol=1e-5)
        for state, other in zip(states[k], wide[k], strict=True):
            torch.testing.assert_close(state.cpu().double(), other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_half_precision_sums_in_float32_and_rounds_once(dtype):
    table = torch.randn(5, 4).to(dtype)
    expected = table.double()
    grad = torch.rand(3000, 4).to(dtype)  # a sum in half precision would stop growing
    batch = sort_rows(torch.full((3000,), 2), 5)
    optimizer, lr = RowOptimizer("sgd"), torch.tensor(2.0**-10)
    step_rows([table], [()], batch, [grad], [3000], optimizer, lr, torch.tensor(1))
    expected[2] -= 2.0**-10 * grad.double().sum(0)
    eps = 1e-12 if dtype == torch.float64 else torch.finfo(dtype).eps
    torch.testing.assert_close(table.double(), expected, rtol=eps, atol=1e-5)


def test_the_same_batch_gives_the_same_bits_and_untouched_rows_keep_theirs():
    rows = (torch.rand(5000) ** 4 * 1000).long()
    grad, before = torch.randn(5000, 16), torch.randn(1000, 16)
    runs = []
    for _ in range(2):
        table, states = before.clone(), states_of("adam", before)
        for t in (1, 2):
            one = torch.tensor(t)
            step_rows([table], [states], sort_rows(rows, 1000), [grad], [5000], RowOptimizer("adam"), one * 0.1, one)
        runs.append(table)
    assert torch.equal(*runs)
    untouched = torch.ones(1000, dtype=torch.bool).index_fill(0, rows, False)
    assert untouched.any() and torch.equal(runs[0][untouched], before[untouched])


def test_a_batch_of_nothing_or_of_padding_changes_nothing():
    table = torch.randn(4, 3)
    before, states = table.clone(), states_of("adamw", table)
    for rows in (torch.zeros(0, dtype=torch.int64), torch.full((3,), 4)):
        n = len(rows)
        step_rows(
            *([table], [states], sort_rows(rows, 4), [torch.full((n, 3), torch.nan)], [n]),
            *(RowOptimizer("adamw", weight_decay=0.1), torch.tensor(0.1), torch.tensor(1)),
        )
    assert torch.equal(table, before) and not states[0].any()


def test_the_average_is_that_of_all_steps_of_all_rows(device):
    decay, optimizer = 0.9, RowOptimizer("adagrad", average=0.9)
    table = torch.randn(12, 3, device=device)
    states = states_of("adagrad", table, average=True)
    expected = None
    for t in range(1, 41):
        rows = torch.randint(0, 3 if t % 4 else 12, (5,), device=device)  # some rows wait for long
        step = torch.tensor(t, device=device)
        lr = torch.tensor(0.1, device=device)
        step_rows([table], [states], sort_rows(rows, 12), [torch.randn(5, 3).to(device)], [5], optimizer, lr, step)
        now = table.double()
        expected = now if expected is None else decay * expected + (1 - decay) * now
        if t in (1, 17):
            flush_average(table, states[-2], states[-1], decay, step)
            torch.testing.assert_close(states[-2].double(), expected, rtol=1e-5, atol=1e-6)
            assert (states[-1] == t).all()
            again = states[-2].clone()
            flush_average(table, states[-2], states[-1], decay, step)
            assert torch.equal(again, states[-2])
    flush_average(table, states[-2], states[-1], decay, step)
    torch.testing.assert_close(states[-2].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_rows, dtype", [(2**31 - 2, torch.int32), (2**31 - 1, torch.int64), (2**40, torch.int64)])
def test_sorted_rows_are_as_narrow_as_their_number_allows(num_rows, dtype):
    batch = sort_rows(torch.tensor([num_rows, 0, num_rows - 1, 0]), num_rows)
    assert batch.rows.dtype == dtype and batch.order.dtype == torch.int32
    assert batch.rows.tolist() == [0, 0, num_rows - 1, num_rows] and batch.order.tolist() == [1, 3, 2, 0]
