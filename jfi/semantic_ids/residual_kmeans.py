"""Residual k-means: the traditional way to semantic IDs, several codebooks one after another."""

import torch
from torch import Tensor

from jfi.semantic_ids.codec import Codec, FitInputs
from jfi.semantic_ids.decoders import SumOfCentroids
from jfi.semantic_ids.packing import Layout, code_bits, pack_codes
from jfi.semantic_ids.stages import fit_stages, nearest_code

#: Lloyd steps from codebooks that were fitted to nearly the same rows.
_REFIT_STEPS = 2
_BLOCK = 2**14


class OneHot:
    """One-hot digits over K centroids: a stage of residual k-means.

    Args:
        size: K.
        steps: most steps of Lloyd's algorithm.
        generator: of the rows at which the centroids begin, on the CPU.
        start: centroids `[K, D]` to begin with instead.
    """

    def __init__(self, size: int, steps: int, generator: torch.Generator, start: Tensor | None = None) -> None:
        self.size, self.steps, self.generator, self.start = size, steps, generator, start

    by_moments = False

    def fit(self, residual: Tensor, moments: Tensor) -> Tensor:
        centroids = self._plus_plus(residual) if self.start is None else self.start.to(residual.dtype)
        for _ in range(self.steps):
            moved = self._step(residual, centroids)
            if torch.equal(moved, centroids):
                break
            centroids = moved
        return centroids

    def digits(self, residual: Tensor, basis: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(nearest_code(residual, basis), self.size).to(residual.dtype)

    def _plus_plus(self, x: Tensor) -> Tensor:
        """k-means++: each next centroid is a row, drawn in proportion to its squared distance from those so far."""
        draws = torch.rand(self.size, generator=self.generator, dtype=torch.float64)
        row = min(int(draws[0] * len(x)), len(x) - 1)
        chosen, distances = [x[row]], (x - x[row]).square().sum(1)
        for draw in draws[1:]:
            ends = distances.double().cpu().cumsum(0)  # on a GPU the sums would differ from call to call
            row = int(torch.searchsorted(ends, (draw * ends[-1])[None]).clamp(max=len(x) - 1))
            chosen.append(x[row])
            distances = torch.minimum(distances, (x - x[row]).square().sum(1))
        return torch.stack(chosen)

    def _step(self, x: Tensor, centroids: Tensor) -> Tensor:
        """Centroids at the means of their rows; one without rows moves to a row that is far from its own."""
        sums, counts = torch.zeros_like(centroids), torch.zeros_like(centroids[:, :1])
        distances = x.new_empty(len(x))
        for begin in range(0, len(x), _BLOCK):
            block = x[begin : begin + _BLOCK]
            codes = nearest_code(block, centroids)
            # A product instead of index_add_, whose sums differ from call to call on a GPU.
            hot = torch.nn.functional.one_hot(codes, self.size).to(x.dtype)
            sums += hot.T @ block
            counts += hot.sum(0)[:, None]
            distances[begin : begin + _BLOCK] = (block - centroids[codes]).square().sum(1)
        means = sums / counts.clamp(min=1)
        dead = (counts[:, 0] == 0).nonzero()[:, 0]
        far = distances.argsort(descending=True, stable=True)[: len(dead)]
        far = far[distances[far] > 0]  # where all rows are at centroids there is nothing to take over
        kept = torch.where(counts > 0, means, centroids)
        kept[dead[: len(far)]] = x[far]
        return kept


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
        code_bits(num_levels, codebook_size)
        if steps < 1:
            raise ValueError(f"steps is {steps}, must be at least 1")
        settings = {"num_levels": num_levels, "codebook_size": codebook_size, "steps": steps}
        super().__init__({**settings, "seed": seed, "max_rows": max_rows}, seed, max_rows)
        self.num_levels, self.codebook_size, self.steps = num_levels, codebook_size, steps

    @property
    def layout(self) -> Layout:
        return Layout(self.num_levels, self.codebook_size)

    def decoder(self, dtype: torch.dtype = torch.float32) -> SumOfCentroids:
        return SumOfCentroids(self.tensors["codebooks"].to(dtype))

    def _fit(self, given: FitInputs) -> None:
        if len(given.x) < self.codebook_size:
            raise ValueError(f"codebook_size is {self.codebook_size}, but only {len(given.x)} rows have content")
        levels = [OneHot(self.codebook_size, self.steps, given.generator) for _ in range(self.num_levels)]
        self.tensors["codebooks"] = torch.stack(fit_stages(given.x, levels, given.progress)).double()

    def refit(self, x: Tensor) -> None:
        """A few more steps of Lloyd's algorithm from the present centroids, on `[N, D]` float32 of one source."""
        x = (x - self.tensors["mean"].float()) / self.tensors["scale"].float()
        generator = torch.Generator().manual_seed(self.seed)
        levels = [
            OneHot(self.codebook_size, _REFIT_STEPS, generator, codebook) for codebook in self.tensors["codebooks"]
        ]
        self.tensors["codebooks"] = torch.stack(fit_stages(x, levels)).double()

    def _encode(self, x: Tensor) -> Tensor:
        codes, residual = [], x.clone()
        for codebook in self.tensors["codebooks"]:
            codes.append(nearest_code(residual, codebook))
            residual -= codebook[codes[-1]]
        return pack_codes(torch.stack(codes, 1), self.codebook_size)
