"""Compile kernels for Hopper as they would be launched; a script, since it must not run under Triton's interpreter.

Those written in Gluon, which no interpreter runs, and those with many ways through them: what the interpreter forgives,
a compiler may not.
"""

import sys

import torch
import triton.tools.tensor_descriptor
from row_optimizers import CLASSES, states_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jfi.kernels import absorbed_weights, plan
from jfi.kernels.common.launch import Launcher
from jfi.kernels.exchange import partition as exchange_ids
from jfi.kernels.exchange.push import push
from jfi.kernels.jagged_attention import execute as jagged_attention
from jfi.kernels.jagged_attention.buckets import bucket_edges
from jfi.kernels.plan import A100, H200, Device, plan_jagged_attention, plan_target_attention
from jfi.kernels.tables import step as tables_step
from jfi.kernels.tables.gather import bound_ids, gather_rows
from jfi.kernels.target_attention import execute as target_attention
from jfi.kernels.target_attention import partials_message
from jfi.ops.step_rows import RowOptimizer, sort_rows
from jfi.utils.operands import MAX_STEPPED_WIDTH, JaggedAttentionInputs, TargetAttentionInputs


def tensors(rows: int, num_kv_heads: int, width: int) -> tuple[torch.Tensor, ...]:
    """Query, key and value."""
    return tuple(torch.randn(rows, num_heads, width).half() for num_heads in (4, num_kv_heads, num_kv_heads))


def subsets(*inputs: torch.Tensor | None, every: bool) -> list[tuple[bool, ...]]:
    """Which gradients are needed: those of all inputs; if ``every``, also of each input alone."""
    kinds = [tuple(x is not None for x in inputs)]
    if every:
        kinds += [tuple(y is x for y in inputs) for x in inputs if x is not None]
    return kinds


