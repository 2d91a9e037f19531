"""Jagged attention on a CPU: samples of equal and of similar lengths in batches, by both of its implementations.

tests/ops/test_jagged_attention.py has the features one by one; here are batches large enough to be split.
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
from jfi.cpu import attention_chunks
from jfi.utils.operands import JaggedAttentionInputs

pytestmark = pytest.mark.usefixtures("poisoned")

CPU = torch.device("cpu")
LENGTHS = {
    "many_short": [i * 7 % 12 for i in range(150)],
    "equal": [5] * 40,
    "one_long_among_short": [3, 0, 4, 300, 2, 1, 5],
    "all_different": list(range(0, 60, 3)),
}


def check(
    lengths,
    queries=None,
    num_heads=2,
    num_kv_heads=2,
    width=16,
    value_width=16,
    biased=False,
    dtype=torch.float32,
    **options,
):
    offsets = offsets_of(lengths, CPU)
    query_offsets = offsets if queries is None else offsets_of(queries, CPU, torch.int32)
    shapes = [
        (int(query_offsets[-1]), num_heads, width),
        (sum(lengths), num_kv_heads, width),
        (sum(lengths), num_kv_heads, value_width),
    ]
    shapes += [(sum(lengths), num_heads)] if biased else []
    scale = options.pop("scale", width**-0.5)

    def public(query, key, value, bias=None):
        where = {"query_offsets": query_offsets, "key_offsets": offsets}
        return jfi.ops.jagged_attention(query, key, value, **where, key_bias=bias, scale=scale, **options)

    def plain(query, key, value, bias=None):
        where = query_offsets, offsets, options.get("causal", False), options.get("window_size")
        return reference.jagged_attention(query, key, value, *where, bias, scale)[0]

    compare(public, plain, [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes])


@pytest.mark.parametrize("case", LENGTHS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "num_heads": 4},
        {"biased": True, "causal": True, "num_heads": 4},
        {"window_size": (4, 1), "value_width": 5},
        {"scale": -1.0, "causal": True},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_batches(case, options):
    check(LENGTHS[case], **options)


@pytest.mark.parametrize("case", LENGTHS)
@pytest.mark.parametrize("sizes", [(7, 2**10, 2**10), (16, 2**14, 2**13)], ids=str)
def test_chunks(case, sizes, monkeypatch):
    for name, size in zip(("CHUNK_QUERIES", "BATCH_ELEMENTS", "MAX_SCORES"), sizes, strict=True):
        monkeypatch.setattr(attention_chunks, name, size)
    for options in ({"biased": True}, {"window_size": (4, 1)}, {"causal": True, "biased": True, "num_heads": 4}):
        check(LENGTHS[case], **options)


@pytest.mark.parametrize("options", [{}, {"biased": True}], ids=lambda options: " ".join(options) or "plain")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_dtypes(dtype, options):
    check(LENGTHS["many_short"], dtype=dtype, **options)


@pytest.mark.parametrize("options", [{}, {"biased": True}, {"causal": True}, {"window_size": (9, 3)}], ids=str)
def test_candidates_against_histories(options):
    check(list(range(30)), queries=[i * 5 % 9 for i in range(30)], **options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (3, 3)}], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_sample(value, options):
    lengths = [5, 4, 6, 5, 2]
    offsets, hit = offsets_of(lengths, CPU), slice(9, 15)  # the third sample, in a batch with the others
    clean = [torch.randn(22, 2, 8) for _ in range(3)]
    results = []
    for broken in (False, True):
        leaves = [x.clone() for x in clean]
        for x in leaves if broken else []:
            x[hit] = value
        leaves = [x.requires_grad_() for x in leaves]
        out = jfi.ops.jagged_attention(*leaves, query_offsets=offsets, **options)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a[:9], b[:9]) and torch.equal(a[15:], b[15:])


class LargestTensor(TorchDispatchMode):
    """The most elements of any tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


@pytest.mark.parametrize("right", [None, 0, 5])
def test_scores_are_never_held_as_a_whole(right):
    """One sample of 3,000 events has 9 million scores, 50 of 300 events half as many."""
    from jfi.cpu import jagged_attention

    for lengths in ([3000], [300] * 50):
        offsets = offsets_of(lengths, CPU)
        query = torch.randn(sum(lengths), 1, 8)
        with LargestTensor() as largest:
            x = JaggedAttentionInputs(query, query, None, offsets, offsets, *(None,) * 5, 0.3, None, right, False)
            out, lse = jagged_attention.forward(x)
            jagged_attention.backward(
                out, None, x, out, lse, [y is not None for y in (x.query, x.key, x.value, x.bias, x.table)]
            )
        assert largest.elements <= 2**20


@pytest.mark.parametrize("causal", [False, True])
def test_autocast_lowers_no_precision(causal):
    offsets = offsets_of([4, 0, 9], CPU)
    leaves = [torch.randn(13, 2, 8, requires_grad=True) for _ in range(3)]
    expected = jfi.ops.jagged_attention(*leaves, query_offsets=offsets, causal=causal)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(jfi.ops.jagged_attention(*leaves, query_offsets=offsets, causal=causal), expected)
