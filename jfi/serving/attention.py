"""Attention of packed queries over the packed keys of their user, in a form that goes into a package whole.

On a GPU `jfi.ops.jagged_attention` is exported, whose Triton kernels become part of the package. On a CPU its operator
is registered from Python, which a package runs without, so the same attention is written with PyTorch's own operators
over padded rows, whose longest lengths come as sizes of tensors.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from jfi.ops import jagged_attention


class Segments(NamedTuple):
    """Which of N packed rows are whose, of U users."""

    offsets: Tensor  # [U + 1], from 0 to N
    owner: Tensor  # [N], the user of each row
    places: Tensor  # 0, 1, ... up to the longest user's rows: its size is what counts


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    queries: Segments,
    keys: Segments,
    *,
    bias: Tensor | None,
    scale: float,
    causal: bool,
    impl: str,
) -> Tensor:
    """As `jfi.ops.jagged_attention`, forward alone.

    Args:
        query: [R, H, D].
        key: [S, G, D]; G divides H.
        value: [S, G, E], or None: value = key.
        queries, keys: whose the rows are; with `causal` the same.
        bias: [S, H], or None.
        scale: of the scores.
        causal: hide the keys behind a query's own place.
        impl: "triton" or "torch".

    Returns:
        [R, H, E]; zeros for a user without keys.
    """
    if impl == "triton":
        offsets = {"query_offsets": queries.offsets, "key_offsets": keys.offsets}
        return jagged_attention(query, key, value, **offsets, causal=causal, key_bias=bias, scale=scale, impl=impl)
    (rows, heads, width), groups = query.shape, key.shape[1]
    padded_query, _ = padded(query, queries)  # [U, R', H, D]
    padded_key, present = padded(key, keys)  # [U, S', G, D]
    padded_value = padded_key if value is None else padded(value, keys)[0]
    users, longest = padded_query.shape[:2]
    events = padded_key.shape[1]
    # Heads that share a key head lie in one matrix product.
    padded_query = padded_query.transpose(1, 2).reshape(users, groups, heads // groups * longest, width)
    scores = padded_query @ padded_key.permute(0, 2, 3, 1) * scale
    scores = scores.view(users, heads, longest, events)
    if bias is not None:
        scores = scores + padded(bias, keys)[0].transpose(1, 2).unsqueeze(2)
    present = present[:, None, None]
    seen = present & (keys.places <= queries.places.unsqueeze(1)) if causal else present
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, 0)
    out = weights.view(users, groups, heads // groups * longest, events) @ padded_value.transpose(1, 2)
    out = out.view(users, heads, longest, out.size(-1))
    place = torch.arange(rows, device=query.device) - queries.offsets[queries.owner]
    return out[queries.owner, :, place]


def padded(rows: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """[N, ...] -> [U, longest, ...] with rows of others where a user has none left, and [U, longest], what is his."""
    at = segments.offsets[:-1, None] + segments.places
    present = at < segments.offsets[1:, None]
    return rows[at.where(present, 0)], present
