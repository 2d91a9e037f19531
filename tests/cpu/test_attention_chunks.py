"""Jagged attention by times on a CPU: chunks of queries, batches of chunks, and the search for edges.

tests/ops/test_timelines.py has the features one by one; here are samples large enough to be split.
"""

import pytest
import torch
from ops.budget import compare
from ops.ragged import offsets_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import jfi.ops
from jfi import reference
from jfi.cpu import attention_chunks, bucket_edges

pytestmark = pytest.mark.usefixtures("poisoned")

CPU = torch.device("cpu")
QUERIES, KEYS = [70, 0, 3, 130, 20, 9, 64, 8], [90, 4, 0, 150, 3, 11, 200, 12]


def ascending(lengths, most, dtype=torch.int64):
    return torch.cat([torch.randint(most, (n,)).sort().values for n in lengths]).to(dtype)


def timelines(dtype=torch.float64, num_heads=2, num_kv_heads=2, most=300, spread=1.0, **options):
    """The public operator and the plain formula as functions of the operands, and these."""
    offsets = {"query_offsets": offsets_of(QUERIES, CPU), "key_offsets": offsets_of(KEYS, CPU)}
    times = {"query_time": ascending(QUERIES, most), "key_time": ascending(KEYS, most)}
    names = ["query", "key", "value", "time_bias", *(["key_bias"] if options.pop("key_bias", False) else [])]
    shapes = [(sum(QUERIES), num_heads, 8), (sum(KEYS), num_kv_heads, 8), (sum(KEYS), num_kv_heads, 5)]
    shapes += [(6, num_heads), (sum(KEYS), num_heads)][: len(names) - 3]
    scale = 0.4 * spread

    def public(*tensors):
        given = dict(zip(names, tensors, strict=True))
        return jfi.ops.jagged_attention(**given, **offsets, **times, scale=scale, return_lse=True, **options)

    def plain(*tensors):
        given = {"key_bias": None} | dict(zip(names, tensors, strict=True))
        arguments = (*(given[name] for name in names[:3]), *offsets.values(), False, None, given["key_bias"], scale)
        visible = (tuple(times.values()), options.get("max_visible"), given["time_bias"], None)
        return reference.jagged_attention(*arguments, *visible)

    return public, plain, [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.fixture(params=[(64, 2**19, 2**13), (16, 2**19, 2**13), (7, 2**10, 0), (7, 2**12, 100)], ids=str)
def sizes(request, monkeypatch):
    for name, size in zip(("CHUNK_QUERIES", "BATCH_ELEMENTS", "PADDED_PAIRS"), request.param, strict=True):
        monkeypatch.setattr(attention_chunks, name, size)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_heads": 4},
        {"num_heads": 4, "num_kv_heads": 1},
        {"key_bias": True},
        {"max_visible": 9},
        {"most": 5},
        {"spread": 40},  # beyond the range of plain exponentials
        {"spread": 400},
    ],
    ids=str,
)
def test_chunks_are_exact_in_float64(sizes, options):
    public, plain, operands = timelines(**options)
    results = []
    for function in (public, plain):
        leaves = [x.clone().requires_grad_() for x in operands]
        out, lse = function(*leaves)
        seen = lse != -torch.inf
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        loss = (out * weights).sum() + lse[seen].square().sum()
        results.append([out, lse, *torch.autograd.grad(loss, leaves)])
    for got, want in zip(*results, strict=True):
        largest = want[want.isfinite()].abs().max().item()
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11 * largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes(sizes, dtype):
    public, plain, operands = timelines(dtype)
    compare(lambda *x: public(*x)[0], lambda *x: plain(*x)[0], operands)


def test_the_same_bits_every_time_for_every_number_of_threads():
    public, _, operands = timelines(torch.float32)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 1, 2, 2):
            torch.set_num_threads(count)
            leaves = [x.clone().requires_grad_() for x in operands]
            results.append(torch.autograd.grad(public(*leaves)[0].square().sum(), leaves))
    finally:
        torch.set_num_threads(threads)
    for first, second in (results[:2], results[2:]):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class LargestTensor(TorchDispatchMode):
    """The most elements of any tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


@pytest.mark.parametrize("lengths", [[3000], [300] * 50])
def test_scores_are_never_held_as_a_whole(lengths):
    offsets, times = offsets_of(lengths, CPU), ascending(lengths, 10**6)
    x = [torch.randn(sum(lengths), 1, 8, requires_grad=True), torch.zeros(32, 1, requires_grad=True)]
    where = {"query_offsets": offsets, "query_time": times, "key_time": times}
    from jfi.cpu import jagged_attention
    from jfi.ops.jagged_attention import prepare_jagged_attention

    options = dict.fromkeys(("key_offsets", "window_size", "max_visible", "key_bias", "position_bias", "scale"))
    options |= {"causal": False, "time_bias": x[1], "impl": "torch"}
    inputs, _ = prepare_jagged_attention(x[0], x[0], None, **where, **options)
    with LargestTensor() as largest, torch.no_grad():
        out, lse = jagged_attention.forward(inputs)
        jagged_attention.backward(
            out,
            None,
            inputs,
            out,
            lse,
            [x is not None for x in (inputs.query, inputs.key, inputs.value, inputs.bias, inputs.table)],
        )
    assert largest.elements <= 2**20


@pytest.mark.parametrize("step", [1, 0.25, 0.1, 1e-9, 3.7e8])
def test_edges_of_floating_times_are_those_of_their_rounded_ages(step):
    """Whole numbers are searched for as integers, fractions by the ages themselves."""
    lengths = [40, 0, 17]
    offsets, least = offsets_of(lengths, CPU), 2.0 ** torch.arange(30)
    query_time, key_time = (ascending(lengths, 10**4, torch.float64) * step for _ in range(2))
    edges = bucket_edges.bucket_edges(offsets, offsets, query_time, key_time, 57, False, None, 31, True)
    for begin, end in ((0, 40), (40, 57)):
        ages = query_time[begin:end, None] - key_time[begin:end]
        older = (ages > 0).sum(1)
        assert torch.equal(edges[begin:end, 0] // 64, older.int())
        aged = (ages[..., None] >= least).sum(1)
        assert torch.equal(edges[begin:end, 1:-1] // 64, torch.minimum(aged, older[:, None]).int())
