"""Batches of samples of similar lengths, padded where that is cheaper than another batch."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from jfi.cpu.blocks import Shapes, widen
from jfi.plan import JaggedAttentionInputs

#: The most elements of a batch of samples, operands and scores: 1 MB of float32, so that it stays in the L2 cache.
BATCH_ELEMENTS = 2**18
#: Padding a batch up to this many scores costs less than another batch, some 100 µs.
PADDED_SCORES = 2**15


@dataclass
class Rows:
    """The packed rows of K samples, on the side of the queries or of the keys, padded to N places each.

    Attributes:
        place: [K, N] int64: the row at each place; padding repeats the sample's last row.
        lengths: [K] int64.
        padding: [K, N], or None where every place has a row of its own.
    """

    place: Tensor
    lengths: Tensor
    padding: Tensor | None

    @cached_property
    def real(self) -> Tensor:
        """The places in [K · N] that are not padding."""
        return (~self.padding).flatten().nonzero()[:, 0]

    @classmethod
    def of(cls, starts: Tensor, lengths: Tensor, longest: int, is_full: bool) -> "Rows":
        places = torch.arange(longest)
        if is_full:
            return cls(starts[:, None] + places, lengths, None)
        place = starts[:, None] + torch.minimum(places, lengths[:, None] - 1)
        return cls(place, lengths, places >= lengths[:, None])

    def index(self, heads: Tensor) -> Tensor:
        """[K, G, N, n]: the rows of a tensor [S · H, ...], heads [G, n] being those of each key head."""
        return self.place[:, None, :, None] * heads.numel() + heads[:, None]

    def put(self, out: Tensor, index: Tensor, x: Tensor) -> None:
        """Write x to the rows of out at index, [K, N] or [K, G, N, n], padding excepted."""
        x, rows = x.flatten(0, index.dim() - 1), index.flatten()
        if self.padding is not None:
            real = self.real
            if index.dim() == 4:
                real = (~self.padding[:, None, :, None]).expand_as(index).flatten().nonzero()[:, 0]
            x, rows = x.index_select(0, real), rows.index_select(0, real)
        out.index_copy_(0, rows, x.to(out.dtype))


def take(x: Tensor, index: Tensor) -> Tensor:
    """The rows of x at index, [*index.shape, ...], at least float32."""
    return widen(x.index_select(0, index.flatten())).unflatten(0, index.shape)


class Problem:
    def __init__(self, x: JaggedAttentionInputs):
        self.num_heads, self.num_kv_heads = x.query.shape[1], x.key.shape[1]
        self.query, self.key, self.value, self.bias = x.query, x.key, x.value, x.bias
        self.edges, self.table = x.edges, x.table
        self.scale, self.left, self.right = x.scale, x.left, x.right
        self.offsets = x.query_offsets.long(), x.key_offsets.long()
        self.query_heads = torch.arange(self.num_heads).view(self.num_kv_heads, -1)
        self.key_heads = torch.arange(self.num_kv_heads)[:, None]

    def batches(self, is_flash: bool) -> Iterator[tuple[Rows, Rows]]:
        """The query rows and the key rows of all samples that have both; is_flash: no scores are kept."""
        lengths = [offsets.diff() for offsets in self.offsets]
        widths = self.query.shape[2] + (self.key if self.value is None else self.value).shape[2]
        padded = Shapes.of(*lengths).padded(PADDED_SCORES // self.num_heads)
        for part, (num_queries, num_keys), is_full in padded:
            rows = self.num_heads * num_queries + self.num_kv_heads * num_keys
            elements = rows * widths + (0 if is_flash else self.num_heads * num_queries * num_keys)
            for samples in part.split(max(1, BATCH_ELEMENTS // elements)):
                queries, keys = (
                    Rows.of(offsets[samples], length[samples], longest, is_full)
                    for offsets, length, longest in zip(self.offsets, lengths, (num_queries, num_keys), strict=True)
                )
                yield queries, keys
