"""The step of rows against torch.optim's optimizers of the rows that a batch has read."""

import pytest
import torch
from ops.overrides import override
from ops.ragged import SLOW_HERE
from ops.row_optimizers import CLASSES, states_of, torch_step

from jfi.tables.kernels import step as kernels
from jfi.tables.step_rows import RowOptimizer, flush_average, round_stochastically, rounding_seed, sort_rows, step_rows
from jfi.utils.operands import MAX_STEPPED_WIDTH, ROW_FACTOR, power_of_two

SIZES = [7, 1, 40]
IMPLS = ["triton", "torch"]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", CLASSES)
def test_steps_are_those_of_torch_of_the_rows_of_the_batch(name, decay, impl, device):
    optimizer = RowOptimizer(name, 1e-8, 0.8, 0.95, decay)
    tables = [torch.randn(size, 6, device=device) for size in SIZES]
    expected = [table.double().cpu() for table in tables]
    states, wide = ([states_of(name, x, decay=decay > 0) for x in some] for some in (tables, expected))
    first = torch.tensor([0, 7, 8, 48])
    steps = 30 if impl == "torch" or device.type == "cuda" else 8
    for t in range(1, steps + 1):
        rows = torch.randint(0, 49, (25,))  # 48 is padding
        if t == 7:
            rows = rows.clamp(max=7)  # a table without a row in the batch
        grads = [torch.randn(10, 6), None, torch.randn(12, 6)]
        lr = torch.tensor(0.3 / t, device=device)
        own = [grad if grad is None else grad.to(device) for grad in grads]
        batch = sort_rows(rows.to(device), 48)
        step_rows(tables, states, batch, own, [10, 3, 12], optimizer, lr, torch.tensor(t, device=device), impl)

        joined = torch.cat([grads[0], torch.zeros(3, 6), grads[2]]).double()
        total = torch.zeros(49, 6, dtype=torch.float64).index_add_(0, rows, joined)
        for k, table in enumerate(expected):
            mine = rows[(rows >= first[k]) & (rows < first[k + 1])].unique()
            torch_step(optimizer, table, wide[k], mine - first[k], total[mine], lr.item(), t)
    for k, table in enumerate(expected):
        torch.testing.assert_close(tables[k].cpu().double(), table, rtol=1e-5, atol=1e-5)
        for state, other in zip(states[k], wide[k], strict=True):
            torch.testing.assert_close(state.cpu().double(), other.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("impl", "dtype"),
    [
        ("torch", torch.float64),
        *((impl, torch.bfloat16) for impl in IMPLS),
        ("torch", torch.float16),
        pytest.param("triton", torch.float16, marks=SLOW_HERE),
    ],
)
def test_half_precision_sums_in_float32_and_rounds_once(impl, dtype, device):
    table = torch.randn(5, 4, device=device).to(dtype)
    expected = table.double()
    grad = torch.rand(1000, 4, device=device).to(dtype)  # a sum in half precision would stop growing
    batch = sort_rows(torch.full((1000,), 2, device=device), 5)
    optimizer, lr, one = RowOptimizer("sgd"), torch.tensor(2.0**-10, device=device), torch.tensor(1, device=device)
    step_rows([table], [()], batch, [grad], [1000], optimizer, lr, one, impl)
    expected[2] -= 2.0**-10 * grad.double().sum(0)
    eps = 1e-12 if dtype == torch.float64 else torch.finfo(dtype).eps
    torch.testing.assert_close(table.double(), expected, rtol=eps, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_same_batch_gives_the_same_bits_and_untouched_rows_keep_theirs(impl, device):
    count = 5000 if impl == "torch" or device.type == "cuda" else 200
    rows = (torch.rand(count, device=device) ** 4 * 1000).long()
    grad, before = torch.randn(count, 16, device=device), torch.randn(1000, 16, device=device)
    runs, optimizer = [], RowOptimizer("adam")
    for _ in range(2):
        table, states = before.clone(), states_of("adam", before)
        for t in (1, 2):
            one = torch.tensor(t, device=device)
            step_rows([table], [states], sort_rows(rows, 1000), [grad], [count], optimizer, one * 0.1, one, impl)
        runs.append(table)
    assert torch.equal(*runs)
    untouched = torch.ones(1000, dtype=torch.bool, device=device).index_fill(0, rows, False)
    assert untouched.any() and torch.equal(runs[0][untouched], before[untouched])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["adagrad", "rowwise_adagrad", "adam"])
