"""Discrete PCA: content as a sum of directions, each taken once forward, once backward or not at all."""

import torch
from torch import Tensor

from jfi.semantic_ids.codec import Codec, Decoder, Progress
from jfi.semantic_ids.packing import Layout

_LLOYD_STEPS = 100


class SumOfDirections(Decoder):
    """Σ_l t_l b_l for ternary digits t_l.

    Args:
        basis: `[L, D]`, the b_l.
    """

    basis: Tensor

    def __init__(self, basis: Tensor) -> None:
        super().__init__()
        self.width = basis.shape[1]
        self.register_buffer("basis", basis)

    def forward(self, digits: Tensor) -> Tensor:
        return digits.to(self.basis.dtype) @ self.basis


class DiscretePCA(Codec):
    """Discrete PCA (DPCA) of Ramasamy et al. 2025: x is approximated by mean + Σ_l t_l b_l with t_l in {-1, 0, 1}.

    Each direction b_l is the first principal component of what the digits before have left, so a strong direction
    comes again, in finer steps. 40 digits fit an int64. Several sources count alike, whatever their widths and scales.

    Args:
        num_digits: L, from 1 to 40.
        seed: of the rows that are drawn where there are more than `max_rows`.
        max_rows: most rows that `fit` looks at.

    Raises:
        ValueError: `num_digits` or `max_rows` is out of range.

    Example:
        >>> content = torch.randn(100, 8)
        >>> codec = DiscretePCA(num_digits=20).fit(content)
        >>> sids = codec.encode(content)
        >>> sids.shape, sids.dtype
        (torch.Size([100]), torch.int64)
        >>> codec.digits(sids).shape, codec.decode(sids).shape
        (torch.Size([100, 20]), torch.Size([100, 8]))
        >>> bool((codec.decode(sids) - content).square().sum() < 0.3 * content.square().sum())
        True
    """

    def __init__(self, num_digits: int = 25, seed: int = 0, max_rows: int = 2**17) -> None:
        super().__init__(Layout(num_digits), seed, max_rows, num_digits=num_digits)

    def decoder(self, dtype: torch.dtype = torch.float32) -> SumOfDirections:
        return SumOfDirections(self.tensors["basis"].to(dtype))

    def _fit(self, x: Tensor, generator: torch.Generator, progress: Progress | None, **_: object) -> None:
        residual, basis = x.double(), []
        moments = residual.T @ residual
        for done in range(1, self.layout.num_digits + 1):
            direction = first_direction(moments)
            b = ternary_step((residual @ direction).abs()) * direction[None]
            trits = nearest_trit(residual @ b.T, b.square().sum(1))
            # (R - tb)ᵀ(R - tb), from sums over the rows of one column instead of D.
            cross = (residual.T @ trits) @ b
            moments = moments - cross - cross.T + b.T @ (trits.T @ trits) @ b
            residual -= trits @ b
            basis.append(b)
            if progress is not None:
                progress(done, self.layout.num_digits)
        self.tensors["basis"] = torch.cat(basis)

    def _encode(self, x: Tensor) -> Tensor:
        # The residual's product with b_l is x·b_l - Σ_{j<l} t_j b_j·b_l: D is summed over once, not once a digit.
        basis = self.tensors["basis"]
        products, gram = basis @ x.T, basis @ basis.T  # [L, N], so that a digit's products are adjacent
        for digit in range(len(basis)):
            trit = nearest_trit(products[digit], gram[digit, digit])
            products[digit + 1 :].addr_(gram[digit + 1 :, digit], trit, alpha=-1)
            products[digit] = trit
        return self.layout.pack(products.T.to(torch.int8))


def nearest_trit(products: Tensor, squares: Tensor) -> Tensor:
    """The t in {-1, 0, 1} that minimises |r - t b|², from r·b and |b|², in the products' dtype.

    Since |r - t b|² = |r|² - 2 t r·b + t² |b|², t is the sign of r·b where |r·b| exceeds half of |b|².
    """
    half = squares / 2
    return (products > half).to(products.dtype) - (products < -half).to(products.dtype)


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
