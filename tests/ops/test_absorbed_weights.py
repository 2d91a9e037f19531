"""The products of weights, and the gradients of all that is made of them, against autograd in float64."""

import pytest
import torch
from ops.budget import check
from ops.overrides import override

from jfi.kernels import absorbed_weights
from jfi.ops.absorbed_target_attention import absorb, weight_gradients

F, DTYPES = 2, [torch.float32, torch.bfloat16] if torch.cuda.is_available() else [torch.float32]


@pytest.fixture(autouse=True)
def short_chunks():
    """So many SMs that a batch is split."""
    with override(num_sms=1000):
        yield


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_queries", "num_heads", "width", "history_width", "target_width", "batch"),
    [
        (1, 1, 8, 16, 16, 5),
        (3, 1, 20, 70, 17, 1100),
        (2, 2, 35, 66, 68, 33),
        (1, 3, 1, 1, 1, 3100),
        pytest.param(3, 2, 20, 70, 17, 1200, marks=pytest.mark.slow),
        pytest.param(2, 4, 70, 100, 130, 33, marks=pytest.mark.slow),
        (1, 1, 4, 4, 4, 0),
    ],
)
def test_absorbed_weights_and_their_gradients(
    num_queries, num_heads, width, history_width, target_width, batch, dtype, impl, device
):
    dim = num_heads * width
    shapes = (
        (num_queries * dim, target_width),
        (num_queries * dim,),
        (dim, history_width),
        (dim, history_width),
        (dim, num_queries * dim),
    )
    weights = tuple(torch.randn(F, *shape, device=device) for shape in shapes)
    rows = num_queries * num_heads * history_width
    rows = tuple(torch.randn(F, batch, size, device=device).to(dtype) for size in (rows, target_width, rows, dim))

    def plain(in_dtype):
        leaves = [x.to(in_dtype).requires_grad_() for x in weights]
        output_bias = torch.zeros(F, dim, dtype=in_dtype, device=device, requires_grad=True)
        w_qk, b_qk, w_vo = absorb(tuple(leaves), num_heads, in_dtype)
        dquery, target, attended, grad = (x.to(in_dtype) for x in rows)
        query = torch.baddbmm(b_qk.unsqueeze(1), target, w_qk.mT)
        out = torch.baddbmm(output_bias.unsqueeze(1), attended, w_vo)
        grads = torch.autograd.grad([query, out], [*leaves, output_bias], [dquery, grad])
        return [x.detach() for x in (w_qk, b_qk, w_vo)], grads

    got = absorb(weights, num_heads, dtype, impl)
    dgot = weight_gradients(rows, weights, torch.float32, num_heads, impl)
    assert all(x.dtype == dtype for x in got) and all(x.dtype == torch.float32 for x in dgot)
    (truth, dtruth), (expected, dexpected) = plain(torch.float64), plain(dtype)
    names = ("w_qk", "b_qk", "w_vo", "dw_q", "db_q", "dw_k", "dw_v", "dw_o", "db_o")
    terms = max(dim, history_width, batch) ** 0.5
    for name, x, rough, true in zip(names, (*got, *dgot), (*expected, *dexpected), (*truth, *dtruth), strict=True):
        check(name, x.to(dtype), rough, true, terms=float(true.norm()) * terms)


def test_a_product_beyond_32_bits_is_refused():
    shapes = (1, 2**12, 2**12), (1, 2**12), (1, 2**12, 2**12), (1, 2**12, 2**12), (1, 2**12, 2**12)
    with pytest.raises(ValueError, match=r"below 2\*\*31, got 1 · 128 · 4096 · 4096"):
        absorbed_weights.absorb(tuple(torch.empty(shape, device="meta") for shape in shapes), 1, 128, torch.bfloat16)
