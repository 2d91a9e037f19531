"""The six operators of the paper's Table 1 on a CPU: numbers, gradients of gradients, isolation of samples, memory."""

import pytest
import torch
from ops.budget import compare
from ops.ragged import LENGTHS, offsets_of
from torch import Tensor
from torch.autograd import gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jfi import ops, reference, table1
from jfi.table1 import cpu

pytestmark = pytest.mark.usefixtures("poisoned")

CPU = torch.device("cpu")
CASES = LENGTHS | {
    "runs_of_equal_lengths": [3, 3, 3, 0, 3, 1, 1],
    "scattered_equal_lengths": [2, 5, 1] * 8,
    "two_of_equal_lengths_apart": [3, 5, 3],
    "large_samples_of_equal_lengths": [130, 1, 130, 1, 130, 1, 130, 1, 130, 1],
}


def problems(lengths: list[int], width: int, out_width: int, dtype: torch.dtype = torch.float32):
    """name -> (public operator, plain operator, inputs) of the six."""
    other = [(3 * n + 1) % 50 for n in lengths]
    x_offsets, y_offsets = offsets_of(lengths, CPU), offsets_of(other, CPU, torch.int32)
    s, r, pairs = sum(lengths), sum(other), sum(n * m for n, m in zip(lengths, other, strict=True))
    both = x_offsets, y_offsets

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(dtype)

    def case(name: str, inputs: list[Tensor], *rest, **hints):
        return (
            lambda *args: getattr(table1, name)(*args, *rest, **hints),
            lambda *args: getattr(reference, name)(*args, *rest, *hints.values()),
            inputs,
        )

    x, dense = random(s, width), random(len(lengths), width, out_width)
    return {
        "jagged_dense_bmm": (
            lambda x, dense: table1.jagged_dense_bmm(x, x_offsets, dense),
            lambda x, dense: reference.jagged_dense_bmm(x, x_offsets, dense),
            [x, dense],
        ),
        "jagged_jagged_bmm": case("jagged_jagged_bmm", [x, random(s, out_width)], x_offsets),
        "jagged_softmax": case("jagged_softmax", [x], x_offsets),
        "jagged_jagged_bmm_jagged_out": case("jagged_jagged_bmm_jagged_out", [x, random(r, width)], *both),
        "jagged2_softmax": case("jagged2_softmax", [random(pairs)], *both),
        "array_jagged_bmm_jagged_out": case(
            "array_jagged_bmm_jagged_out", [random(pairs), random(r, width)], *both, out_rows=s
        ),
    }


NAMES = list(problems([1], 1, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_ragged(case, dtype):
    for function, plain, inputs in problems(CASES[case], 17, 8, dtype).values():
        compare(function, plain, inputs)


@pytest.mark.parametrize(("width", "out_width"), [(1, 1), (96, 5), (256, 33)])
def test_widths(width, out_width):
    for function, plain, inputs in problems([3, 0, 70, 1, 3, 9, 3, 9, 3, 9, 3], width, out_width).values():
        compare(function, plain, inputs)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_gradients(name):
    function, _, inputs = problems([2, 0, 1], 2, 2, torch.float64)[name]
    assert gradgradcheck(function, tuple(x.requires_grad_() for x in inputs))


@pytest.mark.parametrize("name", NAMES)
def test_views_give_the_same_bits(name):
    """Operands that are not contiguous, or begin within a storage."""
    function, _, inputs = problems([4, 0, 9, 4, 4], 6, 6)[name]
    views = [torch.stack([x + 1, x], -1)[..., 1] for x in inputs]
    parts = [torch.cat([x.flatten()[:1], x.flatten()])[1:].view_as(x) for x in inputs]
    expected = function(*inputs)
    assert torch.equal(function(*views), expected) and torch.equal(function(*parts), expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_sample(value):
    lengths = [3, 5, 3, 3, 5, 3, 3, 3]
    offsets, hit = offsets_of(lengths, CPU), slice(8, 11)  # the third sample
    x = torch.randn(28, 4)
    broken = x.clone()
    broken[hit] = value
    rest = torch.ones(28, dtype=torch.bool)
    rest[hit] = False
    pairs = table1.jagged_jagged_bmm_jagged_out(rest[:, None].float(), rest[:, None].float(), offsets) > 0

    def results(x: Tensor) -> list[Tensor]:
        a = table1.jagged_jagged_bmm_jagged_out(x, x, offsets)
        weights = table1.jagged2_softmax(a, offsets)
        out = table1.array_jagged_bmm_jagged_out(weights, x, offsets)
        totals = table1.jagged_jagged_bmm(x, x, offsets)
        totals[2] = 0
        return [
            *(a[pairs], weights[pairs], out[rest], table1.jagged_softmax(x, offsets)[rest]),
            *(totals, table1.jagged_dense_bmm(x, offsets, torch.ones(8, 4, 2))[rest]),
        ]

    for clean, got in zip(results(x), results(broken), strict=True):
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got, clean)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e3, -1e3])
def test_no_sample_changes_the_bits_of_another(value):
    offsets, hit = offsets_of([30, 50, 3, 0, 70], CPU), slice(80, 83)  # the third sample
    weights, outs = [], []
    for broken in (False, True):
        torch.manual_seed(0)
        x = torch.randn(153, 7)
        query, key, bias = torch.randn(5, 3, 2, 8), torch.randn(153, 1, 8), torch.randn(153, 2)
        if broken:
            x[hit, 3] = value
            bias[hit, 1] = value
        weights.append(table1.jagged_softmax(x, offsets))
        leaves = [leaf.requires_grad_() for leaf in (query, key, bias)]
        out = ops.target_attention(*leaves[:2], offsets=offsets, key_bias=bias)
        outs.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    rest = torch.ones(153, dtype=torch.bool)
    rest[hit] = False
    assert torch.equal(weights[0][rest], weights[1][rest])
    columns = [0, 1, 2, 4, 5, 6]
    assert torch.equal(weights[0][:, columns], weights[1][:, columns])
    samples = [0, 1, 3, 4]
    for clean, got, others in zip(*outs, (samples, samples, rest, rest), strict=True):
        assert torch.equal(clean[others], got[others])


