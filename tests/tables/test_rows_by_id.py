"""Attention to rows of tables by id against the dense calls on rows that were gathered before."""

import importlib

import pytest
import torch
from ops.absorbed import absorbed_target_attention
from ops.budget import compare
from ops.overrides import override
from ops.ragged import offsets_of
from ops.test_absorbed_target_attention import problem

import jfi.ops as ops
from jfi import reference
from jfi.kernels.plan import H200
from jfi.utils.operands import MAX_TABLES

pytestmark = pytest.mark.usefixtures("poisoned")
IMPLS = ["triton", "torch"]
LENGTHS = [5, 0, 70, 1]
EVENTS = sum(LENGTHS)
HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def short_ranges():
    """Small test histories are split as long ones are, unless their longest is known: then a program handles each."""
    with override(MIN_CHUNK=128, num_sms=64, PROGRAM_PER_SAMPLE_ROWS=2**30, PROGRAM_PER_SAMPLE_BYTES=2**30):
        yield


def popular(rows: int, count: int, device, dtype=torch.int64) -> torch.Tensor:
    """Ids of which a few come often, from an address that 16 bytes do not divide."""
    return (torch.rand(count + 1) ** 4 * rows).to(device=device, dtype=dtype)[1:]


def widened(table: torch.Tensor) -> torch.Tensor:
    """A dense gradient is summed in float32."""
    return table if table.dtype == torch.float64 else table.float()


def gathered(tables, indices, dtype) -> torch.Tensor:
    return sum(widened(table)[index] for table, index in zip(tables, indices, strict=True)).to(dtype)


def one_or_tuple(given: list):
    return given[0] if len(given) == 1 else tuple(given)


def check(
    device,
    impl,
    num_tables=1,
    dtype=torch.float32,
    table_dtype=torch.float32,
    index_dtype=torch.int64,
    num_queries=1,
    num_heads=2,
    num_kv_heads=1,
    width=16,
    value_width=None,
    bias=None,
    value_scale=False,
    lengths=LENGTHS,
    longest=(None, 70),
):
    """Output and gradients of target attention, those of the tables among them."""
    events, offsets = sum(lengths), offsets_of(lengths, device, index_dtype)
    sizes = [3 + 20 * k for k in range(num_tables)]
    indices = [popular(size, events, device, index_dtype) for size in sizes]

    def random(*shape, dtype=dtype):
        return torch.randn(shape, device=device).to(dtype)

    inputs = [random(len(lengths), num_queries, num_heads, width)]
    # The gradients of a half-precision query's rows are rounded to its dtype before they are summed.
    given = dtype if dtype in HALVES else table_dtype
    inputs += [random(size, num_kv_heads, width, dtype=given) for size in sizes]
    if value_width is not None:
        inputs.append(random(events, num_kv_heads, value_width))
    buckets = torch.randint(0, 7, (events,), device=device) if bias == "by index" else None
    if bias is not None:
        inputs.append(random(7 if bias == "by index" else events, num_heads))
    scale = torch.rand(events, device=device) if value_scale else None

    def operands(tensors):
        query, tables, rest = tensors[0], tensors[1 : 1 + num_tables], list(tensors[1 + num_tables :])
        value = rest.pop(0) if value_width is not None else None
        return query, tables, value, rest.pop(0) if bias is not None else None

    def plain(*tensors):
        query, tables, value, event_bias = operands(tensors)
        key = gathered(tables, indices, query.dtype)
        value = key if value is None else value
        value = value if scale is None else value * scale[:, None, None].to(value)
        event_bias = event_bias[buckets].to(query.dtype) if bias == "by index" else event_bias
        return reference.target_attention(query, key, value, offsets, event_bias, width**-0.5)

    for max_seqlen in longest if impl == "triton" else (None,):

        def public(*tensors, max_seqlen=max_seqlen):
            query, tables, value, event_bias = operands(tensors)
            tables = [table.to(table_dtype) for table in tables]
            options = {"offsets": offsets, "indices": one_or_tuple(indices), "key_bias": event_bias, "impl": impl}
            options |= {"key_bias_index": buckets, "value_scale": scale, "max_seqlen": max_seqlen}
            return ops.target_attention(query, one_or_tuple(tables), value, **options)

        compare(public, plain, inputs)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("num_tables", "num_kv_heads"), [(1, 2), (2, 1), (MAX_TABLES, 2), (MAX_TABLES + 1, 1)])
