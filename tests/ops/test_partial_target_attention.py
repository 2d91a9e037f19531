"""What parts of a history send each other, by kernels, against the formulas in float64."""

import pytest
import torch
from torch import Tensor

from jfi.ops.partial_target_attention import (
    add_parts,
    combine_parts,
    pack_gradient,
    pack_part,
    unpack_gradient,
)

IMPLS = ("torch", "triton")
#: Parts, rows and width; 33 in half precision is for the formula alone.
SHAPES = {"one row": (2, 1, 8), "ragged tile": (3, 67, 96), "one part": (1, 5, 64), "odd width": (2, 9, 33)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def parts_of(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    count, rows, width = shape
    outs, lses = torch.randn(count, rows, 1, width, device=device).to(dtype), torch.randn(count, rows, 1, device=device)
    outs[0, 0], lses[0, 0] = 0, -torch.inf  # a part without an event
    lses[:, -1] = -torch.inf  # and a row without one in any part
    outs[:, -1] = 0
    return outs, lses * 3


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_parts_combine(name, dtype, impl, device, poisoned):
    outs, lses = parts_of(SHAPES[name], dtype, device)
    out, lse = combine_parts(pack_part(outs, lses, impl), impl)
    wide = lses.double()
    total = wide.logsumexp(0)
    weights = (wide - total).exp().nan_to_num(0.0)
    torch.testing.assert_close(lse.double(), total, atol=1e-5, rtol=1e-5)
    rounding = torch.finfo(dtype).eps
    expected = (outs.double() * weights.unsqueeze(-1)).sum(0)
    torch.testing.assert_close(out.double(), expected, atol=4e-6 + rounding, rtol=rounding)
    assert (out[-1] == 0).all() and (lse[-1] == -torch.inf).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_arrive_with_their_products(name, dtype, impl, device, poisoned):
    (out, grad), lses = parts_of((2, *SHAPES[name][1:]), dtype, device)
    lse = lses[1]
    grad[0] = 0  # of which any O gives 0
    packed = pack_gradient(grad, out, lse, impl)
    arrived, other, found = unpack_gradient(packed, grad.size(-1), 0.5, impl)
    assert torch.equal(found, lse) and torch.equal(arrived, grad * 0.5)
    expected = (grad.double() * out.double()).sum(-1) * 0.5
    scale = (grad.double().abs() * out.double().abs()).sum(-1)
    wrong = ((arrived.double() * other.double()).sum(-1) - expected).abs()
    assert (wrong <= 2 * torch.finfo(dtype).eps * (expected.abs() + scale) + 1e-6).all()
    assert (other[0] == 0).all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_of_parts_are_added_in_float32(name, impl, device, poisoned):
    parts = torch.randn(SHAPES[name], device=device).bfloat16()
    expected = parts.double().sum(0) * 2
    torch.testing.assert_close(
        add_parts(parts, 2.0, impl).double(), expected, atol=1e-6, rtol=torch.finfo(torch.bfloat16).eps
    )


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_arrives_where_there_are_no_rows(impl, device):
    out, lse = combine_parts(
        pack_part(torch.zeros(2, 0, 8, device=device), torch.zeros(2, 0, device=device), impl), impl
    )
    assert out.shape == (0, 8) and lse.shape == (0,)