def attend(query, key, value, bias=None, window=(None, None), every=False) -> None:
    """Forward and backward of two samples."""
    offsets = torch.tensor([0, query.shape[0] // 2, query.shape[0]])
    x = JaggedAttentionInputs(query, key, value, offsets, offsets, bias, None, None, None, None, 0.125, *window, False)
    plan = plan_jagged_attention(x, "triton", H200)
    assert plan.family == "jagged_sm90", plan
    out, lse = jagged_attention.forward(x, plan)
    dlse = None if bias is None else torch.randn_like(lse)
    for needed in subsets(query, key, value, bias, None, every=every):
        jagged_attention.backward(torch.randn_like(out), dlse, x, out, lse, needed, plan)


def attend_by_time(query, key, value, kind: str, device: Device, every: bool = False) -> None:
    """Forward and backward of two timelines: what is older, by ages, or by distances in causal attention."""
    offsets = torch.tensor([0, query.shape[0] // 2, query.shape[0]])
    times = torch.arange(query.shape[0])
    times = times.double() if kind == "float64" else times
    table = None if kind == "older" else torch.randn(32, query.shape[1]).half()
    edges = torch.zeros(query.shape[0], 33 if table is not None else 2, dtype=torch.int32)
    by_age = (times, times) if kind in ("ages", "float64") else (None, None)
    tensors = (query, key, value, offsets, offsets, None, edges, table, *by_age)
    x = JaggedAttentionInputs(*tensors, 0.125, None, None, kind == "distances")
    plan = plan_jagged_attention(x, "triton", device)
    assert plan.family == ("jagged_sm90" if device is H200 else "jagged_triton"), plan
    out, lse = jagged_attention.forward(x, plan)
    for needed in subsets(query, key, value, None, table, every=every):
        jagged_attention.backward(torch.randn_like(out), None, x, out, lse, needed, plan)
    bucket_edges(offsets, offsets, times, times, len(times), kind == "distances", 5, 32, kind != "distances")


def attend_by_bucket(width: int, rows: int, longest: int | None, halves: bool, every: bool = False) -> None:
    """Forward and backward of few queries, with a bias table of so many rows and a scale of values."""
    query, key = torch.randn(8, 1, 4, width).half(), torch.randn(800, 1, width // (2 if halves else 1)).half()
    offsets, table = torch.arange(0, 801, 100), torch.randn(rows, 4)
    events = (table, torch.zeros(800, dtype=torch.int64), torch.rand(800), key[:, 0].clone() if halves else None)
    x = TargetAttentionInputs(query, key, None, offsets, *events, [], [], 0.125, longest)
    plan = plan_target_attention(x, "triton", H200)
    out, lse = target_attention.forward(x, plan)
    for needed in subsets(query, key, None, table, x.second, every=every):
        target_attention.backward(out, x, out, lse, needed, plan)


def attend_by_id(dtype: torch.dtype, table_dtype: torch.dtype, width: int, count: int, longest: int | None) -> None:
    """Forward and backward of few queries over rows of so many tables."""
    table = torch.zeros(50, width, dtype=table_dtype)
    query, key = torch.randn(8, 1, 4, width).to(dtype), torch.zeros((), dtype=dtype).expand(800, 1, width)
    offsets, indices = torch.arange(0, 801, 100), [torch.zeros(800, dtype=torch.int32)] * count
    x = TargetAttentionInputs(query, key, None, offsets, *(None,) * 4, [table] * count, indices, 0.125, longest)
    plan = plan_target_attention(x, "triton", H200)
    out, lse = target_attention.forward(x, plan)
    target_attention.backward(out, x, out, lse, (True, True, False, False, False), plan)


def attend_many(num_queries: int, own_values: bool) -> None:
    """Backward of many queries, whatever is needed, in one sweep or in two."""
    query, key = torch.randn(8, num_queries, 1, 64).half(), torch.randn(800, 1, 64).half()
    value, bias = key.clone() if own_values else None, torch.randn(800, 1).half()
    x = TargetAttentionInputs(query, key, value, torch.arange(0, 801, 100), bias, *(None,) * 3, [], [], 0.125, None)
    with plan.override(TARGET_FAMILY="target_multi_tile"):
        chosen = plan_target_attention(x, "triton", H200)
    out, lse = target_attention.forward(x, chosen)
    for needed in subsets(query, key, value, bias, None, every=True):
        target_attention.backward(out, x, out, lse, needed, chosen)


def attend_to_digits(dtype: torch.dtype, num_digits: int, biased: bool, device: Device, every: bool = False) -> None:
    """Forward and backward over digits by event, or by id with a table of biases and a scale of values."""
    query, offsets = torch.randn(8, 2, 4, num_digits).to(dtype), torch.arange(0, 801, 100)
    digits, of_events = torch.zeros(800, -(-num_digits // 16), dtype=torch.int32), torch.zeros(800, dtype=torch.int64)
    key, tables, indices, events = digits.unsqueeze(1), [], [], (None,) * 3
    if biased:
        tables, indices, events = [digits], [of_events], (torch.randn(32, 4), of_events, torch.rand(800))
    x = TargetAttentionInputs(query, key, None, offsets, *events, None, tables, indices, 0.125, None)
    plan = plan_target_attention(x, "triton", device)
    in_registers = device is H200 and dtype != torch.float32
    assert plan.family == ("digits_registers" if in_registers else "target_single_tile"), plan
    out, lse = target_attention.forward(x, plan)
    for needed in subsets(query, None, None, x.bias, None, every=every):
        target_attention.backward(out, x, out, lse, needed, plan)


def attend_ragged_to_digits(dtype: torch.dtype, num_digits: int, kind: str | None, device: Device) -> None:
    """Forward and backward of two users' candidates, plain or with a bias by event and a scale of values, or by age."""
    query, offsets = torch.randn(40, 4, num_digits).to(dtype), torch.tensor([0, 20, 40])
    digits, times = torch.zeros(800, -(-num_digits // 16), dtype=torch.int32), (torch.arange(40), torch.arange(800))
    table = torch.randn(32, 4).to(dtype) if kind == "ages" else None
    edges = None if table is None else torch.zeros(40, 33, dtype=torch.int32)
    bias, weights = (torch.randn(800, 4).to(dtype), torch.rand(800)) if kind == "bias" else (None, None)
    by_age = (None, None) if table is None else times
    tensors = (query, digits, weights, offsets, torch.tensor([0, 400, 800]), bias, edges, table, *by_age)
    x = JaggedAttentionInputs(*tensors, 0.125, None, None, False)
    plan = plan_jagged_attention(x, "triton", device)
    assert plan.family == "jagged_triton", plan
    out, lse = jagged_attention.forward(x, plan)
    for needed in subsets(query, None, None, bias, table, every=True):
        jagged_attention.backward(torch.randn_like(out), None, x, out, lse, needed, plan)


def step_tables(name: str, width: int, dtype: torch.dtype, grad_dtype: torch.dtype, ema_decay: float | None) -> None:
    """The step of two tables by two gradients, and the rows that they are read from."""
    optimizer = RowOptimizer(name, weight_decay=0.1, ema_decay=ema_decay)
    tables = [torch.zeros(50, width, dtype=dtype) for _ in range(2)]
    states = [states_of(name, table, ema_decay is not None) for table in tables]
    grads = [torch.zeros(1000, width, dtype=grad_dtype) for _ in range(2)]
    batch, one = sort_rows(torch.randint(0, 101, (2000,)), 100), torch.tensor(1)
    tables_step.step_rows(tables, states, batch, grads, [1000, 1000], optimizer, one.float(), one)
    tables_step.sum_rows(grads[0], sort_rows(torch.randint(0, 50, (1000,)), 50), 50, dtype)
    ids = torch.zeros(1000, dtype=torch.int64)
    gather_rows(tuple(tables), (ids, ids), grad_dtype)
    bound_ids([ids, ids.int()] * 3, [50] * 6, ids[:6])
    bound_ids([ids] * 3, [50, 50, 2**31 + 1], None)


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


def exchange(dtype: torch.dtype, num_ranks: int, columns: int) -> None:
    """What ranks send each other: ids by owner, with what they bring along; rows of queries, outputs and gradients."""
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
    brought = None if columns == 1 else torch.zeros(5000, columns - 1, dtype=torch.int32)
    buffer = torch.zeros(num_ranks * 3000, columns, dtype=torch.int32)
    exchange_ids.partition([owned], brought, num_ranks, 3000, buffer, ids if columns == 1 else None)
    exchange_ids.count_samples([owned], num_ranks)
    exchange_ids.collect(buffer, torch.zeros(num_ranks, dtype=torch.int64), buffer[0], 3000, 4000)
    rows, lse = torch.zeros(num_ranks, 500, 64, dtype=dtype), torch.zeros(num_ranks, 500)
    for shared in (False, True):
        push(rows, torch.arange(num_ranks), ids, 16, shared)
    partials_message.combine(partials_message.pack(rows, None, lse))
    partials_message.unpack(partials_message.pack(rows, rows, lse), 64, 0.5)
    partials_message.add(rows, 2.0)


def type_of(x: object) -> str | tuple:
    if isinstance(x, tuple):
        return tuple(map(type_of, x))
    if isinstance(x, TensorDescriptor):
        return f"tensordesc<fp16{x.block_shape},{x.layout!r}>"
    if isinstance(x, triton.tools.tensor_descriptor.TensorDescriptor):
        return f"tensordesc<fp16{x.block_shape}>"
    if isinstance(x, torch.Tensor):
        return {
            torch.float16: "*fp16",
            torch.bfloat16: "*bf16",
            torch.uint8: "*u8",
            torch.int16: "*i16",
            torch.float32: "*fp32",
            torch.int32: "*i32",
            torch.int64: "*i64",
            torch.float64: "*fp64",
        }[x.dtype]
    return {int: "i32", float: "fp32", type(None): "constexpr"}[type(x)]


def check(launcher: Launcher, arguments: tuple) -> None:
    """Compile for sm_90, and see that as many programs as are meant to find room on an SM."""
    kernel, constants = launcher.kernel, dict(launcher.constants)
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in constants}
    given = dict(zip(kernel.arg_names, arguments, strict=False))
    signature = {name: "constexpr" if name in constants else type_of(given[name]) for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): x for name, x in constants.items()}
    aligned = {}
    for i, name in enumerate(kernel.arg_names):
        x = given.get(name)
        for path, one in (((i, j), y) for j, y in enumerate(x)) if isinstance(x, tuple) else [((i,), x)]:
            if one is None:
                places.setdefault(path, None)
            elif isinstance(one, torch.Tensor):
                aligned[path] = [["tt.divisibility", 16]]
    source = (GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource)(kernel, signature, places, aligned)
    binary = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options)
    programs = 65536 // (options["maxnreg"] * 256) if options.get("maxnreg") else 1
    assert (binary.metadata.shared + 1024) * programs <= 228 * 1024, (kernel.__name__, binary.metadata.shared)


def main(every: bool) -> None:
    """Compiles every launch, or of each kernel the first and the last one."""
    launches = {}

    def record(self, grid, given, numbers=(), descriptors=()) -> None:
        flat = [y for x in given for y in (x if isinstance(x, tuple) else (x,))]
        launches.setdefault((self, *[x is None for x in flat]), (self, (*descriptors, *given, *numbers)))

    Launcher.__call__ = record
    for width, num_kv_heads, biased, window in (
        (64, 4, True, (None, None)),
        (64, 1, False, (5, 0)),
        (128, 4, True, (None, 0)),
    ):
        for rows in (300, 4000):
            attend(*tensors(rows, num_kv_heads, width), torch.randn(rows, 4).half() if biased else None, window)
    gluon = [launcher.kernel for launcher, _ in launches.values() if isinstance(launcher.kernel, GluonJITFunction)]
    assert (len(gluon), len(set(gluon))) == (12, 3), gluon  # short and long share the backward's
    with plan.override(SM90_SPLITS=4):
        attend(*tensors(300, 4, 64), torch.randn(300, 4).half(), (5, 0))
        query, key, _ = tensors(300, 1, 128)
        attend_by_time(query, key, None, "ages", H200)  # value = key
    for num_kv_heads, kind, device in (
        (1, "ages", H200),
        (4, "distances", H200),
        (1, "older", H200),
        (1, "float64", A100),
    ):
        attend_by_time(*tensors(300, num_kv_heads, 128 if kind == "ages" else 64), kind, device)
    for rows in (32, 100):
        for longest in (None, 100, 400):
            attend_by_bucket(64, rows, longest, halves=rows == 100)
    # Gradients that are not needed are left out.
    attend(*tensors(300, 4, 64), torch.randn(300, 4).half(), every=True)
    for num_kv_heads, device in ((4, H200), (1, A100)):
        query, key, value = tensors(300, num_kv_heads, 64)
        attend_by_time(query, key, value if num_kv_heads > 1 else None, "ages", device, every=True)
    attend_by_bucket(64, 32, 100, halves=False, every=True)
    attend_by_bucket(64, 100, None, halves=True, every=True)
    for num_queries, own_values in ((40, True), (100, False), (100, True)):
        attend_many(num_queries, own_values)
    half = torch.bfloat16
    for dtype, table_dtype in (
        (half, half),
        (half, torch.float32),
        (torch.float32, torch.float32),
    ):
        for width, count, longest in ((64, 1, None), (128, 2, 100)):
            attend_by_id(dtype, table_dtype, width, count, longest)
    for num_digits, biased in ((25, True), (64, False), (100, True)):
        attend_to_digits(half, num_digits, biased, H200)
    attend_to_digits(torch.float32, 40, True, H200)
    attend_to_digits(half, 40, True, A100, every=True)
    attend_to_digits(half, 40, True, H200, every=True)
    for num_digits, kind in ((25, None), (66, "bias"), (66, "ages")):
        attend_ragged_to_digits(half, num_digits, kind, H200)
    attend_ragged_to_digits(torch.float32, 40, "bias", A100)
    for name in CLASSES:
        step_tables(name, 64, torch.float32, half, 0.999)
        step_tables(name, 100, half, half, None)
    for name, width, ema_decay in (("adam", 1, 0.999), ("adam", 256, 0.999), ("sgd", MAX_STEPPED_WIDTH, None)):
        step_tables(name, width, torch.float32, torch.float32, ema_decay)
    for dtype, num_ranks, columns in ((half, 2, 1), (torch.float32, 1, 3), (half, 8, 2)):
        exchange(dtype, num_ranks, columns)
    for num_queries, dtype in ((1, torch.float16), (32, torch.float16), (2, torch.float32)):
        with plan.override(NUM_SMS=132):
            multiply_weights(num_queries, 128, dtype)
    by_kernel: dict[object, list] = {}
    for launcher, arguments in launches.values():
        by_kernel.setdefault(launcher.kernel, []).append((launcher, arguments))
    found = [launch for one in by_kernel.values() for launch in (one if every else one[:1] + one[1:][-1:])]
    for launcher, arguments in found:
        check(launcher, arguments)


if __name__ == "__main__":
    main("--every" in sys.argv)
