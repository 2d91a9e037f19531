"""Residual quantization in stages, over any alphabet of digits: what discrete PCA, PCA and residual k-means share.

x is approximated by Σ_l s_l b_l. A stage takes the residual R `[N, D]`, finds a basis b `[m, D]`, gives every row the
digits s `[N, m]` of its alphabet that minimise |r - s b|², and leaves R - s b to the next stage.

    alphabet         s                          b                              the stages are
    real numbers     [N, 1], r·b / |b|²         first eigenvector of RᵀR       PCA
    -1, 0, 1         [N, 1], nearest of three   a · first eigenvector of RᵀR   discrete PCA (Ramasamy et al. 2025)
    one-hot          [N, K], nearest centroid   K centroids of R               residual k-means
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

_LLOYD_STEPS = 100


class Alphabet(Protocol):
    """The digits that a stage has, and how its basis is found."""

    #: Whether `fit` reads `moments`.
    by_moments: bool

    def fit(self, residual: Tensor, moments: Tensor) -> Tensor:
        """A basis `[m, D]` for a residual R `[N, D]`, and RᵀR `[D, D]` where `by_moments`, else an empty tensor."""

    def digits(self, residual: Tensor, basis: Tensor) -> Tensor:
        """The digits `[N, m]` of each row, in the residual's dtype."""


def fit_stages(
    x: Tensor, alphabets: Sequence[Alphabet], progress: Callable[[int, int], None] | None = None
) -> list[Tensor]:
    """Fits one stage after another to what those before have left.

    Args:
        x: `[N, D]`, centred.
        alphabets: of each stage.
        progress: called with the number of stages done and that of all.

    Returns:
        The basis of each stage, `[m, D]`.
    """
    residual, bases = x.clone(), []
    by_moments = any(alphabet.by_moments for alphabet in alphabets)
    moments = x.T @ x if by_moments else x.new_empty(0)
    for alphabet in alphabets:
        basis = alphabet.fit(residual, moments)
        digits = alphabet.digits(residual, basis)
        if by_moments:  # (R - sb)ᵀ(R - sb), from sums over the rows of m columns instead of D
            cross = (residual.T @ digits) @ basis
            moments = moments - cross - cross.T + basis.T @ (digits.T @ digits) @ basis
        residual -= digits @ basis
        bases.append(basis)
        if progress is not None:
            progress(len(bases), len(alphabets))
    return bases


class Ternary:
    """Digits -1, 0 and 1 along the direction of largest variance, in steps of a length found by Lloyd's algorithm."""

    by_moments = True

    def fit(self, residual: Tensor, moments: Tensor) -> Tensor:
        direction = first_direction(moments)
        sizes = (residual @ direction).abs()
        return (ternary_step(sizes) * direction)[None]

    def digits(self, residual: Tensor, basis: Tensor) -> Tensor:
        return nearest_trit(residual @ basis.T, basis.square().sum(1))


def nearest_trit(products: Tensor, squares: Tensor) -> Tensor:
    """The t in {-1, 0, 1} that minimises |r - t b|², from r·b and |b|², in the products' dtype.

    Since |r - t b|² = |r|² - 2 t r·b + t² |b|², t is the sign of r·b where |r·b| exceeds half of |b|².
    """
    half = squares / 2
    return (products > half).to(products.dtype) - (products < -half).to(products.dtype)


def nearest_code(x: Tensor, centroids: Tensor) -> Tensor:
    """`[N]` int64, the centroid `[K, D]` nearest to each row of `x [N, D]`; the first of those as near."""
    return torch.addmm(centroids.square().sum(1), x, centroids.T, alpha=-2).argmin(1)


def first_direction(moments: Tensor) -> Tensor:
    """The unit vector `[D]` along which rows with these moments `[D, D]` are largest; its largest entry is positive."""
    direction = torch.linalg.eigh(moments).eigenvectors[:, -1]
    largest = direction[direction.abs().argmax()]
    return torch.where(largest < 0, -direction, direction)


def ternary_step(sizes: Tensor) -> Tensor:
    """The a of the levels -a, 0 and a, by Lloyd's algorithm: the mean of the sizes above a / 2, until it is still."""
    step = sizes.mean()
    for _ in range(_LLOYD_STEPS):
        above = sizes > step / 2
        new = (sizes * above).sum() / above.sum().clamp(min=1)
        if torch.equal(new, step):
            break
        step = new
    return step
