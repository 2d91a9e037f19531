"""Attention of packed queries over their user's packed keys, in a form that AOTInductor can compile into a package.

On a GPU `jfi.ops.jagged_attention` is exported, whose Triton kernels become part of the package. On a CPU its operator
is registered from Python, and a package runs without Python, so the same attention is written with PyTorch's operators
on padded rows.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jfi.modules.events import floor_log2
from jfi.ops import jagged_attention


class PackedUsers(NamedTuple):
    """The users of N packed rows, U users in all."""

    offsets: Tensor  # [U + 1], from 0 to N
    owner: Tensor  # [N], the user of each row
    positions: Tensor  # [longest], 0, 1, ...; its size is the number of rows of the user with the most


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    *,
    queries: PackedUsers,
    keys: PackedUsers,
    causal: bool = False,
    key_bias: Tensor | None = None,
    position_bias: Tensor | None = None,
    scale: float | None = None,
    impl: str,
) -> Tensor:
    """The forward of `jfi.ops.jagged_attention`.

    Args:
        query: [R, H, D].
        key: [S, G, D]; G divides H.
        value: [S, G, E], or None for value = key.
        queries, keys: the users of the rows; the same for a causal attention.
        causal: hides the keys after a query's own position.
        key_bias: [S, H], added to the scores, or None; -inf hides an event.
        position_bias: [N, H], added to the scores of a causal attention by the distance of query and key, or None.
        scale: factor of the scores; None means 1/sqrt(D).
        impl: "triton" or "torch".

    Returns:
        [R, H, E]; zeros for a user without keys.
    """
    if impl == "triton":
        offsets = {"query_offsets": queries.offsets, "key_offsets": keys.offsets}
        options = {"causal": causal, "key_bias": key_bias, "position_bias": position_bias, "scale": scale}
        return jagged_attention(query, key, value, **offsets, **options, impl=impl)
    (rows, num_heads, width), num_kv_heads = query.shape, key.shape[1]
    padded_query, _ = padded(query, queries)  # [U, R', H, D]
    padded_key, present = padded(key, keys)  # [U, S', G, D]
    padded_value = padded_key if value is None else padded(value, keys)[0]
    users, longest = padded_query.shape[:2]
    events = padded_key.shape[1]
    # The query heads of a key head are rows of one matrix product.
    padded_query = padded_query.transpose(1, 2).reshape(users, num_kv_heads, num_heads // num_kv_heads * longest, width)
    scores = padded_query @ padded_key.permute(0, 2, 3, 1) * (width**-0.5 if scale is None else scale)
    scores = scores.view(users, num_heads, longest, events)
    present = present[:, None, None]
    if key_bias is not None:
        added = padded(key_bias, keys)[0].transpose(1, 2).unsqueeze(2)
        scores, present = scores + added, present & (added != -torch.inf)  # an event of weight 0 is hidden
    if position_bias is not None:
        distance = (queries.positions.unsqueeze(1) - keys.positions).clamp(min=0)
        # Distances 0, 1, 2 to 3, 4 to 7, ... are in buckets 0, 1, 2, 3, ...
        bucket = floor_log2(2 * distance, position_bias.size(0))
        scores = scores + F.embedding(bucket, position_bias).permute(2, 0, 1)
    visible = present & (keys.positions <= queries.positions.unsqueeze(1)) if causal else present
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).masked_fill(~visible, 0)
    out = weights.view(users, num_kv_heads, num_heads // num_kv_heads * longest, events) @ padded_value.transpose(1, 2)
    out = out.view(users, num_heads, longest, out.size(-1))
    position = torch.arange(rows, device=query.device) - queries.offsets[queries.owner]
    return out[queries.owner, :, position]


def padded(rows: Tensor, segments: PackedUsers) -> tuple[Tensor, Tensor]:
    """[N, ...] -> [U, longest, ...], and the mask [U, longest] of the rows that are not padding.

    Padding is a copy of row 0, so that no memory has to be filled.
    """
    index = segments.offsets[:-1, None] + segments.positions
    present = index < segments.offsets[1:, None]
    return rows[index.where(present, 0)], present