def test_tables_and_heads(num_tables, num_kv_heads, impl, device):
    check(device, impl, num_tables, num_kv_heads=num_kv_heads)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("width", [1, 17, 64, 100])
def test_widths_and_indices(width, index_dtype, impl, device):
    check(device, impl, 2, index_dtype=index_dtype, num_kv_heads=2, width=width)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("dtype", "table_dtype"),
    [
        *((torch.float32, half) for half in HALVES),
        *((half, torch.float32) for half in HALVES),
        *((torch.bfloat16, torch.float16), (torch.float16, torch.float16), (torch.float32, torch.float64)),
    ],
)
def test_rows_are_converted_to_the_dtype_of_the_query(dtype, table_dtype, impl, device):
    check(device, impl, 2, dtype, table_dtype, longest=(70,))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("bias", "value_scale", "value_width"),
    [("by event", False, None), ("by index", True, None), ("by event", True, 12), (None, False, 16)],
)
def test_biases_scales_and_values_beside(bias, value_scale, value_width, impl, device):
    shape = {"num_queries": 2, "num_heads": 4, "num_kv_heads": 2}
    check(device, impl, 2, bias=bias, value_scale=value_scale, value_width=value_width, **shape)


@pytest.mark.parametrize("impl", IMPLS)
def test_many_queries_read_gathered_rows(impl, device):
    check(device, impl, 2, num_queries=20, bias="by index", value_scale=True, longest=(None,))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("lengths", [[], [0, 0, 0], [0, 3, 0]], ids=["no_samples", "all_empty", "few"])
def test_empty_histories(lengths, impl, device):
    check(device, impl, 2, lengths=lengths)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_learned_scale_of_values(impl, device):
    """The values are then rows of their own, times the scale; keys are still read by id."""
    ids, offsets = popular(9, 12, device), offsets_of([5, 0, 7], device)
    inputs = [torch.randn(3, 1, 2, 8, device=device), torch.randn(9, 1, 8, device=device)]
    compare(
        lambda query, table, scale: ops.target_attention(
            query, table, indices=ids, offsets=offsets, value_scale=scale, impl=impl
        ),
        lambda query, table, scale: reference.target_attention(
            query, table[ids], table[ids] * scale[:, None, None], offsets, None, 8**-0.5
        ),
        [*inputs, torch.rand(12, device=device)],
    )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("features", "num_queries", "num_tables"), [(1, 1, 1), (2, 2, 2), (1, 20, 1), (1, 1, 5)])
def test_absorbed_target_attention(features, num_queries, num_tables, impl, device):
    leaves, options = problem(features, num_queries, widths=(), device=device)
    width, events = 16, int(options["offsets"][-1])
    dim = leaves["weight 2"].shape[1]
    for k in (2, 3):  # key_weight and value_weight
        leaves[f"weight {k}"] = torch.randn(features, dim, width, device=device) / 4
    indices = [popular(9, events, device) for _ in range(num_tables)]
    inputs = [*leaves.values(), *(torch.randn(9, width, device=device) for _ in range(num_tables))]

    def public(target, *rest):
        weights, tables = rest[:6], rest[6:]
        by_id = {"indices": one_or_tuple(indices), "impl": impl}
        return absorbed_target_attention(target, one_or_tuple(tables), weights, **options, **by_id)

    def plain(target, *rest):
        history = gathered(rest[6:], indices, target.dtype)
        return absorbed_target_attention(target, history, rest[:6], **options, impl="torch")

    compare(public, plain, inputs)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_same_bits_twice(impl, device):
    offsets = offsets_of([400, 0, 900], device)
    ids, table = popular(50, 1300, device), torch.randn(50, 1, 16, device=device, requires_grad=True)
    query = torch.randn(3, 1, 2, 16, device=device, requires_grad=True)
    runs = []
    for _ in range(2):
        out = ops.target_attention(query, table, indices=ids, offsets=offsets, impl=impl)
        runs.append((out, *torch.autograd.grad(out.square().sum(), (query, table))))
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


