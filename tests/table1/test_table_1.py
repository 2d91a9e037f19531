"""The six operators of the paper's Table 1: kernels and gradients within the budget, on ragged batches of all kinds."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ops.budget import compare
from ops.ragged import CASES, LENGTHS, offsets_of

from jfi import reference, table1

pytestmark = pytest.mark.usefixtures("poisoned")


def problems(lengths: list[int], width: int, out_width: int, dtype: torch.dtype, device: torch.device):
    """(name, public operator, plain operator, inputs) of the six."""
    other = [(3 * n + 1) % 50 for n in lengths]
    x_offsets, y_offsets = offsets_of(lengths, device), offsets_of(other, device, torch.int32)
    s, r, pairs = sum(lengths), sum(other), sum(n * m for n, m in zip(lengths, other, strict=True))

    def random(*shape: int):
        return torch.randn(shape, device=device).to(dtype)

    def case(name, *inputs, extra=(), **hints):
        def public(*args):
            return getattr(table1, name)(*args, *extra, impl="triton", **hints)

        def plain(*args):
            rows = (hints["out_rows"],) if "out_rows" in hints else ()
            return getattr(reference, name)(*args, *extra, *rows)

        return name, public, plain, list(inputs)

    x = random(s, width)
    yield case("jagged_dense_bmm", x, x_offsets, random(len(lengths), width, out_width))
    yield case("jagged_jagged_bmm", x, random(s, out_width), extra=(x_offsets,))
    yield case("jagged_softmax", x, extra=(x_offsets,))
    yield case("jagged_jagged_bmm_jagged_out", x, random(r, width), extra=(x_offsets, y_offsets))
    yield case("jagged2_softmax", random(pairs), extra=(x_offsets, y_offsets))
    yield case("array_jagged_bmm_jagged_out", random(pairs), random(r, width), extra=(x_offsets, y_offsets), out_rows=s)


@pytest.mark.parametrize(("case", "dtype"), CASES)
def test_ragged(case, dtype, device):
    for _, public, plain, inputs in problems(LENGTHS[case], 17, 8, dtype, device):
        compare(public, plain, inputs)


@pytest.mark.parametrize(
    ("width", "out_width"),
    [(1, 1), (100, 33), (256, 8), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((96, 5), (300, 130)))],
)
def test_widths(width, out_width, device):
    for _, public, plain, inputs in problems([3, 0, 70, 1], width, out_width, torch.float32, device):
        compare(public, plain, inputs)


any_shape = given(
    lengths=st.lists(st.integers(0, 90), max_size=6), width=st.integers(1, 40), out_width=st.integers(1, 20)
)


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@any_shape
def test_any_shape(lengths, width, out_width, device):
    for _, public, plain, inputs in problems(lengths, width, out_width, torch.float32, device):
        compare(public, plain, inputs)


@pytest.mark.slow
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@any_shape
def test_many_shapes(lengths, width, out_width, device):
    for _, public, plain, inputs in problems(lengths, width, out_width, torch.float32, device):
        compare(public, plain, inputs)


@pytest.mark.parametrize("width", [64, 65, 129, 300, 513, 1100])
def test_softmax_rows_of_any_width(width, device):
    """One warp reads a row, in tiles of several widths, or the row is read in pieces."""
    x_offsets, y_offsets = offsets_of([9, 0, 3], device), offsets_of([width, 5, 1], device)
    inputs = [3 * torch.randn(9 * width + 3, device=device)]
    compare(
        lambda a: table1.jagged2_softmax(a, x_offsets, y_offsets, impl="triton"),
        lambda a: reference.jagged2_softmax(a, x_offsets, y_offsets),
        inputs,
    )


def test_rows_far_below_zero_keep_their_weights(device):
    x = torch.full((5, 2), -1e30, device=device)
    weights = table1.jagged_softmax(x, offsets_of([4, 1], device), impl="triton")
    torch.testing.assert_close(weights[:, 0].cpu(), torch.tensor([0.25, 0.25, 0.25, 0.25, 1.0]))
    hidden = torch.full((4,), -torch.inf, device=device)
    assert table1.jagged2_softmax(hidden, offsets_of([2], device), impl="triton").eq(0).all()
    assert table1.jagged_softmax(hidden[:, None], offsets_of([4], device), impl="triton").eq(0).all()


def test_same_offsets_by_default(device):
    offsets, x = offsets_of([3, 0, 2], device), torch.randn(5, 4, device=device)
    for impl in ("triton", "torch"):
        a = table1.jagged_jagged_bmm_jagged_out(x, x, offsets, impl=impl)
        torch.testing.assert_close(
            a, table1.jagged_jagged_bmm_jagged_out(x, x, offsets, offsets, out_size=13, impl=impl)
        )
        p = table1.jagged2_softmax(a, offsets, impl=impl)
        assert table1.array_jagged_bmm_jagged_out(p, x, offsets, impl=impl).shape == (5, 4)
