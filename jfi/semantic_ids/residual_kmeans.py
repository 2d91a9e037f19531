"""Residual k-means: the traditional way to semantic IDs, several codebooks one after another."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from jfi.semantic_ids.codec import Codec, Decoder, Progress
from jfi.semantic_ids.packing import Layout

#: Lloyd steps from codebooks that were fitted to nearly the same rows.
_REFIT_STEPS = 2
_BLOCK = 2**14


class SumOfCentroids(Decoder):
    """Σ_l c_l, the centroids that codes name.

    Args:
        codebooks: `[L, K, D]`.
    """

    codebooks: Tensor

    def __init__(self, codebooks: Tensor) -> None:
        super().__init__()
        self.width = codebooks.shape[2]
        self.register_buffer("codebooks", codebooks)

    def forward(self, digits: Tensor) -> Tensor:
        codes = digits.clamp(min=0)
        rows = [F.embedding(codes[:, level], codebook) for level, codebook in enumerate(self.codebooks)]
        return sum(rows, rows[0].new_zeros(()))


class ResidualKMeans(Codec):
    """Residual k-means: x is approximated by mean + a centroid + a centroid of what is left, and so on.

    Each level's centroids begin by k-means++ and move by Lloyd's algorithm; a code that no row takes is re-seeded at
    the row that is farthest from its own centroid.

    Args:
        num_levels: the number of codebooks.
        codebook_size: K, codes of each; the codes of an item must fit 63 bits.
        steps: most steps of Lloyd's algorithm for a level.
        seed: of the rows that are drawn.
        max_rows: most rows that `fit` looks at.

    Raises:
        ValueError: an argument is out of range; or in `fit`, there are fewer rows with content than codes.

    Example:
        >>> content = torch.randn(100, 8)
        >>> codec = ResidualKMeans(num_levels=2, codebook_size=16).fit(content)
        >>> codes = codec.digits(codec.encode(content))
        >>> codes.shape, codes.dtype
        (torch.Size([100, 2]), torch.int64)
    """

    def __init__(
        self, num_levels: int = 3, codebook_size: int = 256, steps: int = 25, seed: int = 0, max_rows: int = 2**16
    ) -> None:
        for name, value, least in (("codebook_size", codebook_size, 2), ("steps", steps, 1)):
            if value < least:
                raise ValueError(f"{name} is {value}, must be at least {least}")
        settings = {"num_levels": num_levels, "codebook_size": codebook_size, "steps": steps}
        super().__init__(Layout(num_levels, codebook_size), seed, max_rows, **settings)
        self.codebook_size, self.steps = codebook_size, steps

    def decoder(self, dtype: torch.dtype = torch.float32) -> SumOfCentroids:
        return SumOfCentroids(self.tensors["codebooks"].to(dtype))

    def _fit(self, x: Tensor, generator: torch.Generator, progress: Progress | None, **_: object) -> None:
        if len(x) < self.codebook_size:
            raise ValueError(f"codebook_size is {self.codebook_size}, but only {len(x)} rows have content")
        self._fit_levels(x, lambda rest, _: plus_plus(rest, self.codebook_size, generator), self.steps, progress)

    def refit(self, x: Tensor) -> None:
        """A few more steps of Lloyd's algorithm from the present centroids, on `[N, D]` float32 of one source."""
        x = (x - self.tensors["mean"].float()) / self.tensors["scale"].float()
        self._fit_levels(x, lambda _, level: self.tensors["codebooks"][level].to(x.dtype), _REFIT_STEPS)

    def _fit_levels(
        self, x: Tensor, start: Callable[[Tensor, int], Tensor], steps: int, progress: Progress | None = None
    ) -> None:
        """Fits one codebook after another to what those before have left, each from its `start`."""
        residual, codebooks = x.clone(), []
        for level in range(self.layout.num_digits):
            centroids = lloyd(residual, start(residual, level), steps)
            residual -= centroids[nearest_code(residual, centroids)]
            codebooks.append(centroids)
            if progress is not None:
                progress(len(codebooks), self.layout.num_digits)
        self.tensors["codebooks"] = torch.stack(codebooks).double()

    def _encode(self, x: Tensor) -> Tensor:
        codes, residual = [], x.clone()
        for codebook in self.tensors["codebooks"]:
            codes.append(nearest_code(residual, codebook))
            residual -= codebook[codes[-1]]
        return self.layout.pack(torch.stack(codes, 1))


def plus_plus(x: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Draws centroids `[size, D]` by k-means++: each next one in proportion to its squared distance from those so far.

    The generator is on the CPU.
    """
    draws = torch.rand(size, generator=generator, dtype=torch.float64)
    row = min(int(draws[0] * len(x)), len(x) - 1)
    chosen, distances = [x[row]], (x - x[row]).square().sum(1)
    for draw in draws[1:]:
        ends = distances.double().cpu().cumsum(0)  # on a GPU the sums would differ from call to call
        row = int(torch.searchsorted(ends, (draw * ends[-1])[None]).clamp(max=len(x) - 1))
        chosen.append(x[row])
        distances = torch.minimum(distances, (x - x[row]).square().sum(1))
    return torch.stack(chosen)


def lloyd(x: Tensor, centroids: Tensor, steps: int) -> Tensor:
    """Moves centroids `[K, D]` by at most so many steps of Lloyd's algorithm: to the means of their rows `[N, D]`.

    One without rows moves to a row that is far from its own centroid.
    """
    for _ in range(steps):
        sums, counts = torch.zeros_like(centroids), torch.zeros_like(centroids[:, :1])
        distances = x.new_empty(len(x))
        for begin in range(0, len(x), _BLOCK):
            block = x[begin : begin + _BLOCK]
            codes = nearest_code(block, centroids)
            # A product instead of index_add_, whose sums differ from call to call on a GPU.
            hot = F.one_hot(codes, len(centroids)).to(x.dtype)
            sums += hot.T @ block
            counts += hot.sum(0)[:, None]
            distances[begin : begin + _BLOCK] = (block - centroids[codes]).square().sum(1)
        dead = (counts[:, 0] == 0).nonzero()[:, 0]
        far = distances.argsort(descending=True, stable=True)[: len(dead)]
        far = far[distances[far] > 0]  # where all rows are at centroids there is nothing to take over
        moved = torch.where(counts > 0, sums / counts.clamp(min=1), centroids)
        moved[dead[: len(far)]] = x[far]
        if torch.equal(moved, centroids):
            break
        centroids = moved
    return centroids


def nearest_code(x: Tensor, centroids: Tensor) -> Tensor:
    """`[N]` int64, the centroid `[K, D]` nearest to each row of `x [N, D]`; the first of those as near."""
    return torch.addmm(centroids.square().sum(1), x, centroids.T, alpha=-2).argmin(1)
