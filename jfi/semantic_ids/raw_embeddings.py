"""Content embeddings as they are: an ID is the row of a frozen table of all content."""

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from jfi.semantic_ids.codec import Codec, FitInputs, Progress
from jfi.semantic_ids.decoders import SumOfCentroids
from jfi.semantic_ids.packing import Layout
from jfi.semantic_ids.sources import Sources, as_sources, normalize, present_rows, spread
from jfi.semantic_ids.stages import nearest_code

#: Rows of content and of the table that are compared at a time.
_BLOCK, _ROWS = 4096, 2**14


class RawEmbeddings(Codec):
    """Content embeddings themselves, in the place of a codec: what the IDs of the others approximate.

    The codec is the table `[N, D]` float32 of all different content, and an ID is a row of it. A model reads it with
    `read="decode"`. Nothing is learned, so two items share an ID only if their content is equal. New content has the ID
    of the nearest row.

    Example:
        >>> content = torch.randn(100, 8)
        >>> codec = RawEmbeddings().fit(content)
        >>> sids = codec.encode(content)
        >>> torch.allclose(codec.decode(sids), content, atol=1e-5)
        True
        >>> torch.equal(codec.encode(content + 1e-4), sids)
        True
    """

    def __init__(self) -> None:
        super().__init__({}, seed=0, max_rows=2**62)
        self._sorted: tuple[Tensor, Tensor] | None = None

    def fit(
        self, sources: Sources, labels: Mapping[str, Tensor] | None = None, progress: Progress | None = None
    ) -> Self:
        """Fits as `Codec.fit` does, with all rows that have content; raises ValueError too if all of them are equal."""
        super().fit(sources, labels, progress)
        mean, scale = self.tensors["mean"], self.tensors["scale"]
        listed, parts = as_sources(sources), []
        for begin in range(0, len(listed[0]), _BLOCK):
            block = [source[begin : begin + _BLOCK] for source in listed]
            present = present_rows(block)
            # As `encode` has them, whose rows must be equal to these.
            parts.append(_single(normalize(block, present, mean, scale)[present.any(1)]))
        rows = _distinct(torch.cat(parts))
        if len(rows) < 2:
            self.tensors = {}
            raise ValueError("sources must have at least 2 different rows with content, got 1")
        self.tensors["rows"], self._sorted = rows, None
        if progress is not None:
            progress(1, 1)
        return self

    @property
    def layout(self) -> Layout:
        self._check_fitted()
        return Layout(1, len(self.tensors["rows"]))

    def decoder(self, dtype: torch.dtype = torch.float32) -> SumOfCentroids:
        return SumOfCentroids(self.tensors["rows"].to(dtype)[None])

    def restore(self, digits: Tensor) -> Tensor:
        # As that of all codecs, without a copy of the table.
        rows = self.tensors["rows"].index_select(0, digits[:, 0].clamp(min=0)).double()
        return rows * spread(self.tensors["scale"], self.widths) + self.tensors["mean"]

    def _fit(self, given: FitInputs) -> None:
        pass

    def _encode(self, x: Tensor) -> Tensor:
        rows, table = _single(x), self.tensors["rows"]
        if self._sorted is None or self._sorted[0].device != table.device:
            self._sorted = _hashes(table).sort()
        values, order = self._sorted
        codes = order[torch.searchsorted(values, _hashes(rows)).clamp(max=len(order) - 1)]
        other = (table[codes] != rows).any(1).nonzero()[:, 0]
        if len(other):
            codes[other] = _nearest(rows[other], table)
        return codes


def _single(x: Tensor) -> Tensor:
    """float32, in which 0 has one sign."""
    return x.float() + 0.0


def _hashes(rows: Tensor) -> Tensor:
    """`[N]` int64 of rows `[N, D]` float32: equal of equal rows, and hardly ever of others."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**63), 2**63 - 1, (rows.shape[1],), generator=generator) | 1
    factors, found = factors.to(rows.device), torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    for begin in range(0, len(rows), _ROWS):
        bits = rows[begin : begin + _ROWS].contiguous().view(torch.int32).long()
        found[begin : begin + _ROWS] = (bits * factors).sum(1)  # which wraps around
    return found


def _distinct(rows: Tensor) -> Tensor:
    """The rows without those that are equal to an earlier one."""
    _, inverse = _hashes(rows).unique(return_inverse=True)
    place = torch.arange(len(rows), device=rows.device)
    first = torch.full_like(place, len(rows)).scatter_reduce_(0, inverse, place, "amin")[inverse]
    # Of one hash, but another row: it stays.
    return rows[(first == place) | (rows[first] != rows).any(1)]


def _nearest(x: Tensor, table: Tensor) -> Tensor:
    """`[n]` int64: the row of the table that is nearest to each row, the first of those as near."""
    found = []
    for block in x.double().split(_BLOCK):
        best = torch.full((len(block),), torch.inf, dtype=torch.float64, device=x.device)
        codes = torch.zeros(len(block), dtype=torch.int64, device=x.device)
        for begin in range(0, len(table), _ROWS):
            rows = table[begin : begin + _ROWS].double()
            near = nearest_code(block, rows)
            distance = (block - rows[near]).square().sum(1)
            closer = distance < best
            best, codes = torch.where(closer, distance, best), torch.where(closer, near + begin, codes)
        found.append(codes)
    return torch.cat(found)
