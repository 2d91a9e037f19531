"""Calls that launch the kernels of jfi: those of one device, dtype and width, with what a compiler may trip on.

Nothing runs: where `Launcher.__call__` records, outputs stay as they were allocated.
"""

from collections.abc import Iterator

import torch
from overrides import FAMILIES, override
from row_optimizers import CLASSES, states_of
from torch import Tensor

from jfi.kernels import absorbed_weights
from jfi.kernels.digit_attention.sid_words import sid_words
from jfi.kernels.exchange import partition as exchange_ids
from jfi.kernels.exchange.push import push
from jfi.kernels.jagged_attention import execute as jagged_attention
from jfi.kernels.jagged_attention.buckets import bucket_edges
from jfi.kernels.plan import H200, AttentionPlan, Device, plan_jagged_attention, plan_target_attention
from jfi.kernels.target_attention import execute as target_attention
from jfi.kernels.target_attention import partials_message
from jfi.table1 import kernels as table1
from jfi.tables.kernels import step as tables_step
from jfi.tables.kernels.gather import bound_ids, gather_rows
from jfi.tables.kernels.map_ids import map_ids
from jfi.tables.step_rows import RowOptimizer, sort_rows
from jfi.utils.operands import IdMap, JaggedAttentionInputs, TargetAttentionInputs

HALF = torch.float16


def tensors(rows: int, num_kv_heads: int, width: int, dtype: torch.dtype = HALF) -> tuple[Tensor, ...]:
    """Query, key and value."""
    return tuple(torch.randn(rows, num_heads, width).to(dtype) for num_heads in (4, num_kv_heads, num_kv_heads))


def subsets(*inputs: Tensor | None, every: bool) -> list[tuple[bool, ...]]:
    """Which gradients are needed: those of all inputs; if ``every``, also of each input alone."""
    kinds = [tuple(x is not None for x in inputs)]
    if every:
        kinds += [tuple(y is x for y in inputs) for x in inputs if x is not None]
    return kinds


# --- Jagged attention -------------------------------------------------------------------------------------------------
def _run_jagged(x: JaggedAttentionInputs, device: Device, needed: list[tuple[bool, ...]]) -> AttentionPlan:
    plan = plan_jagged_attention(x, "triton", device)
    out, lse, _ = jagged_attention.forward(x, plan)
    dlse = None if x.bias is None or x.is_packed else torch.randn_like(lse)
    for some in needed:
        jagged_attention.backward(torch.randn_like(out), dlse, x, out, lse, some, plan)
    return plan


