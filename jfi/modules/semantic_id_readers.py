"""Readers of semantic IDs: as digits, as the content that they stand for, or by learned tables."""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from jfi.ops.checks import may_read
from jfi.semantic_ids.codec import Codec
from jfi.semantic_ids.packing import Layout, trits_of_bytes

Read = Literal["digits", "decode", "tables", "prefix_tables"]
Init = Literal["random", "centroids"]


class Digits(nn.Module):
    """Digits of IDs: as floats -1, 0 and 1 [S, L], or codes [S, L] int64."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout, self.width = layout, layout.num_digits
        if not layout.codebook_size:
            self.register_buffer("trits", trits_of_bytes().float(), persistent=False)

    def forward(self, sids: Tensor) -> Tensor:
        pieces = self.layout.pieces(sids)
        if self.layout.codebook_size:
            return pieces
        return F.embedding(pieces, self.trits).flatten(1)[:, : self.width]


class Decoder(nn.Module):
    """The content of IDs, [S, D], scaled so that the mean square of each source's elements was 1 before encoding."""

    def __init__(self, codec: Codec) -> None:
        super().__init__()
        self.digits, self.decoder = Digits(codec.layout), codec.decoder().cpu()
        self.width = self.decoder.width
        scales = [math.sqrt(width) for width in codec.widths for _ in range(width)]
        self.register_buffer("scale", torch.tensor(scales, device="cpu"))

    def forward(self, sids: Tensor) -> Tensor:
        if not may_read(sids):
            return self.decoder(self.digits(sids)) * self.scale
        # Histories repeat items, and a network decodes each of them once.
        distinct, index = torch.unique(sids, return_inverse=True)
        return (self.decoder(self.digits(distinct)) * self.scale).index_select(0, index)


class Tables(nn.Module):
    """The sum of a learned vector for each digit, [S, D]."""

    def __init__(self, codec: Codec, width: int, init: Init, spread: float, device: torch.device | None) -> None:
        super().__init__()
        self.layout, self.spread = codec.layout, spread
        self.digits = Digits(codec.layout)
        self._begin = _components(codec.decoder().vectors().cpu(), width) if init == "centroids" else None
        #: One table below the other.
        self.num_rows = codec.layout.codebook_size or 3
        self.weight = nn.Parameter(torch.empty(codec.layout.num_digits * self.num_rows, width, device=device))

    def reset_parameters(self) -> None:
        if self._begin is None:
            nn.init.normal_(self.weight, std=self.spread)
        else:
            self.weight.copy_(self._begin.flatten(0, 1) * self.spread)

    def forward(self, sids: Tensor) -> Tensor:
        rows = self.digits(sids)
        if not self.layout.codebook_size:
            rows = rows.long() + 1
        tables = self.weight.split(self.num_rows)
        return sum(F.embedding(rows[:, digit], table) for digit, table in enumerate(tables))


class PrefixTables(nn.Module):
    """The sum of a learned vector for each prefix of an ID's pieces, [S, D]."""

    def __init__(
        self, layout: Layout, width: int, spread: float, num_buckets: int, device: torch.device | None
    ) -> None:
        super().__init__()
        self.spread = spread
        #: By prefix its bits, and the rows of its table.
        self.bits = [layout.piece_bits * (piece + 1) for piece in range(layout.num_pieces)]
        self.rows = [2**bits if 2**bits <= num_buckets else num_buckets for bits in self.bits]
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(rows, width, device=device)) for rows in self.rows)

    def reset_parameters(self) -> None:
        for weight in self.weights:
            nn.init.normal_(weight, std=self.spread)

    def forward(self, sids: Tensor) -> Tensor:
        found = []
        for bits, rows, weight in zip(self.bits, self.rows, self.weights, strict=True):
            prefix = sids & ((1 << bits) - 1) if bits < 64 else sids
            found.append(F.embedding(prefix if rows == 2**bits else _mix(prefix) % rows, weight))
        return sum(found)


def _mix(numbers: Tensor) -> Tensor:
    """Hashes int64s to numbers from 0 on: the finalizer of SplitMix64, whose products wrap around."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ _shifted(numbers, shift)) * (factor - 2**64)
    return (numbers ^ _shifted(numbers, 31)) & (2**63 - 1)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shifts logically to the right; torch's shift repeats the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def _components(vectors: Tensor, width: int) -> Tensor:
    """Returns the first principal components [L, K, width] of vectors [L, K, d], with elements of mean square 1."""
    rows = vectors.flatten(0, 1).double()
    components = torch.linalg.eigh(rows.T @ rows).eigenvectors.flip(1)[:, :width]
    found = F.pad(rows @ components, (0, max(0, width - components.shape[1])))
    found = found / found.square().mean().sqrt().clamp(min=1e-30)
    return found.float().view(*vectors.shape[:2], width)