def test_scores_of_any_size_and_hidden_ones():
    offsets = offsets_of([4, 0, 1], CPU)
    for value in (-1e30, -1e3, 1e3, 1e30):
        weights = table1.jagged_softmax(torch.full((5, 2), value), offsets)
        torch.testing.assert_close(weights[:, 0], torch.tensor([0.25, 0.25, 0.25, 0.25, 1.0]))
    x = torch.tensor([[0.0, -torch.inf], [-torch.inf, -torch.inf], [0.0, -torch.inf], [-torch.inf] * 2, [1.0, 2.0]])
    expected = torch.tensor([[0.5, 0], [0, 0], [0.5, 0], [0, 0], [1, 1]])
    torch.testing.assert_close(table1.jagged_softmax(x, offsets), expected)
    a = torch.tensor([0.0, -torch.inf, -torch.inf, -torch.inf])
    assert table1.jagged2_softmax(a, offsets_of([2], CPU)).tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("name", NAMES)
def test_autocast_lowers_no_precision(name):
    function, _, inputs = problems([4, 0, 9, 4], 6, 6)[name]
    leaves = [x.requires_grad_() for x in inputs]
    expected = function(*leaves)
    grads = torch.autograd.grad(expected.sum(), leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = function(*leaves)
        assert torch.equal(got, expected)
        assert all(map(torch.equal, torch.autograd.grad(got.sum(), leaves), grads))


OPCHECKS = {
    "jagged_dense_bmm": lambda x, dense, o, p: (x, o, dense, False, "torch"),
    "jagged_jagged_bmm": lambda x, y, o, p: (x, y, o, "torch"),
    "jagged_softmax": lambda x, o, p: (x, o, "torch"),
    "jagged_softmax_bwd": lambda x, o, p: (x, x.detach().clone(), o, "torch"),
    "jagged_jagged_bmm_jagged_out": lambda x, y, o, p: (x, y, o, p, 4 * 13 + 9 * 28, "torch"),
    "jagged2_softmax": lambda a, o, p: (a, o, p, "torch"),
    "jagged2_softmax_bwd": lambda a, o, p: (a, a.detach().clone(), o, p, "torch"),
    "array_jagged_bmm_jagged_out": lambda a, y, o, p: (a, y, o, p, 13, False, "torch"),
}


@pytest.mark.parametrize("name", OPCHECKS)
def test_opcheck(name):
    lengths = [4, 0, 9]
    _, _, inputs = problems(lengths, 6, 5)[name.removesuffix("_bwd")]
    offsets = offsets_of(lengths, CPU), offsets_of([(3 * n + 1) % 50 for n in lengths], CPU, torch.int32)
    arguments = OPCHECKS[name](*(x.requires_grad_() for x in inputs), *offsets)
    torch.library.opcheck(getattr(torch.ops.jfi, name).default, arguments)


class LargestTensor(TorchDispatchMode):
    """The most elements of any tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        sizes = [x.untyped_storage().nbytes() // x.element_size() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


@pytest.mark.parametrize("name", NAMES)
def test_nothing_larger_than_the_operands_is_allocated(name):
    """The plain formulas hold [S, D, T] or [Σ L·M, D], here 8 to 32 times the operands."""
    lengths = [90, 0, 3, 60, 90, 3, 3, 3, 3, 3, 90]
    x_offsets, y_offsets = offsets_of(lengths, CPU), offsets_of(lengths[::-1], CPU)
    s, pairs = sum(lengths), sum(map(int.__mul__, lengths, lengths[::-1]))
    x, y, a = torch.randn(s, 64), torch.randn(s, 32), torch.randn(pairs)
    dense = torch.randn(len(lengths), 64, 32)
    arguments = {
        "jagged_dense_bmm": (x, x_offsets, dense, False),
        "jagged_jagged_bmm": (x, y, x_offsets),
        "jagged_softmax": (x, x_offsets),
        "jagged_jagged_bmm_jagged_out": (x, x, x_offsets, y_offsets, pairs),
        "jagged2_softmax": (a, x_offsets, y_offsets),
        "array_jagged_bmm_jagged_out": (a, x, x_offsets, y_offsets, s, False),
    }[name]
    with LargestTensor() as largest:
        getattr(cpu, name)(*arguments)
    assert largest.elements <= max(x.numel(), dense.numel(), a.numel())


def test_a_hundred_thousand_tiny_samples_take_few_operations():
    """Their number does not grow with that of the samples."""

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.calls += 1
            return function(*args, **kwargs or {})

    offsets = torch.nn.functional.pad((torch.arange(100_000) % 3 + 1).cumsum(0), (1, 0))
    x = torch.randn(int(offsets[-1]), 2)
    with Count() as count:
        a = cpu.jagged_jagged_bmm_jagged_out(x, x, offsets, offsets, int(offsets.diff().square().sum()))
        weights = cpu.jagged2_softmax(a, offsets, offsets)
        cpu.array_jagged_bmm_jagged_out(weights, x, offsets, offsets, len(x), False)
        cpu.jagged_jagged_bmm(x, x, offsets)
        cpu.jagged_softmax(x, offsets)
    assert count.calls < 5000