def by_id(device, num_tables=1, dtype=torch.float32, table_dtype=torch.float32, num_queries=1, width=16):
    """Query, tables and indices of a small problem, and its offsets."""
    query = torch.randn(3, num_queries, 2, width, device=device, dtype=dtype)
    tables = [torch.randn(9, 1, width, device=device, dtype=table_dtype) for _ in range(num_tables)]
    indices = [popular(9, 12, device) for _ in range(num_tables)]
    return query, one_or_tuple(tables), one_or_tuple(indices), offsets_of([5, 0, 7], device)


@pytest.mark.parametrize(
    ("shape", "reads"),
    [
        *(({"num_tables": n}, n <= MAX_TABLES) for n in (1, MAX_TABLES, MAX_TABLES + 1)),
        *(({"num_queries": n}, n <= 8) for n in (8, 9)),
        ({"table_dtype": torch.bfloat16}, True),
        ({"table_dtype": torch.float64}, False),
    ],
)
def test_few_queries_never_make_the_history(shape, reads, device, monkeypatch):
    query, tables, indices, offsets = by_id(device, **shape)
    module, calls = importlib.import_module("jfi.ops.target_attention"), []
    monkeypatch.setattr(module, "read_rows", lambda rows, read=module.read_rows: calls.append(1) or read(rows))
    ops.target_attention(query, tables, indices=indices, offsets=offsets, impl="triton")
    assert len(calls) == (0 if reads else 1)
    made = ops.explain(ops.target_attention, query, tables, indices=indices, offsets=offsets, device=H200)
    count = len(tables) if isinstance(tables, tuple) else 1
    assert made.problem.num_tables == count * reads
    assert (f"by id from {count} table" in made.reason) == reads


@pytest.mark.parametrize("impl", IMPLS)
def test_tables_without_a_gradient(impl, device):
    query, tables, indices, offsets = by_id(device, 2)
    query.requires_grad_()
    tables[1].requires_grad_()

    def attend():
        return ops.target_attention(query, tables, indices=indices, offsets=offsets, impl=impl)

    attend().sum().backward()
    assert tables[0].grad is None and tables[1].grad.ne(0).any() and query.grad.ne(0).any()
    with torch.no_grad():
        out = attend()
    assert not out.requires_grad
    torch.testing.assert_close(out, attend().detach(), rtol=0, atol=0)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_table_that_was_stepped_after_the_forward(impl, device):
    """Kernels read the rows again in the backward, where autograd refuses others; else the rows are saved."""
    query, table, ids, offsets = by_id(device)
    query.requires_grad_()
    want = torch.autograd.grad(ops.target_attention(query, table, indices=ids, offsets=offsets, impl=impl).sum(), query)
    out = ops.target_attention(query, table, indices=ids, offsets=offsets, impl=impl)
    table.add_(1)
    if impl == "triton":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    else:
        torch.testing.assert_close(torch.autograd.grad(out.sum(), query), want)


@pytest.mark.parametrize("impl", IMPLS)
def test_opcheck_and_tracers(impl, device):
    query, (a, b), (ids, other), offsets = by_id(device, 2)
    if impl == "triton":
        rows = torch.zeros((), device=device).expand(12, 1, 16).requires_grad_()
        lists = [a.flatten(1), b.flatten(1)], [ids, other]
        arguments = (query.requires_grad_(), rows, None, offsets, *(None,) * 4, *lists, 0.3, None, impl)
        torch.library.opcheck(torch.ops.jfi.target_attention_fwd.default, arguments)

    def attend(query, a, b, ids, other):
        return ops.target_attention(query, (a, b), indices=(ids, other), offsets=offsets, impl=impl)

    inputs = (query, a, b, ids, other)
    torch.testing.assert_close(torch.fx.symbolic_trace(attend)(*inputs), attend(*inputs))
    offsets, inputs = offsets.to("meta"), [x.to("meta") for x in inputs]
    assert attend(*inputs).shape == query.shape


