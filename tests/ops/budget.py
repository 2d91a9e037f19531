"""How far a kernel may be from the truth: the tolerance comes from the data, not from taste."""

import torch
from torch import Tensor


def check(name: str, got: Tensor, plain: Tensor, truth: Tensor, terms: float) -> None:
    """The error of ``got`` is at most twice that of the plain formula in the same dtype, plus one rounding (in norm).

    Args:
        got: the result under test.
        plain: the same from plain PyTorch in the same dtype.
        truth: the same in float64.
        terms: norm of the largest result of the same problem, times the square root of the longest sum of products in
            it.  A gradient of the scores is a difference of terms of that size, P dO·v and P Δ, which cancel in full
            where a sample has one event; what stays is their float32 rounding, one of it allowed.
    """
    assert got.shape == truth.shape, f"{name}: shape {list(got.shape)}, expected {list(truth.shape)}"
    assert got.dtype == plain.dtype, f"{name}: {got.dtype}, expected {plain.dtype}"
    assert torch.isfinite(got).all(), f"{name}: not finite"
    error = (got.double() - truth).norm()
    rounding = torch.finfo(got.dtype).eps * truth.norm() + torch.finfo(torch.float32).eps * terms
    allowed = 2 * (plain.double() - truth).norm() + rounding
    assert error <= allowed, f"{name}: error {error:.3e}, allowed {allowed:.3e}"


def gradients(function, inputs: list[Tensor], seed: int = 1) -> list[Tensor]:
    """The output and the gradient of every floating input, for one fixed random gradient of the output."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    out = function(*leaves)
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
    floating = [x for x in leaves if x.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, floating, grad)]


def compare(function, plain, inputs: list[Tensor]) -> None:
    """Check function and its gradients against plain, whose float64 result is the truth."""
    truth = gradients(plain, [x.double() if x.is_floating_point() else x for x in inputs])
    longest = max((x.shape[-1] for x in inputs if x.is_floating_point() and x.dim() > 1), default=1)
    terms = max(float(x.norm()) for x in truth) * max(longest, 16) ** 0.5
    for i, (a, b, c) in enumerate(zip(gradients(function, inputs), gradients(plain, inputs), truth, strict=True)):
        check("output" if i == 0 else f"gradient {i - 1}", a, b, c, terms)