def attend(query, key, value, bias=None, window=(None, None), device: Device = H200, every=False) -> AttentionPlan:
    """Forward and backward of two samples."""
    offsets = torch.tensor([0, query.shape[0] // 2, query.shape[0]])
    x = JaggedAttentionInputs(query, key, value, offsets, offsets, bias, None, None, None, None, 0.125, *window, False)
    return _run_jagged(x, device, subsets(query, key, value, bias, None, every=every))


def attend_by_time(query, key, value, kind: str, device: Device, every: bool = False) -> AttentionPlan:
    """Forward and backward of two timelines: what is older, by ages, or by distances in causal attention."""
    offsets = torch.tensor([0, query.shape[0] // 2, query.shape[0]])
    times = torch.arange(query.shape[0])
    times = times.double() if kind == "float64" else times
    table = None if kind == "older" else torch.randn(32, query.shape[1]).to(query.dtype)
    edges = torch.zeros(query.shape[0], 33 if table is not None else 2, dtype=torch.int32)
    by_age = (times, times) if kind in ("ages", "float64") else (None, None)
    x = JaggedAttentionInputs(
        query, key, value, offsets, offsets, None, edges, table, *by_age, 0.125, None, None, kind == "distances"
    )
    plan = _run_jagged(x, device, subsets(query, key, value, None, table, every=every))
    bucket_edges(offsets, offsets, times, times, len(times), kind == "distances", 5, 32, kind != "distances")
    return plan


def attend_ragged_to_digits(dtype: torch.dtype, num_digits: int, kind: str | None, device: Device) -> AttentionPlan:
    """Forward and backward of two users' candidates, plain or with a bias by event and a scale of values, or by age."""
    query, offsets = torch.randn(40, 4, num_digits).to(dtype), torch.tensor([0, 20, 40])
    digits, times = torch.zeros(800, -(-num_digits // 16), dtype=torch.int32), (torch.arange(40), torch.arange(800))
    table = torch.randn(32, 4).to(dtype) if kind == "ages" else None
    edges = None if table is None else torch.zeros(40, 33, dtype=torch.int32)
    bias, weights = (torch.randn(800, 4).to(dtype), torch.rand(800)) if kind == "bias" else (None, None)
    by_age = (None, None) if table is None else times
    tensors = (query, digits, weights, offsets, torch.tensor([0, 400, 800]), bias, edges, table, *by_age)
    x = JaggedAttentionInputs(*tensors, 0.125, None, None, False)
    return _run_jagged(x, device, subsets(query, None, None, bias, table, every=True))


# --- Target attention -------------------------------------------------------------------------------------------------
def _run_target(x: TargetAttentionInputs, device: Device, needed: list[tuple[bool, ...]]) -> AttentionPlan:
    plan = plan_target_attention(x, "triton", device)
    out, lse = target_attention.forward(x, plan)
    for some in needed:
        target_attention.backward(out, x, out, lse, some, plan)
    return plan


def attend_to_few(
    dtype: torch.dtype, width: int, num_queries: int, own_values: bool, longest: int | None, device: Device
) -> AttentionPlan:
    """Forward and backward of few queries over rows, with a bias by event."""
    query, key = torch.randn(8, num_queries, 2, width).to(dtype), torch.randn(800, 1, width).to(dtype)
    value, bias = key.clone() if own_values else None, torch.randn(800, 2).to(dtype)
    offsets = torch.arange(0, 801, 100)
    x = TargetAttentionInputs(query, key, value, offsets, bias, *(None,) * 3, [], [], 0.125, longest)
    return _run_target(x, device, subsets(query, key, value, bias, None, every=False))


def attend_by_bucket(
    width: int, rows: int, longest: int | None, halves: bool, dtype=HALF, device: Device = H200, every: bool = False
) -> AttentionPlan:
    """Forward and backward of few queries, with a bias table of so many rows and a scale of values."""
    query, key = torch.randn(8, 1, 4, width).to(dtype), torch.randn(800, 1, width // (2 if halves else 1)).to(dtype)
    offsets, table = torch.arange(0, 801, 100), torch.randn(rows, 4)
    events = (table, torch.zeros(800, dtype=torch.int64), torch.rand(800), key[:, 0].clone() if halves else None)
    x = TargetAttentionInputs(query, key, None, offsets, *events, [], [], 0.125, longest)
    return _run_target(x, device, subsets(query, key, None, table, x.second, every=every))


def attend_by_id(
    dtype: torch.dtype, table_dtype: torch.dtype, width: int, count: int, longest: int | None, device: Device = H200
) -> AttentionPlan:
    """Forward and backward of few queries over rows of so many tables."""
    table = torch.zeros(50, width, dtype=table_dtype)
    query, key = torch.randn(8, 1, 4, width).to(dtype), torch.zeros((), dtype=dtype).expand(800, 1, width)
    offsets, indices = torch.arange(0, 801, 100), [torch.zeros(800, dtype=torch.int32)] * count
    x = TargetAttentionInputs(query, key, None, offsets, *(None,) * 4, [table] * count, indices, 0.125, longest)
    return _run_target(x, device, [(True, True, False, False, False)])


def attend_many(
    num_queries: int, own_values: bool, dtype=HALF, width: int = 64, device: Device = H200, every: bool = True
) -> AttentionPlan:
    """Forward and backward of many queries, in one sweep or in two."""
    query, key = torch.randn(8, num_queries, 1, width).to(dtype), torch.randn(800, 1, width).to(dtype)
    value, bias = key.clone() if own_values else None, torch.randn(800, 1).to(dtype)
    x = TargetAttentionInputs(query, key, value, torch.arange(0, 801, 100), bias, *(None,) * 3, [], [], 0.125, None)
    with override(**FAMILIES["target_multi_tile"]):
        return _run_target(x, device, subsets(query, key, value, bias, None, every=every))


def attend_to_digits(
    dtype: torch.dtype, num_digits: int, biased: bool, device: Device, every: bool = False
) -> AttentionPlan:
    """Forward and backward over digits, with a table of biases and a scale of values if biased."""
    query, offsets = torch.randn(8, 2, 4, num_digits).to(dtype), torch.arange(0, 801, 100)
    digits, of_events = torch.zeros(800, -(-num_digits // 16), dtype=torch.int32), torch.zeros(800, dtype=torch.int64)
    events = (torch.randn(32, 4), of_events, torch.rand(800)) if biased else (None,) * 3
    x = TargetAttentionInputs(query, digits.unsqueeze(1), None, offsets, *events, None, [], [], 0.125, None)
    return _run_target(x, device, subsets(query, None, None, x.bias, None, every=every))


# --- Tables, weights, exchange, products ------------------------------------------------------------------------------
def step_tables(name: str, width: int, dtype: torch.dtype, grad_dtype: torch.dtype, ema_decay: float | None) -> None:
    """The step of two tables by two gradients, and the rows that they are read from."""
    optimizer = RowOptimizer(name, weight_decay=0.1, ema_decay=ema_decay)
    tables = [torch.zeros(50, width, dtype=dtype) for _ in range(2)]
    states = [states_of(name, table, ema_decay is not None, decay=True) for table in tables]
    grads = [torch.zeros(1000, width, dtype=grad_dtype) for _ in range(2)]
    batch, one = sort_rows(torch.randint(0, 101, (2000,)), 100), torch.tensor(1)
    seeds = [(0, 1), (50, 2)] if dtype.itemsize == 2 else None
    tables_step.step_rows(tables, states, batch, grads, [1000, 1000], optimizer, one.float(), one, seeds, one)
    tables_step.sum_rows(grads[0], sort_rows(torch.randint(0, 50, (1000,)), 50), 50, dtype)
    ids = torch.zeros(1000, dtype=torch.int64)
    gather_rows(tuple(tables), (ids, ids), grad_dtype)
    bound_ids([ids, ids.int()] * 3, [50] * 6, ids[:6])
    bound_ids([ids] * 3, [50, 50, 2**31 + 1], None)
    for records in (False, True):
        map_ids(ids, IdMap(ids[:50], ids[:50], ids[:50].bool(), ids, ids[:1], ids[:1]), records)


def multiply_weights(num_queries: int, width: int, dtype: torch.dtype) -> None:
    shapes = (
        (num_queries * width, width),
        (num_queries * width,),
        (width, width),
        (width, width),
        (width, num_queries * width),
    )
    weights = tuple(torch.randn(1, *shape) for shape in shapes)
    absorbed_weights.absorb(weights, num_queries, 4, dtype)
    sizes = (num_queries * 4 * width, width) * 2
    absorbed_weights.gradients(
        tuple(torch.randn(1, 600, size).to(dtype) for size in sizes), weights, dtype, num_queries, 4
    )


def exchange(dtype: torch.dtype, num_ranks: int, columns: int, width: int = 64) -> None:
    """What ranks send each other: ids by owner, with their payload; rows of queries, outputs and gradients."""
    ids, offsets = torch.zeros(5000, dtype=torch.int64), torch.tensor([0, 2000, 4000])
    owned = (
        ids,
        offsets,
        torch.zeros(num_ranks - 1, dtype=torch.int64),
        torch.zeros(num_ranks, dtype=torch.uint8),
        ids,
        50,
        ids[:1],
    )
    payload = None if columns == 1 else torch.zeros(5000, columns - 1, dtype=torch.int32)
    buffer = torch.zeros(num_ranks * 3000, columns, dtype=torch.int32)
    exchange_ids.partition([owned], payload, num_ranks, 3000, buffer, ids if columns == 1 else None)
    exchange_ids.count_samples([owned], num_ranks)
    exchange_ids.collect(buffer, torch.zeros(num_ranks, dtype=torch.int64), buffer[0], 3000, 4000)
    rows, lse = torch.zeros(num_ranks, 500, width, dtype=dtype), torch.zeros(num_ranks, 500)
    for shared in (False, True):
        push(rows, torch.arange(num_ranks), ids, 16, shared)
    partials_message.combine(partials_message.pack(rows, None, lse))
    partials_message.unpack(partials_message.pack(rows, rows, lse), width, 0.5)
    partials_message.add(rows, 2.0)


def table_1(dtype: torch.dtype, width: int) -> None:
    """The products and softmaxes of two samples, as the operators and their gradients use them."""
    x, y = torch.zeros(300, width, dtype=dtype), torch.zeros(200, width, dtype=dtype)
    x_offsets, y_offsets = torch.tensor([0, 100, 300]), torch.tensor([0, 150, 200])
    dense, pairs = torch.zeros(2, width, width, dtype=dtype), torch.zeros(100 * 150 + 200 * 50, dtype=dtype)
    for transposed in (False, True):
        table1.jagged_dense_bmm(x, x_offsets, dense, transposed)
        rows, out_rows = (x, 200) if transposed else (y, 300)
        table1.array_jagged_bmm_jagged_out(pairs, rows, x_offsets, y_offsets, out_rows, transposed)
    table1.jagged_jagged_bmm(x, x, x_offsets)
    table1.jagged_jagged_bmm_jagged_out(x, y, x_offsets, y_offsets, len(pairs))
    table1.jagged_softmax(x, x_offsets)
    table1.jagged_softmax_bwd(x, x, x_offsets)
    table1.jagged2_softmax(pairs, x_offsets, y_offsets)
    table1.jagged2_softmax_bwd(pairs, pairs, x_offsets, y_offsets)


def launch_all(device: Device, dtype: torch.dtype, width: int) -> Iterator[AttentionPlan]:
    """Every kernel for a device, forward and backward; the plans of attention."""
    for num_kv_heads, window in ((4, (None, None)), (1, (5, 0))):
        query, key, value = tensors(300, num_kv_heads, width, dtype)
        bias = torch.randn(300, 4).to(dtype) if num_kv_heads > 1 else None
        yield attend(query, key, value, bias, window, device)
        yield attend_by_time(query, key, value if num_kv_heads > 1 else None, "ages", device)
    for num_queries, own_values in ((1, True), (1, False), (8, False)):
        for longest in (None, 400):
            yield attend_to_few(dtype, width, num_queries, own_values, longest, device)
    for longest in (None, 100):
        yield attend_by_bucket(width, 32, longest, width % 2 == 0, dtype, device)
        for count in (1, 2):
            yield attend_by_id(dtype, torch.float32, width, count, longest, device)
    for num_queries in (40, 100):
        for own_values in (False, True):
            yield attend_many(num_queries, own_values, dtype, width, device, every=False)
    for biased in (False, True):
        yield attend_to_digits(dtype, width, biased, device)
    for kind in (None, "bias", "ages"):
        yield attend_ragged_to_digits(dtype, width, kind, device)
    for name in CLASSES:
        step_tables(name, width, dtype, dtype, 0.999 if name == "adam" else None)
    multiply_weights(2, width, dtype)
    exchange(dtype, 2, 1, width)
    table_1(dtype, width)
    sid_words(torch.zeros(600, dtype=torch.int64), 40)