def test_weight_decay_keeps_what_never_had_a_gradient(name, impl, device):
    table = torch.ones(3, 4, device=device)
    grad = torch.tensor([[0.0, 0, 0, 0], [1, 0, 0, 0]], device=device)
    states, optimizer = states_of(name, table, decay=True), RowOptimizer(name, weight_decay=1e-3)
    for t in (1, 2):
        batch = sort_rows(torch.tensor([0, 1], device=device), 3)
        schedule = torch.tensor(0.01, device=device), torch.tensor(t, device=device)
        step_rows([table], [states], batch, [grad], [2], optimizer, *schedule, impl)
    assert (table[0] == 1).all(), "a row without a gradient"
    assert (table[1, 1:] > 0.9999).all() and table[1, 0] < 0.995


@pytest.mark.parametrize("impl", IMPLS)
def test_a_batch_of_nothing_or_of_padding_changes_nothing(impl, device):
    table = torch.randn(4, 3, device=device)
    before, states = table.clone(), states_of("adamw", table, decay=True)
    for rows in (torch.zeros(0, dtype=torch.int64, device=device), torch.full((3,), 4, device=device)):
        n = len(rows)
        step_rows(
            *([table], [states], sort_rows(rows, 4), [torch.full((n, 3), torch.nan, device=device)], [n]),
            *(RowOptimizer("adamw", weight_decay=0.1), torch.tensor(0.1, device=device)),
            *(torch.tensor(1, device=device), impl),
        )
    assert torch.equal(table, before) and not states[0].any()


@pytest.mark.parametrize("impl", IMPLS)
def test_the_average_is_that_of_all_steps_of_all_rows(impl, device):
    decay, optimizer = 0.9, RowOptimizer("adagrad", ema_decay=0.9)
    table = torch.randn(12, 3, device=device)
    states = states_of("adagrad", table, average=True)
    states[-2].fill_(torch.nan)  # read only after a row's first step
    expected, flushed_at = None, torch.tensor(0, device=device)
    for t in range(1, 41):
        rows = torch.randint(0, 3 if t % 4 else 12, (5,), device=device)  # some rows wait for long
        step = torch.tensor(t, device=device)
        lr = torch.tensor(0.1, device=device)
        grads = [torch.randn(5, 3).to(device)]
        batch = sort_rows(rows, 12)
        step_rows([table], [states], batch, grads, [5], optimizer, lr, step, impl, flushed_at=flushed_at)
        now = table.double()
        expected = now if expected is None else decay * expected + (1 - decay) * now
        if t in (3, 17):
            flush_average(table, *states[-2:], flushed_at, decay, step)
            torch.testing.assert_close(states[-2].double(), expected, rtol=1e-5, atol=1e-6)
            flushed_at.fill_(t)
            again = states[-2].clone()
            flush_average(table, *states[-2:], flushed_at, decay, step)
            assert torch.equal(again, states[-2])
    flush_average(table, *states[-2:], flushed_at, decay, step)
    torch.testing.assert_close(states[-2].double(), expected, rtol=1e-5, atol=1e-6)


def step_beside_torch(optimizer, sizes, parts, rows, width, dtype, device, grad_dtype=torch.float32, tolerance=1e-5):
    """Two steps of tables of these sizes by the kernels, and by plain PyTorch in float64; None is a part of zeros."""
    tables = [torch.randn(size, width).to(dtype).to(device) for size in sizes]
    wide = [table.double().cpu() for table in tables]
    kinds = optimizer.ema_decay is not None, optimizer.weight_decay > 0
    states = [states_of(optimizer.name, table, *kinds) for table in tables]
    expected = [states_of(optimizer.name, table, *kinds) for table in wide]
    counts = [abs(part) for part in parts]
    for t in (1, 2):
        grads = [None if part < 0 else torch.randn(part, width).to(grad_dtype) for part in parts]
        own = [None if grad is None else grad.to(device) for grad in grads]
        batch = sort_rows(rows.to(device), sum(sizes))
        lr, step = torch.tensor(0.3, device=device), torch.tensor(t, device=device)
        flushed = torch.tensor(1, device=device) if kinds[0] else None
        step_rows(tables, states, batch, own, counts, optimizer, lr, step, "triton", flushed_at=flushed)

        grads = [None if grad is None else grad.double() for grad in grads]
        lr, step = torch.tensor(0.3, dtype=torch.float64), torch.tensor(t)
        batch, flushed = sort_rows(rows, sum(sizes)), torch.tensor(1)
        step_rows(wide, expected, batch, grads, counts, optimizer, lr, step, "torch", flushed_at=flushed)
    for table, other in zip(tables, wide, strict=True):
        torch.testing.assert_close(table.cpu().double(), other, rtol=tolerance, atol=tolerance)
    for some, others in zip(states, expected, strict=True):
        for state, other in zip(some, others, strict=True):
            torch.testing.assert_close(state.cpu().double(), other.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["rowwise_adagrad", "adam"])