def good() -> dict:
    return {
        "query": torch.randn(2, 1, 2, 8),
        "key": torch.randn(9, 1, 8),
        "indices": torch.tensor([0, 8, 3, 3, 1]),
        "offsets": torch.tensor([0, 2, 5]),
    }


TWO = {"key": (torch.randn(9, 1, 8), torch.randn(4, 1, 8)), "indices": (torch.tensor([0, 8, 3, 3, 1]),) * 2}
BAD = {
    "index too large": ({"indices": torch.tensor([0, 9, 3, 3, 1])}, "indices must be from 0 to 8, rows of key, got 9"),
    "index below 0": ({"indices": torch.tensor([0, -1, 3, 3, 1])}, "indices must be from 0 to 8, rows of key, got -1"),
    "index of the second": (TWO, r"indices\[1\] must be from 0 to 3, rows of key\[1\], got 8"),
    "no row": ({"key": torch.randn(0, 1, 8)}, "indices must be from 0 to -1, rows of key, got "),
    "width": ({"key": torch.randn(9, 1, 7)}, "key must have D = 8, got 7"),
    "width of two heads": ({"key": torch.randn(9, 1, 16)}, "key must have D = 8, got 16"),
    "query": ({"query": torch.randn(8)}, r"query must be \[B, T, H, D\], got a tensor of shape \[8\]"),
    "heads": ({"key": torch.randn(9, 3, 8)}, "key must have G heads that divide the query's H = 2, got G = 3"),
    "rows of 2 dimensions": ({"key": torch.randn(9, 8)}, r"key must be \[N, G, D\]"),
    "length": ({"indices": torch.tensor([0, 8, 3])}, "offsets must end at 3, the rows of key, got 5"),
    "lengths": (
        TWO | {"indices": (torch.tensor([0, 1, 3, 3, 1]), torch.tensor([0, 1]))},
        r"indices\[1\] must have S = 5, got 2",
    ),
    "indices of 2 dimensions": ({"indices": torch.zeros(5, 1).long()}, r"indices must be \[S\]"),
    "indices of floats": ({"indices": torch.zeros(5)}, "indices must be int32 or int64, got torch.float32"),
    "no tensor of indices": ({"indices": [0, 8, 3, 3, 1]}, "indices must be a Tensor, got list"),
    "no tensor": ({"key": 3}, "key must be a Tensor, got int"),
    "integers": ({"key": torch.ones(9, 1, 8).int()}, "key must be float32, .*, got torch.int32"),
    "one table, two indices": ({"indices": TWO["indices"]}, "indices must come one to a table of key, got 2 for 1"),
    "no tables": ({"key": (), "indices": ()}, "indices must come one to a table of key, got 0 for 0"),
    "several dtypes": (
        TWO | {"key": (torch.randn(9, 1, 8), torch.randn(9, 1, 8).half())},
        r"key\[1\] must have the dtype of key\[0\], torch.float32, got torch.float16",
    ),
    "several widths": (TWO | {"key": (torch.randn(9, 1, 8), torch.randn(9, 1, 4))}, r"key\[1\] must have D = 8, got 4"),
    "a tuple without indices": (TWO | {"indices": None}, "key must be a Tensor where indices is None, got a tuple"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_argument_is_named(case):
    change, message = BAD[case]
    arguments = good() | change
    with pytest.raises((ValueError, TypeError), match=message):
        ops.target_attention(arguments.pop("query"), arguments.pop("key"), **arguments)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU always reads ids")
def test_validation_checks_ids_on_a_gpu(device):
    arguments = {name: x.to(device) for name, x in good().items()}
    arguments["indices"] += 1
    with ops.validation(), pytest.raises(ValueError, match="indices must be from 0 to 8, rows of key, got 9"):
        ops.target_attention(arguments.pop("query"), arguments.pop("key"), **arguments)
