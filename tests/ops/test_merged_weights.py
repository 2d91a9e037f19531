"""The products of weights, and their gradients, against autograd in float64."""

import pytest
import torch
from ops.budget import check

from jfi.ops._merged_weights import merge, merge_eagerly, split

F, DTYPES = 2, [torch.float32, torch.bfloat16] if torch.cuda.is_available() else [torch.float32]


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("times", "heads", "width", "history_width", "target_width"),
    [(1, 1, 8, 16, 16), (3, 2, 20, 70, 17), (2, 4, 70, 100, 130), (1, 3, 1, 1, 1)],
)
def test_merge_and_its_gradient(times, heads, width, history_width, target_width, dtype, impl, device):
    dim = heads * width
    shapes = (times * dim, target_width), (times * dim,), (dim, history_width), (dim, history_width), (dim, times * dim)
    weights = tuple(torch.randn(F, *shape, device=device) for shape in shapes)

    def plain(in_dtype):
        leaves = [x.to(in_dtype).requires_grad_() for x in weights]
        outputs = merge(tuple(leaves), times, heads, in_dtype)
        return [x.detach() for x in outputs], torch.autograd.grad(outputs, leaves, [x.to(in_dtype) for x in grads])

    got = merge_eagerly(weights, times, heads, dtype, impl)
    grads = tuple(torch.randn_like(x) for x in got)
    dgot = split(grads, weights, times, heads, impl)
    assert all(x.dtype == dtype for x in got) and all(x.dtype == torch.float32 for x in dgot)
    (truth, dtruth), (expected, dexpected) = plain(torch.float64), plain(dtype)
    names = ("w_qk", "b_qk", "w_vo", "dw_q", "db_q", "dw_k", "dw_v", "dw_o")
    for name, x, rough, true in zip(names, (*got, *dgot), (*expected, *dexpected), (*truth, *dtruth), strict=True):
        check(name, x.to(dtype), rough, true, terms=float(true.norm()) * max(dim, history_width) ** 0.5)