@pytest.mark.parametrize("width", [1, 17, *(pytest.param(width, marks=SLOW_HERE) for width in (64, 256))])
def test_widths(width, name, device):
    """Popular rows fill chunks of their own, and others lie across the border of two; the last places are padding."""
    block = kernels.step_tiles(power_of_two(width))[0]
    rows = torch.cat([torch.full((5 * block,), 3), torch.full((block // 2,), 5), torch.randint(0, 49, (4 * block,))])
    rows = rows[torch.randperm(len(rows))]
    with override(num_sms=2):
        optimizer = RowOptimizer(name, weight_decay=0.1, ema_decay=0.9)
        # Adam divides sums that cancel by their own size.
        tolerance = 1e-4 if name == "adam" else 1e-5
        step_beside_torch(optimizer, SIZES, [len(rows)], rows, width, torch.float32, device, tolerance=tolerance)


@pytest.mark.parametrize("num_sms", [1, pytest.param(64, marks=SLOW_HERE)])
@pytest.mark.parametrize("of", ["one row", "its first place", "its last place", "all but one"])
def test_rows_of_many_chunks(of, num_sms, device):
    """One row fills all chunks, or begins or ends where a chunk does; the row after and before it have their own."""
    chunk = kernels.step_tiles(16)[0]
    count = {"one row": 700, "its first place": 3 * chunk, "its last place": 3 * chunk - 1, "all but one": 699}[of]
    rows = torch.full((700,), 4)
    rows[count:] = 5
    rows[:chunk] = torch.tensor(3 if of == "its first place" else 4)
    with override(num_sms=num_sms):
        step_beside_torch(RowOptimizer("adagrad"), [10], [700], rows, 3, torch.float32, device)


def test_many_gradients_and_many_tables(device, monkeypatch):
    """More than a launch takes of either: neighbours are concatenated, tables stepped by several launches."""
    monkeypatch.setattr(kernels, "MAX_STEPPED_TABLES", 2)
    parts = [3, 1, -4, 5, 0, 2, 7, 1, -2, 3, 4, 6]
    rows = torch.randint(0, 54, (sum(map(abs, parts)),))
    assert len(parts) > kernels.MAX_GRADS
    step_beside_torch(RowOptimizer("adagrad", ema_decay=0.5), [*SIZES, 2, 3], parts, rows, 6, torch.float32, device)
    step_beside_torch(RowOptimizer("sgd"), [*SIZES, 2, 3], [-40, 0], rows[:40] // 2, 6, torch.float32, device)


def test_gradients_of_several_dtypes(device):
    rows, parts = torch.randint(0, 9, (30,)), [10, 8, 12]
    grads = [torch.randn(n, 4, device=device).to(x) for n, x in zip(parts, DTYPES, strict=True)]
    table = torch.zeros(9, 4, device=device)
    one = torch.tensor(1, device=device)
    step_rows(
        [table], [()], sort_rows(rows.to(device), 9), grads, parts, RowOptimizer("sgd"), one.float(), one, "triton"
    )
    expected = torch.zeros(9, 4, dtype=torch.float64).index_add_(0, rows, torch.cat(grads).double().cpu())
    torch.testing.assert_close(table.cpu().double(), -expected, rtol=1e-5, atol=1e-5)


def test_gradients_and_tables_that_begin_anywhere(device):
    rows, places = torch.randint(0, 9, (30,), device=device), torch.randn(30 * 4 + 9 * 4 + 2, device=device)
    grad, table = places[1:121].view(30, 4), places[121:157].view(9, 4)
    expected = table.double().index_add_(0, rows, grad.double(), alpha=-1)
    one = torch.tensor(1, device=device)
    other = torch.zeros(2, 4, device=device)
    batch = sort_rows(rows + 2, 11)
    step_rows([other, table], [(), ()], batch, [grad], [30], RowOptimizer("sgd"), one.float(), one, "triton")
    torch.testing.assert_close(table.double(), expected, rtol=1e-5, atol=1e-5)
    assert not other.any()


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tables_and_gradients_in_half_precision(dtype, name, device):
    rows = torch.randint(0, 48, (100,))
    tolerance = 4 * torch.finfo(dtype).eps
    step_beside_torch(RowOptimizer(name, 1e-8), SIZES, [100], rows, 8, dtype, device, dtype, tolerance)


HALVES = [torch.bfloat16, torch.float16]


def keys(table, count):
    return (torch.arange(count) * ROW_FACTOR + rounding_seed(table)) % 2**32


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("scale", [1.0, 2.0**-22])
def test_stochastic_rounding_has_the_same_bits_in_the_kernels_and_in_a_shard(scale, dtype, device):
    """Sums of gradients are exact, so that their order makes no difference; the step's number changes in place."""
    sizes, seeds = [7, 40], [(0, rounding_seed("a")), (7, rounding_seed("b"))]
    start = [(torch.randn(size, 5) * scale).to(dtype).to(device) for size in sizes]
    rows = torch.cat([torch.full((40,), 3), torch.randint(0, 48, (24,))]).to(device)
    grad = (torch.randint(-512, 512, (64, 5)) * (scale / 1024)).to(device)
    shards = [start[0], start[1][:15], start[1][15:]]
    ways = [
        ("torch", start, seeds),
        ("triton", start, seeds),
        ("torch", shards, seeds),
        ("triton", [torch.cat(start)], [*seeds, (22, rounding_seed("b", 15))]),
        ("torch", start, None),
    ]
    found, lr = [], torch.tensor(0.5, device=device)
    for impl, given, own in ways:
        tables, step = [table.clone() for table in given], torch.zeros((), dtype=torch.int64, device=device)
        for _ in range(2):
            step += 1
            batch, optimizer = sort_rows(rows, 47), RowOptimizer("sgd")
            step_rows(tables, [()] * len(tables), batch, [grad], [64], optimizer, lr, step, impl, own)
        found.append(torch.cat(tables).view(torch.int16))
    assert all(torch.equal(found[0], other) for other in found[1:4])
    assert not torch.equal(found[0], found[4])


@pytest.mark.parametrize("dtype", HALVES)
def test_stochastic_rounding_has_the_value_as_its_mean(dtype):
    """Numbers between two neighbours go to these; those of the dtype, infinities and NaN stay."""
    tiny = torch.finfo(dtype).smallest_normal
    values = torch.tensor([1.001, -0.3337, 3e-8, -2.1e-5, 6.1e-5, 0.3 * tiny, -1.7 * tiny, 2000.7])
    if dtype == torch.float16:
        values = torch.cat([values, torch.tensor([1e-9, 65503.0])])
    x, steps = values.repeat_interleave(32).expand(100, -1), 100
    rounded = [round_stochastically(x, dtype, keys("t", 100), t) for t in range(steps)]
    mean = sum(one.double() for one in rounded) / steps
    low, high = (getattr(torch.stack(rounded), way)(0).values.double() for way in ("min", "max"))
    distance = (high.amax((0,)) - low.amin((0,))).view(-1, 32).amax(1)
    nearest = values.to(dtype)
    assert (distance <= 1.01 * torch.finfo(dtype).eps * values.abs().clamp(min=tiny)).all()
    error = (mean.mean(0).view(-1, 32).mean(1) - values).abs()
    assert (error <= 2.5 * distance / (steps * 100 * 32) ** 0.5).all() and (distance > 0).all()

    largest = torch.finfo(dtype).max
    stays = torch.tensor([0.0, 1.0, -largest, largest, tiny, torch.inf, -torch.inf, torch.nan]).expand(100, -1)
    stays = torch.cat([stays, nearest.float().expand(100, -1)], 1)
    for t in range(5):
        torch.testing.assert_close(
            round_stochastically(stays, dtype, keys("t", 100), t).float(), stays, rtol=0, atol=0, equal_nan=True
        )


def test_random_bits_depend_on_the_table_the_row_the_column_and_the_step():
    x = torch.full((64, 32), 1.0 + 2.0**-9)  # between two numbers of bfloat16
    draws = []
    for table, t in (("a", 1), ("a", 2), ("b", 1)):
        draws.append(round_stochastically(x, torch.bfloat16, keys(table, 64), t) > 1)
    again = round_stochastically(x, torch.bfloat16, keys("a", 64), 1) > 1
    assert torch.equal(draws[0], again)
    others = [draws[1], draws[2], draws[0].roll(1, 0), draws[0].roll(1, 1)]
    for other in others:  # a quarter is rounded up: as independent draws 6 of 16 differ
        assert 0.3 < (draws[0] != other).float().mean() < 0.45


def test_rows_wider_than_a_tile_are_refused(device):
    table = torch.zeros(2, MAX_STEPPED_WIDTH + 1, device=device)
    rows = sort_rows(torch.tensor([1], device=device), 2)
    one = torch.tensor(1, device=device)
    with pytest.raises(ValueError, match=r"tables must be at most 2048 wide for impl='triton', got 2049"):
        step_rows([table], [()], rows, [table[:1]], [1], RowOptimizer("sgd"), one.float(), one, "triton")


@pytest.mark.parametrize("num_rows, dtype", [(2**31 - 2, torch.int32), (2**31 - 1, torch.int64), (2**40, torch.int64)])
def test_sorted_rows_are_as_narrow_as_their_number_allows(num_rows, dtype):
    batch = sort_rows(torch.tensor([num_rows, 0, num_rows - 1, 0]), num_rows)
    assert batch.rows.dtype == dtype and batch.order.dtype == torch.int32
    assert batch.rows.tolist() == [0, 0, num_rows - 1, num_rows] and batch.order.tolist() == [1, 3, 2, 0]
